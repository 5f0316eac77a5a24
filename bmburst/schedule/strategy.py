"""How an attention is spread over the ranks of a group, and which way costs least: pure, by stated constants."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bmburst.errors import UserError
from bmburst.schedule.double_schedule import layout_itinerary
from bmburst.schedule.gather_plan import Sight, most_seen
from bmburst.schedule.heads_plan import HeadShapes
from bmburst.schedule.layout import Layout, rank_areas
from bmburst.schedule.mask import Full, Mask
from bmburst.schedule.ring_schedule import (
    AttentionShape,
    backward_bytes,
    choose_travellers,
    distances,
    forward_bytes,
)
from bmburst.schedule.strategy_names import STRATEGIES, Asked, Outer, Travellers
from bmburst.schedule.units import hides_transfers, most_exchanged, most_gathered
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.constants import ATTENTION_BACKWARD


@dataclass(frozen=True, slots=True)
class Strategy:
    """How many neighbouring ranks exchange heads, and what happens between such groups.

    Attributes:
        heads: Ranks that exchange heads; 1 for none.
        outer: What goes on between groups of that many ranks.
        travellers: What goes round in backward.
        most_kv_heads: KV heads that one step of an exchange or of a gather moves; 0: all in one step.
        pace: Of an exchange of heads, time to move one tensor's part of a head over the time to attend with it.
    """

    heads: int
    outer: Outer
    travellers: Travellers
    most_kv_heads: int = 0
    pace: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What a transport gives.

    Attributes:
        bandwidth: Bytes a second into a rank.
        latency: Seconds from the start of a step to its first byte.
        exposed: Share of a transfer's time that attention beside it takes longer.
    """

    bandwidth: float
    latency: float
    exposed: float


LINKS = {
    "peer": Link(3.5e11, 2e-5, 0.02),  # H200, NVLink: a copy engine holds no multiprocessor
    "nccl": Link(1.5e11, 3e-5, 0.9),  # the same; its blocks hold multiprocessors, so that little is hidden
    "gloo": Link(1e9, 2e-4, 0.8),
    "threads": Link(1e10, 1e-4, 1.0),
}
"""By transport; measured on 8 H200s, and guessed for hosts without GPUs."""

BETWEEN_NODES = {"nccl": Link(4.5e10, 5e-5, 0.5)}
"""The same between nodes, where it differs; a guess for a port of 400 Gb/s a GPU."""

_MEMORY_BANDWIDTH = 3.5e12  # bytes a second, for merging partial results
_KERNEL_RATE = {"peer": 6e14, "nccl": 6e14}  # FLOP/s
_CPU_KERNEL_RATE = 2e11
_CUT_LOSS = 0.03  # a kernel's share lost when the scores are cut into rectangles


@bounded_cache(maxsize=256)
def choose_strategy(
    name: str,
    shapes: HeadShapes,
    length: int,
    mask: Mask,
    transport: str,
    nodes: int | None = None,
    heads: int | None = None,
) -> Strategy:
    """Return the strategy of that name, or for "auto" the one with the lowest `cost`.

    Args:
        name: One of `bmburst.schedule.strategy_names.STRATEGIES`.
        shapes: Sizes; `degree` is not looked at.
        length: Real tokens of the sequence.
        mask: The mask.
        transport: What moves the blocks.
        nodes: Nodes that the ranks lie on, in order, each with as many; None: not known yet.
        heads: How many neighbouring ranks must exchange heads; None: what is cheapest.

    Raises:
        UserError: The strategy asked for cannot work with these shapes, with the reason.
    """
    shapes, asked = replace(shapes, degree=1), STRATEGIES[name]
    found = list(_candidates(asked, shapes, mask, nodes))
    if not found:
        raise UserError(f"strategy '{name}' cannot work: {_refusal(asked, shapes, mask, nodes)}\nuse strategy='auto'")
    if heads is not None and shapes.layout.size > 1:
        found = [strategy for strategy in found if strategy.heads == heads]
    if not found:
        reason = replace(shapes, degree=heads).refusal() if heads else None
        raise UserError(
            f"the mesh has {heads} ranks exchange heads, but {reason or f'strategy {name!r} has others do so'}\n"
            "use strategy='auto', or a mesh with other heads"
        )
    best = min(found, key=lambda strategy: cost(strategy, shapes, length, mask, transport, nodes or 1))
    within = replace(shapes, degree=best.heads)
    most = _most_kv_heads(best, within, length, mask, transport)
    return replace(best, most_kv_heads=most, pace=_pace(within, length, mask, transport))


def cost(strategy: Strategy, shapes: HeadShapes, length: int, mask: Mask, transport: str, nodes: int = 1) -> float:
    """Return the predicted seconds of a forward and a backward pass.

    Compute at one device's rate, of the rank with most to see; transfers by bytes over bandwidth, of which the
    transport's share is exposed; a latency a step; merging at memory speed. Links inside nodes and between them are
    busy at the same time in a double ring only.
    """
    link = _link(transport)
    far = BETWEEN_NODES.get(transport, link)
    within = replace(shapes, degree=strategy.heads)
    outer = within.outer
    bytes_moved, across, steps, merged = 0.0, 0.0, 0, 0
    if strategy.heads > 1:
        # q, k, v and out forward; q, k, v, dO, dQ, dK and dV backward; statistics, one number a vector, are left out
        vectors = shapes.batch * shapes.layout.tokens * (5 * shapes.heads + 6 * max(shapes.kv_heads, strategy.heads))
        to_each = vectors * shapes.head_dim * shapes.itemsize / strategy.heads
        bytes_moved += to_each * (strategy.heads - 1)
        across += to_each * max(0, strategy.heads - shapes.layout.size // nodes)
        steps += 2
    inner = _attention_shape(within)
    if outer.size > 1:
        moved, slow, hops = _outer_traffic(strategy, inner, outer, length, mask, nodes)
        bytes_moved += moved
        across += slow
        steps += 2 * hops
        merged = hops * 6 * inner.batch * inner.tokens * inner.heads
    compute = (1 + ATTENTION_BACKWARD) * inner.heads * _head_seconds(within, length, mask, transport)
    compute *= 1 + (_CUT_LOSS if merged else 0)
    if strategy.outer == "double-ring" and transport == "nccl":
        link = LINKS["peer"]  # inside nodes
    times = (bytes_moved - across) / link.bandwidth, across / far.bandwidth
    moving = max(times) if strategy.outer == "double-ring" else sum(times)
    exposed = max(times[0] * link.exposed + times[1] * far.exposed, moving - compute)
    merging = merged * inner.head_dim * shapes.statistics_itemsize / _MEMORY_BANDWIDTH
    return compute + exposed + steps * link.latency + merging


def _outer_traffic(
    strategy: Strategy, inner: AttentionShape, outer: Layout, length: int, mask: Mask, nodes: int
) -> tuple[float, float, int]:
    """Return the bytes that a rank moves between groups, forward and backward, and the steps of each pass.

    All are 0 where no rank sees a key of another. The second number: of those bytes, what waits for links between
    nodes; each hop of a ring does that on some rank.
    """
    if strategy.outer == "gather":  # its gradients travel as the kernel wrote them
        inner = replace(inner, gradient_itemsize=inner.itemsize)
        whole = forward_bytes(inner, outer.size) + backward_bytes(inner, outer.size, "kv")
        seen = most_seen(Sight(outer, length, mask))
        moved = whole * seen / ((outer.size - 1) * outer.tokens)
        return moved, moved * (nodes - 1) / nodes, int(seen > 0)
    whole = forward_bytes(inner, outer.size) + backward_bytes(inner, outer.size, strategy.travellers)
    hop = whole / (outer.size - 1)
    if strategy.outer == "double-ring":
        way = layout_itinerary(outer, length, mask, strategy.travellers, nodes, returning=True)
        stops, moved = len(way.owners(0)), way.outer_hops + way.inner_hops
        return hop * moved, hop * way.outer_hops, stops if stops > 1 else 0
    hops = len(distances(outer, length, mask, strategy.travellers)) - 1
    return hop * hops, hop * hops if nodes > 1 else 0.0, 1 + hops if hops else 0


def _candidates(asked: Asked, shapes: HeadShapes, mask: Mask, nodes: int | None) -> Iterator[Strategy]:
    """Yield what is asked for and the shapes permit."""
    size = shapes.layout.size
    if size == 1:
        yield Strategy(1, "ring", "kv")  # nothing is spread, whatever the name
        return
    for degree in range(1, size + 1):
        within = replace(shapes, degree=degree)
        if within.refusal() is not None or not asked.allows(degree, size):
            continue
        least = choose_travellers(_attention_shape(within), size // degree)
        possible: dict[Outer, bool] = {
            "ring": True,
            "gather": degree < size and gather_refusal(within.outer, mask) is None,
            "double-ring": _can_double(asked, size, degree, nodes),
        }
        for outer in asked.outer:
            if possible[outer]:
                yield Strategy(degree, outer, asked.travellers or least)


def _can_double(asked: Asked, size: int, degree: int, nodes: int | None) -> bool:
    """Return whether there are nodes, and ranks in each, between which no heads are exchanged; None: whether may be."""
    if nodes is None:
        return asked.needs("double-ring") and any(size % count == 0 for count in range(2, size))
    places = size // nodes
    return nodes > 1 and places % degree == 0 and places > degree


def gather_refusal(layout: Layout, mask: Mask) -> str | None:
    """Return why keys cannot be gathered in global order under this layout, or None."""
    if layout.name == "striped" and mask != Full():
        return "layout 'striped' has no run of neighbouring tokens; 'zigzag' has"
    return None


def _refusal(asked: Asked, shapes: HeadShapes, mask: Mask, nodes: int | None) -> str:
    size = shapes.layout.size
    if asked.needs("double-ring"):
        found = f"{size} ranks" if nodes is None else f"{size} ranks on {nodes} node{'s' * (nodes != 1)}"
        return f"{found} are no 2 nodes or more of 2 ranks or more (BMBURST_NODE names a rank's node)"
    if asked.exchange == "all":
        return str(replace(shapes, degree=size).refusal())
    if asked.exchange == "some":
        reasons = (replace(shapes, degree=degree).refusal() for degree in range(2, size))
        return next((reason for reason in reasons if reason), f"{size} ranks form no smaller groups")
    return gather_refusal(shapes.layout, mask) or "no rank can take part"


def _attention_shape(shapes: HeadShapes) -> AttentionShape:
    """Return the sizes that one rank sees after the exchange of heads."""
    return AttentionShape(
        batch=shapes.batch,
        tokens=shapes.tokens,
        heads=shapes.own_heads,
        kv_heads=shapes.own_kv_heads,
        head_dim=shapes.head_dim,
        itemsize=shapes.itemsize,
        gradient_itemsize=shapes.statistics_itemsize,
        statistics_itemsize=shapes.statistics_itemsize,
    )


def _link(transport: str) -> Link:
    """Return what moves blocks; a communicator of the user's own is taken for gloo."""
    return LINKS.get(transport, LINKS["gloo"])


def _head_seconds(shapes: HeadShapes, length: int, mask: Mask, transport: str) -> float:
    """Return how long the rank with most to see attends with a head forward."""
    flops = 4.0 * shapes.batch * max(rank_areas(shapes.outer, length, mask)) * shapes.head_dim
    return flops / _KERNEL_RATE.get(transport, _CPU_KERNEL_RATE)


def _pace(shapes: HeadShapes, length: int, mask: Mask, transport: str) -> float:
    """Return how long one tensor's part of a head moves, over how long the head is attended with forward."""
    if shapes.degree == 1:
        return 0.0
    moved = shapes.batch * shapes.tokens * (1 - 1 / shapes.degree) * shapes.head_dim * shapes.itemsize
    moving = moved / _link(transport).bandwidth
    return moving / max(_head_seconds(shapes, length, mask, transport), moving / shapes.own_heads)


def _most_kv_heads(strategy: Strategy, shapes: HeadShapes, length: int, mask: Mask, transport: str) -> int:
    """Return how many KV heads move in one step, so that memory for them stays bounded; 0: all."""
    work = 4 * shapes.batch * sum(rank_areas(shapes.layout, length, mask)) * shapes.head_dim
    hides, vector = hides_transfers(transport, work), shapes.batch * shapes.head_dim * shapes.itemsize
    if strategy.heads == 1:
        return most_gathered(shapes.kv_heads, vector * shapes.layout.size * shapes.layout.tokens, hides=hides)
    return most_exchanged(shapes.own_heads, shapes.own_kv_heads, vector * shapes.tokens, hides=hides)
