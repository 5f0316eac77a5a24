"""Strategies, the ways to spread an attention over ranks, and the names by which users ask for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Outer = Literal["ring", "gather", "double-ring"]
Travellers = Literal["kv", "q"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How an attention is spread: head exchange within groups of neighbouring ranks, and what happens between groups.

    Attributes:
        ulysses_degree: Neighbouring ranks that exchange heads (DeepSpeed Ulysses); 1 for none.
        outer: What goes on between groups of that many ranks.
        travellers: What goes round in backward.
        most_kv_heads: KV heads that one step of an exchange or of a gather moves; 0: all in one step.
        pace: Of an exchange of heads, time to move one tensor's part of a head over the time to attend with it.
    """

    ulysses_degree: int
    outer: Outer
    travellers: Travellers
    most_kv_heads: int = 0
    pace: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """What a name asks for.

    Attributes:
        exchange: How many neighbouring ranks exchange heads: none, groups of some, all, or any number.
        outer: What may go on between such groups: blocks go round a ring, each rank gathers what it needs, or blocks go
            round inside nodes and from node to node. Where all ranks are one group, that group is a ring of one.
        travellers: What goes round a ring in backward, keys and values or queries; None: what has fewer bytes.
    """

    exchange: Literal["none", "some", "all", "any"]
    outer: tuple[Outer, ...] = ("ring",)
    travellers: Travellers | None = None

    def allows(self, heads: int, size: int) -> bool:
        """Return whether `heads` of `size` neighbouring ranks may exchange heads."""
        return {"none": heads == 1, "some": 1 < heads < size, "all": heads == size, "any": True}[self.exchange]

    def fits(self, heads: int, size: int, outer: str) -> bool:
        """Return whether that may be, with `outer` between groups; where there is one group it may be anything."""
        return self.allows(heads, size) and (heads == size or outer in self.outer)

    def needs(self, outer: Outer) -> bool:
        """Return whether nothing else may go on between groups."""
        return self.outer == (outer,)


STRATEGIES: Mapping[str, StrategySpec] = MappingProxyType(
    {
        "auto": StrategySpec(exchange="any", outer=("ring", "gather", "double-ring")),
        "heads": StrategySpec(exchange="all"),
        "gather": StrategySpec(exchange="none", outer=("gather",)),
        "ring": StrategySpec(exchange="none"),
        "kv": StrategySpec(exchange="none", travellers="kv"),
        "burst": StrategySpec(exchange="none", travellers="q"),
        "heads+ring": StrategySpec(exchange="some"),
        "heads+gather": StrategySpec(exchange="some", outer=("gather",)),
        "double-ring": StrategySpec(exchange="none", outer=("double-ring",)),
    }
)


def name_of(heads: int, size: int, outer: str) -> str:
    """Return the first name that asks for `heads` of `size` ranks and `outer` between groups; "auto" if none does."""
    if size == 1:
        return "auto"  # nothing is spread, and every name would do
    named = (name for name, asked in STRATEGIES.items() if asked.exchange != "any" and asked.fits(heads, size, outer))
    return next(named, "auto")
