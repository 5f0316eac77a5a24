"""Predicts every way to train and orders them, and chooses the recompute policy of `--recompute auto`.

Between a policy for no layer and one for all layers lie policies that recompute the first N layers. Of each kind only
the smallest N that fits is tried: it is the fastest of its kind, since each layer it names is computed again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bmburst.amounts import GIB
from bmburst.errors import UserError
from bmburst.plan.candidates import RECOMPUTE, ZERO, Candidate, Task, candidates, way_of
from bmburst.plan.counts import CURRENT, Operators
from bmburst.plan.memory import Memory, block_bytes, memory_of, taken
from bmburst.plan.step import StepTime, step_time, utilisation
from bmburst.recompute.policy import FIRST, MIXED, POLICIES, Policy, require_end
from bmburst.schedule.cost import AttentionCost
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy import ALIKE as ALIKE_STRATEGIES
from bmburst_ops.constants import ATTENTION_BACKWARD

MARGIN = 0.05
"""Of the free memory: fragments, and how far formulas may be off."""


def with_margin(hardware: Hardware, free: float, task: Task) -> Hardware:
    """Return a machine whose GPUs have what may be planned with.

    Args:
        hardware: The machine.
        free: Bytes of a GPU that a run's tensors can have.
        task: The run.
    """
    return replace(hardware, memory=free * (1 - MARGIN) + taken(task, hardware))


def of_first_layers(way: Candidate, room: Hardware, policies: Sequence[str]) -> list[Candidate]:
    """Return the ways between "none" and policies of `MIXED` that are tried too; none where "none" itself fits.

    Args:
        way: All but the policy.
        room: What it must fit: `with_margin`.
        policies: That are tried.
    """
    whole = replace(way, recompute="none")
    if "none" not in policies or way.task.model.num_layers == 1:
        return []
    memory = memory_of(whole, room)
    if memory.fits:
        return []
    found: list[Candidate] = []
    for row in MIXED:
        ways = [_fewest(whole, name, memory.total, room) if name in policies else None for name in row]
        resident, *hosted = ways
        found += [one for one in ([resident] if resident else hosted) if one]
    return found


def _fewest(whole: Candidate, name: str, total: float, room: Hardware) -> Candidate | None:
    """Return the way that computes the fewest layers again by a policy and fits; None: there is none.

    Args:
        whole: The way that computes none again.
        name: The policy.
        total: Bytes of the GPU that `whole` takes.
        room: See `of_first_layers`.
    """
    each = replace(whole, recompute=name)
    # The peak is where all layers are done with their forward: each that it names leaves it so much lower.
    fewest = max(1, math.ceil((total - room.memory) / (_kept(whole) - _kept(each))))
    counts = range(fewest, min(fewest + 2, whole.task.model.num_layers))
    tried = (replace(whole, recompute=f"{name}{FIRST}{count}") for count in counts)
    return next((one for one in tried if memory_of(one, room).fits), None)


def _kept(way: Candidate) -> float:
    """Return what a layer keeps of its forward, in bytes."""
    return way.policy.kept(block_bytes(way))


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

    To the policies that are asked for come those that `bmburst.plan.search` finds between them. Of the ways that
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
        policies: To choose from, and from what `bmburst.plan.search` finds between them.
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
