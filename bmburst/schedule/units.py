"""Sizes of an attention over ranks, the units that its heads are cut into, and the bytes that both move.

A unit is the heads that one kernel call attends with while other heads are exchanged or gathered.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from bmburst.schedule.layout import Layout
from bmburst.schedule.strategy_names import RingTensors, Strategy
from bmburst.schedule.tiles import Span
from bmburst_ops.constants import ATTENTION_BACKWARD, TILE_ROWS

_OUTBOX_BYTES = 1 << 30
_GATHERED_BYTES = 4 << 30
_RECORDED_SUMS = 512 << 20  # bytes
_PIPELINED_WORK = 5e10  # FLOPs of one head: below, a kernel is too short to hide anything and only its launch counts


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShapes:
    """Sizes of an attention over the ranks of a sequence.

    Attributes:
        layout: Which rank holds which tokens.
        degree: Ulysses degree: neighbouring ranks that exchange heads, 1 for none.
        batch: Samples.
        heads: Query heads before the exchange.
        kv_heads: KV heads before the exchange.
        head_dim: Numbers of a head.
        itemsize: Bytes of a number of q, k and v.
        statistics_itemsize: Bytes of a number of the log-sum-exp, of delta, and of sums of gradients.
    """

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
        return self.layout.over_groups(self.degree)

    @property
    def groups(self) -> int:
        """Groups of ranks that exchange heads."""
        return self.layout.size // self.degree

    @property
    def q_bytes(self) -> int:
        """Bytes of a rank's queries, and of its output."""
        return self.batch * self.layout.tokens * self.heads * self.head_dim * self.itemsize

    @property
    def k_bytes(self) -> int:
        """Bytes of a rank's keys, and of its values, once heads are exchanged."""
        return self.batch * self.layout.tokens * self.kv_heads * self.head_dim * self.itemsize * self.replicas

    @property
    def statistics_bytes(self) -> int:
        """Bytes of a rank's log-sum-exp, and of its delta."""
        return self.batch * self.layout.tokens * self.heads * self.statistics_itemsize

    def ring_bytes(self, ring_tensors: RingTensors) -> tuple[int, int]:
        """Return the bytes of a hop in backward: of what visits, and of the gradients that follow it.

        "kv": K and V, dK and dV. "q": Q, dO, log-sum-exp and delta, dQ (BurstAttention, arXiv:2403.09347, section 3.2).
        """
        if ring_tensors == "q":
            visiting, gradients = 2 * self.q_bytes + 2 * self.statistics_bytes, self.q_bytes
        else:
            visiting = gradients = 2 * self.k_bytes
        return visiting, gradients * self.statistics_itemsize // self.itemsize

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


def forward_bytes(shapes: HeadShapes) -> int:
    """Return the bytes that a rank sends in a ring forward: K and V over groups - 1 hops."""
    return (shapes.groups - 1) * 2 * shapes.k_bytes


def backward_bytes(shapes: HeadShapes, ring_tensors: RingTensors) -> int:
    """Return the bytes that a rank sends in a ring backward: gradients make one hop more, for they must come home."""
    visiting, returning = shapes.ring_bytes(ring_tensors)
    return (shapes.groups - 1) * visiting + shapes.groups * returning if shapes.groups > 1 else 0


def choose_ring_tensors(shapes: HeadShapes) -> RingTensors:
    """Return what moves in backward for the fewest bytes; a tie goes to "q", whose dK and dV stay at home."""
    return "q" if backward_bytes(shapes, "q") <= backward_bytes(shapes, "kv") else "kv"


class Unit(NamedTuple):
    """Heads of a rank's share: query heads, the KV heads they attend to, and those that no unit before has brought."""

    heads: Span
    kv_heads: Span
    new_kv_heads: Span


def make_units(heads: int, kv_heads: int, *, most: int, pace: float = 0.0, backward: bool) -> tuple[Unit, ...]:
    """Return what a rank's share is cut into, one kernel call each, so that blocks move while kernels run.

    The first unit and the last are small: nothing hides the first one's way in and the last one's way out. Those
    between them are few: each call costs the host time. Where the heads of a group are parted, those that stay together
    fill a kernel's tile evenly if they can, which is what lets it share keys and values among them.

    Args:
        heads: Query heads of the share.
        kv_heads: KV heads of the share.
        most: KV heads a unit may have, to bound the outbox; `kv_heads` or more for no bound, 0 for a single unit.
        pace: Time in which one tensor's part of one head moves, over that in which a query head is attended with
            forward: a unit has no more heads than come in while those before it are attended with.
        backward: Whether the query heads of a KV head stay together, since its gradient is their sum, and more moves.
    """
    group = heads // kv_heads
    if most == 0 or heads == 1:
        cuts = [(Span(0, heads), Span(0, kv_heads))]
    elif kv_heads <= min(2, most) and heads >= 3 and group > 1 and not backward:
        fitting = (n for n in range(1, heads // 4 + 1) if TILE_ROWS % ((heads - 2 * n) // kv_heads) == 0)
        edge = next(fitting, 1)
        cuts = [
            (Span(0, edge), Span(0, 1)),
            (Span(edge, heads - edge), Span(0, kv_heads)),
            (Span(heads - edge, heads), Span(kv_heads - 1, kv_heads)),
        ]
    else:
        moved, attended = (2 * group + 2, ATTENTION_BACKWARD * group) if backward else (group + 2, group)
        edges = accumulate(_counts(kv_heads, most, pace * moved / attended), initial=0)
        spans = [Span(a, b) for a, b in pairwise(edges)]
        cuts = [(Span(span.start * group, span.stop * group), span) for span in spans]
    units, brought = [], 0
    for own, kv in cuts:
        units.append(Unit(own, kv, Span(min(max(brought, kv.start), kv.stop), kv.stop)))
        brought = max(brought, kv.stop)
    return tuple(units)


def even_units(heads: int, kv_heads: int, most: int) -> tuple[Unit, ...]:
    """Return the heads of a gather in as few units of at most `most` KV heads (0: no bound) as there can be, and even.

    None is small: a rank has few queries, and a kernel of few heads would leave most of the GPU idle. What hides the
    first unit's way in is the attention to own keys.
    """
    count = -(-kv_heads // most) if most else 1
    spans = [Span(a, b) for a, b in pairwise(i * kv_heads // count for i in range(count + 1))]
    group = heads // kv_heads
    return tuple(Unit(Span(span.start * group, span.stop * group), span, span) for span in spans)


def hides_transfers(transport: str, work: float) -> bool:
    """Return whether moving some heads beside attending with others pays.

    Kernels must be long enough, and the transport must leave them alone.

    Args:
        transport: What moves them.
        work: FLOPs of one head forward, over all ranks.
    """
    return transport == "peer" and work >= _PIPELINED_WORK


def records_kernels(transport: str, sums: float) -> bool:
    """Return whether a rank starts the kernels of an exchange of heads as CUDA graphs.

    Their inputs and outputs must stay at the same addresses, as the buffers of `peer` do. The memory that they allocate
    must be little, because graphs keep it. Where it is more, kernels are long enough to hide the host's time.

    Args:
        transport: What moves the heads.
        sums: Bytes of a sum for each number of the queries of a rank's heads: most of what a backward takes.
    """
    return transport == "peer" and sums <= _RECORDED_SUMS


def most_exchanged(heads: int, kv_heads: int, head_bytes: int, *, hides: bool) -> int:
    """Return how many KV heads one step of an exchange of heads moves, at least 1; 0: all in one step.

    In two steps or more where one `hides` the other, else in as few as an outbox of 1 GiB allows.

    Args:
        heads: Query heads of a rank's share.
        kv_heads: KV heads of the share.
        head_bytes: Of one head of a tensor, after the exchange.
        hides: See `hides_transfers`.
    """
    most = _OUTBOX_BYTES // (head_bytes * (heads // kv_heads + 2))
    return _bounded(most, kv_heads, hides=hides)


def most_gathered(kv_heads: int, head_bytes: int, *, hides: bool) -> int:
    """Return the same of a gather, whose outboxes and other buffers may take 4 GiB.

    Args:
        kv_heads: KV heads of a rank.
        head_bytes: Of one head of a tensor, of the whole sequence.
        hides: See `hides_transfers`.
    """
    bound = _GATHERED_BYTES // (12 * head_bytes)  # backward's formula in `bmburst.attention.gather`, of many ranks
    return _bounded(min(-(-kv_heads // 2), bound) if hides else bound, kv_heads, hides=hides)


def _bounded(most: int, kv_heads: int, *, hides: bool) -> int:
    return max(1, most) if hides or most < kv_heads else 0


def _counts(kv_heads: int, most: int, ratio: float) -> list[int]:
    """Return the KV heads of each unit: one, as many as come in meanwhile or twice as many, up to the last, one.

    While the units of `done` heads are attended with, `done / ratio` come in, and the first was here before.
    """
    counts = [1]
    while (left := kv_heads - 1 - sum(counts)) > 0:
        done = sum(counts)
        in_time = left if ratio * (done + left - 1) <= done else int(done / ratio) + 1 - done
        counts.append(min(left, most, max(2 * counts[-1], in_time)))
    return counts + [1] * (kv_heads > 1)


@dataclass(frozen=True)
class Sizes:
    """One rank's attention by a strategy, in bytes of its local tensors.

    Attributes:
        strategy: How it is spread.
        shapes: Sizes; `degree` is the strategy's.
    """

    strategy: Strategy
    shapes: HeadShapes

    @cached_property
    def gather_bytes(self) -> float:
        """Bytes of K and V of all other groups, as a rank pulls and sends home if its queries see all of them."""
        return 2.0 * self.shapes.k_bytes * (self.shapes.groups - 1)

    @cached_property
    def gather_units(self) -> int:
        """Units that a gather is cut into."""
        return len(even_units(self.shapes.own_heads, self.shapes.own_kv_heads, self.strategy.most_kv_heads))

    def records_kernels(self, transport: str, nodes: int) -> bool:
        """Return whether kernels run as CUDA graphs: in an exchange of heads alone, inside a node.

        Args:
            transport: What moves the heads.
            nodes: On how many nodes the ranks of the sequence lie.
        """
        sums = self.shapes.q_bytes * self.shapes.statistics_itemsize / self.shapes.itemsize
        is_alone = self.shapes.degree > 1 and self.shapes.groups == 1 and nodes == 1
        return is_alone and records_kernels(transport, sums)

    def unit_shares(self, *, backward: bool) -> list[float]:
        """Return the share of the query heads in each unit of an exchange of heads."""
        own, most, pace = self.shapes.own_heads, self.strategy.most_kv_heads, self.strategy.pace
        units = make_units(own, self.shapes.own_kv_heads, most=most, pace=pace, backward=backward)
        return [len(unit.heads) / own for unit in units]

    def head_bytes(self, *, backward: bool) -> tuple[int, int]:
        """Return the bytes that an exchange of heads brings to a rank, and that it takes home; its own part is in."""
        q, k, statistics = self.shapes.q_bytes, self.shapes.k_bytes, self.shapes.statistics_bytes
        if backward:
            return 2 * q + 2 * k + 2 * statistics, q + 2 * k
        return q + 2 * k, q + statistics

    def calls(self, stops: int, *, backward: bool) -> int:
        """Return how often a pass calls the kernel.

        Args:
            stops: At how many steps a rank attends: to own keys, and to those of others.
            backward: Which pass.
        """
        units = len(self.unit_shares(backward=backward)) if self.shapes.degree > 1 else 1
        if stops == 1:
            return units
        if self.strategy.outer == "gather":
            inner = self.gather_units if self.shapes.degree == 1 else 1
            return units * (3 * inner if backward else 2 * inner + 1)
        return units * stops
