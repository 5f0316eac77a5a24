"""Recurrences of linear attention and state space models on one device: `select_kernel`, and the causal convolution.

- `kernel.py`: the kinds of recurrences, and the interface of kernels
- `reference.py`: their definition in plain torch, for any device and dtype
- `triton.py`: Triton kernels, for GPUs
- `scan.py`, `kinds.py`: how they are called, on fragments that run at the same time
- `triton_gated_delta.py`, `triton_decay.py`, `triton_kda.py`, `triton_kda_gradients.py`, `triton_norms.py`: the kernels
- `tiles.py`: what the kernels share
- `paths.py`, `fold.py`, `triton_fold.py`: the states between fragments and between links
- `conv.py`, `triton_conv.py`: the causal convolution
"""

from bmburst_ops.errors import KernelError, unknown_kernel
from bmburst_ops.linear.kernel import Inputs, LinearKernel, Pieces, PreparedScan, Recurrence, Slots
from bmburst_ops.linear.reference import ReferenceKernel
from bmburst_ops.linear.triton import TritonKernel

__all__ = [
    "KERNELS",
    "Inputs",
    "LinearKernel",
    "Pieces",
    "PreparedScan",
    "Recurrence",
    "ReferenceKernel",
    "Slots",
    "TritonKernel",
    "select_kernel",
]

KERNELS: tuple[LinearKernel, ...] = (TritonKernel(), ReferenceKernel())
"""All kernels; "auto" takes the first that can run."""


def select_kernel(name: str, recurrence: Recurrence, inputs: Inputs) -> LinearKernel:
    """Return the kernel of a name, or for "auto" the first that supports the inputs on this machine.

    Raises:
        KernelError: The name is unknown, or the kernel cannot compute this.
    """
    known = ["auto", *(kernel.name for kernel in KERNELS)]
    if name not in known:
        raise unknown_kernel(name, known)
    reason: str | None = None
    for kernel in KERNELS:
        if name in ("auto", kernel.name):
            reason = kernel.refusal(recurrence, inputs)
            if reason is None:
                return kernel
    raise KernelError(f"kernel '{name}' cannot run here: {reason}\nfix: kernel='auto'")
