"""Sums of floating-point numbers that do not depend on their order, on the host: `triton_fixed_point` says how."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.flash.triton import strides_of
from bmburst_ops.flash.triton_launch import padded

_NUMBERS = 8192  # of a matrix that a program looks at
_AT_ONCE = 256  # sums that a program makes numbers of


def no_sums(grad_out: Tensor, v: Tensor, delta: Tensor, rows: int) -> tuple[Tensor, int]:
    """Return room for a table's gradient as integers, zero, and how many bits they are to have. The host does not wait.

    What is not finite makes the unit, and then all numbers, not finite.

    Args:
        grad_out: dO, `[batch, queries, heads, head_dim]` with dense rows, at least one number, as all of these.
        v: `[batch, keys, heads, head_dim]`.
        delta: `[batch, heads, queries]`.
        rows: Of the table.

    Returns:
        int64 `[heads * rows + PEAKS]`, which ends with what the unit follows from.
    """
    batch, queries, heads, head_dim = grad_out.shape
    kernels, dim, keys = _kernels(), padded(head_dim), v.shape[1]
    sums = torch.zeros(heads * rows + kernels.room, dtype=torch.int64, device=v.device)
    tokens = _NUMBERS // dim
    strides = map(strides_of, (grad_out, v, delta.transpose(1, 2)))
    with torch.cuda.device_of(v):
        kernels.peaks[(-(-max(queries, keys) // tokens), heads, batch)](
            *(grad_out, v, delta, sums, *strides, queries, keys, rows), HEAD_DIM=head_dim, DIM=dim, TOKENS=tokens
        )
    return sums, kernels.bits - math.ceil(math.log2(batch * queries))


def as_numbers(sums: Tensor, bits: int, numbers: Tensor) -> None:
    """Write the numbers that the sums are, `[rows, heads]`, dense, at least one."""
    kernels, programs = _kernels(), -(-numbers.numel() // _AT_ONCE)
    with torch.cuda.device_of(sums):
        kernels.numbers[(programs,)](sums, bits, numbers, *numbers.shape, AT_ONCE=_AT_ONCE)


class _Kernels(NamedTuple):
    peaks: Any
    numbers: Any
    room: int
    bits: int


@cache
def _kernels() -> _Kernels:
    """Import Triton, and the kernels, where they are first needed."""
    from bmburst_ops.biased.triton_fixed_point import FREE_BITS, PEAKS, numbers_kernel, peaks_kernel

    return _Kernels(peaks_kernel, numbers_kernel, PEAKS, FREE_BITS)
