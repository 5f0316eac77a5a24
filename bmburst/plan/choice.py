"""Which recompute policy a run takes that asks for "auto": the fastest whose peak fits, by the planner's formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bmburst.amounts import GIB
from bmburst.errors import UserError
from bmburst.plan.attention import attention_cost
from bmburst.plan.candidates import Candidate, strategies
from bmburst.plan.first_layers import of_first_layers, with_margin
from bmburst.plan.memory import taken
from bmburst.plan.search import ALIKE, Prediction, predict
from bmburst.recompute.policy import POLICIES, Policy, require_end
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy_names import STRATEGIES


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy.

    Attributes:
        name: Of the policy.
        said: A line that says why.
    """

    name: str
    said: str


def way_of(candidate: Candidate, strategy: str, heads: int | None, hardware: Hardware) -> Candidate:
    """Return the way that a run goes: like a candidate, with attention spread as a strategy's name says.

    Args:
        candidate: Its mesh counts.
        strategy: One of `bmburst.schedule.strategy_names.STRATEGIES`.
        heads: Ranks that exchange heads, if that is set.
        hardware: By which "auto" takes the fastest, which may be another one than attention itself takes.
    """
    spread = strategies(candidate.task, candidate.data, candidate.tensor)
    asked = STRATEGIES[strategy]
    ways = [replace(candidate, heads=h, outer=o) for h, o in spread if asked.fits(h, candidate.sequence, o)]
    ways = [way for way in ways if heads is None or way.heads == heads] or ways
    if not ways:  # the strategy will be refused, or is one that the planner does not try
        return replace(candidate, heads=1, outer="none" if candidate.sequence == 1 else "ring")

    def seconds(way: Candidate) -> float:
        cost = attention_cost(way, hardware)
        return cost.forward.total + cost.backward.total

    return replace(min(ways, key=seconds), travellers=asked.travellers or "auto")


def choose(
    way: Candidate, hardware: Hardware, free: float, *, layout: str, policies: Sequence[str] = POLICIES
) -> Choice:
    """Return the fastest policy that fits, or where none does the one with the smallest peak.

    Args:
        way: All but the policy.
        hardware: Its rates; its host's memory is what this run may use.
        free: Bytes of a GPU that a run's tensors can have.
        layout: Over the ranks of a sequence, which may rule out to keep a part of attention.
        policies: To choose from, and from what `bmburst.plan.first_layers` finds between them.
    """
    room = with_margin(hardware, free, way.task)
    ways = [replace(way, recompute=name) for name in policies if _is_possible(name, layout, way.sequence)]
    ways += of_first_layers(way, room, policies)
    found = [predict(each, room) for each in ways]
    fitting = [each for each in found if each.memory.fits]
    in_host = [each for each in found if each.memory.in_host <= each.memory.host_capacity]
    best = _fastest(fitting) if fitting else min(in_host or found, key=lambda each: each.memory.total)
    peak, most = (best.memory.total - taken(way.task, hardware)) / GIB, free / GIB
    name = best.candidate.recompute
    why = "the fastest that fits" if fitting else "none fits by this estimate, it needs least"
    hosted = best.memory.in_host / GIB
    more = f" and {hosted:.1f} GiB of each host's" if hosted else ""
    return Choice(name, f"recompute: {name} ({why}: {peak:.1f} of {most:.1f} GiB that are free on each GPU{more})")


def _fastest(found: Sequence[Prediction]) -> Prediction:
    """Return the fastest; of like speed the one that leaves the host alone, computes least again and takes least."""
    least = min(each.seconds for each in found)
    alike = [each for each in found if each.seconds <= least * (1 + ALIKE)]
    return min(alike, key=lambda each: (each.memory.in_host, each.time.recompute, each.memory.total))


def _is_possible(name: str, layout: str, ranks: int) -> bool:
    try:
        require_end(Policy.parse(name).attention, layout, ranks)
    except UserError:
        return False
    return True
