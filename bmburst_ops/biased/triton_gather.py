"""Gathers that loops keep out of their pipelines. Needs Triton.

A load in a loop that leads to a product Triton makes ahead, into shared memory, in the layout of rows: right for rows,
but not for one number a pair, which are read where they are used, from a vector that the first cache holds. A number
is 32 bits here, whatever they stand for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

_ALL = tl.constexpr("ld.global.nc.b32 $0, [$1];")
_SOME = tl.constexpr(
    "{ .reg .pred there; setp.ne.s32 there, $2, 0; mov.b32 $0, $3; @there ld.global.nc.b32 $0, [$1]; }"
)


@triton.jit
def gather(vector, index, PRECISION: tl.constexpr):
    """Return int32 or fp32 `vector[index]`, all of which is there; for PRECISION see `flash.triton_forward.product`."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index)
    else:
        bits = tl.inline_asm_elementwise(_ALL, "=r,l", [(vector + index).to(tl.int64)], tl.int32, True, 1)
        found = bits.to(vector.dtype.element_ty, bitcast=True)
    return found


@triton.jit
def gather_some(vector, index, is_there, other, PRECISION: tl.constexpr):
    """Return int32 or fp32 `vector[index]`, `other` where it is not there."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index, mask=is_there, other=other)
    else:
        absent = tl.full([], other, vector.dtype.element_ty).to(tl.int32, bitcast=True)
        operands = [(vector + index).to(tl.int64), is_there.to(tl.int32), absent]
        bits = tl.inline_asm_elementwise(_SOME, "=r,l,r,r", operands, tl.int32, True, 1)
        found = bits.to(vector.dtype.element_ty, bitcast=True)
    return found
