"""What kernels are told before they go over blocks: which to take, and how; made on the device, once for a batch.

Memory is linear in the tokens, and the host waits for nothing.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.biased.kernel import Pairs
from bmburst_ops.flash.triton_launch import Side

_AT_ONCE = 64  # blocks of a line that are looked at together
_MOST = 128  # runs of a line that there is room for

Cut = tuple[Side, int, int]
"""Of which side a kernel's programs hold blocks, of how many tokens, and how many of the other's they take at once."""


class Runs(NamedTuple):
    """Runs of blocks on each line; see `triton_runs`.

    Attributes:
        runs: int32 `[batch, lines, most, 3]`: the first block, the one after the last, and their kind.
        counts: int32 `[batch, lines]`: how many there are.
    """

    runs: Tensor
    counts: Tensor

    @property
    def most(self) -> int:
        """How many runs of a line there is room for."""
        return self.runs.shape[2]


class Lines(NamedTuple):
    """A line for each block of one side, and the extents that kinds were found by."""

    runs: Runs
    query_extents: Tensor
    key_extents: Tensor


def line_runs(pairs: Pairs, cut: Cut, most: int = 0) -> Lines:
    """Return the runs of a kernel that goes over lines of blocks.

    Args:
        pairs: The queries and the keys.
        cut: How they are cut.
        most: How many runs there is room for; 0: as many as is usual.
    """
    most = most or _MOST
    found = pairs.once.get(("lines", cut, most), partial(_make_lines, pairs, cut, most))
    return Lines(Runs(*found[:2]), *found[2:])


def diagonal_runs(pairs: Pairs, cut: Cut, most: int = 0) -> Runs:
    """Return the runs of the kernel that goes along diagonals, for both sides of which there are tokens.

    Args:
        pairs: The queries and the keys.
        cut: How lines of queries are cut; a block of queries is some whole blocks of keys.
        most: As in `line_runs`, whose are as many.
    """
    most = most or _MOST
    return Runs(*pairs.once.get(("diagonals", cut, most), partial(_make_diagonals, pairs, cut, most)))


def extents(pairs: Pairs, side: Side, size: int) -> Tensor:
    """Return the numbers of a side's blocks of so many tokens, int32 `[batch, blocks, triton_extents.NUMBERS]`."""
    name = "queries" if pairs.keys is pairs.queries else side
    return pairs.once.get(("extents", name, size), partial(_make_extents, pairs, side, size))[0]


def _make_lines(pairs: Pairs, cut: Cut, most: int) -> tuple[Tensor, ...]:
    from bmburst_ops.biased.triton_runs import lines_kernel

    own = extents(pairs, *cut[:2])
    other = extents(pairs, "keys" if cut[0] == "queries" else "queries", cut[2])
    of_queries = cut[0] == "queries"
    query_extents, key_extents = (own, other) if of_queries else (other, own)
    runs = _room(own, own.shape[1], most)
    if not other.shape[1]:
        runs.counts.zero_()
    elif own.shape[1] and own.shape[0]:
        with torch.cuda.device_of(own):
            lines_kernel[(own.shape[1], own.shape[0])](
                query_extents,
                key_extents,
                *runs,
                query_extents.shape[1],
                key_extents.shape[1],
                *pairs.lookup(),
                OF_QUERIES=of_queries,
                RUNS=most,
                AT_ONCE=_AT_ONCE,
                num_warps=2,
            )
    return *runs, query_extents, key_extents


def _make_diagonals(pairs: Pairs, cut: Cut, most: int) -> tuple[Tensor, ...]:
    from bmburst_ops.biased.triton_runs import diagonals_kernel

    lines = line_runs(pairs, cut, most)
    query_blocks, key_blocks, ratio = lines.query_extents.shape[1], lines.key_extents.shape[1], cut[1] // cut[2]
    runs = _room(lines.query_extents, ratio * (query_blocks - 1) + key_blocks, most)
    with torch.cuda.device_of(runs.runs):
        diagonals_kernel[(runs.runs.shape[1], runs.runs.shape[0])](
            *lines[1:],
            *lines.runs,
            *runs,
            query_blocks,
            key_blocks,
            *pairs.lookup(),
            RATIO=ratio,
            RUNS=most,
            AT_ONCE=_AT_ONCE,
            num_warps=2,
        )
    return runs


def _make_extents(pairs: Pairs, side: Side, size: int) -> tuple[Tensor, ...]:
    from bmburst_ops.biased.triton_runs import NUMBERS, extents_kernel

    packed = pairs.packed()[side == "keys"]
    _, batch, tokens = packed.shape
    blocks = -(-tokens // size)
    found = packed.new_empty(batch, blocks, NUMBERS)
    if found.numel():
        with torch.cuda.device_of(found):
            extents_kernel[(blocks, batch)](packed, found, tokens, SIZE=size, num_warps=1)
    return (found,)


def _room(like: Tensor, lines: int, most: int) -> Runs:
    """Return room for the runs of so many lines a batch."""
    batch = like.shape[0]
    return Runs(like.new_empty(batch, lines, most, 3), like.new_empty(batch, lines))
