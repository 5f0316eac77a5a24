"""Sizes of attention over ranks, its division into units of heads, and the bytes that strategies move.

A unit is the heads of one kernel call. The heads of other units are exchanged or gathered at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from bmburst.schedule.layout import Layout
from bmburst.schedule.parallelism import RingTensors, Strategy
from bmburst.schedule.tiles import Span
from bmburst_ops import ATTENTION_BACKWARD, TILE_ROWS

_OUTBOX_BYTES = 1 << 30
_GATHERED_BYTES = 4 << 30
_RECORDED_SUMS = 512 << 20  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShapes:
    """Sizes of an attention over the ranks of a sequence.

    Attributes:
        layout: Which rank holds which tokens.
        degree: Ulysses degree: how many neighbouring ranks exchange heads; 1: none.
        batch: Batch size.
        heads: Query heads before the exchange.
        kv_heads: KV heads before the exchange.
        head_dim: Head dimension of queries and keys.
        itemsize: Bytes per element of q, k and v.
        statistics_itemsize: Bytes per element of the log-sum-exp, of delta, and of gradient sums.
        value_dim: Head dimension of values and outputs; 0: `head_dim`.
        latent_dim: Numbers of a token from which a rank can compute its keys and values; 0: it gets these themselves.
    """

    layout: Layout
    degree: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    statistics_itemsize: int
    value_dim: int = 0
    latent_dim: int = 0

    @property
    def value_width(self) -> int:
        """Head dimension of values and outputs."""
        return self.value_dim or self.head_dim

    @property
    def mean_width(self) -> float:
        """Mean head dimension of a key and a value, or of a query and an output."""
        return (self.head_dim + self.value_width) / 2

    @property
    def widest(self) -> int:
        """The larger head dimension."""
        return max(self.head_dim, self.value_width)

    @property
    def own_heads(self) -> int:
        """Query heads of a rank after the exchange."""
        return self.heads // self.degree

    @property
    def own_kv_heads(self) -> int:
        """KV heads of a rank after the exchange."""
        return max(1, self.kv_heads // self.degree)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same KV head."""
        return max(1, self.degree // self.kv_heads)

    @property
    def tokens(self) -> int:
        """Tokens of a rank after the exchange."""
        return self.layout.tokens * self.degree

    @property
    def key_tokens(self) -> int:
        """Keys of a rank after the exchange; as many as `tokens`, except in cross-attention."""
        return self.layout.keys.tokens * self.degree

    @property
    def outer(self) -> Layout:
        """The layout after the exchange: groups of ranks, each with the tokens of its ranks."""
        return self.layout.over_groups(self.degree)

    @property
    def groups(self) -> int:
        """Number of groups of ranks that exchange heads."""
        return self.layout.size // self.degree

    @property
    def q_bytes(self) -> int:
        """Bytes of a rank's queries."""
        return self.batch * self.layout.tokens * self.heads * self.head_dim * self.itemsize

    @property
    def out_bytes(self) -> int:
        """Bytes of a rank's output."""
        return self.batch * self.layout.tokens * self.heads * self.value_width * self.itemsize

    @property
    def k_bytes(self) -> int:
        """Bytes of a rank's keys after the exchange."""
        return self.batch * self.layout.keys.tokens * self.kv_heads * self.head_dim * self.itemsize * self.replicas

    @property
    def kv_bytes(self) -> int:
        """Bytes of a rank's keys and values after the exchange."""
        return self.k_bytes * (self.head_dim + self.value_width) // self.head_dim

    @property
    def latent_bytes(self) -> int:
        """Bytes of a rank's latents after the exchange, which brings them to all ranks."""
        return self.batch * self.layout.tokens * self.latent_dim * self.itemsize * self.degree

    @property
    def statistics_bytes(self) -> int:
        """Bytes of a rank's log-sum-exp, or of its delta."""
        return self.batch * self.layout.tokens * self.heads * self.statistics_itemsize

    def ring_bytes(self, ring_tensors: RingTensors) -> tuple[int, int]:
        """Return the bytes of a hop in backward: of the blocks, and of the gradients that follow them.

        "kv": K and V, dK and dV. "q": Q, dO, log-sum-exp and delta, dQ (BurstAttention, arXiv:2403.09347, section 3.2).
        """
        if ring_tensors == "q":
            visiting, gradients = self.q_bytes + self.out_bytes + 2 * self.statistics_bytes, self.q_bytes
        else:
            visiting = gradients = self.kv_bytes
        return visiting, gradients * self.statistics_itemsize // self.itemsize

    def pair_flops(self, *, backward: bool) -> float:
        """Return the FLOPs of one head for a query and a key, without those of padding inside a kernel.

        Scores, dQ and dK are products over the width of keys; the output, dP and dV over that of values.
        """
        if backward:
            return 2.0 * (3 * self.head_dim + 2 * self.value_width)
        return 2.0 * (self.head_dim + self.value_width)

    @property
    def can_exchange_at_once(self) -> bool:
        """Whether one collective over all ranks of the sequence can exchange all heads."""
        is_whole = 1 < self.degree == self.layout.size and self.layout.keys == self.layout
        vector = self.batch * self.tokens * self.widest * self.itemsize
        return is_whole and most_exchanged(self.own_heads, self.own_kv_heads, vector) == self.own_kv_heads

    def refusal(self) -> str | None:
        """Return why these heads cannot be exchanged, or None."""
        if self.layout.size % self.degree:
            return f"{self.layout.size} ranks cannot form groups of {self.degree}"
        if self.heads % self.degree:
            return f"{self.heads} query heads cannot be split over {self.degree} ranks"
        if self.kv_heads % self.degree and self.degree % self.kv_heads:
            return f"{self.kv_heads} key/value heads can be neither split over {self.degree} ranks nor shared by them"
        if self.layout.is_striped and 1 < self.degree < self.layout.size:
            return "the tokens of neighbouring ranks in layout 'striped' do not form one stripe"
        return None


def backward_bytes(shapes: HeadShapes, ring_tensors: RingTensors) -> int:
    """Return the bytes that a rank sends in a ring backward; gradients make one hop more, back to their owners."""
    visiting, returning = shapes.ring_bytes(ring_tensors)
    return (shapes.groups - 1) * visiting + shapes.groups * returning if shapes.groups > 1 else 0


def choose_ring_tensors(shapes: HeadShapes) -> RingTensors:
    """Return the tensors with the fewest bytes in a ring backward; on a tie "q", for which dK and dV do not move."""
    return "q" if backward_bytes(shapes, "q") <= backward_bytes(shapes, "kv") else "kv"


class Unit(NamedTuple):
    """Heads of one kernel call: query heads, their KV heads, and those KV heads that no earlier unit has moved."""

    heads: Span
    kv_heads: Span
    new_kv_heads: Span


def make_units(heads: int, kv_heads: int, counts: Sequence[int] = ()) -> tuple[Unit, ...]:
    """Divide the heads of a rank into units, one kernel call each.

    Args:
        heads: Query heads of the rank.
        kv_heads: KV heads of the rank.
        counts: Query heads of each unit, in order, of `unit_plans`; empty: a single unit.
    """
    group = heads // kv_heads
    units, brought = [], 0
    for start, stop in pairwise(accumulate(counts or (heads,), initial=0)):
        kv = Span(start // group, -(-stop // group))
        units.append(Unit(Span(start, stop), kv, Span(min(max(brought, kv.start), kv.stop), kv.stop)))
        brought = max(brought, kv.stop)
    return tuple(units)


def unit_plans(
    heads: int, kv_heads: int, *, most: int, pace: float, backward: bool, overlaps: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the divisions of a rank's heads that can be the fastest, as `make_units` takes them.

    They are: a single unit; units of equal size; and units so that transfers overlap with kernels. Of these the first
    and the last are small, because the transfer to the first and from the last cannot be hidden, or only one of them
    is. There are few units between them, because each call takes host time. If the query heads of a KV head are
    divided, the parts fill a kernel's tile evenly where possible, so that the kernel can share keys and values among
    them.

    Args:
        heads: Query heads of the rank.
        kv_heads: KV heads of the rank.
        most: Maximum KV heads of a unit, to bound the outbox.
        pace: Time to move one head of one tensor / forward time of attention with one query head: a unit has no more
            heads than arrive while the units before it are computed.
        backward: Whether it is a backward pass: the query heads of a KV head stay together, since its gradient is their
            sum, and more tensors move.
        overlaps: Whether transfers may overlap with kernels; if not, there are as few units as `most` allows.
    """
    group = heads // kv_heads
    count = -(-kv_heads // most)
    even = tuple(group * len(span) for span in even_spans(kv_heads, count))
    if not overlaps or heads == 1:
        return (even,)
    moved, attended = (2 * group + 2, ATTENTION_BACKWARD * group) if backward else (group + 2, group)
    growing = _counts(kv_heads, most, pace * moved / attended)
    found = [even, tuple(group * n for n in growing)]
    if kv_heads > 1:
        found.append(tuple(group * len(span) for span in even_spans(kv_heads, max(2, count))))
    if len(growing) > 2 and growing[-2] < most:
        found.append(tuple(group * n for n in (*growing[:-2], growing[-2] + 1)))
        found.append(tuple(group * n for n in (growing[0] + growing[1], *growing[2:])))
    if kv_heads <= min(2, most) and heads >= 3 and group > 1 and not backward:
        fitting = (n for n in range(1, heads // 4 + 1) if TILE_ROWS % ((heads - 2 * n) // kv_heads) == 0)
        edge = next(fitting, 1)
        found.append((edge, heads - 2 * edge, edge))
    return tuple(dict.fromkeys(found))


def even_spans(heads: int, count: int) -> list[Span]:
    """Divide heads into `count` spans of nearly equal size."""
    return [Span(a, b) for a, b in pairwise(i * heads // count for i in range(count + 1))]


def even_units(heads: int, kv_heads: int, most: int) -> tuple[Unit, ...]:
    """Divide the heads of a gather into as few equal units of at most `most` KV heads (0: no bound) as possible.

    No unit is small: a rank has few queries, and a kernel of few heads would leave most of the GPU idle. The transfer
    of the first unit overlaps with attention to own keys.
    """
    group = heads // kv_heads
    spans = even_spans(kv_heads, -(-kv_heads // most) if most else 1)
    return tuple(Unit(Span(span.start * group, span.stop * group), span, span) for span in spans)


def overlaps(transport: str) -> bool:
    """Return whether transfers of a transport can overlap with kernels without occupying multiprocessors."""
    return transport == "peer"


def records_kernels(stays: bool, sums: float) -> bool:
    """Return whether the kernels of a head exchange run as CUDA graphs.

    Graphs keep the memory that they allocate, so it must be small. Where it is larger, kernels are long enough to hide
    the host's time.

    Args:
        stays: Whether inputs and outputs of the kernels stay at their addresses from call to call.
        sums: Bytes of fp32 or wider sums for all elements of a rank's queries: most of the workspace of a backward.
    """
    return stays and sums <= _RECORDED_SUMS


def most_exchanged(heads: int, kv_heads: int, head_bytes: int) -> int:
    """Return how many KV heads one step of a head exchange may move: as many as an outbox of 1 GiB holds, at least 1.

    Args:
        heads: Query heads of a rank after the exchange.
        kv_heads: KV heads of a rank after the exchange.
        head_bytes: Bytes of one head of a tensor after the exchange.
    """
    return min(kv_heads, max(1, _OUTBOX_BYTES // (head_bytes * (heads // kv_heads + 2))))


def most_gathered(kv_heads: int, head_bytes: int) -> int:
    """Return how many KV heads one step of a gather may move: as many as buffers of 4 GiB hold, at least 1.

    Args:
        kv_heads: KV heads of a rank.
        head_bytes: Bytes of one head of a tensor of the whole sequence.
    """
    # The formula of backward in `bmburst.attention.gather` for many ranks.
    return min(kv_heads, max(1, _GATHERED_BYTES // (12 * head_bytes)))


def _counts(kv_heads: int, most: int, ratio: float) -> list[int]:
    """Return the KV heads of each unit: 1 first, then as many as arrive meanwhile, at least doubling, 1 last.

    While the kernels of `done` heads run, `done / ratio` heads arrive; the first head arrived before.
    """
    counts = [1]
    while (left := kv_heads - 1 - sum(counts)) > 0:
        done = sum(counts)
        in_time = left if ratio * (done + left - 1) <= done else int(done / ratio) + 1 - done
        counts.append(min(left, most, max(2 * counts[-1], in_time)))
    return counts + [1] * (kv_heads > 1)


@dataclass(frozen=True)
class Sizes:
    """Bytes, units and kernel calls of one rank's attention under a strategy.

    Attributes:
        strategy: The strategy.
        shapes: Sizes; `degree` is the strategy's.
    """

    strategy: Strategy
    shapes: HeadShapes

    @cached_property
    def gather_bytes(self) -> float:
        """Bytes of K and V of all other groups: under a full mask a rank pulls them, and returns their gradients."""
        return float(self.shapes.kv_bytes * (self.shapes.groups - 1))

    @cached_property
    def gather_units(self) -> int:
        """Number of units of a gather."""
        return len(even_units(self.shapes.own_heads, self.shapes.own_kv_heads, self.strategy.most_kv_heads))

    def records_kernels(self, transport: str, nodes: int) -> bool:
        """Return whether kernels run as CUDA graphs: only in a pure head exchange, on memory that stays in place.

        Args:
            transport: The transport.
            nodes: Number of nodes of the ranks of the sequence.
        """
        on_gpu = transport in ("peer", "nccl")
        stays = on_gpu if self.strategy.at_once else transport == "peer" and nodes == 1
        sums = self.shapes.q_bytes * self.shapes.statistics_itemsize / self.shapes.itemsize
        return self.shapes.degree > 1 and self.shapes.groups == 1 and records_kernels(stays, sums)

    def unit_shares(self, *, backward: bool) -> list[float]:
        """Return the fraction of the query heads in each unit of a head exchange."""
        return [len(unit.heads) / self.shapes.own_heads for unit in self._units(backward=backward)]

    def _units(self, *, backward: bool) -> tuple[Unit, ...]:
        return make_units(self.shapes.own_heads, self.shapes.own_kv_heads, self.strategy.units(backward=backward))

    def first_bytes(self, *, backward: bool) -> float:
        """Return the bytes of the inputs of the first unit in a head exchange; own parts included."""
        unit, (inward, _) = self._units(backward=backward)[0], self.head_bytes(backward=backward)
        of_keys = self.shapes.kv_bytes
        heads, kv_heads = len(unit.heads) / self.shapes.own_heads, len(unit.new_kv_heads) / self.shapes.own_kv_heads
        return (inward - of_keys) * heads + of_keys * kv_heads

    def head_bytes(self, *, backward: bool) -> tuple[int, int]:
        """Return the bytes of a rank's inputs in a head exchange, and of its results; own parts included."""
        sizes = self.shapes
        q, out, statistics = sizes.q_bytes, sizes.out_bytes, sizes.statistics_bytes
        kv = sizes.latent_bytes if self.strategy.latents else sizes.kv_bytes
        if backward:
            return q + out + kv + 2 * statistics, q + kv
        return q + kv, out + statistics

    def unit_count(self, *, backward: bool) -> int:
        """Return the number of units of a head exchange; 1 without one."""
        return len(self.unit_shares(backward=backward)) if self.shapes.degree > 1 else 1

    @property
    def inner_units(self) -> int:
        """Number of units of a gather; behind a head exchange it has one."""
        return self.gather_units if self.shapes.degree == 1 else 1

    def calls(self, stops: int, *, backward: bool) -> int:
        """Return the number of kernel calls of a pass where the tokens of two ranks are one tile, as in "zigzag".

        Args:
            stops: Number of steps with attention: to own keys, and to other ranks' keys.
            backward: Whether it is a backward pass.
        """
        units = self.unit_count(backward=backward)
        if stops == 1:
            return units
        if self.strategy.outer == "gather":
            return units * (3 * self.inner_units if backward else 2 * self.inner_units + 1)
        return units * stops


def with_units(
    strategy: Strategy, shapes: HeadShapes, transport: str, pace: float = 0.0, *, backward: bool
) -> tuple[Strategy, ...]:
    """Return the strategy with each division of a rank's heads that can be the fastest, largest units first.

    Args:
        strategy: The strategy.
        shapes: Sizes; `degree` is the strategy's.
        transport: The transport.
        pace: See `unit_plans`.
        backward: Whether the units of backward differ; else those of forward, or of both passes of a gather.
    """
    vector = shapes.batch * shapes.widest * shapes.itemsize
    if shapes.degree == 1:
        if backward or strategy.outer != "gather":
            return (strategy,)
        most = most_gathered(shapes.kv_heads, vector * shapes.layout.size * shapes.layout.keys.tokens)
        half = min(most, -(-shapes.kv_heads // 2))
        mosts = dict.fromkeys((0 if most == shapes.kv_heads else most, *([half] if overlaps(transport) else [])))
        return tuple(replace(strategy, most_kv_heads=each) for each in mosts)
    heads = shapes.own_heads, shapes.own_kv_heads
    most = most_exchanged(*heads, vector * max(shapes.tokens, shapes.key_tokens))
    plans = unit_plans(*heads, most=most, pace=pace, backward=backward, overlaps=overlaps(transport))
    counts = [plan if len(plan) > 1 else () for plan in plans]
    if backward:
        return tuple(replace(strategy, backward_units=units) for units in counts)
    return tuple(replace(strategy, forward_units=units) for units in counts)
