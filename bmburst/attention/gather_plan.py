"""Gathered keys as plain data: which bytes a rank pulls, who attends to them, and how their gradients go home.

A rank has its own keys already. Of the others it pulls those that its mask lets it see, into one buffer, in global
order (under a full mask order does not matter, and they stand in rank order). So each run of its queries sees a prefix
of that buffer, all of it, and no rectangle needs a mask. Padding is neither pulled nor attended to.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from bmburst.comm.exchange import Block, Exchange, Move, make_exchange, placed
from bmburst.layout import Layout, Run, real_tokens
from bmburst.schedule import Mask, Span, Tile


@dataclass(frozen=True, slots=True)
class Sight:
    """What decides who sees whose keys: the layout, the real tokens of the whole sequence, the mask."""

    layout: Layout
    length: int
    mask: Mask


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherShapes:
    """Sizes of a gather; `itemsize` in bytes."""

    sight: Sight
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int


class Piece(NamedTuple):
    """Local tokens of a rank, and where they start in the buffer of the one that pulls them."""

    owner: int
    tokens: Span
    start: int


class Unit(NamedTuple):
    """Heads that are attended together: KV heads, and all query heads that attend to them."""

    heads: Span
    kv_heads: Span


class Rows(NamedTuple):
    """Local tokens whose gradient is the sum of the first `parts` parts."""

    tokens: Span
    parts: int


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Everything one rank does in a forward or a backward pass.

    Attributes:
        units: The heads, cut.
        real: Own local tokens that are no padding.
        seen: Tokens pulled from others.
        forward: Rectangles of own queries and pulled keys. A query is in one of them at most: one merge.
        backward: The same pairs, cut so that a key is in exactly one of them: its gradient leaves as the kernel wrote
            it.
        query_sums: How the gradients of own queries add up: part 0 is of own keys, the others of `backward`.
        key_sums: How those of own keys do: part 0 is of own queries, the others come from ranks.
        key_parts: Parts of the latter.
        inbound: For each unit, K and V: each fills one half of an outbox `[batch, local tokens, kv_heads, head_dim]`,
            and goes to targets 0 and 1, `[batch, seen, kv_heads, head_dim]`.
        outbound: For each unit, dK and dV: from halves of an outbox, shaped as those targets, to targets 0 and 1,
            `[key_parts, batch, real, kv_heads, head_dim]`.
    """

    units: tuple[Unit, ...]
    real: int
    seen: int
    forward: tuple[Tile, ...]
    backward: tuple[Tile, ...]
    query_sums: tuple[Rows, ...]
    key_sums: tuple[Rows, ...]
    key_parts: int
    inbound: tuple[Exchange, ...]
    outbound: tuple[Exchange, ...]


@lru_cache(maxsize=256)
def make_gather_plan(shapes: GatherShapes, rank: int, most: int) -> GatherPlan:
    """Return a rank's plan.

    Args:
        shapes: Sizes.
        rank: The rank.
        most: KV heads a unit may have; 0 for a single unit.
    """
    sight = shapes.sight
    units = make_units(shapes.heads, shapes.kv_heads, most)
    sizes = [len(unit.kv_heads) for unit in units]
    inbound = {heads: _inbound(shapes, rank, heads) for heads in set(sizes)}
    outbound = {heads: _outbound(shapes, rank, heads) for heads in set(sizes)}
    prefixes = _prefixes(sight, rank)
    backward = _rectangles_by_keys(prefixes)
    return GatherPlan(
        units=units,
        real=_real(sight, rank),
        seen=_seen(sight, rank),
        forward=_rectangles_by_queries(prefixes),
        backward=backward,
        query_sums=_sums((span, sum(t.queries.start <= span.start for t in backward)) for span, _ in prefixes),
        key_sums=_sums((span, _seers(sight, rank, span.start)) for span, _ in prefixes),
        key_parts=1 + len(_slots(sight, rank)),
        inbound=tuple(inbound[heads] for heads in sizes),
        outbound=tuple(outbound[heads] for heads in sizes),
    )


def make_units(heads: int, kv_heads: int, most: int) -> tuple[Unit, ...]:
    """Return the heads in as few units of at most `most` KV heads (0: no bound) as there can be, as even as they get.

    None is small: a rank has few queries, and a kernel of few heads would leave most of the GPU idle. What hides the
    first unit's way in is the attention to own keys.
    """
    count = -(-kv_heads // most) if most else 1
    edges = [i * kv_heads // count for i in range(count + 1)]
    group = heads // kv_heads
    return tuple(Unit(Span(a * group, b * group), Span(a, b)) for a, b in pairwise(edges))


@lru_cache(maxsize=4096)
def pulled(sight: Sight, rank: int) -> tuple[Piece, ...]:
    """Return what a rank pulls from others, in the order of its buffer."""
    wanted = _everybody(sight, rank) if sight.mask == "full" else _before(sight, rank)
    pieces, start = [], 0
    for owner, tokens in wanted:
        pieces.append(Piece(owner, tokens, start))
        start += len(tokens)
    return tuple(pieces)


def _everybody(sight: Sight, rank: int) -> list[tuple[int, Span]]:
    if not _real(sight, rank):
        return []
    others = ((p, Span(0, _real(sight, p))) for p in range(sight.layout.size) if p != rank)
    return [(p, span) for p, span in others if len(span)]


def _before(sight: Sight, rank: int) -> list[tuple[int, Span]]:
    """Others' runs before the last one of this rank, in global order. Before a real token nothing is padding."""
    last = max((run.start for run in _runs(sight, rank)), default=0)
    found = [
        (run.start, p, Span(run.offset, run.offset + run.tokens))
        for p in range(sight.layout.size)
        if p != rank
        for run in _runs(sight, p)
        if run.start < last
    ]
    return [(p, span) for _, p, span in sorted(found)]


def _prefixes(sight: Sight, rank: int) -> list[tuple[Span, int]]:
    """Return each run of a rank's real tokens, and how many of the pulled keys its queries see."""
    pieces = pulled(sight, rank)
    if sight.mask == "full":
        real = _real(sight, rank)
        return [(Span(0, real), _seen(sight, rank))] if real else []
    found = []
    for run in _runs(sight, rank):
        seen = sum(len(p.tokens) for p in pieces if _global_start(sight, p.owner, p.tokens.start) < run.start)
        found.append((Span(run.offset, run.offset + run.real(sight.length)), seen))
    return found


def _rectangles_by_queries(prefixes: Sequence[tuple[Span, int]]) -> tuple[Tile, ...]:
    """One rectangle a run, of all keys that it sees; runs that see the same keys share one."""
    tiles: list[Tile] = []
    for queries, seen in prefixes:
        if tiles and len(tiles[-1].keys) == seen:
            tiles[-1] = Tile(Span(tiles[-1].queries.start, queries.stop), tiles[-1].keys, causal=False)
        elif seen:
            tiles.append(Tile(queries, Span(0, seen), causal=False))
    return tuple(tiles)


def _rectangles_by_keys(prefixes: Sequence[tuple[Span, int]]) -> tuple[Tile, ...]:
    """One rectangle for the keys that each run sees and the run before it does not, of all queries from there on."""
    tiles, before = [], 0
    for queries, seen in prefixes:
        if seen > before:
            tiles.append(Tile(Span(queries.start, prefixes[-1][0].stop), Span(before, seen), causal=False))
        before = seen
    return tuple(tiles)


@lru_cache(maxsize=4096)
def _slots(sight: Sight, rank: int) -> dict[int, int]:
    """Return in which part a rank lays the gradients of its keys that each other rank brings.

    Those who see most of them come first, so that whoever sees a token's key is in its first parts.
    """
    counts = {p: sum(len(piece.tokens) for piece in _from(sight, rank, p)) for p in range(sight.layout.size)}
    seers = sorted((p for p, tokens in counts.items() if tokens), key=lambda p: (-counts[p], p))
    return {p: slot for slot, p in enumerate(seers, 1)}


def _seers(sight: Sight, rank: int, token: int) -> int:
    """Return how many other ranks pull this token of a rank."""
    pieces = (piece for p in _slots(sight, rank) for piece in _from(sight, rank, p))
    return sum(piece.tokens.start <= token < piece.tokens.stop for piece in pieces)


def _from(sight: Sight, owner: int, puller: int) -> Sequence[Piece]:
    """Return what one rank pulls from another."""
    return _by_owner(sight, puller).get(owner, ())


@lru_cache(maxsize=4096)
def _by_owner(sight: Sight, puller: int) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pulled(sight, puller):
        found.setdefault(piece.owner, []).append(piece)
    return found


def _sums(others: Iterable[tuple[Span, int]]) -> tuple[Rows, ...]:
    """Return runs of tokens with the number of their parts, own part included; equal neighbours are one."""
    rows: list[Rows] = []
    for span, count in others:
        if rows and rows[-1].parts == count + 1:
            rows[-1] = Rows(Span(rows[-1].tokens.start, span.stop), count + 1)
        else:
            rows.append(Rows(span, count + 1))
    return tuple(rows)


def _inbound(shapes: GatherShapes, rank: int, kv_heads: int) -> Exchange:
    layout = shapes.sight.layout
    row = kv_heads * shapes.head_dim * shapes.itemsize
    starts, nbytes = placed([shapes.batch * layout.tokens * row] * 2)

    def route(source: int, target: int) -> Iterator[Move]:
        pitch = _seen(shapes.sight, target) * row
        for buffer in (0, 1):
            for piece in _from(shapes.sight, source, target):
                size = (len(piece.tokens) * row, shapes.batch)
                start = starts[buffer] + piece.tokens.start * row
                yield Move(Block(start, *size, layout.tokens * row), Block(piece.start * row, *size, pitch, buffer))

    return make_exchange(rank, layout.size, nbytes, route)


def _outbound(shapes: GatherShapes, rank: int, kv_heads: int) -> Exchange:
    sight, layout = shapes.sight, shapes.sight.layout
    row = kv_heads * shapes.head_dim * shapes.itemsize
    most = max(1, *(_seen(sight, p) for p in range(layout.size)))
    starts, nbytes = placed([shapes.batch * most * row] * 2)

    def route(source: int, target: int) -> Iterator[Move]:
        pitch, real = _seen(sight, source) * row, _real(sight, target)
        for buffer in (0, 1):
            for piece in _from(sight, target, source):
                size = (len(piece.tokens) * row, shapes.batch)
                first = _slots(sight, target)[source] * shapes.batch * real + piece.tokens.start
                start = starts[buffer] + piece.start * row
                yield Move(Block(start, *size, pitch), Block(first * row, *size, real * row, buffer))

    return make_exchange(rank, layout.size, nbytes, route)


def _runs(sight: Sight, rank: int) -> list[Run]:
    """Return a rank's runs that have a real token."""
    runs = [run for run in sight.layout.runs(rank) if run.real(sight.length)]
    assert all(run.stride == 1 for run in runs)  # under a causal mask, where runs matter, striped is refused
    return runs


def _global_start(sight: Sight, rank: int, offset: int) -> int:
    return next(run.start for run in sight.layout.runs(rank) if run.offset == offset)


def _real(sight: Sight, rank: int) -> int:
    return real_tokens(sight.layout, rank, sight.length)


def _seen(sight: Sight, rank: int) -> int:
    return sum(len(piece.tokens) for piece in pulled(sight, rank))
