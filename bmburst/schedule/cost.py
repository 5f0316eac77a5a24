"""The cost model of attention: predicts kernel time, merge time and exposed communication of one call on a rank.

This is the only cost model. `burst_attention` takes the cheapest strategy (`bmburst.schedule.strategy`); the planner,
`--recompute auto` and the out-of-memory advice use it for training steps. All rates come from the hardware file
(`bmburst.schedule.hardware`). Transfers are those of the executors in `bmburst.attention`. A transfer is hidden behind
the kernels that run at the same time, except for the exposed share of its transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from bmburst.schedule.calls import kernel_calls
from bmburst.schedule.gather_plan import Visibility, most_seen, sums_own_tiles
from bmburst.schedule.hardware import HOST, Hardware, hardware_like
from bmburst.schedule.layout import key_areas, merged_queries, most_keys, narrowed_queries, rank_areas
from bmburst.schedule.mask import Mask
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.ring_schedule import distances, layout_ring_order
from bmburst.schedule.units import HeadShapes, Sizes, with_units

# Bytes read and written per element of a rank's queries (Q) and keys (K): merges, sums and copies of the executors.
# RING_TILE counts only those queries and keys of a step that its tiles have.
GATHER_FORWARD_Q, GATHER_FORWARD_K = 22.0, 8.0
GATHER_BACKWARD_Q, GATHER_BACKWARD_K, GATHER_KEY_PART = 8.0, 8.0, 2.0
TILE_SUMS = 20.0  # in a gather, if own keys have several tiles: fitted to records of sums in fp32
RING_TILE_Q, RING_FORWARD_K, RING_TILE_BACKWARD_K = 10.0, 8.0, 20.0
BURST_BACKWARD_Q, KV_BACKWARD_K, RING_SUMS = 32.0, 48.0, 4.0
LEVEL = 6.0  # a level of a tree that is merged, or whose gradients are added, in place
KERNEL_BACKWARD_Q = 16.0  # before and after the kernel: delta from O and dO; fp32 sums of dQ, zeroed and rounded
KERNEL_BACKWARD_K = 20.0  # the same for dK and dV, if several query heads share a KV head
HEADS_OWN = 2.0  # in a head exchange, for each byte that a rank keeps
REPLICA_SUMS, REPLICA_PARTS = 20.0, 4.0  # dK and dV of a KV head of several ranks: sums in fp32, and the ranks' parts
KERNEL_TILE = 128.0  # queries in a tile of the kernel
EDGE_KEYS = 256.0
"""Additional cost, in keys, of a query that does not see the first key of the sequence: its tile has hidden pairs at
both ends, and start and end of the tile's work weigh more. Fitted to forward on one GPU under windows and documents,
attention_masks_2xh200_202611.json: 1.04 to 1.07 times the time of as many FLOPs of a causal mask."""
UNITS_ALIKE = 0.005
"""Fraction of a pass by which costs of units of heads may differ to count as equal.

Kernels of few heads lose time that the formulas do not have. On 4 H200s, 28 query heads and 4 KV heads, 160K tokens:
forward in units of 1, 5 and 1 head ran at 0.932 of one GPU's rate; one call, after an exchange over NCCL, at 0.956.
"""
HOST_HIDDEN = 0.75
"""Fraction of a pass's GPU time in which the host can launch its work. Fitted on 2 H200s: a gather of 8 query
heads and one KV head, 64K tokens, in a window of 4,096 takes 4.37 ms forward and backward."""


class Pass(NamedTuple):
    """Seconds of a forward or a backward pass.

    Attributes:
        kernel: The attention kernel and the kernels before and after it, for the rank with the most FLOPs.
        joining: Overhead of smaller tiles and more calls, and merges, sums and copies.
        exposed: Exposed communication.
    """

    kernel: float
    joining: float
    exposed: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.kernel + self.joining + self.exposed

    def times(self, calls: float) -> "Pass":
        """Return the seconds of several passes."""
        return Pass(*(calls * seconds for seconds in self))


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """The cost of one attention call, forward and backward.

    Attributes:
        forward: Seconds of the GPU, forward.
        backward: Seconds of the GPU, backward.
        waits: Seconds that the GPU waits for the host, forward and backward; above 0 for short sequences only.
        launch: Seconds of the host to launch the forward pass, if there are several ranks.
    """

    forward: Pass
    backward: Pass
    waits: tuple[float, float] = (0.0, 0.0)
    launch: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of both passes, by which strategies are compared."""
        return self.forward.total + self.backward.total + sum(self.waits)

    def times(self, calls: float) -> "AttentionCost":
        """Return the cost of several calls, one after the other."""
        waits = calls * self.waits[0], calls * self.waits[1]
        return AttentionCost(self.forward.times(calls), self.backward.times(calls), waits, calls * self.launch)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of the ranks of a sequence, and the transports between them.

    Attributes:
        transport: Transport between any two ranks.
        nodes: Number of nodes; None: not known yet, which costs the same as one.
        even: Whether every node has the same number of consecutive ranks.
        within: Transport of a double ring inside a node. Default: "peer" if `transport` is "nccl", else `transport`.
        collectives: Whether heads may be exchanged by a collective of the group instead of copy engines.
    """

    transport: str
    nodes: int | None = 1
    even: bool = True
    within: str | None = None
    collectives: bool = True

    @property
    def inside(self) -> str:
        """Transport of a double ring inside a node."""
        return self.within or ("peer" if self.transport == "nccl" else self.transport)


@dataclass(frozen=True, slots=True)
class Link:
    """A link into a rank.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds.
        share: Fraction of a transfer's time by which overlapping kernels slow down.
    """

    bandwidth: float
    latency: float
    share: float

    def seconds(self, nbytes: float) -> float:
        """Return the time of a transfer."""
        return nbytes / self.bandwidth + self.latency if nbytes else 0.0

    def exposed(self, nbytes: float, hidden_behind: float) -> float:
        """Return the exposed seconds of a transfer that overlaps with `hidden_behind` seconds of kernels."""
        seconds = self.seconds(nbytes)
        return max(seconds * self.share, seconds - hidden_behind)


@dataclass(frozen=True)
class Problem:
    """An attention call over the ranks of a sequence, for any strategy.

    Attributes:
        shapes: Sizes; `degree` is ignored.
        length: Real tokens of the sequence.
        mask: Which keys a query sees.
        placement: Nodes and transports.
        hardware: The machine of the ranks.
    """

    shapes: HeadShapes
    length: int
    mask: Mask
    placement: Placement
    hardware: Hardware

    def in_units(self, strategy: Strategy) -> Strategy:
        """Return the strategy with the cheapest way to move heads: in units of each pass, or by one collective."""
        within, transport = replace(self.shapes, degree=strategy.ulysses_degree), self.placement.transport
        pace = self._pace(within)
        strategy = replace(strategy, forward_units=(), backward_units=(), at_once=False)
        for backward in (False, True):
            strategy = self._fewest_units(
                with_units(strategy, within, transport, pace, backward=backward), backward=backward
            )
        if not (self.placement.collectives and within.can_exchange_at_once):
            return strategy
        at_once = replace(strategy, forward_units=(), backward_units=(), at_once=True)
        ways = [at_once, strategy, *([replace(at_once, latents=True)] if within.latent_dim else [])]
        return min(ways, key=lambda way: self.cost(way).total)

    def cost(self, strategy: Strategy) -> AttentionCost:
        """Return the predicted seconds of a forward and a backward pass.

        Args:
            strategy: As `in_units` returns it.
        """
        cost = _StrategyCost(self, strategy, replace(self.shapes, degree=strategy.ulysses_degree))
        passes = [(cost.run(backward=way), cost.host_seconds(backward=way)) for way in (False, True)]
        of_forward, of_backward = (max(0.0, launch - HOST_HIDDEN * each.total) for each, launch in passes)
        (forward, launch), (backward, _) = passes
        return AttentionCost(forward, backward, (of_forward, of_backward), launch)

    def head_seconds(self, shapes: HeadShapes, *, backward: bool = False, keys_stay: bool = False) -> float:
        """Return the seconds of one head in a pass on the rank with the most work.

        Args:
            shapes: Sizes, with the degree.
            backward: Whether it is a backward pass.
            keys_stay: Whether a rank computes all pairs of its own keys instead of all pairs of its own queries.
        """
        sequence = shapes.outer, self.length, self.mask
        areas = key_areas(*sequence) if keys_stay else rank_areas(*sequence)
        most = max(map(lambda area, cut: area + EDGE_KEYS * cut, areas, narrowed_queries(*sequence)))
        flops = shapes.pair_flops(backward=backward) * shapes.batch * most
        return flops / self.hardware.attention_rate(backward=backward)

    def link(self, transport: str) -> Link:
        """Return the link between two ranks of a node; transports on CPUs use the numbers of the host."""
        hardware = _mover(self.hardware, transport)
        if transport in ("peer", "threads"):
            return Link(hardware.peer_bandwidth, hardware.peer_latency, hardware.peer_exposed)
        return Link(hardware.nccl_bandwidth, hardware.nccl_latency, hardware.nccl_exposed)

    def _fewest_units(self, ways: Sequence[Strategy], *, backward: bool) -> Strategy:
        """Return the way with the fewest units in a pass, of those that are the fastest up to `UNITS_ALIKE`."""
        if len(ways) == 1:
            return ways[0]
        costs = [self.cost(way) for way in ways]
        least = min(costs, key=lambda cost: cost.total)
        limit = least.total + UNITS_ALIKE * (least.backward if backward else least.forward).total
        alike = [(way, cost) for way, cost in zip(ways, costs, strict=True) if cost.total <= limit]
        return min(alike, key=lambda found: (len(found[0].units(backward=backward)), found[1].total))[0]

    def _pace(self, shapes: HeadShapes) -> float:
        """Return the time to move one tensor of a head, divided by the forward time of attention with that head."""
        if shapes.degree == 1:
            return 0.0
        moved = shapes.batch * shapes.tokens * (1 - 1 / shapes.degree) * shapes.mean_width * shapes.itemsize
        moving = moved / self.link(self.placement.transport).bandwidth
        return moving / max(self.head_seconds(shapes), moving / shapes.own_heads)


def _mover(hardware: Hardware, transport: str) -> Hardware:
    return hardware if transport in ("peer", "nccl") else hardware_like(HOST)


class _Elements(NamedTuple):
    """Elements of a rank's queries and of its output, and the mean of those of its keys and of its values."""

    q: float
    out: float
    k: float


@dataclass(frozen=True)
class _StrategyCost:
    """The cost of a problem under one strategy; `shapes` has the strategy's degree."""

    problem: Problem
    strategy: Strategy
    shapes: HeadShapes

    def run(self, *, backward: bool) -> Pass:
        """Return the seconds of a pass."""
        hardware, shapes = self.problem.hardware, self.shapes
        keys_stay = backward and self.stops > 1 and self.strategy.moves_queries
        whole = self.problem.head_seconds(shapes, backward=backward, keys_stay=keys_stay) * shapes.own_heads
        kernel = whole * (1 + hardware.attention_half_rows / shapes.tokens) + hardware.attention_call
        if backward:
            (q, _, k), grouped = self._numbers, shapes.own_heads > shapes.own_kv_heads
            kernel += hardware.memory_seconds(KERNEL_BACKWARD_Q * q + grouped * KERNEL_BACKWARD_K * k)
        more_calls = self._calls(backward=backward) - 1
        joining = more_calls * hardware.attention_call + self._merges(backward=backward)
        if self.shapes.groups == 1:
            # At the end of a call its longest tile runs on one multiprocessor, others idle; rectangles have no tail.
            pairs = KERNEL_TILE * most_keys(self.problem.mask, self.problem.length)
            tile = pairs * shapes.pair_flops(backward=backward)
            tile *= hardware.attention_tail * hardware.multiprocessors / hardware.attention_rate(backward=backward)
            joining += more_calls * min(tile, whole)
        exposed = 0.0
        if shapes.degree > 1:
            more_joining, exposed = self._exchange(kernel, backward=backward)
            joining += more_joining + (self._expanding(backward=backward) if self.strategy.latents else 0.0)
        if self.stops > 1:
            outer = self._gather if self.strategy.outer == "gather" else self._ring
            more_joining, more_exposed = outer(kernel, backward=backward)
            joining += hardware.cut_loss * kernel + more_joining
            exposed += more_exposed
        return Pass(kernel, joining, exposed)

    def host_seconds(self, *, backward: bool) -> float:
        """Return the host's seconds to launch a pass over several ranks.

        In a head exchange: its start, kernels, and messages to each other rank or a collective each way. In a ring or a
        gather: its start, each kernel call and each hop.
        """
        hardware, shapes = self.problem.hardware, self.shapes
        if shapes.layout.size == 1:
            return 0.0
        calls = self._calls(backward=backward)
        if shapes.groups > 1:
            hops = self.stops - 1 + (backward and self.stops > 1) if self.strategy.outer != "gather" else 0
            return hardware.call_start * (1 + calls + hops)
        is_recorded = self.sizes.records_kernels(self.problem.placement.transport, self.nodes)
        kernels = calls * (hardware.graph_host if is_recorded else hardware.call_start)
        if self.strategy.at_once:
            expanding = hardware.collective_host if self.strategy.latents else 0.0  # it launches about as many kernels
            return hardware.pass_host + kernels + 2 * hardware.collective_host + expanding
        messages = 2 * len(self.sizes.unit_shares(backward=backward)) * shapes.degree
        return hardware.pass_host + kernels + messages * hardware.message_host

    def _calls(self, *, backward: bool) -> int:
        return kernel_calls(self.sizes, self._visibility, self.stops, backward=backward)

    def _merges(self, *, backward: bool) -> float:
        """Return the seconds to merge the levels of a tree; in backward, to add their gradients of q."""
        mask, (q, out, _) = self.problem.mask, self._numbers
        is_one_merge = self.stops == 1 and not (backward and len(mask.levels) > 2)
        merged = (q if backward else out) * merged_queries(mask, self.problem.length) / self.problem.length
        return self.problem.hardware.memory_seconds(merged * (LEVEL if is_one_merge else RING_TILE_Q))

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.strategy, self.shapes)

    @cached_property
    def nodes(self) -> int:
        return self.problem.placement.nodes or 1

    @cached_property
    def places(self) -> int:
        """Ranks of the sequence on each node."""
        return max(1, self.shapes.layout.size // self.nodes)

    @cached_property
    def near(self) -> int:
        """Head exchange groups on each node."""
        return max(1, self.places // self.shapes.degree)

    @cached_property
    def _numbers(self) -> "_Elements":
        sizes = self.shapes
        return _Elements(*(n / sizes.itemsize for n in (sizes.q_bytes, sizes.out_bytes, sizes.kv_bytes / 2)))

    @cached_property
    def _visibility(self) -> Visibility:
        return Visibility(self.shapes.outer, self.problem.length, self.problem.mask)

    @cached_property
    def stops(self) -> int:
        """Number of steps with attention; 1: no rank sees keys of another group. A gather has two."""
        if (outer := self.shapes.outer).size == 1:
            return 1
        if self.strategy.outer == "gather":
            return 2 if most_seen(self._visibility) else 1
        return len(distances(outer, self.problem.length, self.problem.mask, self.strategy.ring_tensors))

    def _exchange(self, kernel: float, *, backward: bool) -> tuple[float, float]:
        """Return seconds of copies and sums, and exposed seconds: inputs of the first unit, results of the last unit.

        The other transfers overlap with kernels.
        """
        shapes, degree = self.shapes, self.shapes.degree
        fits = degree <= self.places and self.places % degree == 0
        link = self._mixed(degree, degree if fits else self.places if degree % self.places == 0 else 1)
        inward, outward = self.sizes.head_bytes(backward=backward)
        units, first = self.sizes.unit_shares(backward=backward), self.sizes.first_bytes(backward=backward)
        # Kernels copy own blocks; those of the first unit are copied during its transfer.
        nbytes = HEADS_OWN * (inward - first + outward) / degree
        if backward and shapes.replicas > 1:
            nbytes += (REPLICA_SUMS / shapes.replicas + REPLICA_PARTS) * self._numbers.k
        away, last = (degree - 1) / degree, outward * units[-1]
        exposed = link.seconds(away * first) + link.seconds(away * last)
        if len(units) > 1:
            exposed += link.exposed(away * (inward - first + outward - last), kernel)
            exposed += (len(units) - 2) * link.latency * link.share
        return self.problem.hardware.memory_seconds(nbytes), exposed

    def _expanding(self, *, backward: bool) -> float:
        """Return the seconds that latents take beside their transfer: copies; in backward, to expand them again."""
        shapes, hardware = self.shapes, self.problem.hardware
        if not backward:
            return hardware.memory_seconds(2 * shapes.q_bytes)
        rows, width = shapes.batch * shapes.tokens, shapes.head_dim + shapes.value_width
        products = hardware.matmul_seconds(2.0 * rows * shapes.own_heads * width * shapes.latent_dim, rows)
        nbytes = 2 * (shapes.q_bytes + shapes.out_bytes) + 3 * shapes.kv_bytes + 2 * shapes.latent_bytes
        return products + hardware.memory_seconds(nbytes)

    def _gather(self, kernel: float, *, backward: bool) -> tuple[float, float]:
        groups, sizes, hardware = self.shapes.groups, self.sizes, self.problem.hardware
        seen = most_seen(self._visibility) / self.shapes.key_tokens
        link = self._mixed(groups, self.near)
        moved, units = sizes.gather_bytes * seen / (groups - 1), sizes.gather_units
        q, out, k = self._numbers
        sums = TILE_SUMS * (q + 2 * k) if sums_own_tiles(self._visibility) else 0.0
        alone = kernel / groups  # attention to own keys, which overlaps with the first unit's transfer
        exposed = link.exposed(moved, kernel - (kernel - alone) / units) + 2 * link.latency
        share = min(1.0, seen)  # the number of queries that see other ranks' keys is about that of pulled keys
        if not backward:
            return hardware.memory_seconds(GATHER_FORWARD_Q * share * out + GATHER_FORWARD_K * k), exposed
        exposed += link.exposed(moved, kernel * (1 - 1 / units)) + (moved / units / link.bandwidth if units > 1 else 0)
        key_parts = 2 * (min((groups + 1) / 2, 1 + seen) + 1)  # of K and V: on average half of the groups see a key
        nbytes = share * q * GATHER_BACKWARD_Q + k * (GATHER_BACKWARD_K + GATHER_KEY_PART * key_parts) + sums
        return hardware.memory_seconds(nbytes), exposed

    def _ring(self, kernel: float, *, backward: bool) -> tuple[float, float]:
        shapes, (q, out, k) = self.shapes, self._numbers
        others = self.stops - 1
        # As many queries see other ranks' keys as a gather would pull keys; striped queries see keys of all ranks.
        seen = others if shapes.outer.is_striped else most_seen(self._visibility) / shapes.key_tokens
        tiles = 1 + min(others, seen)
        if not backward:
            nbytes = self.stops * RING_FORWARD_K * k + tiles * RING_TILE_Q * out
            visiting, returning = shapes.kv_bytes, 0
        else:
            step = BURST_BACKWARD_Q * q if self.strategy.ring_tensors == "q" else KV_BACKWARD_K * k
            nbytes = self.stops * step + tiles * (RING_TILE_Q * q + RING_TILE_BACKWARD_K * k)
            nbytes += RING_SUMS * (q + 2 * k)
            visiting, returning = shapes.ring_bytes(self.strategy.ring_tensors)
        return self.problem.hardware.memory_seconds(nbytes), self._hops(visiting, returning, kernel / self.stops)

    def _hops(self, visiting: float, returning: float, behind: float) -> float:
        """Return the exposed seconds of all hops. Hops overlap with kernels, except the last hop of the gradients.

        Args:
            visiting: Bytes of the blocks of a hop.
            returning: Bytes of the gradients that follow them.
            behind: Seconds of the kernels at one step.
        """
        placement = self.problem.placement
        if self.strategy.outer == "double-ring":
            ring_order = layout_ring_order(
                self.shapes.outer,
                self.problem.length,
                self.problem.mask,
                self.strategy.ring_tensors,
                self.nodes,
                returning=bool(returning),
            )
            home, away = self.problem.link(placement.inside), self._between(self.places)
            exposed = ring_order.inner_hops * home.exposed(visiting + returning, behind)
            exposed += ring_order.outer_hops * away.exposed(visiting + returning, behind * self.near)
            return exposed + (away.seconds(returning) + home.seconds(returning))
        # On each node the ranks of one head exchange group send to the next node at once.
        link = self.problem.link(placement.transport) if self.nodes == 1 else self._between(self.shapes.degree)
        return (self.stops - 1) * link.exposed(visiting + returning, behind) + link.seconds(returning)

    def _between(self, crossing: int) -> Link:
        """Return the link between two nodes if `crossing` ranks of a node receive at once."""
        hardware = _mover(self.problem.hardware, self.problem.placement.transport)
        bandwidth = min(hardware.inter_lone_bandwidth, hardware.inter_bandwidth * self.places / crossing)
        return Link(bandwidth, hardware.inter_latency, hardware.inter_exposed)

    def _mixed(self, ranks: int, near: int) -> Link:
        """Return the link into a rank that receives equally from `ranks` ranks, itself included; `near` on its node."""
        transport = self.problem.placement.transport
        if self.strategy.at_once and transport == "peer":
            transport = "nccl"
        home = self.problem.link(transport)
        if transport == "nccl":
            home = replace(home, bandwidth=self.problem.hardware.all_to_all_bandwidth)
        if ranks <= near:
            return home
        away = self._between(self.places)
        far = (ranks - near) / max(1, ranks - 1)
        # Both links are used at once: the slower one counts.
        slowest = max((1 - far) / home.bandwidth, far / away.bandwidth)
        return Link(1 / slowest, away.latency, away.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCost:
    """The bytes and seconds in which a recurrent layer exchanges summaries (`bmburst.linear.fold`); none on tokens.

    Attributes:
        size: Ranks.
        links: Links of a rank times samples.
        transition: Bytes of M of a link.
        state: Bytes of a state.
        samples: Samples of which every rank gets the final state; 0 without.
    """

    size: int
    links: int
    transition: int
    state: int
    samples: int = 0

    def forward_bytes(self, hops: int) -> int:
        """Return the bytes that a rank receives in forward: M and U of links, and with two hops the states."""
        return self._bytes(self.links * (self.transition + self.state), self.links + self.samples, hops)

    def backward_bytes(self, hops: int) -> int:
        """Return the bytes that a rank receives in backward: gradients of states, and with two hops of others."""
        return self._bytes((self.links + self.samples) * self.state, self.links, hops)

    def seconds(self, hops: int, hardware: Hardware) -> float:
        """Return the seconds of both passes inside a node, by collectives of the group."""
        bandwidth = hardware.collective_bandwidth if hops == 1 else hardware.all_to_all_bandwidth
        nbytes = self.forward_bytes(hops) + self.backward_bytes(hops)
        return 2 * hops * hardware.nccl_latency + nbytes / bandwidth

    def hops(self, hardware: Hardware) -> int:
        """Return 1 if all ranks should get all summaries, 2 if each should fold its share of the heads."""
        return min((1, 2), key=lambda hops: self.seconds(hops, hardware))

    def _bytes(self, out: int, states: int, hops: int) -> int:
        others = self.size - 1
        return others * out if hops == 1 else others * (out + states * self.state) // self.size
