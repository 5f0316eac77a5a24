"""What blocks of tokens have in common: kernels leave out what nobody sees, and look nothing up where all is alike.

From the smallest and the largest of each integer of two blocks a kernel knows, with a few comparisons, that no query of
one sees a key of the other, or that all do and have one row of the table: far from the diagonal, and between samples.
Memory is linear in the tokens, and the host waits for nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.biased.tokens import PADDING, Tokens, vectors_of

_NOWHERE = torch.iinfo(torch.int32).max


class Extents(NamedTuple):
    """Of the blocks of a kernel's own side, which its programs hold, and of the other side, which they go over.

    Attributes:
        own: int32 `[batch, blocks, 6, 2]`: smallest and largest of each integer, in the order of `Tokens`; of contexts
            whether there is one. A block that is not full has a token of padding.
        other: The same of the other side.
        ranges: int32 `[batch, own blocks, 2]`: the first of the other's blocks that may have a span in common, and the
            one after the last.
    """

    own: Tensor
    other: Tensor
    ranges: Tensor


def extents(own: Tokens, other: Tokens, own_size: int, other_size: int) -> Extents:
    """Return what a kernel is told of blocks of so many tokens."""
    own_blocks, other_blocks = _blocks(own, own_size), _blocks(other, other_size)
    smallest, largest = _spans(own_blocks)
    other_smallest, other_largest = _spans(other_blocks)
    # Of blocks in any order: none before the first has a span so large, none from the last on one so small.
    first = torch.searchsorted(other_largest.cummax(1).values, smallest)
    last = torch.searchsorted(other_smallest.flip(1).cummin(1).values.flip(1).contiguous(), largest, right=True)
    ranges = torch.stack((first, last), -1).to(torch.int32)
    return Extents(_smallest_and_largest(own_blocks), _smallest_and_largest(other_blocks), ranges)


def steps(tokens: Tokens, size: int) -> Tensor:
    """Return by what positions go up within each block of so many tokens, `[batch, blocks]`; 0 where unevenly."""
    places = _blocks(tokens, size)[0]
    ahead = places.diff(dim=-1)
    first = ahead[..., 0]
    is_even: Tensor = (ahead == first[..., None]).all(-1) & (first > 0)
    return torch.where(is_even, first, 0)


def _blocks(tokens: Tokens, size: int) -> Tensor:
    """Return the integers by blocks, `[6, batch, blocks, size]`, the last filled up with padding."""
    *others, span, context = vectors_of(tokens)
    missing = -tokens.shape[1] % size
    filled = [torch.nn.functional.pad(vector, (0, missing)) for vector in (*others, (context != 0).to(torch.int32))]
    filled.insert(-1, torch.nn.functional.pad(span, (0, missing), value=PADDING))
    blocks: Tensor = torch.stack(filled).unflatten(-1, (-1, size))
    return blocks


def _spans(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest span of each block's real tokens, `[batch, blocks]` each."""
    span = blocks[4]
    smallest: Tensor = torch.where(span < 0, _NOWHERE, span).amin(-1)
    largest: Tensor = span.clamp(min=PADDING).amax(-1)
    return smallest, largest


def _smallest_and_largest(blocks: Tensor) -> Tensor:
    found: Tensor = torch.stack((blocks.amin(-1), blocks.amax(-1)), -1).movedim(0, 2).contiguous()
    return found
