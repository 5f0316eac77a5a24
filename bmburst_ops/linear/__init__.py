"""Recurrences of linear attention and state space models on one device: `select_kernel`, and the causal convolution.

- `kernel.py`: the kinds of recurrences, and the interface of kernels
- `reference.py`: their definition in plain torch, for any device and dtype
- `fla.py`: kernels of the package fla-core, for GPUs
- `fla_split.py`: the same kernels on fragments that run at the same time, for the gated delta rule
- `fold.py`, `triton_fold.py`: the states between fragments
- `conv.py`: the causal convolution
"""

from bmburst_ops.errors import KernelError, unknown_kernel
from bmburst_ops.linear.fla import FlaKernel
from bmburst_ops.linear.fla_split import FlaSplitKernel
from bmburst_ops.linear.kernel import Inputs, LinearKernel, Pieces, PreparedScan, Recurrence
from bmburst_ops.linear.reference import ReferenceKernel

__all__ = [
    "KERNELS",
    "FlaKernel",
    "FlaSplitKernel",
    "Inputs",
    "LinearKernel",
    "Pieces",
    "PreparedScan",
    "Recurrence",
    "ReferenceKernel",
    "select_kernel",
]

KERNELS: tuple[LinearKernel, ...] = (FlaKernel(), ReferenceKernel(), FlaSplitKernel())
"""All kernels; "auto" takes the first that can run. The last one runs by name only: it has not been measured."""


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
