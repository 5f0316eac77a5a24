"""Sums of floating-point numbers that do not depend on their order: as integers, in units of a power of two.

A bias table's gradient is a histogram with weights: programs that run in any order add to the same few numbers. Sums of
integers are exact, so they are the same bits each time; atomic adds of floats are not. Needs Triton.

A score's gradient is at most P (|dO_q| |V_k| + |delta_q|), and P adds up to 1 at most over the keys of a query: all
together are at most the queries times the largest bracket, and a unit is such that these have `FREE_BITS`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_formula import NOT_SPECIALIZED
from bmburst_ops.flash.triton_backward import load_numbers
from bmburst_ops.flash.triton_forward import load_rows, matrix_of

FREE_BITS = 61
"""Of a signed 64-bit integer, less one for rounding errors in the bound."""
PEAKS = 3
"""Numbers that stand behind the sums: the largest square of dO's and of V's rows, and of delta the largest."""
_LARGEST = tl.constexpr(100)  # of a unit's exponents: fp32 holds it, and its products with what it was made for


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def peaks_kernel(
    grad, v, delta, sums, grad_strides, v_strides, delta_strides, queries, keys, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: what TOKENS queries and as many keys of a head raise the peaks to, which are zero before. They stand
    behind the sums, `[heads, rows]`. Grid: (blocks, heads, batch).
    """
    first, head, batch = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    grad_matrix, v_matrix = matrix_of(grad, grad_strides, batch, head), matrix_of(v, v_strides, batch, head)
    grads = load_rows(grad_matrix, first, grad_strides[1], queries, HEAD_DIM, TOKENS, DIM, True)
    values = load_rows(v_matrix, first, v_strides[1], keys, HEAD_DIM, TOKENS, DIM, True)
    peaks = sums + tl.num_programs(1) * rows
    delta_row = matrix_of(delta, delta_strides, batch, head)
    _raise(peaks, _squares(grads))
    _raise(peaks + 1, _squares(values))
    _raise(peaks + 2, load_numbers(delta_row, first, delta_strides[1], queries, TOKENS, True))


@triton.jit
def _squares(block):
    numbers = block.to(tl.float32)
    return tl.sum(numbers * numbers, 1)


@triton.jit
def _raise(peak, numbers):
    """Raise a peak to the largest magnitude: as bits, in whose order a NaN is above all numbers."""
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(peak, tl.max(bits, 0).to(tl.int64), sem="relaxed")


@triton.jit
def unit_of(peaks, bits):
    """Return the factor that makes gradients of scores integers of so many bits, NaN if the bound is not finite."""
    bound = tl.sqrt(_peak(peaks)) * tl.sqrt(_peak(peaks + 1)) + _peak(peaks + 2)
    exponent = ((bound.to(tl.int32, bitcast=True) >> 23) & 255) - 127  # the bound is below 2 ** (exponent + 1)
    power = tl.minimum(bits - 1 - exponent, _LARGEST)
    return tl.where(exponent == 128, float("nan"), ((power + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _peak(peak):
    return tl.load(peak).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def add_integers(sums, values, unit, mask):
    """Add values to sums in units."""
    tl.atomic_add(sums, (values * unit).to(tl.int64), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=("bits", "rows", "heads"))
def numbers_kernel(sums, bits, numbers, rows, heads, AT_ONCE: tl.constexpr):
    """One program: AT_ONCE of the numbers that the sums are, `[rows, heads]` of `[heads, rows]`. Grid: blocks."""
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < rows * heads
    total = tl.load(sums + place % heads * rows + place // heads, mask=inside, other=0)
    number = (total.to(tl.float64) / unit_of(sums + rows * heads, bits).to(tl.float64)).to(tl.float32)
    tl.store(numbers + place, number.to(numbers.dtype.element_ty), mask=inside)
