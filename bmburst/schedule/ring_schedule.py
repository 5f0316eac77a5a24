"""Layout x mask -> the tiles each rank computes at each step, as plain data.

A schedule is made on the CPU in microseconds, cached, and can be printed. The executors in `bmburst.attention` only
obey it; tests count every (query, key) pair of it by brute force.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmburst.schedule.layout import Layout, real_positions
from bmburst.schedule.mask import Mask
from bmburst.schedule.strategy_names import Travellers
from bmburst.schedule.tiles import Span, Tile, make_tiles, seen_by
from bmburst_ops.bounded_cache import bounded_cache


class Step(NamedTuple):
    """One stop of the ring: whose blocks are here, and what to compute with them."""

    distance: int
    """How far they came: ours are of rank - distance."""
    owner: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does, step by step.

    All ranks have steps of the same distances: 0, and those at which any of them has work. Blocks move from one to the
    next at once, and after the last one what must return goes the rest of the way home.
    """

    size: int
    steps: tuple[Step, ...]

    @property
    def hops(self) -> tuple[int, ...]:
        """How far blocks move behind each step; behind the last one, to be home."""
        distances = [*(step.distance for step in self.steps), self.size]
        return tuple(after - before for before, after in pairwise(distances))


@bounded_cache(maxsize=128)
def make_schedule(layout: Layout, length: int, mask: Mask, rank: int, travellers: Travellers) -> Schedule:
    """Return the schedule of one rank.

    Args:
        layout: Which rank holds which tokens.
        length: Global number of real tokens; positions from there on are padding, in no tile.
        mask: Which keys a query sees.
        rank: The rank on the sequence ring.
        travellers: "kv": keys and values visit our queries. "q": queries visit our keys and values.
    """
    owners = [(rank - distance) % layout.size for distance in distances(layout, length, mask, travellers)]
    steps = tuple(make_step(layout, length, mask, rank, owner, travellers) for owner in owners)
    return Schedule(layout.size, steps)


def make_step(layout: Layout, length: int, mask: Mask, rank: int, owner: int, travellers: Travellers) -> Step:
    """Return what a rank computes with the blocks of another; the arguments are those of `make_schedule`."""
    pair = (rank, owner) if travellers == "kv" else (owner, rank)
    return Step((rank - owner) % layout.size, owner, tiles(layout, length, mask, *pair))


@bounded_cache(maxsize=256)
def tiles(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
    """Return the work between one rank's queries and another's keys, in the local coordinates of each."""
    return make_tiles(
        mask, length, real_positions(layout, query_rank, length), real_positions(layout, key_rank, length)
    )


@bounded_cache(maxsize=256)
def distances(layout: Layout, length: int, mask: Mask, travellers: Travellers) -> tuple[int, ...]:
    """Return 0 and the distances at which a rank's queries may see another's keys."""
    found, ranks = _meetings(layout, length, mask), np.arange(layout.size)
    way = -1 if travellers == "kv" else 1
    return (0, *(d for d in range(1, layout.size) if found[ranks, (ranks + way * d) % layout.size].any()))


def meet(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> bool:
    """Return whether any query of one rank may see a key of another.

    Judged by what runs of neighbouring tokens see. Where a run is of every n-th token, as if it were of all: no work is
    missed.
    """
    return bool(_meetings(layout, length, mask)[query_rank, key_rank])


@bounded_cache(maxsize=64)
def _meetings(layout: Layout, length: int, mask: Mask) -> NDArray[np.bool_]:
    """Return `meet` of all pairs, `[query ranks, key ranks]`."""
    found = np.zeros((layout.size, layout.size), bool)
    keys = [(rank, run) for rank in range(layout.size) for run in layout.runs(rank)]
    owner, start, stride, end = np.array(
        [(rank, run.start, run.stride, run.start + run.stride * run.real(length)) for rank, run in keys]
    ).T
    for rank in range(layout.size):
        for seen in _seen_from(layout, length, mask, rank):
            first = start + np.maximum(0, -((start - seen.start) // stride)) * stride
            found[rank, owner[first < np.minimum(seen.stop, end)]] = True
    return found


def _seen_from(layout: Layout, length: int, mask: Mask, rank: int) -> tuple[Span, ...]:
    """Return the positions that runs of a rank's queries see."""
    runs = [run for run in layout.runs(rank) if run.real(length)]
    ends = ((run.start, run.start + run.stride * (run.real(length) - 1)) for run in runs)
    return tuple(span for first, last in ends for span in seen_by(mask, length, first, last))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Sizes that decide what a strategy moves.

    `itemsize` is that of activations, `gradient_itemsize` that of travelling gradients, `statistics_itemsize` that of
    log-sum-exp and delta, each in bytes.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2
    gradient_itemsize: int = 4
    statistics_itemsize: int = 4


def forward_bytes(shape: AttentionShape, size: int) -> int:
    """Return the bytes that a rank sends forward: K and V over size - 1 hops."""
    keys = shape.batch * shape.tokens * shape.kv_heads * shape.head_dim
    return (size - 1) * 2 * keys * shape.itemsize


def backward_bytes(shape: AttentionShape, size: int, travellers: Travellers) -> int:
    """Return the bytes that a rank sends backward.

    "kv": K and V over size - 1 hops, dK and dV over size hops (they must come home). "q": Q, dO, log-sum-exp and delta
    over size - 1 hops, dQ over size hops (BurstAttention, arXiv:2403.09347, section 3.2).
    """
    if size == 1:
        return 0
    rows = shape.batch * shape.tokens
    if travellers == "kv":
        keys = rows * shape.kv_heads * shape.head_dim
        return (size - 1) * 2 * keys * shape.itemsize + size * 2 * keys * shape.gradient_itemsize
    queries = rows * shape.heads * shape.head_dim
    read = 2 * queries * shape.itemsize + 2 * rows * shape.heads * shape.statistics_itemsize
    return (size - 1) * read + size * queries * shape.gradient_itemsize


def choose_travellers(shape: AttentionShape, size: int) -> Travellers:
    """Return what moves in backward for the fewest bytes; a tie goes to "q", whose dK and dV stay at home."""
    return "q" if backward_bytes(shape, size, "q") <= backward_bytes(shape, size, "kv") else "kv"
