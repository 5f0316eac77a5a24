"""Dequantization of 4-bit weights in Triton: the twin of `bmburst_ops.nf4.dequantize`. Importing it needs Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops import NF4_BLOCK, NF4_GROUP
from bmburst_ops.nf4 import Layout, number_values, scale_values

_BYTES = 1024  # of codes that a program reads; it writes twice as many numbers


def dequantize(words: Tensor, out: Tensor) -> None:
    """Write the numbers of packed words to `out`, contiguous, fp32 or 16-bit."""
    layout = Layout(out.numel())
    if not layout.numbers:
        return
    scales, factors, offset = layout.of_scales(words)
    values = number_values(words.device), scale_values(words.device)
    with torch.cuda.device_of(out):  # Triton launches on the current device, wherever the tensors are
        _dequantize_kernel[(triton.cdiv(layout.code_bytes, _BYTES),)](
            *(layout.codes(words), scales, factors, offset, *values, out, layout.numbers),
            **{"BYTES": _BYTES, "BLOCK": NF4_BLOCK, "GROUP": NF4_GROUP},
            enable_fp_fusion=False,  # a scale is rounded twice, as in bitsandbytes
        )


@triton.jit(do_not_specialize=["count"])
def _dequantize_kernel(
    codes, scales, factors, offset, number_values, scale_values, out, count,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    is_there = 2 * at < count
    pairs = tl.load(codes + at, mask=is_there, other=0).to(tl.int32)
    block = 2 * at // BLOCK  # a block has an even size, so both numbers of a byte are in it
    code = tl.load(scales + block, mask=is_there, other=0).to(tl.int32)
    factor = tl.load(factors + block // GROUP, mask=is_there, other=0.0)
    scale = tl.load(scale_values + code) * factor + tl.load(offset)
    first = tl.load(number_values + (pairs >> 4)) * scale
    second = tl.load(number_values + (pairs & 15)) * scale
    place = tl.program_id(0).to(tl.int64) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out + place, tl.interleave(first, second).to(out.dtype.element_ty), mask=place < count)
