"""Plans of a head exchange: the heads of each kernel call, and the bytes that move before and after it.

Ranks exchange their tokens of all heads for all tokens of their own heads (DeepSpeed Ulysses, arXiv:2309.14509). Ranks
`g * degree` to `(g + 1) * degree - 1` form a group; after the exchange each holds, for its own heads, the tokens of one
rank of a layout over `size / degree` ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from bmburst.schedule.exchange import Block, Exchange, Move, make_exchange, offsets_of
from bmburst.schedule.layout import Layout, Run
from bmburst.schedule.tiles import Span
from bmburst.schedule.units import HeadShapes, Unit, make_units
from bmburst_ops.pattern import IntArray


class Operand(IntEnum):
    """The inputs of attention that an exchange moves, in the order of their buffers."""

    Q = 0
    K = 1
    V = 2
    GRAD_OUT = 3
    LSE = 4
    DELTA = 5

    @property
    def is_kv(self) -> bool:
        """Whether it has KV heads; the others have query heads. Gradients are laid out as their inputs."""
        return self in (Operand.K, Operand.V)

    @property
    def is_value(self) -> bool:
        """Whether it has the head dimension of values; an output is laid out as its gradient."""
        return self in (Operand.V, Operand.GRAD_OUT)

    @property
    def is_statistic(self) -> bool:
        """Whether it is `[batch, heads, tokens]`; the others are `[batch, tokens, heads, head_dim]`."""
        return self in (Operand.LSE, Operand.DELTA)


class Strides(NamedTuple):
    """Bytes from one batch row, token and head of a tensor to the next."""

    batch: int
    token: int
    head: int

    @classmethod
    def of(cls, elements: tuple[int, ...], shapes: HeadShapes) -> "Strides":
        """Return the strides of a tensor, or of a statistic `[batch, heads, tokens]`, from those in elements."""
        if len(elements) == 4:
            batch, token, head = (stride * shapes.itemsize for stride in elements[:3])
        else:
            batch, head, token = (stride * shapes.statistics_itemsize for stride in elements)
        return cls(batch, token, head)


class Place(NamedTuple):
    """The place of a tensor: buffer, byte offset and strides."""

    buffer: int
    start: int
    strides: Strides

    def at(self, head: int) -> "Place":
        """Return the place of the tensor from `head` on."""
        return self._replace(start=self.start + head * self.strides.head)


class StridedView(NamedTuple):
    """A `[batch, tokens, heads, head_dim]` or a statistic `[batch, heads, tokens]` in a buffer, in elements."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class UnitResults:
    """The exchange that returns the results of a unit, and the views of its tensors in the outbox."""

    exchange: Exchange
    views: tuple[StridedView, ...]


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """The plan of one rank for a forward or a backward pass.

    Attributes:
        shapes: The sizes.
        backward: Whether it is a backward pass.
        nbytes: Size of the inbox.
        units: The heads of each kernel call.
        views: For each unit, the views of its inputs in the inbox.
        inbound: For each unit, the exchange of its inputs.
        outbound: For each unit, the exchange of its results.
    """

    shapes: HeadShapes
    backward: bool
    nbytes: int
    units: tuple[Unit, ...]
    views: tuple[tuple[StridedView, ...], ...]
    inbound: tuple[Exchange, ...]
    outbound: tuple[UnitResults, ...]

    @property
    def sums_nbytes(self) -> int:
        """Bytes of fp32 or wider sums for all elements of a rank's queries: most of the workspace of its kernels."""
        sizes = self.shapes
        return sizes.batch * sizes.tokens * sizes.own_heads * sizes.head_dim * sizes.statistics_itemsize

    def taken_nbytes(self, i: int) -> int:
        """Return the workspace bytes of unit i's backward."""
        heads, kv_heads, _ = self.units[i]
        return workspace_nbytes(self.shapes, len(heads), len(kv_heads))


def workspace_nbytes(shapes: HeadShapes, heads: int, kv_heads: int) -> int:
    """Return the workspace bytes of backward: sums of dQ, of dK and dV if heads share them, 3 statistics.

    This is the workspace of `_flash_attn_bwd` of flash-attn-4, apart from its padding of documents.

    Args:
        shapes: The sizes.
        heads: Query heads of the kernel call.
        kv_heads: Its KV heads.
    """
    of_keys = kv_heads * (shapes.head_dim + shapes.value_width) if heads > kv_heads else 0
    numbers = heads * (shapes.head_dim + 3) + of_keys
    return shapes.batch * shapes.tokens * numbers * shapes.statistics_itemsize


def make_heads_plan(
    shapes: HeadShapes, rank: int, sources: tuple[Strides, ...], *, backward: bool, units: tuple[int, ...] = ()
) -> HeadsPlan:
    """Return a rank's plan.

    Forward exchanges q, k and v, and returns out and the log-sum-exp (targets 0 and 1). Backward exchanges q, k, v, dO,
    the log-sum-exp and delta, and returns dQ, dK and dV (targets 0 to 2).

    Args:
        shapes: The sizes.
        rank: The rank.
        sources: Strides of these inputs, in that order; the heads of a token are contiguous. They may differ between
            ranks: all ranks divide tensors into the same blocks.
        backward: Whether it is a backward pass.
        units: Query heads of each unit; see `make_units`.
    """
    own, own_kv = shapes.own_heads, shapes.own_kv_heads
    counts = (own, own_kv, own_kv, own, own, own) if backward else (own, own_kv, own_kv)
    sizes = zip(Operand, counts, strict=False)
    starts, nbytes = offsets_of([_rows(shapes, operand) * count * _item(shapes, operand) for operand, count in sizes])
    cuts = make_units(own, own_kv, units)
    views = (
        tuple(
            _view(shapes, operand, start, counts[operand], unit.kv_heads if operand.is_kv else unit.heads)
            for operand, start in zip(Operand, starts, strict=False)
        )
        for unit in cuts
    )
    return HeadsPlan(
        shapes,
        backward,
        nbytes,
        cuts,
        tuple(views),
        tuple(_inbound(shapes, rank, cuts, i, sources, starts, nbytes) for i in range(len(cuts))),
        tuple(_outbound(shapes, rank, unit, backward=backward) for unit in cuts),
    )


def _inbound(
    shapes: HeadShapes,
    rank: int,
    units: Sequence[Unit],
    i: int,
    sources: tuple[Strides, ...],
    starts: tuple[int, ...],
    nbytes: int,
) -> Exchange:
    """Return the exchange of unit i's inputs. The second also has the own blocks of all later units, in one copy."""
    kept = units[:1] if i == 0 else _as_one(units[1:]) if i == 1 else ()

    def route(source: int, target: int) -> Iterator[Move]:
        if source // shapes.degree != target // shapes.degree:
            return
        for unit in kept if source == target else units[i : i + 1]:
            yield from _unit_moves(shapes, unit, source, target, sources, starts)

    return make_exchange(rank, shapes.layout.size, nbytes, route)


def _as_one(units: Sequence[Unit]) -> tuple[Unit]:
    """Return consecutive units as one."""
    (heads, kv_heads, new_kv_heads), last = units[0], units[-1]
    return (
        Unit(
            Span(heads.start, last.heads.stop),
            Span(kv_heads.start, last.kv_heads.stop),
            Span(new_kv_heads.start, last.new_kv_heads.stop),
        ),
    )


def _unit_moves(
    shapes: HeadShapes, unit: Unit, source: int, target: int, sources: tuple[Strides, ...], starts: tuple[int, ...]
) -> Iterator[Move]:
    member = target % shapes.degree
    for operand, strides, start in zip(Operand, sources, starts, strict=False):
        span = unit.new_kv_heads if operand.is_kv else unit.heads
        count = shapes.own_kv_heads if operand.is_kv else shapes.own_heads
        first = member * (shapes.kv_heads if operand.is_kv else shapes.heads) // shapes.degree
        item = _item(shapes, operand)
        here = Place(operand, 0, strides).at(first + span.start)
        there = Place(0, start, _strides(operand, _tokens(shapes, operand), count, item)).at(span.start)
        for run in _landing(shapes, operand, source):
            yield from _moves(shapes.batch, len(span), item, run.tokens, (here, run.offset, 1), (there, *run[1:3]))


def _outbound(shapes: HeadShapes, rank: int, unit: Unit, *, backward: bool) -> UnitResults:
    # dQ, dK and dV have the layouts of q, k and v; the output has that of dO.
    operands = (Operand.Q, Operand.K, Operand.V) if backward else (Operand.GRAD_OUT, Operand.LSE)
    spans = [unit.kv_heads if operand.is_kv else unit.heads for operand in operands]
    items = [_item(shapes, operand) for operand in operands]
    rows = [_rows(shapes, operand) for operand in operands]
    starts, nbytes = offsets_of([n * len(span) * item for n, span, item in zip(rows, spans, items, strict=True)])

    def route(source: int, target: int) -> Iterator[Move]:
        if source // shapes.degree != target // shapes.degree:
            return
        member = source % shapes.degree
        for buffer, (operand, span, item, start) in enumerate(zip(operands, spans, items, starts, strict=True)):
            heads = shapes.kv_heads if operand.is_kv else shapes.heads
            replica = member % shapes.replicas if operand.is_kv else 0
            tokens = _tokens(shapes, operand)
            local = tokens // shapes.degree
            offset = replica * shapes.batch * local * heads * item
            here = Place(0, start, _strides(operand, tokens, len(span), item))
            there = Place(buffer, offset, _strides(operand, local, heads, item))
            there = there.at(member * heads // shapes.degree + span.start)
            for run in _landing(shapes, operand, target):
                yield from _moves(shapes.batch, len(span), item, run.tokens, (here, *run[1:3]), (there, run.offset, 1))

    views = (
        _view(shapes, operand, start, len(span), Span(0, len(span)))
        for operand, start, span in zip(operands, starts, spans, strict=True)
    )
    return UnitResults(make_exchange(rank, shapes.layout.size, nbytes, route), tuple(views))


def _view(shapes: HeadShapes, operand: Operand, start: int, heads: int, span: Span) -> StridedView:
    """Return the view of some heads of a tensor of `heads` heads at byte `start` of a buffer."""
    itemsize = shapes.statistics_itemsize if operand.is_statistic else shapes.itemsize
    tokens = _tokens(shapes, operand)
    strides = _strides(operand, tokens, heads, _item(shapes, operand))
    first = Place(0, start, strides).at(span.start).start // itemsize
    batch, token, head = (stride // itemsize for stride in strides)
    if operand.is_statistic:
        return StridedView((shapes.batch, len(span), tokens), (batch, head, token), first)
    return StridedView((shapes.batch, tokens, len(span), _width(shapes, operand)), (batch, token, head, 1), first)


def _tokens(shapes: HeadShapes, operand: Operand) -> int:
    """Return the tokens of a rank after the exchange: of its queries, or of its keys."""
    return shapes.key_tokens if operand.is_kv else shapes.tokens


def _rows(shapes: HeadShapes, operand: Operand) -> int:
    return shapes.batch * _tokens(shapes, operand)


def _item(shapes: HeadShapes, operand: Operand) -> int:
    """Return the bytes per token and head: of a vector, or of a statistic."""
    return shapes.statistics_itemsize if operand.is_statistic else _width(shapes, operand) * shapes.itemsize


def _width(shapes: HeadShapes, operand: Operand) -> int:
    """Return the head dimension of a tensor."""
    return shapes.value_width if operand.is_value else shapes.head_dim


def _strides(operand: Operand, tokens: int, heads: int, item: int) -> Strides:
    """Return the strides of a contiguous `[batch, tokens, heads, head_dim]`, or statistic `[batch, heads, tokens]`."""
    return Strides(tokens * heads * item, *((item, tokens * item) if operand.is_statistic else (heads * item, item)))


_TokenRun = tuple[Place, int, int]  # a tensor, its first token, and the stride of tokens


def _moves(batches: int, heads: int, item: int, tokens: int, source: _TokenRun, target: _TokenRun) -> Iterator[Move]:
    """Yield the moves of `tokens` tokens of `heads` heads: as few rectangles of bytes as the strides allow."""
    if not heads:
        return
    ends = [
        (place, place.start + first * place.strides.token, stride * place.strides.token)
        for place, first, stride in (source, target)
    ]
    if heads == 1 or all(place.strides.head == item for place, _, _ in ends):
        rectangles = [(0, heads * item, tokens, [pitch for _, _, pitch in ends])]
    elif all(pitch == item for _, _, pitch in ends):
        rectangles = [(0, tokens * item, heads, [place.strides.head for place, _, _ in ends])]
    else:
        rectangles = [(head, item, tokens, [pitch for _, _, pitch in ends]) for head in range(heads)]
    for batch in range(batches):
        for head, width, rows, pitches in rectangles:
            yield Move(
                *(
                    Block(
                        start + batch * place.strides.batch + head * place.strides.head,
                        width,
                        rows,
                        pitch,
                        place.buffer,
                    )
                    for (place, start, _), pitch in zip(ends, pitches, strict=True)
                )
            )


def token_order(layout: Layout, batch: int) -> IntArray:
    """Return the place in `[batch, tokens]` of each token of `[ranks, batch, local_tokens]`, flat.

    Args:
        layout: The layout of the tokens; all ranks exchange heads.
        batch: Sequences.
    """
    outer, places = layout.over_groups(layout.size), np.empty((layout.size, 1, layout.tokens), np.int64)
    for rank in range(layout.size):
        for run in _landing_runs(layout, outer, rank, layout.size):
            places[rank, 0, run.offset : run.offset + run.tokens] = run.start + run.stride * np.arange(run.tokens)
    return (places + layout.size * layout.tokens * np.arange(batch)[:, None]).ravel()


def _landing(shapes: HeadShapes, operand: Operand, rank: int) -> list[Run]:
    """Return the positions of a rank's tokens in the token order of its group, as runs."""
    layout, outer = shapes.layout, shapes.outer
    if operand.is_kv:
        layout, outer = layout.keys, outer.keys
    return _landing_runs(layout, outer, rank, shapes.degree)


def _landing_runs(layout: Layout, outer: Layout, rank: int, degree: int) -> list[Run]:
    group = outer.runs(rank // degree)
    found = []
    for run in layout.runs(rank):
        into = next(each for each in group if 0 <= run.start - each.start < each.tokens * each.stride)
        start = into.offset + (run.start - into.start) // into.stride
        found.append(Run(run.offset, start, run.stride // into.stride, run.tokens))
    return found
