"""What kernels are told before they go over blocks: which to take, and how; all of it made on the device.

Memory is linear in the tokens, and the host waits for nothing.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.biased.extents import extents, steps
from bmburst_ops.biased.tokens import Tokens
from bmburst_ops.flash.triton_masks import Side

_AT_ONCE = 64  # blocks of a line that are looked at together
_MOST = 128  # runs of a line that there is room for


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


def line_runs(
    queries: Tokens, keys: Tokens, side: tuple[Side, int, int], bias: tuple[Any, ...], most: int = 0
) -> Lines:
    """Return the runs of a kernel that goes over lines of blocks.

    Args:
        queries: What the queries are.
        keys: What the keys are.
        side: Of which side its programs hold blocks, of how many tokens, and how many of the other's they take at once.
        bias: Relations and distances, as kernels take them.
        most: How many runs there is room for; 0: as many as is usual.
    """
    of_queries = side[0] == "queries"
    own, other, ranges = extents(*((queries, keys) if of_queries else (keys, queries)), *side[1:])
    query_extents, key_extents = (own, other) if of_queries else (other, own)
    runs = _room(own, own.shape[1], most or _MOST)
    if own.shape[1] and own.shape[0]:
        with torch.cuda.device_of(own):
            _kernels()[0][(own.shape[1], own.shape[0])](
                query_extents,
                key_extents,
                ranges,
                *runs,
                query_extents.shape[1],
                key_extents.shape[1],
                *bias,
                OF_QUERIES=of_queries,
                RUNS=runs.most,
                AT_ONCE=_AT_ONCE,
                num_warps=2,
            )
    return Lines(runs, query_extents, key_extents)


def diagonal_runs(
    queries: Tokens, keys: Tokens, side: tuple[Side, int, int], lines: Lines, bias: tuple[Any, ...]
) -> Runs:
    """Return the runs of the kernel that goes along diagonals, for both sides of which there are tokens.

    Args:
        queries: What the queries are.
        keys: What the keys are.
        side: How lines of queries are cut, as in `line_runs`; a block of queries is some whole blocks of keys.
        lines: Theirs.
        bias: As in `line_runs`.
    """
    query_blocks, key_blocks, ratio = lines.query_extents.shape[1], lines.key_extents.shape[1], side[1] // side[2]
    runs = _room(lines.query_extents, ratio * (query_blocks - 1) + key_blocks, lines.runs.most)
    with torch.cuda.device_of(runs.runs):
        _kernels()[1][(runs.runs.shape[1], runs.runs.shape[0])](
            *lines[1:],
            steps(queries, side[1]),
            steps(keys, side[2]),
            *lines.runs,
            *runs,
            query_blocks,
            key_blocks,
            *bias,
            RATIO=ratio,
            RUNS=runs.most,
            AT_ONCE=_AT_ONCE,
            num_warps=2,
        )
    return runs


def _room(like: Tensor, lines: int, most: int) -> Runs:
    """Return room for the runs of so many lines a batch."""
    batch = like.shape[0]
    return Runs(like.new_empty(batch, lines, most, 3), like.new_empty(batch, lines))


@cache
def _kernels() -> tuple[Any, Any]:
    """Import Triton, and the kernels, where they are first needed."""
    from bmburst_ops.biased.triton_runs import diagonals_kernel, lines_kernel

    return lines_kernel, diagonals_kernel
