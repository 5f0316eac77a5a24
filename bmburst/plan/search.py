"""Every way to train, predicted, the best first."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bmburst.plan.candidates import RECOMPUTE, ZERO, Candidate, candidates, way_of
from bmburst.plan.first_layers import of_first_layers, with_margin
from bmburst.plan.memory import Memory, memory_of, taken
from bmburst.plan.operators import CURRENT, Operators
from bmburst.plan.step import StepTime, step_time, utilisation
from bmburst.plan.task import Task
from bmburst.schedule.cost import AttentionCost
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy import ALIKE as ALIKE_STRATEGIES
from bmburst_ops.constants import ATTENTION_BACKWARD

ALIKE = 1e-3  # of a step: predictions closer than this are the same, and memory decides: of hosts, then of GPUs


@dataclass(frozen=True)
class Prediction:
    """What a way costs.

    Attributes:
        candidate: The way.
        hardware: The machine.
        time: Parts of a step.
        memory: The peak.
    """

    candidate: Candidate
    hardware: Hardware
    time: StepTime
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second and GPU."""
        task = self.candidate.task
        return task.batch * task.sequence / self.seconds / task.gpus

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: causal attention halved, backward twice the forward, recomputation not counted."""
        return utilisation(self.candidate, self.hardware, self.seconds)

    @property
    def kernel_utilisation(self) -> float:
        """The same with attention's backward counted as 2.5 times the forward."""
        return utilisation(self.candidate, self.hardware, self.seconds, attention_backward=ATTENTION_BACKWARD)


def predict(candidate: Candidate, hardware: Hardware, *, operators: Operators = CURRENT) -> Prediction:
    """Return what one way costs."""
    time = step_time(candidate, hardware, operators=operators)
    return Prediction(candidate, hardware, time, memory_of(candidate, hardware, operators=operators))


def search(
    task: Task,
    hardware: Hardware,
    *,
    recompute: Sequence[str] = RECOMPUTE,
    zero: Sequence[int] = ZERO,
    tensor: Sequence[int] | None = None,
) -> list[Prediction]:
    """Return all ways, those that fit first, the fastest of them first; of like speed the one with less memory.

    To the policies that are asked for come those that `bmburst.plan.first_layers` finds between them. Of the ways that
    do not fit the first is nearest to it.

    Raises:
        UserError: There is none.
    """
    costs: dict[tuple[int, int, int, str], AttentionCost] = {}
    found = []
    ways = candidates(task, recompute=recompute, zero=zero, tensor=tensor)
    room = with_margin(hardware, hardware.memory - taken(task, hardware), task)
    each_once = (way for way in ways if way.recompute == recompute[0])  # mesh, strategy and stage
    between = [new for way in each_once for new in of_first_layers(way, room, recompute)]
    for candidate in ways + between:
        spread = candidate.data, candidate.tensor, candidate.heads, candidate.outer
        if spread not in costs:  # neither recomputation nor ZeRO changes it
            costs[spread] = candidate.attention_cost(hardware)
        time = step_time(candidate, hardware, attention=costs[spread])
        found.append(Prediction(candidate, hardware, time, memory_of(candidate, hardware)))
    found.sort(key=lambda each: (not each.memory.fits, each.seconds if each.memory.fits else each.memory.total))
    return _own_choice_first(_frugal_first(found))


def _own_choice_first(found: list[Prediction]) -> list[Prediction]:
    """Let each mesh begin with the strategy that `burst_attention` takes there, if such a way fits and is alike."""
    ordered: list[Prediction] = []
    begun: dict[tuple[int, int], Prediction] = {}
    for each in found:
        way = each.candidate
        if (way.data, way.tensor) not in begun:
            taken = way_of(way, "auto", None, each.hardware)
            mesh = (way.data, way.tensor, taken.heads, taken.outer)
            same = (one for one in found if _spread(one) == mesh and one.memory.fits == each.memory.fits)
            own = next((one for one in same if one.seconds <= each.seconds * (1 + ALIKE_STRATEGIES)), each)
            begun[way.data, way.tensor] = own
            ordered.append(own)
        if each is not begun[way.data, way.tensor]:
            ordered.append(each)
    return ordered


def _spread(found: Prediction) -> tuple[int, int, int, str]:
    way = found.candidate
    return way.data, way.tensor, way.heads, way.outer


def _frugal_first(found: list[Prediction]) -> list[Prediction]:
    """Among neighbours of like speed put the one first that leaves hosts alone, then the one with the least memory."""
    ordered: list[Prediction] = []
    run: list[Prediction] = []
    for each in found:
        first = run[0] if run else each
        if each.memory.fits and each.seconds <= first.seconds * (1 + ALIKE):
            run.append(each)
            continue
        ordered += sorted(run, key=_bytes)
        run = [each]
    return ordered + sorted(run, key=_bytes)


def _bytes(found: Prediction) -> tuple[float, float]:
    return found.memory.in_host, found.memory.total


def best_of_each(found: Sequence[Prediction], most: int) -> list[Prediction]:
    """Return the best way of each mesh and strategy, at most so many: what a comparison shows."""
    shown: dict[tuple[int, int, int, str], Prediction] = {}
    for each in found:
        shown.setdefault(_spread(each), each)
    return list(shown.values())[:most]
