"""AdamW with small moments in Triton: the twin of `bmburst_ops.moments`. Importing it needs Triton.

A pass reads and writes each tensor once. 16-bit tensors are passed as their bits, which are rounded here: to nearest
even for weights, stochastically for moments.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.moments import BLOCK, Rounding, blocks_of, flip, table

_BLOCKS = 4  # of a program: 8 elements for each of its 128 threads


def adamw_(
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    rounding: Rounding,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    scale: float,
    master: Tensor | None = None,
    remainder: Tensor | None = None,
) -> None:
    """Take one step of AdamW (arXiv:1711.05101, algorithm 2) in place. All tensors are flat `[n]` and contiguous.

    Args:
        weights: fp32; bf16 with remainders; or fp16 with a master.
        gradient: In the dtype of the weights.
        moments: The first and the second, bf16 or codes; updated.
        rounding: How they are rounded; updated are its scales.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`.
        step: Number of steps taken, including this one.
        scale: The gradient is divided by it; the result is exact if it is a power of 2.
        master: fp32 master of fp16 weights; updated.
        remainder: int16 remainders of bf16 weights (`bmburst_ops.host_adamw`); updated.
    """
    count, own = len(weights), master if remainder is None else remainder
    tensors = (weights, gradient, *moments, *(() if own is None else (own,)))
    assert all(t.is_contiguous() and len(t) == count for t in tensors)
    if not count:
        return
    mean, square = (each if rounding.scales else each.view(torch.int16) for each in moments)
    tables = [table(weights.device, signed=signed) for signed in (True, False)] if rounding.scales else [weights] * 2
    scales = rounding.scales or (weights, weights)  # not read
    blocks, key = blocks_of(rounding.first, count), rounding.key
    corrections = [1 - beta**step for beta in betas]
    numbers = (*betas, *(1 - beta for beta in betas), eps, lr / corrections[0], 1 / corrections[1], lr * weight_decay)
    with torch.cuda.device_of(weights):  # Triton launches on the current device, wherever the tensors are
        _adamw_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            weights if remainder is None else weights.view(torch.int16),
            weights if own is None else own,
            *(gradient, mean, square, *scales, *tables),
            *(count, blocks, rounding.first % BLOCK, rounding.first % (1 << 32) - (1 << 31)),
            key - (1 << 31),
            *numbers,
            1 / scale,
            _flip(tables[0]) if rounding.scales else 0.0,
            OWN="weights" if own is None else "master" if remainder is None else "remainder",
            CODED=rounding.scales is not None,
            BLOCKS=_BLOCKS,
            BLOCK=BLOCK,
            num_warps=4,
        )


def _flip(numbers: Tensor) -> float:
    return float(flip(numbers.cpu()))


@triton.jit
def _random_bits(index, key):
    x = index * 0x9E3779B1 + key
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _nearest(number):
    """Return the upper half of the bf16 nearest to a number, ties to even, as int32."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _rounded_by(number, noise):
    """Return the bits of the bf16 above or below a number, by 16 random bits."""
    bits = number.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return (tl.where(is_finite, bits + noise, bits) >> 16).to(tl.int16)


@triton.jit
def _coded(numbers, noise, table, flip):
    """Return the codes of rows, and their scales `[rows]`."""
    most = tl.max(tl.maximum(numbers, numbers * flip), axis=1)
    part = tl.minimum(tl.div_rn(numbers, tl.where(most > 0, most, 1.0)[:, None] + tl.zeros_like(numbers)), 1.0)
    at = tl.zeros_like(noise)
    for power in tl.static_range(8):
        step = 128 >> power
        at += tl.where(tl.load(table + at + step) <= part, step, 0)
    low = tl.load(table + at)
    width = tl.load(table + tl.minimum(at + 1, 255)) - low
    at += ((part - low) * 65536.0 > noise.to(tl.float32) * width).to(tl.int32)
    at = tl.where((flip == 0.0) & (at == 0) & (numbers > 0), 1, at)
    return at.to(tl.uint8), most


@triton.jit(do_not_specialize=["count", "blocks", "lead", "first", "key"])
def _adamw_kernel(
    weights, own, gradient, mean, square, mean_scales, square_scales, mean_table, square_table,
    count, blocks, lead, first, key,
    kept1, kept2, added1, added2, eps, rate, square_factor, decay, unscale, flip,
    OWN: tl.constexpr, CODED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = row.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] - lead
    inside = (at >= 0) & (at < count)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * unscale
    if CODED:
        of_mean = tl.load(mean_scales + row, mask=row < blocks, other=0.0)
        of_square = tl.load(square_scales + row, mask=row < blocks, other=0.0)
        m = tl.load(mean_table + tl.load(mean + at, mask=inside, other=0).to(tl.int32)) * of_mean[:, None]
        v = tl.load(square_table + tl.load(square + at, mask=inside, other=0).to(tl.int32)) * of_square[:, None]
    else:
        m = (tl.load(mean + at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        v = (tl.load(square + at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    m = tl.where(inside, kept1 * m + added1 * g, 0.0)
    v = tl.where(inside, kept2 * v + added2 * g * g, 0.0)
    if OWN == "remainder":
        rest = tl.load(own + at, mask=inside, other=0).to(tl.int32)
        p = ((tl.load(weights + at, mask=inside, other=0).to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)
    else:
        p = tl.load(own + at, mask=inside, other=0.0)
    p -= tl.div_rn(rate * m, tl.sqrt_rn(v * square_factor) + eps) + decay * p
    if OWN == "remainder":
        upper = _nearest(p)
        rest = tl.minimum(p.to(tl.int32, bitcast=True) - (upper << 16), 32767)
        tl.store(weights + at, upper.to(tl.int16), mask=inside)
        tl.store(own + at, rest.to(tl.int16), mask=inside)
    else:
        tl.store(own + at, p, mask=inside)
        if OWN == "master":
            tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)
    # The arguments are signed: `first` and `key` are less by 2^31, whose sum with each other is that of 32 bits.
    index = (at + first).to(tl.uint32) + 0x80000000
    noise = _random_bits(index, key.to(tl.uint32, bitcast=True) + 0x80000000)
    low, high = (noise & 0xFFFF).to(tl.int32), (noise >> 16).to(tl.int32)
    if CODED:
        codes, scales = _coded(m, low, mean_table, flip)
        tl.store(mean + at, codes, mask=inside)
        tl.store(mean_scales + row, scales, mask=row < blocks)
        codes, scales = _coded(v, high, square_table, 0.0)
        tl.store(square + at, codes, mask=inside)
        tl.store(square_scales + row, scales, mask=row < blocks)
    else:
        tl.store(mean + at, _rounded_by(m, low), mask=inside)
        tl.store(square + at, _rounded_by(v, high), mask=inside)
