"""Gathers that loops keep out of their pipelines. Needs Triton.

A load in a loop that leads to a product Triton makes ahead, into shared memory, in the layout of rows: right for rows,
but not for one number a pair, which are read where they are used, from a vector that the first cache holds.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

_INTEGERS = tl.constexpr(
    "{ .reg .pred there; setp.ne.s32 there, $2, 0; mov.b32 $0, $3; @there ld.global.nc.b32 $0, [$1]; }"
)
_NUMBERS = tl.constexpr(
    "{ .reg .pred there; setp.ne.s32 there, $2, 0; mov.f32 $0, $3; @there ld.global.nc.f32 $0, [$1]; }"
)


@triton.jit
def gather_integers(vector, index, is_there, other, PRECISION: tl.constexpr):
    """Return int32 `vector[index]`, `other` where it is not there; for PRECISION see `flash.triton_forward.product`."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index, mask=is_there, other=other)
    else:
        found = tl.inline_asm_elementwise(
            _INTEGERS, "=r,l,r,r", [(vector + index).to(tl.int64), is_there.to(tl.int32), other], tl.int32, True, 1
        )
    return found


@triton.jit
def gather_numbers(vector, index, is_there, other, PRECISION: tl.constexpr):
    """Return fp32 `vector[index]`, `other` where it is not there."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index, mask=is_there, other=other)
    else:
        found = tl.inline_asm_elementwise(
            _NUMBERS, "=f,l,r,f", [(vector + index).to(tl.int64), is_there.to(tl.int32), other], tl.float32, True, 1
        )
    return found


@triton.jit
def gather_near(vector, index, PRECISION: tl.constexpr):
    """Return fp32 `vector[index]`, all of which is there."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index)
    else:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [(vector + index).to(tl.int64)], tl.float32, True, 1
        )
    return found
