"""Attention of one tile on one device: the table of kernels in order of preference, and `select_kernel`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, unknown_kernel
from bmburst_ops.flash.cpu import CpuKernel
from bmburst_ops.flash.fa2_fa3 import FlashAttention2Kernel, FlashAttention3Kernel
from bmburst_ops.flash.fa4 import FlashAttention4Kernel
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Kernel, Partial, ReferenceKernel, Scoring
from bmburst_ops.flash.padded import PaddedKernel
from bmburst_ops.flash.torch_cuda import CudnnKernel, TorchKernel
from bmburst_ops.flash.triton import TritonKernel
from bmburst_ops.machine import HERE, Machine
from bmburst_ops.pattern import CAUSAL, FULL, Band, Cells, Need, Pattern, Segments

__all__ = [
    "CAUSAL",
    "FULL",
    "KERNELS",
    "NAMES",
    "BackwardInputs",
    "Band",
    "Cells",
    "Gradients",
    "Kernel",
    "Need",
    "Partial",
    "Pattern",
    "ReferenceKernel",
    "Scoring",
    "Segments",
    "TritonKernel",
    "able_kernels",
    "kernels_on",
    "queries_ahead",
    "select_kernel",
]


def kernels_on(machine: Machine) -> tuple[Kernel, ...]:
    """Return the kernels in order of preference, the fastest first, with the rules that hold on a machine.

    On an H200, bf16, head dim 128, 8K causal, forward / backward TFLOP/s: fa4 642 / 605, cudnn 599 / 527 (with 4 query
    heads a KV head and its expansion 595 / 525), torch 318 / 293. fa3 was not measured there.

    Windows, segments (packed documents) and cells (block-sparse masks): fa4, fa3, fa2 and torch support the first two,
    by window sizes and variable lengths; so does cpu, with one call per segment. cudnn supports none, triton and
    reference all three. fa4 supports cells of whole blocks on Hopper, if it is selected by name. Softcap: fa4, fa3,
    fa2, triton and reference.
    """
    return (
        FlashAttention4Kernel(machine),
        FlashAttention3Kernel(machine),
        CudnnKernel(machine),
        FlashAttention2Kernel(machine),
        TorchKernel(machine),
        CpuKernel(machine),
        TritonKernel(machine),
        ReferenceKernel(),
    )


KERNELS = kernels_on(HERE)
NAMES: tuple[str, ...] = ("auto", *(kernel.name for kernel in KERNELS))


@lru_cache(maxsize=64)
def _padded(kernel: Kernel) -> Kernel:
    """Return the kernel with padded head dims, the same object each time: it is a key of CUDA graphs."""
    return PaddedKernel(kernel)


def select_kernel(
    name: str,
    q: Tensor,
    k: Tensor,
    deterministic: bool = False,
    needs: frozenset[Need] = frozenset(),
    value_dim: int | None = None,
    kernels: Sequence[Kernel] = KERNELS,
) -> Kernel:
    """Return the named kernel, or for "auto" the first kernel of the table that supports these inputs.

    Args:
        name: "auto" or a kernel's name.
        q: Queries `[batch, queries, heads, head_dim]`.
        k: Keys `[batch, keys, kv_heads, head_dim]`.
        deterministic: Whether backward must be deterministic.
        needs: What the patterns of the calls need, and "softcap" if scores are capped.
        value_dim: Head dim of the values; default: that of the keys. A kernel that takes equal head dims only is
            returned as a `bmburst_ops.flash.padded.PaddedKernel`.
        kernels: The kernels to select from, in order of preference.

    Raises:
        KernelError: The name is unknown, or the named kernel does not support these inputs.
    """
    if value_dim is not None and value_dim != q.shape[-1]:
        widest = queries_ahead(q.device, q.dtype, max(q.shape[-1], value_dim))
        kernel = select_kernel(name, widest, widest, deterministic, needs, kernels=kernels)
        return kernel if kernel.takes_widths(q, k, value_dim, needs) else _padded(kernel)
    if name == "auto":
        return next(_able(q, k, deterministic, needs, kernels))
    for kernel in kernels:
        if kernel.name == name:
            reason = _refusal(kernel, q, k, deterministic, needs)
            if reason:
                able = ", ".join(able_kernels(q, k, deterministic, needs, kernels))
                raise KernelError(f"kernel '{name}' {reason}\nfix: use kernel='auto', or one of {able}")
            return kernel
    raise unknown_kernel(name, NAMES)


def able_kernels(
    q: Tensor,
    k: Tensor,
    deterministic: bool = False,
    needs: frozenset[Need] = frozenset(),
    kernels: Sequence[Kernel] = KERNELS,
) -> tuple[str, ...]:
    """Return the names of the kernels that support these inputs, fastest first; see `select_kernel`."""
    return tuple(kernel.name for kernel in _able(q, k, deterministic, needs, kernels))


def _able(
    q: Tensor, k: Tensor, deterministic: bool, needs: frozenset[Need], kernels: Sequence[Kernel]
) -> Iterator[Kernel]:
    able = (kernel for kernel in kernels if _refusal(kernel, q, k, deterministic, needs) is None)
    # On a CPU, Triton's interpreter runs only if it is selected by name.
    return (kernel for kernel in able if not (isinstance(kernel, TritonKernel) and q.device.type == "cpu"))


def _refusal(kernel: Kernel, q: Tensor, k: Tensor, deterministic: bool, needs: frozenset[Need]) -> str | None:
    reason = kernel.refusal(q, k, needs)
    return kernel.nondeterminism(q, needs) if reason is None and deterministic else reason


@dataclass(frozen=True, slots=True)
class _Queries:
    """The properties of queries that `Kernel.refusal` reads."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_cuda: bool


def queries_ahead(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensor:
    """Return a stand-in for queries or keys, without memory, for `select_kernel`, `able_kernels` and `Kernel.refusal`.

    A launcher uses it to select a kernel before any tensor exists.
    """
    return cast(Tensor, _Queries(device, dtype, (1, 1, 1, head_dim), device.type == "cuda"))
