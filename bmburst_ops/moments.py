"""AdamW's moments in 16 or 8 bits: how they are rounded and read. Plain torch, on any device.

A moment changes by a small fraction of itself in a step: the second by up to 1 - beta2, which is 0.1 % for 0.999.
bfloat16 has steps of 0.4 to 0.8 %, so a moment rounded to nearest stays where it is. Here rounding is stochastic: up
with the probability that makes the mean exact. The 32 random bits of an element are a function of its index in its
parameter and of a key, which is that of the parameter and the step. So they depend neither on the number of ranks nor
on whether the run was interrupted.

8-bit moments have the format of bitsandbytes' Adam8bit (arXiv:2110.02861): blocks of 256 neighbours, each with an fp32
scale, and codes that are indices into a table of 256 numbers, seven decades with more numbers in the larger ones. Two
details differ, and both are within the format. Codes are rounded stochastically. And the code of a second moment above
zero is never that of zero, because the update divides by its root.

`host_adamw.c` and `triton_moments` compute the same.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

BLOCK = 256
"""Neighbouring elements of a parameter that share a scale."""
_DECADES = 7
_MASK = (1 << 32) - 1
_Bits = TypeVar("_Bits", int, Tensor)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Rounding:
    """How the small moments of a run of elements are stored.

    Attributes:
        first: Index of the first element in its parameter. Blocks begin at multiples of `BLOCK`.
        key: 32 bits of the parameter and the step; see `key_of`.
        scales: Scales of the blocks of 8-bit moments, first and second, fp32 `[blocks_of(first, n)]`; updated.
    """

    first: int
    key: int
    scales: tuple[Tensor, Tensor] | None = None


def blocks_of(first: int, count: int) -> int:
    """Return the number of blocks that a run of elements touches."""
    return -(-(first + count) // BLOCK) - first // BLOCK if count else 0


def key_of(stem: int, step: int) -> int:
    """Return the key of a step: 32 bits.

    Args:
        stem: 32 bits of the parameter and the run's seed.
        step: Number of the step.
    """
    return _mixed(stem * 0x9E3779B1 + step & _MASK)


def random_bits(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return 32 random bits of each element, int64 `[count]`: the lower half for the first moment (MurmurHash3)."""
    index = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return _mixed(index.bitwise_and_(_MASK).mul_(0x9E3779B1).add_(key).bitwise_and_(_MASK))


def _mixed(x: _Bits) -> _Bits:
    """The finalizer of MurmurHash3, on 32 bits; in int64."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return x ^ x >> 16


@cache
def table(device: torch.device, *, signed: bool) -> Tensor:
    """Return the numbers of the codes, fp32 `[256]`, ascending: bitsandbytes' dynamic map of 8 bits.

    Decade i of 7 holds the middles of 2^i (signed) or 2^(i+1) equal parts of 0.1 to 1, times 10^(i-6). Signed numbers
    have both signs. 0 and 1 are added.
    """
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        ends = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = (10.0 ** (decade - _DECADES + 1) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        numbers += middles + ([-number for number in middles] if signed else [])
    return torch.tensor(sorted(numbers), device=device)


def decoded(stored: Tensor, scales: Tensor | None, first: int, *, signed: bool) -> Tensor:
    """Return a moment in fp32 `[n]`, a new tensor.

    Args:
        stored: fp32, bf16, or codes uint8, `[n]`.
        scales: Of the codes.
        first: See `Rounding`.
        signed: Whether it is the first moment.
    """
    if scales is None:
        return stored.to(torch.float32, copy=True)
    block = (torch.arange(len(stored), device=stored.device) + first % BLOCK) // BLOCK
    return table(stored.device, signed=signed)[stored.int()] * scales[block]


def encode_(
    stored: Tensor, scales: Tensor | None, values: Tensor, first: int, noise: Tensor | None, *, signed: bool
) -> None:
    """Write a moment.

    Args:
        stored: fp32, bf16 or uint8, `[n]`; written.
        scales: Of 8-bit codes; written.
        values: The moment, fp32 `[n]`.
        first: See `Rounding`.
        noise: 16 random bits for each element, int64 `[n]`; None rounds to nearest.
        signed: Whether it is the first moment.
    """
    if scales is not None:
        codes, most = _coded(values, first, noise, table(values.device, signed=signed))
        stored.copy_(codes)
        scales.copy_(most)
    elif stored.dtype == torch.bfloat16 and noise is not None:
        bits = values.view(torch.int32) + noise.int() & -(1 << 16)
        stored.copy_(torch.where(values.isfinite(), bits.view(torch.float32), values))
    else:
        stored.copy_(values)


def _coded(values: Tensor, first: int, noise: Tensor | None, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes `[n]` and scales of the blocks."""
    lead, count = first % BLOCK, len(values)
    rows = values.new_zeros(blocks_of(first, count) * BLOCK)
    rows[lead : lead + count] = values
    rows = rows.view(-1, BLOCK)
    # The least number is nearer to 0 than -1. A block whose extreme is negative has a scale that maps it there.
    scales = torch.maximum(rows, rows * flip(numbers)).amax(1)
    parts = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).clamp_max_(1).view(-1)[lead : lead + count]
    below = torch.searchsorted(numbers, parts, right=True).sub_(1).clamp_min_(0)
    low, high = numbers[below], numbers[(below + 1).clamp_max_(len(numbers) - 1)]
    is_up = parts - low > high - parts if noise is None else (parts - low) * 65536 > noise * (high - low)
    codes = below + is_up
    if numbers[0] == 0:
        codes = torch.where(values > 0, codes.clamp_min(1), codes)
    return codes, scales


def flip(numbers: Tensor) -> Tensor:
    """Return the factor on negative numbers with which the largest of a block is its scale; 0 if there are none."""
    return torch.where(numbers[0] < 0, 1 / numbers[0], 0.0)


def aligned(count: int, first: int, piece: int) -> list[slice]:
    """Return slices of a run of `count` elements that end at multiples of `piece` in their parameter, or at the end.

    Args:
        count: Number of elements.
        first: See `Rounding`.
        piece: A multiple of `BLOCK`, so that no block is cut.
    """
    ends = [0, *range(piece - first % piece, count, piece), count] if count else []
    return [slice(*pair) for pair in pairwise(ends)]


def part_of(rounding: Rounding, run: slice) -> Rounding:
    """Return the rounding of a slice of the run; the slice begins at a block or at the run's first element."""
    first = rounding.first + run.start
    if rounding.scales is None:
        return Rounding(first=first, key=rounding.key)
    begin = first // BLOCK - rounding.first // BLOCK
    blocks = slice(begin, begin + blocks_of(first, run.stop - run.start))
    mean, square = rounding.scales
    return Rounding(first=first, key=rounding.key, scales=(mean[blocks], square[blocks]))
