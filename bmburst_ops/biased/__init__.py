"""Attention with a learned bias and a mask (CPM-Live), both computed in the kernel from a few integers per token."""

from torch import Tensor

from bmburst_ops.biased.formula import (
    PADDING,
    RelativeBias,
    Tokens,
    ant_bias,
    ant_relations,
    ant_tokens,
    bee_bias,
    bee_tokens,
)
from bmburst_ops.biased.kernel import (
    BiasedGradients,
    BiasedKernel,
    BiasedReferenceKernel,
    Pairs,
    require_inputs,
    require_relations,
)
from bmburst_ops.biased.triton import BiasedTritonKernel
from bmburst_ops.errors import KernelError, unknown_kernel

__all__ = [
    "BIASED_NAMES",
    "PADDING",
    "BiasedGradients",
    "BiasedKernel",
    "BiasedReferenceKernel",
    "BiasedTritonKernel",
    "Pairs",
    "RelativeBias",
    "Tokens",
    "ant_bias",
    "ant_relations",
    "ant_tokens",
    "bee_bias",
    "bee_tokens",
    "require_inputs",
    "require_relations",
    "select_biased_kernel",
]

_KERNELS: tuple[BiasedKernel, ...] = (BiasedTritonKernel(), BiasedReferenceKernel())
BIASED_NAMES: tuple[str, ...] = ("auto", *(kernel.name for kernel in _KERNELS))


def select_biased_kernel(name: str, q: Tensor) -> BiasedKernel:
    """Return the named kernel; for "auto" the Triton kernel if it supports the GPU, else plain torch.

    Args:
        name: "auto", "triton" or "reference".
        q: Queries `[batch, queries, heads, head_dim]`.

    Raises:
        KernelError: The name is unknown, or the named kernel does not support these inputs.
    """
    if name not in BIASED_NAMES:
        raise unknown_kernel(name, BIASED_NAMES)
    if name == "auto":
        able = (kernel for kernel in _KERNELS if kernel.refusal(q) is None)
        return next(kernel for kernel in able if q.is_cuda or kernel.name == "reference")
    kernel = next(kernel for kernel in _KERNELS if kernel.name == name)
    if (reason := kernel.refusal(q)) is not None:
        raise KernelError(f"kernel '{name}' {reason}\nfix: use kernel='auto', or 'reference'")
    return kernel
