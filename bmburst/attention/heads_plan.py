"""Head exchange as plain data: which heads are attended together, and which bytes move before and after.

Ranks trade tokens of all heads for all tokens of their own heads (DeepSpeed Ulysses, arXiv:2309.14509). Ranks
`g * degree` to `(g + 1) * degree - 1` trade among themselves; together they then hold what one rank of a layout over
`size / degree` ranks would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from bmburst.comm.exchange import Block, Exchange, Move, make_exchange
from bmburst.layout import Layout, Run
from bmburst.schedule import Span

_ALIGN = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShapes:
    """Sizes of a head exchange; `itemsize` and `statistics_itemsize` in bytes."""

    layout: Layout
    degree: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    statistics_itemsize: int

    @property
    def own_heads(self) -> int:
        """Query heads that a rank attends with."""
        return self.heads // self.degree

    @property
    def own_kv_heads(self) -> int:
        """KV heads that a rank attends to."""
        return max(1, self.kv_heads // self.degree)

    @property
    def replicas(self) -> int:
        """Ranks that attend to the same KV head."""
        return max(1, self.degree // self.kv_heads)

    @property
    def tokens(self) -> int:
        """Tokens of a rank's heads after the exchange."""
        return self.layout.tokens * self.degree

    @property
    def outer(self) -> Layout:
        """How those tokens are cut over the groups."""
        return type(self.layout)(self.layout.size // self.degree, self.tokens)

    def refusal(self) -> str | None:
        """Return why these heads cannot be exchanged, or None."""
        if self.layout.size % self.degree:
            return f"{self.layout.size} ranks cannot form groups of {self.degree}"
        if self.heads % self.degree:
            return f"{self.heads} query heads cannot be dealt to {self.degree} ranks"
        if self.kv_heads % self.degree and self.degree % self.kv_heads:
            return f"{self.kv_heads} key/value heads can be neither dealt to {self.degree} ranks nor shared by them"
        if self.layout.name == "striped" and 1 < self.degree < self.layout.size:
            return "the tokens of neighbouring ranks in layout 'striped' are no stripe together"
        return None


class Unit(NamedTuple):
    """Heads of a rank's share: query heads, the KV heads they attend to, and those that no unit before has brought."""

    heads: Span
    kv_heads: Span
    new_kv_heads: Span


def make_units(heads: int, kv_heads: int, *, most: int, whole_groups: bool) -> tuple[Unit, ...]:
    """Return what a rank's share is cut into, one kernel call each, so that blocks move while kernels run.

    The first unit and the last are small: nothing hides the first one's way in and the last one's way out. Those
    between them are few: each kernel has a tail.

    Args:
        heads: Query heads of the share.
        kv_heads: KV heads of the share.
        most: KV heads a unit may have, to bound the outbox; `kv_heads` or more for no bound, 0 for a single unit.
        whole_groups: Whether the query heads of a KV head must stay together (its gradient is their sum).
    """
    group = heads // kv_heads
    if most == 0 or heads == 1:
        cuts = [(Span(0, heads), Span(0, kv_heads))]
    elif kv_heads <= min(2, most) and heads >= 3 and group > 1 and not whole_groups:
        cuts = [
            (Span(0, 1), Span(0, 1)),
            (Span(1, heads - 1), Span(0, kv_heads)),
            (Span(heads - 1, heads), Span(kv_heads - 1, kv_heads)),
        ]
    else:
        middle = range(1, kv_heads - 1, most)
        edges = sorted({0, 1, *middle, max(kv_heads - 1, 1), kv_heads})
        spans = [Span(a, b) for a, b in pairwise(edges)]
        cuts = [(Span(span.start * group, span.stop * group), span) for span in spans]
    units, brought = [], 0
    for own, kv in cuts:
        units.append(Unit(own, kv, Span(min(max(brought, kv.start), kv.stop), kv.stop)))
        brought = max(brought, kv.stop)
    return tuple(units)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor's part in an exchange.

    By tokens: `[batch, tokens, heads, head_dim]` on both sides, `width` bytes a token, of `pitch` bytes a token in the
    target, from byte `column`. By heads, for statistics: `[batch, heads, tokens]`, `rows` heads of `width` bytes a
    token, of `pitch` heads a batch row in the target, from head `column`.
    """

    start: int
    buffer: int
    width: int
    pitch: int
    column: int
    rows: int = 0
    shift: int = 0
    """Bytes into the target buffer."""


@dataclass(frozen=True, slots=True)
class Transferral:
    """A unit's exchange and where each field starts in the outbox."""

    exchange: Exchange
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """Everything one rank does in a forward or a backward pass, unit by unit."""

    shapes: HeadShapes
    units: tuple[Unit, ...]
    inbound: tuple[Transferral, ...]
    outbound: tuple[Transferral, ...]


@lru_cache(maxsize=256)
def make_heads_plan(shapes: HeadShapes, rank: int, *, backward: bool, most: int) -> HeadsPlan:
    """Return a rank's plan.

    Forward brings q, k and v (targets 0 to 2) and returns out and the log-sum-exp (targets 0 and 1). Backward brings
    q, k, v, dO, the log-sum-exp and delta (targets 0 to 5) and returns dQ, dK and dV (targets 0 to 2).
    """
    units = make_units(shapes.own_heads, shapes.own_kv_heads, most=most, whole_groups=backward)
    return HeadsPlan(
        shapes,
        units,
        tuple(_inbound(shapes, rank, unit, backward=backward) for unit in units),
        tuple(_outbound(shapes, rank, unit, backward=backward) for unit in units),
    )


def _inbound(shapes: HeadShapes, rank: int, unit: Unit, *, backward: bool) -> Transferral:
    row, statistic = shapes.head_dim * shapes.itemsize, shapes.statistics_itemsize
    heads, new = unit.heads, unit.new_kv_heads
    queries = (len(heads) * row, shapes.own_heads * row, heads.start * row)
    keys = (len(new) * row, shapes.own_kv_heads * row, new.start * row)
    sides = [(0, *queries, 0), (1, *keys, 0), (2, *keys, 0)]
    if backward:
        by_heads = (statistic, shapes.own_heads, heads.start, len(heads))
        sides += [(3, *queries, 0), (4, *by_heads), (5, *by_heads)]
    size = [shapes.batch * shapes.layout.tokens * width * max(rows, 1) for _, width, _, _, rows in sides]
    starts, total = _placed([shapes.degree * nbytes for nbytes in size])
    fields = [
        Field(start, buffer, width, pitch, column, rows)
        for start, (buffer, width, pitch, column, rows) in zip(starts, sides, strict=True)
    ]

    def route(source: int, target: int) -> Iterator[Move]:
        if source // shapes.degree != target // shapes.degree:
            return
        for field, nbytes in zip(fields, size, strict=True):
            if nbytes:
                start = field.start + target % shapes.degree * nbytes
                yield from _moves(shapes, field, start, _landing(shapes, source), to_heads=True)

    return Transferral(make_exchange(rank, shapes.layout.size, total, route), starts)


def _outbound(shapes: HeadShapes, rank: int, unit: Unit, *, backward: bool) -> Transferral:
    row, statistic = shapes.head_dim * shapes.itemsize, shapes.statistics_itemsize
    heads, kv_heads = unit.heads, unit.kv_heads
    rows = shapes.batch * shapes.tokens
    widths = [len(heads) * row] + ([len(kv_heads) * row] * 2 if backward else [len(heads) * statistic])
    starts, total = _placed([rows * width for width in widths])

    def fields(source: int) -> Iterator[Field]:
        member = source % shapes.degree
        first = member * shapes.own_heads + heads.start
        yield Field(starts[0], 0, widths[0], shapes.heads * row, first * row)
        if not backward:
            yield Field(starts[1], 1, statistic, shapes.heads, first, len(heads))
            return
        first = member * shapes.kv_heads // shapes.degree + kv_heads.start
        replica = member % shapes.replicas * shapes.batch * shapes.layout.tokens * shapes.kv_heads * row
        for i in (1, 2):
            yield Field(starts[i], i, widths[i], shapes.kv_heads * row, first * row, shift=replica)

    def route(source: int, target: int) -> Iterator[Move]:
        if source // shapes.degree == target // shapes.degree:
            for field in fields(source):
                yield from _moves(shapes, field, field.start, _landing(shapes, target), to_heads=False)

    return Transferral(make_exchange(rank, shapes.layout.size, total, route), starts)


def _moves(shapes: HeadShapes, field: Field, start: int, runs: Sequence[Run], *, to_heads: bool) -> Iterator[Move]:
    """Yield the moves of a field, run by run: from local tokens to those of the heads, or back.

    `runs` says where the tokens of the rank at the local end stand among the tokens of the heads.
    """
    local, whole = shapes.layout.tokens, shapes.tokens
    for batch in range(shapes.batch):
        for run in runs:
            here = (run.offset, 1, local)
            there = (run.start, run.stride, whole)
            source, target = (here, there) if to_heads else (there, here)
            if field.rows:
                yield from _statistic_moves(field, start, batch, run.tokens, source, target)
            else:
                yield _token_move(field, start, batch, run.tokens, source, target)


_End = tuple[int, int, int]  # first token, stride, tokens of the whole tensor


def _token_move(field: Field, start: int, batch: int, tokens: int, source: _End, target: _End) -> Move:
    (source_first, source_stride, source_tokens), (first, stride, all_tokens) = source, target
    return Move(
        Block(
            start + (batch * source_tokens + source_first) * field.width,
            field.width,
            tokens,
            source_stride * field.width,
        ),
        Block(
            field.shift + (batch * all_tokens + first) * field.pitch + field.column,
            field.width,
            tokens,
            stride * field.pitch,
            field.buffer,
        ),
    )


def _statistic_moves(field: Field, start: int, batch: int, tokens: int, source: _End, target: _End) -> Iterator[Move]:
    (source_first, source_stride, source_tokens), (first, stride, all_tokens) = source, target
    item = field.width
    source_row, target_row = source_tokens * item, all_tokens * item
    source_start = start + batch * field.rows * source_row + source_first * item
    target_start = (batch * field.pitch + field.column) * target_row + first * item
    if source_stride == stride == 1:
        yield Move(
            Block(source_start, tokens * item, field.rows, source_row),
            Block(target_start, tokens * item, field.rows, target_row, field.buffer),
        )
        return
    for head in range(field.rows):
        yield Move(
            Block(source_start + head * source_row, item, tokens, source_stride * item),
            Block(target_start + head * target_row, item, tokens, stride * item, field.buffer),
        )


def _landing(shapes: HeadShapes, rank: int) -> list[Run]:
    """Return where a rank's tokens stand among those of its group, as runs of `start` and `stride` there."""
    group = shapes.outer.runs(rank // shapes.degree)
    found = []
    for run in shapes.layout.runs(rank):
        into = next(each for each in group if 0 <= run.start - each.start < each.tokens * each.stride)
        start = into.offset + (run.start - into.start) // into.stride
        found.append(Run(run.offset, start, run.stride // into.stride, run.tokens))
    return found


def _placed(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return where fields of these sizes start one after another, and their end."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return tuple(starts), end
