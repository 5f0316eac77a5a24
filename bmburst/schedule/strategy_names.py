"""Strategies of attention over several ranks, and the names by which users request them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Outer = Literal["ring", "gather", "double-ring"]
RingTensors = Literal["kv", "q"]
"""The tensors that a ring sends from rank to rank in backward: keys and values, or queries and dO."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy: head exchange in groups of neighbouring ranks, and a ring or gather between the groups.

    Attributes:
        ulysses_degree: Neighbouring ranks that exchange heads (DeepSpeed Ulysses); 1 for none.
        outer: How groups of that many ranks share keys and values.
        ring_tensors: The tensors that the ring sends in backward; forward always sends keys and values.
        most_kv_heads: KV heads that one step of an exchange or of a gather moves; 0: all in one step.
        pace: Of a head exchange: time to move one head of one tensor / time of attention with that head.
    """

    ulysses_degree: int
    outer: Outer
    ring_tensors: RingTensors
    most_kv_heads: int = 0
    pace: float = 0.0

    @property
    def moves_queries(self) -> bool:
        """Whether backward is a ring of queries: each rank keeps its keys."""
        return self.outer != "gather" and self.ring_tensors == "q"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """The strategies that a name allows.

    Attributes:
        exchange: How many neighbouring ranks exchange heads: none, groups of some, all, or any number.
        outer: The allowed methods between such groups: a ring, a gather of the keys and values that a rank needs, or a
            double ring (inside nodes and between nodes). If all ranks are one group, it is a ring of one.
        ring_tensors: The tensors that a ring sends in backward; None: the ones that cost less.
    """

    exchange: Literal["none", "some", "all", "any"]
    outer: tuple[Outer, ...] = ("ring",)
    ring_tensors: RingTensors | None = None

    def allows(self, heads: int, size: int) -> bool:
        """Return whether `heads` of `size` neighbouring ranks may exchange heads."""
        return {"none": heads == 1, "some": 1 < heads < size, "all": heads == size, "any": True}[self.exchange]

    def fits(self, heads: int, size: int, outer: str) -> bool:
        """Return whether the name allows `heads` and `outer`; with a single group any `outer` fits."""
        return self.allows(heads, size) and (heads == size or outer in self.outer)

    def needs(self, outer: Outer) -> bool:
        """Return whether `outer` is the only method that the name allows."""
        return self.outer == (outer,)


STRATEGIES: Mapping[str, StrategySpec] = MappingProxyType(
    {
        "auto": StrategySpec(exchange="any", outer=("ring", "gather", "double-ring")),
        "heads": StrategySpec(exchange="all"),
        "gather": StrategySpec(exchange="none", outer=("gather",)),
        "ring": StrategySpec(exchange="none"),
        "kv": StrategySpec(exchange="none", ring_tensors="kv"),
        "burst": StrategySpec(exchange="none", ring_tensors="q"),
        "heads+ring": StrategySpec(exchange="some"),
        "heads+gather": StrategySpec(exchange="some", outer=("gather",)),
        "double-ring": StrategySpec(exchange="none", outer=("double-ring",)),
    }
)


def name_of(heads: int, size: int, outer: str) -> str:
    """Return the first name that allows `heads` of `size` ranks and `outer` between groups; "auto" if none does."""
    if size == 1:
        return "auto"  # there is nothing to distribute: every name fits
    named = (name for name, asked in STRATEGIES.items() if asked.exchange != "any" and asked.fits(heads, size, outer))
    return next(named, "auto")
