"""Layout x mask -> the tiles each rank computes at each step, as plain data.

A schedule is made on the CPU in microseconds, cached, and can be printed. The executors in `bmburst.attention` only
obey it; tests count every (query, key) pair of it by brute force.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from bmburst.errors import require_known
from bmburst.layout import Layout, Run, real_tokens

MASKS = ("causal", "full")
Mask = Literal["causal", "full"]
Travellers = Literal["kv", "q"]


class Span(NamedTuple):
    """Local tokens `start` to `stop`, exclusive."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The span as an index."""
        return slice(self.start, self.stop)


class Tile(NamedTuple):
    """A rectangle of the score matrix with work in it, in local coordinates.

    `causal` is bottom-right aligned: the last query sees the last key, each query before it one key fewer.
    Otherwise every query sees every key.
    """

    queries: Span
    keys: Span
    causal: bool

    @property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        rows, columns = len(self.queries), len(self.keys)
        return rows * columns - (rows * (rows - 1) // 2 if self.causal else 0)


class Step(NamedTuple):
    """One stop of the ring: whose blocks are here, and what to compute with them."""

    owner: int
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> int:
        """Visible (query, key) pairs of this step."""
        return sum(tile.area for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does, step by step. Blocks move one rank up between steps, so step t holds those of rank - t."""

    rank: int
    size: int
    travellers: Travellers
    steps: tuple[Step, ...]

    @property
    def area(self) -> int:
        """Visible (query, key) pairs that this rank computes."""
        return sum(step.area for step in self.steps)


@lru_cache(maxsize=4096)
def make_schedule(layout: Layout, length: int, mask: Mask, rank: int, travellers: Travellers) -> Schedule:
    """Return the schedule of one rank.

    Args:
        layout: Which rank holds which tokens.
        length: Global number of real tokens; positions from there on are padding, in no tile.
        mask: "causal" or "full".
        rank: The rank on the sequence ring.
        travellers: "kv": keys and values visit our queries. "q": queries visit our keys and values.

    Raises:
        UserError: The mask is unknown.
    """
    require_known("mask", mask, MASKS)
    owners = [(rank - step) % layout.size for step in range(layout.size)]
    pairs = [(rank, owner) if travellers == "kv" else (owner, rank) for owner in owners]
    steps = (Step(owner, tiles(layout, length, mask, *pair)) for owner, pair in zip(owners, pairs, strict=True))
    return Schedule(rank, layout.size, travellers, tuple(steps))


def tiles(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
    """Return the work between one rank's queries and another's keys, in the local coordinates of each."""
    queries, keys = (Span(0, real_tokens(layout, rank, length)) for rank in (query_rank, key_rank))
    if not len(queries) or not len(keys):
        return ()
    if mask == "full":
        return (Tile(queries, keys, causal=False),)
    if query_rank == key_rank:  # local order is global order
        return (Tile(queries, keys, causal=True),)
    pieces = [
        tile
        for query_run in layout.runs(query_rank)
        for key_run in layout.runs(key_rank)
        for tile in _between(query_run, key_run, length)
    ]
    return _joined(pieces)


def _between(queries: Run, keys: Run, length: int) -> list[Tile]:
    """Tiles of two runs of equal stride: query i sees key j where j <= i - shift."""
    rows, columns = queries.real(length), keys.real(length)
    shift = -((queries.start - keys.start) // queries.stride)
    first = max(shift, 0)  # the first query that sees any key
    last = columns - 1 + shift  # the first query that sees all of them
    if not columns or first >= rows:
        return []

    def tile(row: int, stop: int, width: int, causal: bool) -> Tile:
        return Tile(
            Span(queries.offset + row, queries.offset + stop), Span(keys.offset, keys.offset + width), causal=causal
        )

    if last <= first:
        return [tile(first, rows, columns, causal=False)]
    triangle = tile(first, min(last + 1, rows), min(columns, rows - shift), causal=True)
    return [triangle] if last + 1 >= rows else [triangle, tile(last + 1, rows, columns, causal=False)]


def _joined(pieces: list[Tile]) -> tuple[Tile, ...]:
    """Join unmasked rectangles that lie side by side: one kernel call instead of two."""
    for a, b in pairwise(pieces):
        if a.causal or b.causal:
            continue
        if a.queries == b.queries and a.keys.stop == b.keys.start:
            both = Tile(a.queries, Span(a.keys.start, b.keys.stop), causal=False)
        elif a.keys == b.keys and a.queries.stop == b.queries.start:
            both = Tile(Span(a.queries.start, b.queries.stop), a.keys, causal=False)
        else:
            continue
        return _joined([both if piece is a else piece for piece in pieces if piece is not b])
    return tuple(pieces)


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
