"""Seconds of one attention call on a rank: kernels, what joins partial results, and exposed communication.

This is the only cost model. `burst_attention` takes the strategy with the lowest price (`bmburst.schedule.strategy`);
`bmburst plan`, `--recompute auto` and the advice when memory is over price training steps with it. Every rate comes
from the machine's file (`bmburst.schedule.hardware`). What moves follows the executors in `bmburst.attention`;
transfers beside kernels are hidden as far as there is something to hide behind, and a transport's share of its time
never is.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from bmburst.schedule.gather_plan import Visibility, most_seen
from bmburst.schedule.hardware import HOST, Hardware, hardware_like
from bmburst.schedule.layout import most_keys, rank_areas
from bmburst.schedule.mask import Mask
from bmburst.schedule.ring_schedule import distances, layout_itinerary
from bmburst.schedule.strategy_names import Strategy
from bmburst.schedule.units import (
    HeadShapes,
    Sizes,
    hides_transfers,
    most_exchanged,
    most_gathered,
)
from bmburst_ops.constants import ATTENTION_BACKWARD

# Bytes at memory speed for each number of a rank's queries, and of its keys: merges, sums and copies of the executors.
GATHER_FORWARD_Q, GATHER_FORWARD_K = 22.0, 8.0
GATHER_BACKWARD_Q, GATHER_BACKWARD_K, GATHER_KEY_PART = 8.0, 8.0, 2.0
RING_FORWARD_Q, RING_FORWARD_K = 10.0, 8.0
BURST_BACKWARD_Q, BURST_BACKWARD_K = 42.0, 20.0
KV_BACKWARD_Q, KV_BACKWARD_K = 10.0, 68.0
RING_SUMS = 4.0
KERNEL_TILE = 128.0  # queries of a kernel's tile
HOST_HIDDEN = 0.75
"""Share of a pass's time on the GPU behind which the host can issue its work. Fitted on 2 H200s: a gather of 8 query
heads and one KV head, 64K tokens, in a window of 4,096 takes 4.37 ms forward and backward."""


class Pass(NamedTuple):
    """Seconds of a forward or a backward pass.

    Attributes:
        kernel: The kernel alone, on the FLOPs of the rank with most of them.
        joining: Smaller tiles, more calls, merges, sums and copies.
        exposed: Transfers that nothing hides.
    """

    kernel: float
    joining: float
    exposed: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.kernel + self.joining + self.exposed


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One attention call, forward and backward.

    Attributes:
        forward: Seconds of the GPU, forward.
        backward: Seconds of the GPU, backward.
        host: Seconds that the GPU waits for the host, in both passes: short sequences only.
    """

    forward: Pass
    backward: Pass
    host: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of both passes: what strategies are compared by."""
        return self.forward.total + self.backward.total + self.host


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a sequence lie, and what moves blocks between them.

    Attributes:
        transport: What moves blocks between any two of them.
        nodes: Nodes that they lie on; None: not known yet, which is priced as one.
        even: Whether each node holds as many of them, next to each other.
        within: What moves blocks inside a node where a double ring has communicators of its own there; by default
            "peer" beside NCCL, else the transport.
    """

    transport: str
    nodes: int | None = 1
    even: bool = True
    within: str | None = None

    @property
    def inside(self) -> str:
        """What moves blocks inside a node in a double ring."""
        return self.within or ("peer" if self.transport == "nccl" else self.transport)


@dataclass(frozen=True, slots=True)
class Link:
    """A way into a rank.

    Attributes:
        bandwidth: Bytes a second.
        latency: Seconds.
        share: Of the transfer's time, by which kernels beside it take longer.
    """

    bandwidth: float
    latency: float
    share: float

    def seconds(self, nbytes: float) -> float:
        """Return the time of a transfer."""
        return nbytes / self.bandwidth + self.latency if nbytes else 0.0

    def exposed(self, nbytes: float, hidden_behind: float) -> float:
        """Return by how much a transfer beside so many seconds of kernels lengthens them."""
        seconds = self.seconds(nbytes)
        return max(seconds * self.share, seconds - hidden_behind)


@dataclass(frozen=True)
class Problem:
    """An attention over the ranks of a sequence, whichever way it is spread.

    Attributes:
        shapes: Sizes; `degree` is not looked at.
        length: Real tokens of the sequence.
        mask: Which keys a query sees.
        placement: Where the ranks lie.
        hardware: What each of them has.
    """

    shapes: HeadShapes
    length: int
    mask: Mask
    placement: Placement
    hardware: Hardware

    def in_units(self, strategy: Strategy) -> Strategy:
        """Return the strategy with the units that its heads are cut into."""
        within = replace(self.shapes, degree=strategy.ulysses_degree)
        most = most_kv_heads(within, self.length, self.mask, self.placement.transport)
        return replace(strategy, most_kv_heads=most, pace=self._pace(within))

    def cost(self, strategy: Strategy) -> AttentionCost:
        """Return the predicted seconds of a forward and a backward pass.

        Args:
            strategy: As `in_units` returns it.
        """
        cost = _StrategyCost(self, strategy, replace(self.shapes, degree=strategy.ulysses_degree))
        forward, backward = (cost.run(backward=direction) for direction in (False, True))
        waits = (
            max(0.0, cost.host_seconds(backward=direction) - HOST_HIDDEN * each.total)
            for direction, each in ((False, forward), (True, backward))
        )
        return AttentionCost(forward, backward, sum(waits))

    def head_seconds(self, shapes: HeadShapes) -> float:
        """Return how long the rank with most to see attends with a head forward; `shapes` has the degree."""
        flops = 4.0 * shapes.batch * max(rank_areas(shapes.outer, self.length, self.mask)) * shapes.head_dim
        return flops / self.hardware.attention_forward

    def link(self, transport: str) -> Link:
        """Return the way between two ranks of a node; what no GPU moves goes at the pace of a host's memory."""
        hardware = _mover(self.hardware, transport)
        if transport in ("peer", "threads"):
            return Link(hardware.peer_bandwidth, hardware.peer_latency, hardware.peer_exposed)
        return Link(hardware.nccl_bandwidth, hardware.nccl_latency, hardware.nccl_exposed)

    def _pace(self, shapes: HeadShapes) -> float:
        """Return how long one tensor's part of a head moves, over how long the head is attended with forward."""
        if shapes.degree == 1:
            return 0.0
        moved = shapes.batch * shapes.tokens * (1 - 1 / shapes.degree) * shapes.head_dim * shapes.itemsize
        moving = moved / self.link(self.placement.transport).bandwidth
        return moving / max(self.head_seconds(shapes), moving / shapes.own_heads)


def most_kv_heads(shapes: HeadShapes, length: int, mask: Mask, transport: str) -> int:
    """Return how many KV heads move in one step, so that memory for them stays bounded; 0: all.

    Args:
        shapes: Sizes; `degree` is the strategy's.
        length: Real tokens of the sequence.
        mask: Which keys a query sees.
        transport: What moves them.
    """
    work = 4 * shapes.batch * sum(rank_areas(shapes.layout, length, mask)) * shapes.head_dim
    hides, vector = hides_transfers(transport, work), shapes.batch * shapes.head_dim * shapes.itemsize
    if shapes.degree == 1:
        return most_gathered(shapes.kv_heads, vector * shapes.layout.size * shapes.layout.tokens, hides=hides)
    return most_exchanged(shapes.own_heads, shapes.own_kv_heads, vector * shapes.tokens, hides=hides)


def _mover(hardware: Hardware, transport: str) -> Hardware:
    return hardware if transport in ("peer", "nccl") else hardware_like(HOST)


@dataclass(frozen=True)
class _StrategyCost:
    """A problem spread by a strategy; `shapes` has the strategy's degree."""

    problem: Problem
    strategy: Strategy
    shapes: HeadShapes

    def run(self, *, backward: bool) -> Pass:
        """Return the seconds of a pass."""
        hardware, shapes = self.problem.hardware, self.shapes
        rate = hardware.attention_backward if backward else hardware.attention_forward
        whole = self.problem.head_seconds(shapes) * shapes.own_heads * hardware.attention_forward / rate
        whole *= ATTENTION_BACKWARD if backward else 1.0
        kernel = whole * (1 + hardware.attention_half_rows / shapes.tokens) + hardware.attention_call
        more_calls = self.sizes.calls(self.stops, backward=backward) - 1
        joining = more_calls * hardware.attention_call
        if self.shapes.groups == 1:
            # When a call ends, its longest tile runs on one multiprocessor, and the others wait; rectangles have none.
            tile = 4.0 * KERNEL_TILE * most_keys(self.problem.mask, self.problem.length) * shapes.head_dim
            tile *= ATTENTION_BACKWARD if backward else 1.0
            joining += more_calls * min(hardware.attention_tail * tile * hardware.multiprocessors / rate, whole)
        exposed = 0.0
        if shapes.degree > 1:
            exposed += self._exchange(kernel, backward=backward)
        if self.stops > 1:
            outer = self._gather if self.strategy.outer == "gather" else self._ring
            more_joining, more_exposed = outer(kernel, backward=backward)
            joining += hardware.cut_loss * kernel + more_joining
            exposed += more_exposed
        return Pass(kernel, joining, exposed)

    def host_seconds(self, *, backward: bool) -> float:
        """Return how long the host issues a pass that is spread: its beginning, each kernel call, each hop of a ring.

        Where kernels run as CUDA graphs, which an exchange of heads inside a node can, calls take next to nothing.
        """
        if self.shapes.layout.size == 1:
            return 0.0
        if self.sizes.records_kernels(self.problem.placement.transport, self.nodes):
            return self.problem.hardware.call_start
        issued = self.sizes.calls(self.stops, backward=backward)
        if self.strategy.outer != "gather":
            issued += self.stops - 1 + (backward and self.stops > 1)
        return self.problem.hardware.call_start * (1 + issued)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.strategy, self.shapes)

    @cached_property
    def nodes(self) -> int:
        return self.problem.placement.nodes or 1

    @cached_property
    def places(self) -> int:
        """Ranks of the sequence on a node."""
        return max(1, self.shapes.layout.size // self.nodes)

    @cached_property
    def near(self) -> int:
        """Groups that exchange heads on a node."""
        return max(1, self.places // self.shapes.degree)

    @cached_property
    def stops(self) -> int:
        """At how many steps a rank attends; 1: it sees no key of another group. A gather has two."""
        outer, length, mask = self.shapes.outer, self.problem.length, self.problem.mask
        if outer.size == 1:
            return 1
        if self.strategy.outer == "gather":
            return 2 if most_seen(Visibility(outer, length, mask)) else 1
        return len(distances(outer, length, mask, self.strategy.ring_tensors))

    def _exchange(self, kernel: float, *, backward: bool) -> float:
        """The first unit's way in and the last one's way out are not hidden; the rest is, behind the other units."""
        degree = self.shapes.degree
        fits = degree <= self.places and self.places % degree == 0
        link = self._mixed(degree, degree if fits else self.places if degree % self.places == 0 else 1)
        away = (degree - 1) / degree
        inward, outward = (away * nbytes for nbytes in self.sizes.head_bytes(backward=backward))
        units = self.sizes.unit_shares(backward=backward)
        if len(units) == 1:
            return link.seconds(inward) + link.seconds(outward)
        first, last = units[0], units[-1]
        beside = inward * (1 - first) + outward * (1 - last)
        return (
            link.seconds(inward * first)
            + link.seconds(outward * last)
            + link.exposed(beside, kernel)
            + (len(units) - 2) * link.latency * link.share
        )

    def _gather(self, kernel: float, *, backward: bool) -> tuple[float, float]:
        groups, sizes, hardware = self.shapes.groups, self.sizes, self.problem.hardware
        seen = most_seen(Visibility(self.shapes.outer, self.problem.length, self.problem.mask)) / self.shapes.tokens
        link = self._mixed(groups, self.near)
        moved, units = sizes.gather_bytes * seen / (groups - 1), sizes.gather_units
        q, k = self.shapes.q_bytes / self.shapes.itemsize, self.shapes.k_bytes / self.shapes.itemsize  # numbers
        alone = kernel / groups  # attention to own keys: what hides the first unit's way in
        exposed = link.exposed(moved, kernel - (kernel - alone) / units) + 2 * link.latency
        q *= min(1.0, seen)  # about as many queries see keys of others as keys are seen
        if not backward:
            return hardware.memory_seconds(GATHER_FORWARD_Q * q + GATHER_FORWARD_K * k), exposed
        exposed += link.exposed(moved, kernel * (1 - 1 / units)) + (moved / units / link.bandwidth if units > 1 else 0)
        key_parts = 2 * (min((groups + 1) / 2, 1 + seen) + 1)  # of K and of V: a key is seen by half of the groups
        nbytes = q * GATHER_BACKWARD_Q + k * (GATHER_BACKWARD_K + GATHER_KEY_PART * key_parts)
        return hardware.memory_seconds(nbytes), exposed

    def _ring(self, kernel: float, *, backward: bool) -> tuple[float, float]:
        shapes, itemsize = self.shapes, self.shapes.itemsize
        q, k = shapes.q_bytes / itemsize, shapes.k_bytes / itemsize  # numbers
        if not backward:
            step, sums = RING_FORWARD_K * k + RING_FORWARD_Q * q, 0.0
            visiting, returning = 2 * shapes.k_bytes, 0
        else:
            is_q = self.strategy.ring_tensors == "q"
            of_q, of_k = (BURST_BACKWARD_Q, BURST_BACKWARD_K) if is_q else (KV_BACKWARD_Q, KV_BACKWARD_K)
            step, sums = of_q * q + of_k * k, RING_SUMS * (q + 2 * k)
            visiting, returning = shapes.ring_bytes(self.strategy.ring_tensors)
        joining = self.problem.hardware.memory_seconds(self.stops * step + sums)
        return joining, self._hops(visiting, returning, kernel / self.stops)

    def _hops(self, visiting: float, returning: float, behind: float) -> float:
        """Visitors move beside kernels; what follows them makes one hop more, at the end, beside nothing.

        Args:
            visiting: Bytes of what visits.
            returning: Bytes of the gradients that follow it.
            behind: Seconds of the kernels at one stop.
        """
        placement = self.problem.placement
        if self.strategy.outer == "double-ring":
            itinerary = layout_itinerary(
                self.shapes.outer,
                self.problem.length,
                self.problem.mask,
                self.strategy.ring_tensors,
                self.nodes,
                returning=bool(returning),
            )
            home, away = self.problem.link(placement.inside), self._between(self.places)
            exposed = itinerary.inner_hops * home.exposed(visiting + returning, behind)
            exposed += itinerary.outer_hops * away.exposed(visiting + returning, behind * self.near)
            return exposed + (away.seconds(returning) + home.seconds(returning))
        # Of each node's ranks those of one group send to the next node at once.
        link = self.problem.link(placement.transport) if self.nodes == 1 else self._between(self.shapes.degree)
        return (self.stops - 1) * link.exposed(visiting + returning, behind) + link.seconds(returning)

    def _between(self, crossing: int) -> Link:
        """Return the way between two nodes, where so many of a node's ranks of this sequence receive at once."""
        hardware = _mover(self.problem.hardware, self.problem.placement.transport)
        bandwidth = min(hardware.inter_lone_bandwidth, hardware.inter_bandwidth * self.places / crossing)
        return Link(bandwidth, hardware.inter_latency, hardware.inter_exposed)

    def _mixed(self, ranks: int, near: int) -> Link:
        """Return the way into a rank that receives alike from `ranks` ranks, itself among them, `near` on its node."""
        transport = self.problem.placement.transport
        home = self.problem.link(transport)
        if transport == "nccl":
            home = replace(home, bandwidth=self.problem.hardware.all_to_all_bandwidth)
        if ranks <= near:
            return home
        away = self._between(self.places)
        far = (ranks - near) / max(1, ranks - 1)
        # Both ways are open at once: the slower one counts.
        slowest = max((1 - far) / home.bandwidth, far / away.bandwidth)
        return Link(1 / slowest, away.latency, away.share)
