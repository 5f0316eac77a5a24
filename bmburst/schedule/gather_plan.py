"""Plans of a gather: which keys a rank pulls, the tiles of its queries with them, and where their gradients go.

A rank pulls those keys of other ranks that its queries see into one buffer, in global order (in rank order under a full
mask, where the order does not matter). So each query sees one interval of the buffer. Padding is not pulled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from bmburst.schedule.documents import Documents
from bmburst.schedule.exchange import Block, Exchange, Move, make_exchange, offsets_of
from bmburst.schedule.layout import Layout, Run, real_positions, real_tokens
from bmburst.schedule.mask import Causal, Full, Mask
from bmburst.schedule.ring_schedule import seen_from
from bmburst.schedule.tiles import Span, Tile, make_tiles
from bmburst.schedule.units import HeadShapes, Unit, even_units
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import FULL, IntArray


@dataclass(frozen=True, slots=True)
class Visibility:
    """The inputs that determine which rank sees which keys: layout, real tokens of the sequence, and mask."""

    layout: Layout
    length: int
    mask: Mask

    @property
    def key_length(self) -> int:
        """Real keys; as many as queries, except in cross-attention."""
        return self.mask.key_length(self.length)


class PulledTokens(NamedTuple):
    """Local tokens of a rank, and their start in the buffer of the rank that pulls them."""

    owner: int
    tokens: Span
    start: int


class SummedTokens(NamedTuple):
    """Local tokens whose gradient is the sum of the first `parts` partial gradients."""

    tokens: Span
    parts: int


class PairExchange(NamedTuple):
    """An exchange of keys and values, or of their gradients, and where each starts in the outbox, in bytes."""

    exchange: Exchange
    starts: tuple[int, ...]


class GradientSumPlan(NamedTuple):
    """How partial gradients are added."""

    rows: tuple[SummedTokens, ...]
    zeroed: bool
    """Whether sums read partial gradients where no kernel wrote, so that they must be zeroed first."""


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The plan of one rank for a forward and a backward pass.

    Attributes:
        units: The units of heads.
        real: Local queries of this rank without padding.
        real_keys: Local keys of this rank without padding; as many as queries, except in cross-attention.
        seen: Tokens pulled from other ranks.
        most_seen: The maximum of `seen` over the ranks: 0 if nothing is pulled.
        own: Tiles of own queries and own keys.
        forward: Tiles of own queries and pulled keys. Each query is in at most one tile, so that it is merged once.
        backward: The same pairs, with each key in at most one tile: kernels write its whole gradient at once.
        apart: Whether every pulled key is in exactly one tile of `backward`: kernels may write to the outbox directly.
        query_sums: How gradients of own queries are added: part 0 is from own keys, the others from `backward`.
        key_sums: How gradients of own keys are added: part 0 is from own queries, the others from other ranks.
        key_parts: Number of parts of `key_sums`.
        most_key_parts: The maximum of `key_parts` over the ranks.
        inbound: For each unit, the exchange of K and V: from an outbox, `[batch, local tokens, kv_heads, head_dim]`
            each, to targets 0 and 1, `[batch, seen, kv_heads, head_dim]`. V and dV have their own head dimension.
        outbound: For each unit, the exchange of dK and dV: from an outbox, shaped as those targets, to targets 0 and 1,
            `[key_parts, batch, real_keys, kv_heads, head_dim]`.
    """

    units: tuple[Unit, ...]
    real: int
    real_keys: int
    seen: int
    most_seen: int
    own: tuple[Tile, ...]
    forward: tuple[Tile, ...]
    backward: tuple[Tile, ...]
    apart: bool
    query_sums: GradientSumPlan
    key_sums: GradientSumPlan
    key_parts: int
    most_key_parts: int
    inbound: tuple[PairExchange, ...]
    outbound: tuple[PairExchange, ...]


@bounded_cache(maxsize=64)
def make_gather_plan(shapes: HeadShapes, length: int, mask: Mask, rank: int, most: int) -> GatherPlan:
    """Return a rank's plan.

    Args:
        shapes: Sizes, without an exchange of heads.
        length: Real tokens of the sequence.
        mask: The mask.
        rank: The rank.
        most: Maximum KV heads of a unit; 0 for a single unit.
    """
    visible = Visibility(shapes.layout, length, mask)
    real, real_keys = _real(visible, rank), _real_keys(visible, rank)
    seen, slots = _seen(visible, rank), _slots(visible, rank)
    units = even_units(shapes.heads, shapes.kv_heads, most)
    sizes = [len(unit.kv_heads) for unit in units]
    inbound = {heads: _inbound(visible, shapes, rank, heads) for heads in set(sizes)}
    outbound = {heads: _outbound(visible, shapes, rank, heads) for heads in set(sizes)}
    mine, others = real_positions(visible.layout, rank, visible.length), _pulled_positions(visible, rank)
    held = real_positions(visible.layout.keys, rank, visible.key_length)
    backward = _tiles(visible, mine, others, by="keys")
    spans = sorted(tile.keys for tile in backward)
    return GatherPlan(
        units=units,
        real=real,
        real_keys=real_keys,
        seen=seen,
        most_seen=most_seen(visible),
        own=make_tiles(visible.mask, visible.length, mine, held),
        forward=_tiles(visible, mine, others, by="queries"),
        backward=backward,
        apart=[span.start for span in spans] + [seen] == [0, *(span.stop for span in spans)],
        query_sums=_sums(real, [[tile.queries] for tile in backward]),
        key_sums=_sums(real_keys, [[piece.tokens for piece in _from(visible, rank, p)] for p in slots]),
        key_parts=1 + len(slots),
        most_key_parts=1 + max(len(_slots(visible, p)) for p in range(visible.layout.size)),
        inbound=tuple(inbound[heads] for heads in sizes),
        outbound=tuple(outbound[heads] for heads in sizes),
    )


@bounded_cache(maxsize=4096)
def pulled(visible: Visibility, rank: int) -> tuple[PulledTokens, ...]:
    """Return the tokens that a rank pulls from other ranks, in the order of its buffer."""
    wanted = _everybody(visible, rank) if visible.mask.sees_all else _visible(visible, rank)
    pieces, start = [], 0
    for owner, tokens in wanted:
        pieces.append(PulledTokens(owner, tokens, start))
        start += len(tokens)
    return tuple(pieces)


@bounded_cache(maxsize=256)
def most_seen(visible: Visibility) -> int:
    """Return the maximum over the ranks of the tokens that a rank pulls."""
    return max(_seen(visible, rank) for rank in range(visible.layout.size))


@bounded_cache(maxsize=256)
def sums_own_tiles(visible: Visibility) -> bool:
    """Return whether some rank has several tiles in `GatherPlan.own`, whose gradients are added up."""
    if isinstance(visible.mask, Causal | Full | Documents) or visible.mask.blocks is not None:
        return False
    length, key_length = visible.length, visible.key_length
    held = (
        (real_positions(visible.layout, rank, length), real_positions(visible.layout.keys, rank, key_length))
        for rank in range(visible.layout.size)
    )
    return any(len(make_tiles(visible.mask, length, *mine)) > 1 for mine in held)


@bounded_cache(maxsize=64)
def tile_counts(visible: Visibility, rank: int) -> tuple[int, int, int]:
    """Return the number of tiles of a rank: `own`, `forward` and `backward` of its `GatherPlan`."""
    mine, others = real_positions(visible.layout, rank, visible.length), _pulled_positions(visible, rank)
    held = real_positions(visible.layout.keys, rank, visible.key_length)
    own = make_tiles(visible.mask, visible.length, mine, held)
    return len(own), len(_tiles(visible, mine, others, "queries")), len(_tiles(visible, mine, others, "keys"))


def _everybody(visible: Visibility, rank: int) -> list[tuple[int, Span]]:
    if not _real(visible, rank):
        return []
    others = ((p, Span(0, _real_keys(visible, p))) for p in range(visible.layout.size) if p != rank)
    return [(p, span) for p, span in others if len(span)]


def _visible(visible: Visibility, rank: int) -> list[tuple[int, Span]]:
    """Return the tokens of other ranks that a rank's queries see, in global order."""
    seen = _seen_spans(visible, rank)
    found = []
    for p in range(visible.layout.size):
        for run in () if p == rank else _key_runs(visible, p):
            end = run.start + run.real(visible.key_length)
            parts = (Span(max(span.start, run.start), min(span.stop, end)) for span in seen)
            found += [(part.start, p, part.stop, run.offset - run.start) for part in _united(parts)]
    return [(p, Span(start + shift, stop + shift)) for start, p, stop, shift in sorted(found)]


def _united(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans as disjoint spans with gaps between them; empty spans are dropped."""
    united: list[Span] = []
    for span in sorted(span for span in spans if span.start < span.stop):
        if united and span.start <= united[-1].stop:
            united[-1] = Span(united[-1].start, max(span.stop, united[-1].stop))
        else:
            united.append(span)
    return united


def _pulled_positions(visible: Visibility, rank: int) -> IntArray:
    """Return the global positions of the tokens in a rank's buffer."""
    layout, length = visible.layout.keys, visible.key_length
    parts = [real_positions(layout, p.owner, length)[p.tokens.slice] for p in pulled(visible, rank)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _tiles(visible: Visibility, queries: IntArray, keys: IntArray, by: Literal["queries", "keys"]) -> tuple[Tile, ...]:
    if visible.mask.sees_all and len(queries) and len(keys):
        return (Tile(Span(0, len(queries)), Span(0, len(keys)), FULL, len(queries) * len(keys)),)
    return make_tiles(visible.mask, visible.length, queries, keys, by)


@bounded_cache(maxsize=4096)
def _slots(visible: Visibility, rank: int) -> dict[int, int]:
    """Return the index of the part to which each other rank sends gradients of this rank's keys.

    Ranks that see more of the keys come first, so that a key's gradient is the sum of its first parts.
    """
    counts = {p: sum(len(piece.tokens) for piece in _from(visible, rank, p)) for p in range(visible.layout.size)}
    seers = sorted((p for p, tokens in counts.items() if tokens), key=lambda p: (-counts[p], p))
    return {p: slot for slot, p in enumerate(seers, 1)}


def _from(visible: Visibility, owner: int, puller: int) -> Sequence[PulledTokens]:
    """Return the tokens that one rank pulls from another."""
    return _by_owner(visible, puller).get(owner, ())


@bounded_cache(maxsize=4096)
def _by_owner(visible: Visibility, puller: int) -> dict[int, list[PulledTokens]]:
    found: dict[int, list[PulledTokens]] = {}
    for piece in pulled(visible, puller):
        found.setdefault(piece.owner, []).append(piece)
    return found


def _sums(tokens: int, parts: Sequence[Sequence[Span]]) -> GradientSumPlan:
    """Return how parts are added: part 0 has all tokens, each further part the tokens in its spans.

    If the parts of every token are the first ones, as under a causal mask, only those are read.
    """
    edges = sorted({0, tokens, *(edge for spans in parts for span in spans for edge in span)})
    rows: list[SummedTokens] = []
    for start, stop in pairwise(edges):
        has = [any(span.start <= start < span.stop for span in spans) for spans in parts]
        count = 1 + sum(has)
        if not all(has[: count - 1]):
            return GradientSumPlan((SummedTokens(Span(0, tokens), 1 + len(parts)),), zeroed=True)
        if rows and rows[-1].parts == count:
            rows[-1] = SummedTokens(Span(rows[-1].tokens.start, stop), count)
        else:
            rows.append(SummedTokens(Span(start, stop), count))
    return GradientSumPlan(tuple(rows), zeroed=False)


def _inbound(visible: Visibility, shapes: HeadShapes, rank: int, kv_heads: int) -> PairExchange:
    layout, rows = visible.layout.keys, _row_bytes(shapes, kv_heads)
    starts, nbytes = offsets_of([shapes.batch * layout.tokens * row for row in rows])

    def route(source: int, target: int) -> Iterator[Move]:
        seen = _seen(visible, target)
        for buffer, row in enumerate(rows):
            for piece in _from(visible, source, target):
                size = (len(piece.tokens) * row, shapes.batch)
                start = starts[buffer] + piece.tokens.start * row
                yield Move(
                    Block(start, *size, layout.tokens * row), Block(piece.start * row, *size, seen * row, buffer)
                )

    return PairExchange(make_exchange(rank, layout.size, nbytes, route), starts)


def _outbound(visible: Visibility, shapes: HeadShapes, rank: int, kv_heads: int) -> PairExchange:
    layout, rows = visible.layout, _row_bytes(shapes, kv_heads)
    most = max(1, *(_seen(visible, p) for p in range(layout.size)))
    starts, nbytes = offsets_of([shapes.batch * most * row for row in rows])

    def route(source: int, target: int) -> Iterator[Move]:
        seen, real = _seen(visible, source), _real_keys(visible, target)
        for buffer, row in enumerate(rows):
            for piece in _from(visible, target, source):
                size = (len(piece.tokens) * row, shapes.batch)
                first = _slots(visible, target)[source] * shapes.batch * real + piece.tokens.start
                start = starts[buffer] + piece.start * row
                yield Move(Block(start, *size, seen * row), Block(first * row, *size, real * row, buffer))

    return PairExchange(make_exchange(rank, layout.size, nbytes, route), starts)


def _row_bytes(shapes: HeadShapes, kv_heads: int) -> list[int]:
    """Return the bytes of a token's keys and of its values, of some heads."""
    return [kv_heads * width * shapes.itemsize for width in (shapes.head_dim, shapes.value_width)]


def _key_runs(visible: Visibility, rank: int) -> list[Run]:
    """Return the runs of a rank's keys that have real tokens."""
    runs = [run for run in visible.layout.keys.runs(rank) if run.real(visible.key_length)]
    assert all(run.stride == 1 for run in runs)  # `gather_refusal` refuses striped where runs matter
    return runs


def _seen_spans(visible: Visibility, rank: int) -> tuple[Span, ...]:
    return seen_from(visible.layout, visible.length, visible.mask, rank)


def _real(visible: Visibility, rank: int) -> int:
    return real_tokens(visible.layout, rank, visible.length)


def _real_keys(visible: Visibility, rank: int) -> int:
    return real_tokens(visible.layout.keys, rank, visible.key_length)


def _seen(visible: Visibility, rank: int) -> int:
    """Return how many tokens a rank pulls, without the list of their owners."""
    if visible.mask.sees_all:
        return visible.key_length - _real_keys(visible, rank) if _real(visible, rank) else 0
    seen = _united(_seen_spans(visible, rank))
    ends = [(run.start, run.start + run.real(visible.key_length)) for run in _key_runs(visible, rank)]
    held = sum(max(0, min(span.stop, end) - max(span.start, start)) for span in seen for start, end in ends)
    return sum(map(len, seen)) - held
