"""Which recompute policy a run takes that asks for "auto": the fastest whose peak fits, by the planner's formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bmburst.amounts import GIB
from bmburst.errors import UserError
from bmburst.plan.candidates import Candidate
from bmburst.plan.first_layers import of_first_layers, with_margin
from bmburst.plan.memory import taken
from bmburst.plan.search import ALIKE, Prediction, predict
from bmburst.recompute.policy import POLICIES, Policy, require_end
from bmburst.schedule.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy.

    Attributes:
        name: Of the policy.
        said: A line that says why.
    """

    name: str
    said: str


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
