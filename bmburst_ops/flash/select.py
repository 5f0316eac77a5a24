"""The table of kernels, in order of preference, and the choice from it."""

import difflib

from torch import Tensor

from bmburst_ops.errors import KernelError
from bmburst_ops.flash.cpu import CpuKernel
from bmburst_ops.flash.kernel import Kernel
from bmburst_ops.flash.reference import ReferenceKernel
from bmburst_ops.flash.torch_cuda import TorchKernel

KERNELS: tuple[Kernel, ...] = (TorchKernel(), CpuKernel(), ReferenceKernel())
NAMES: tuple[str, ...] = ("auto", *(kernel.name for kernel in KERNELS))


def select_kernel(name: str, q: Tensor, k: Tensor) -> Kernel:
    """Return the kernel of that name, or for "auto" the first of the table that takes these inputs.

    Args:
        name: "auto" or a kernel's name.
        q: Queries `[batch, queries, heads, head_dim]`.
        k: Keys `[batch, keys, kv_heads, head_dim]`.

    Raises:
        KernelError: The name is unknown, or the kernel asked for cannot take these inputs.
    """
    if name == "auto":
        return next(kernel for kernel in KERNELS if kernel.refusal(q, k) is None)
    for kernel in KERNELS:
        if kernel.name == name:
            reason = kernel.refusal(q, k)
            if reason:
                raise KernelError(f"kernel '{name}' {reason}\nuse kernel='auto', or one of {', '.join(NAMES[1:])}")
            return kernel
    near = difflib.get_close_matches(str(name), NAMES, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise KernelError(f"unknown kernel '{name}'{hint}\nknown: {', '.join(NAMES)}")
