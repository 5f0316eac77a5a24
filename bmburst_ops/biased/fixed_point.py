"""Sums of floating-point numbers that do not depend on their order, on the host: `triton_fixed_point` says how."""

import math

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
    from bmburst_ops.biased.triton_fixed_point import FREE_BITS, PEAKS, peaks_kernel

    batch, queries, heads, head_dim = grad_out.shape
    dim, keys = padded(head_dim), v.shape[1]
    sums = torch.zeros(heads * rows + PEAKS, dtype=torch.int64, device=v.device)
    tokens = _NUMBERS // dim
    strides = map(strides_of, (grad_out, v, delta.transpose(1, 2)))
    with torch.cuda.device_of(v):
        peaks_kernel[(-(-max(queries, keys) // tokens), heads, batch)](
            *(grad_out, v, delta, sums, *strides, queries, keys, rows), HEAD_DIM=head_dim, DIM=dim, TOKENS=tokens
        )
    return sums, FREE_BITS - math.ceil(math.log2(batch * queries))


def as_numbers(sums: Tensor, bits: int, numbers: Tensor) -> None:
    """Write the numbers that the sums are, `[rows, heads]`, dense, at least one."""
    from bmburst_ops.biased.triton_fixed_point import numbers_kernel

    programs = -(-numbers.numel() // _AT_ONCE)
    with torch.cuda.device_of(sums):
        numbers_kernel[(programs,)](sums, bits, numbers, *numbers.shape, AT_ONCE=_AT_ONCE)
