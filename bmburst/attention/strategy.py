"""How an attention is spread over the ranks of a group, and which way costs least: pure, by stated constants."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from bmburst.attention.heads_plan import HeadShapes
from bmburst.errors import UserError
from bmburst.layout import Layout
from bmburst.schedule import AttentionShape, Mask, Travellers, backward_bytes, choose_travellers, forward_bytes

STRATEGIES = ("auto", "heads", "gather", "ring", "kv", "burst", "heads+ring", "heads+gather")
Outer = Literal["ring", "gather"]

_OUTBOX_BYTES = 1 << 30
_GATHERED_BYTES = 4 << 30
_PIPELINED_WORK = 5e10  # FLOPs of one head: below, a kernel is too short to hide anything and only its launch counts


@dataclass(frozen=True, slots=True)
class Strategy:
    """How many neighbouring ranks exchange heads, and what happens between such groups.

    Attributes:
        heads: Ranks that exchange heads; 1 for none.
        outer: Between groups of that many ranks: blocks go round a ring, or each rank gathers what it needs.
        travellers: What goes round in backward: keys and values, or queries.
        most_kv_heads: KV heads that one step of an exchange or of a gather moves; 0: all in one step.
    """

    heads: int
    outer: Outer
    travellers: Travellers
    most_kv_heads: int = 0


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

_MEMORY_BANDWIDTH = 3.5e12  # bytes a second, for merging partial results
_KERNEL_RATE = {"peer": 6e14, "nccl": 6e14}  # FLOP/s; on CPUs 2e11
_CUT_LOSS = 0.03  # a kernel's share lost when the scores are cut into rectangles


@lru_cache(maxsize=1024)
def choose_strategy(name: str, shapes: HeadShapes, mask: Mask, transport: str, wide: int) -> Strategy:
    """Return the strategy of that name, or for "auto" the one with the lowest `cost`.

    Args:
        name: One of `STRATEGIES`.
        shapes: Sizes; `degree` is not looked at.
        mask: The mask.
        transport: What moves the blocks.
        wide: Bytes of an accumulated number.

    Raises:
        UserError: The strategy asked for cannot work with these shapes, with the reason.
    """
    shapes = replace(shapes, degree=1)
    found = list(_candidates(name, shapes, mask, wide))
    if not found:
        raise UserError(f"strategy '{name}' cannot work: {_refusal(name, shapes, mask)}\nuse strategy='auto'")
    best = min(found, key=lambda strategy: cost(strategy, shapes, mask, transport, wide))
    return replace(best, most_kv_heads=_most_kv_heads(best, replace(shapes, degree=best.heads), mask, transport))


def cost(strategy: Strategy, shapes: HeadShapes, mask: Mask, transport: str, wide: int) -> float:
    """Return the predicted seconds of a forward and a backward pass.

    Compute at one device's rate; transfers by bytes over bandwidth, of which the transport's share is exposed; a
    latency a step; merging at memory speed.
    """
    link = LINKS.get(transport, LINKS["gloo"])  # a communicator of the user's own
    groups = shapes.layout.size // strategy.heads
    inner = _attention_shape(replace(shapes, degree=strategy.heads), wide)
    row = shapes.batch * shapes.layout.tokens * shapes.head_dim
    bytes_moved, steps, merged = 0.0, 0, 0
    if strategy.heads > 1:
        # q, k, v, out and lse forward; q, k, v, dO, lse, delta, dQ, dK and dV backward
        numbers = row * (5 * shapes.heads + 6 * max(shapes.kv_heads, strategy.heads))
        bytes_moved += numbers * shapes.itemsize * (strategy.heads - 1) / strategy.heads
        steps += 2
    if groups > 1:
        travellers = strategy.travellers
        if strategy.outer == "gather":  # its gradients travel as the kernel wrote them
            travellers, inner = "kv", replace(inner, gradient_itemsize=inner.itemsize)
        bytes_moved += forward_bytes(inner, groups) + backward_bytes(inner, groups, travellers)
        steps += 2 if strategy.outer == "gather" else 2 * groups
        merged = (1 if strategy.outer == "gather" else groups) * 6 * inner.batch * inner.tokens * inner.heads
    flops = 7.0 * shapes.batch * (shapes.layout.tokens * shapes.layout.size) ** 2 * shapes.heads * shapes.head_dim
    compute = flops * (1 if mask == "full" else 0.5) * 2 / shapes.layout.size / _KERNEL_RATE.get(transport, 2e11)
    compute *= 1 + (_CUT_LOSS if groups > 1 else 0)
    moving = bytes_moved / link.bandwidth
    exposed = max(moving * link.exposed, moving - compute)
    return compute + exposed + steps * link.latency + merged * inner.head_dim * wide / _MEMORY_BANDWIDTH


def _candidates(name: str, shapes: HeadShapes, mask: Mask, wide: int) -> Iterator[Strategy]:
    """Yield what the name allows and the shapes permit."""
    size = shapes.layout.size
    if size == 1:
        yield Strategy(1, "ring", "kv")  # nothing is spread, whatever the name
        return
    for degree in range(1, size + 1):
        within = replace(shapes, degree=degree)
        if within.refusal() is not None or not _allows(name, degree, size):
            continue
        travellers: Travellers = choose_travellers(_attention_shape(within, wide), size // degree)
        forced: dict[str, Travellers] = {"kv": "kv", "burst": "q"}
        can_gather = degree < size and gather_refusal(within.outer, mask) is None
        for outer in _outers(name, can_gather=can_gather):
            yield Strategy(degree, outer, forced.get(name, travellers))


def _allows(name: str, degree: int, size: int) -> bool:
    if name == "auto":
        return True
    if name == "heads":
        return degree == size
    return 1 < degree < size if name.startswith("heads+") else degree == 1


def _outers(name: str, *, can_gather: bool) -> tuple[Outer, ...]:
    if name.endswith("gather"):
        return ("gather",) if can_gather else ()
    return ("ring", "gather") if name == "auto" and can_gather else ("ring",)


def gather_refusal(layout: Layout, mask: Mask) -> str | None:
    """Return why keys cannot be gathered in global order under this layout, or None."""
    if layout.name == "striped" and mask == "causal":
        return "layout 'striped' has no run of neighbouring tokens; 'zigzag' has"
    return None


def _refusal(name: str, shapes: HeadShapes, mask: Mask) -> str:
    size = shapes.layout.size
    if name == "heads":
        return str(replace(shapes, degree=size).refusal())
    if name.startswith("heads+"):
        reasons = (replace(shapes, degree=degree).refusal() for degree in range(2, size))
        return next((reason for reason in reasons if reason), f"{size} ranks form no smaller groups")
    return gather_refusal(shapes.layout, mask) or "no rank can take part"


def _attention_shape(shapes: HeadShapes, wide: int) -> AttentionShape:
    """Return the sizes that one rank sees after the exchange of heads."""
    return AttentionShape(
        batch=shapes.batch,
        tokens=shapes.tokens,
        heads=shapes.own_heads,
        kv_heads=shapes.own_kv_heads,
        head_dim=shapes.head_dim,
        itemsize=shapes.itemsize,
        gradient_itemsize=wide,
        statistics_itemsize=wide,
    )


def _most_kv_heads(strategy: Strategy, shapes: HeadShapes, mask: Mask, transport: str) -> int:
    """Return how many KV heads move in one step, at least 1, so that memory for them stays bounded.

    In two steps or more where kernels are long enough and the transport leaves them alone, so that one hides the other;
    else in as few as memory allows (0: in one). Heads: what an outbox of 1 GiB holds. Gather alone: what its boxes and
    buffers of 4 GiB hold.
    """
    whole = shapes.layout.size * shapes.layout.tokens
    work = 2 * shapes.batch * whole**2 * shapes.head_dim
    hides = transport == "peer" and work * (2 if mask == "full" else 1) >= _PIPELINED_WORK
    vector = shapes.batch * shapes.head_dim * shapes.itemsize
    if strategy.heads == 1:
        own, bound = shapes.kv_heads, _GATHERED_BYTES // (12 * vector * whole)
        most = min(-(-own // 2), bound) if hides else bound
    else:
        own, group = shapes.own_kv_heads, shapes.own_heads // shapes.own_kv_heads
        most = _OUTBOX_BYTES // (vector * shapes.tokens * (group + 2))
    return max(1, most) if hides or most < own else 0
