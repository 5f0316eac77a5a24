"""Chooses the strategy of an attention call: the cheapest of the requested ones that are possible."""

from collections.abc import Iterator
from dataclasses import replace

from bmburst.errors import UserError
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.layout import Layout
from bmburst.schedule.mask import Mask
from bmburst.schedule.parallelism import STRATEGIES, Outer, Strategy, StrategySpec
from bmburst.schedule.units import HeadShapes, choose_ring_tensors
from bmburst_ops.bounded_cache import bounded_cache

ALIKE = 0.02
"""Costs that differ by less than this fraction count as equal, because half of the predictions have larger errors. Then
the larger Ulysses degree is taken: results of a head exchange are not merged and rounded."""


@bounded_cache(maxsize=256)
def choose_strategy(
    name: str,
    shapes: HeadShapes,
    length: int,
    mask: Mask,
    placement: Placement,
    hardware: Hardware,
    ulysses_degree: int | None = None,
) -> Strategy:
    """Return the strategy of that name, or for "auto" the one with the lowest cost.

    Args:
        name: One of `bmburst.schedule.parallelism.STRATEGIES`.
        shapes: Sizes; `degree` is ignored.
        length: Real tokens of the sequence.
        mask: The mask.
        placement: Nodes and transports.
        hardware: The machine, the same for all ranks.
        ulysses_degree: The required Ulysses degree; None: the cheapest.

    Raises:
        UserError: The requested strategy is impossible for these shapes; the message has the reason.
    """
    shapes, spec = replace(shapes, degree=1), STRATEGIES[name]
    problem = Problem(shapes, length, mask, placement, hardware)
    found = list(possible_strategies(spec, shapes, mask, placement))
    if not found:
        reason = _refusal(spec, shapes, mask, placement)
        raise UserError(f"strategy '{name}' cannot work: {reason}\nfix: use strategy='auto'")
    if ulysses_degree is not None and shapes.layout.size > 1:
        found = [strategy for strategy in found if strategy.ulysses_degree == ulysses_degree]
    if not found:
        why = replace(shapes, degree=ulysses_degree).refusal() if ulysses_degree else None
        other = "a mesh with other heads, or heads=None" if why else "strategy='auto', or a mesh with other heads"
        raise UserError(
            f"the mesh has Ulysses degree {ulysses_degree}, but {why or f'strategy {name!r} needs another degree'}\n"
            f"fix: use {other}"
        )
    if spec.ring_tensors is None:
        rings = (strategy for strategy in found if strategy.ulysses_degree < shapes.layout.size)
        found += [replace(ring, ring_tensors="kv") for ring in rings if ring.moves_queries]
    found = [problem.in_units(strategy) for strategy in found]
    if len(found) == 1:
        return found[0]
    costs = [problem.cost(strategy).total for strategy in found]
    alike = [(s, cost) for s, cost in zip(found, costs, strict=True) if cost <= min(costs) * (1 + ALIKE)]
    best, _ = max(alike, key=lambda way: (way[0].ulysses_degree, -way[1]))
    return best


def possible_strategies(spec: StrategySpec, shapes: HeadShapes, mask: Mask, placement: Placement) -> Iterator[Strategy]:
    """Yield the requested strategies that shapes and nodes permit."""
    size = shapes.layout.size
    if size == 1:
        yield Strategy(1, "ring", "kv")  # a single rank: there is nothing to distribute
        return
    for degree in range(1, size + 1):
        within = replace(shapes, degree=degree)
        if within.refusal() is not None or not spec.allows(degree, size):
            continue
        least = choose_ring_tensors(within)
        for outer in spec.outer:
            if _can(outer, spec, within, mask, placement):
                yield Strategy(degree, outer, spec.ring_tensors or least)


def _can(outer: Outer, spec: StrategySpec, shapes: HeadShapes, mask: Mask, placement: Placement) -> bool:
    """Return whether groups of `shapes.degree` ranks can share keys and values so. `StripedGroups` has one degree."""
    size, degree = shapes.layout.size, shapes.degree
    if outer == "gather":
        return degree < size and gather_refusal(shapes.outer, mask) is None
    return outer == "ring" or _can_double(spec, size, degree, placement)


def _can_double(spec: StrategySpec, size: int, degree: int, placement: Placement) -> bool:
    """Return whether a double ring is possible: several nodes, and several head exchange groups on each."""
    nodes = placement.nodes
    if nodes is None:
        return spec.needs("double-ring") and any(size % count == 0 for count in range(2, size))
    places = size // nodes
    return placement.even and nodes > 1 and places % degree == 0 and places > degree


def gather_refusal(layout: Layout, mask: Mask) -> str | None:
    """Return why keys cannot be gathered in global order under this layout, or None."""
    if layout.keys.name == "striped" and not mask.sees_all:
        return "layout 'striped' has no run of neighbouring tokens; 'zigzag' has"
    return None


def _refusal(spec: StrategySpec, shapes: HeadShapes, mask: Mask, placement: Placement) -> str:
    size, nodes = shapes.layout.size, placement.nodes
    if spec.needs("double-ring"):
        found = f"{size} ranks" if nodes is None else f"{size} ranks on {nodes} node{'s' * (nodes != 1)}"
        return f"{found} do not form 2 or more nodes of 2 or more ranks (BMBURST_NODE names a rank's node)"
    if spec.exchange == "all":
        return str(replace(shapes, degree=size).refusal())
    if spec.exchange == "some":
        reasons = (replace(shapes, degree=degree).refusal() for degree in range(2, size))
        return next((reason for reason in reasons if reason), f"{size} ranks cannot form smaller groups")
    return gather_refusal(shapes.layout, mask) or "no rank can take part"
