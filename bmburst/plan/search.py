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
from bmburst.plan.candidates import RECOMPUTE, ZERO, Candidate, Task, candidates, with_attention_choice
from bmburst.plan.counts import CURRENT, Operators
from bmburst.plan.memory import Memory, block_bytes, memory_of, reserved_memory
from bmburst.plan.step import StepTime, step_time, utilisation
from bmburst.recompute.policy import FIRST, MIXED, POLICIES, Policy, require_end
from bmburst.schedule.cost import AttentionCost
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy import ALIKE as ALIKE_STRATEGIES
from bmburst_ops.constants import ATTENTION_BACKWARD

ALIKE = 1e-3
"""Predictions of a step that differ by a smaller fraction are equal. The one with less memory is then the better."""
MARGIN = 0.05
"""Fraction of the free memory that is left for fragmentation and for the error of the formulas."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a way to train.

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
        """Model FLOPs utilisation with attention's backward counted as 2.5 times its forward, as kernels compute it."""
        return utilisation(self.candidate, self.hardware, self.seconds, attention_backward=ATTENTION_BACKWARD)


def predict(candidate: Candidate, hardware: Hardware, *, operators: Operators = CURRENT) -> Prediction:
    """Return the predicted time and memory of one way."""
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
    """Return the predictions of all ways: those that fit, the fastest first, then the others, the smallest first.

    Ways of equal speed are ordered by memory. Policies of the first layers are added to the given ones.

    Raises:
        UserError: There is none.
    """
    costs: dict[tuple[int, int, int, str], AttentionCost] = {}
    found = []
    ways = candidates(task, recompute=recompute, zero=zero, tensor=tensor)
    room = with_usable_memory(hardware, hardware.memory - reserved_memory(task, hardware), task)
    each_once = (way for way in ways if way.recompute == recompute[0])  # mesh, strategy and stage
    between = [new for way in each_once for new in first_layer_candidates(way, room, recompute)]
    for candidate in ways + between:
        spread = candidate.data, candidate.tensor, candidate.ulysses_degree, candidate.outer
        if spread not in costs:  # neither recomputation nor ZeRO changes it
            costs[spread] = candidate.attention_cost(hardware)
        time = step_time(candidate, hardware, attention=costs[spread])
        found.append(Prediction(candidate, hardware, time, memory_of(candidate, hardware)))
    found.sort(key=lambda each: (not each.memory.fits, each.seconds if each.memory.fits else each.memory.total))
    return _own_choice_first(_frugal_first(found))


def _own_choice_first(found: list[Prediction]) -> list[Prediction]:
    """Let each mesh begin with the strategy that `burst_attention` takes on it, if such a way fits and is as fast."""
    ordered: list[Prediction] = []
    begun: dict[tuple[int, int], Prediction] = {}
    for each in found:
        way = each.candidate
        if (way.data, way.tensor) not in begun:
            taken = with_attention_choice(way, "auto", None, each.hardware)
            mesh = (way.data, way.tensor, taken.ulysses_degree, taken.outer)
            same = (one for one in found if _spread(one) == mesh and one.memory.fits == each.memory.fits)
            own = next((one for one in same if one.seconds <= each.seconds * (1 + ALIKE_STRATEGIES)), each)
            begun[way.data, way.tensor] = own
            ordered.append(own)
        if each is not begun[way.data, way.tensor]:
            ordered.append(each)
    return ordered


def _spread(found: Prediction) -> tuple[int, int, int, str]:
    way = found.candidate
    return way.data, way.tensor, way.ulysses_degree, way.outer


def _frugal_first(found: list[Prediction]) -> list[Prediction]:
    """Order neighbours of equal speed by host memory, then by GPU memory."""
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
    """Return the best way of each mesh and strategy, at most `most` of them."""
    shown: dict[tuple[int, int, int, str], Prediction] = {}
    for each in found:
        shown.setdefault(_spread(each), each)
    return list(shown.values())[:most]


def with_usable_memory(hardware: Hardware, free: float, task: Task) -> Hardware:
    """Return a machine whose GPUs have the memory that a plan may use: the free bytes less `MARGIN`.

    Args:
        hardware: The machine.
        free: Bytes of a GPU that tensors of the run can have.
        task: The run.
    """
    return replace(hardware, memory=free * (1 - MARGIN) + reserved_memory(task, hardware))


def first_layer_candidates(way: Candidate, room: Hardware, policies: Sequence[str]) -> list[Candidate]:
    """Return candidates that recompute only the first layers, by policies of `MIXED`; none where "none" itself fits.

    Args:
        way: Everything but the policy.
        room: The machine that they must fit, of `with_usable_memory`.
        policies: The policies to try.
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
    """Return the candidate that recomputes the fewest layers by a policy and fits, or None.

    Args:
        whole: The candidate that recomputes no layer.
        name: The policy.
        total: Peak bytes of `whole`.
        room: See `first_layer_candidates`.
    """
    each = replace(whole, recompute=name)
    # The peak is where all layers are done with their forward: each recomputed layer lowers it by the same bytes.
    fewest = max(1, math.ceil((total - room.memory) / (_kept(whole) - _kept(each))))
    counts = range(fewest, min(fewest + 2, whole.task.model.num_layers))
    tried = (replace(whole, recompute=f"{name}{FIRST}{count}") for count in counts)
    return next((one for one in tried if memory_of(one, room).fits), None)


def _kept(way: Candidate) -> float:
    """Return the bytes that a layer keeps for its backward."""
    return way.policy.kept(block_bytes(way))


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The recompute policy of a run.

    Attributes:
        name: The policy.
        message: One line that says why it was chosen.
    """

    name: str
    message: str


def choose_recompute(
    way: Candidate, hardware: Hardware, free: float, *, layout: str, policies: Sequence[str] = POLICIES
) -> RecomputeChoice:
    """Return the fastest policy that fits; if none fits, the one with the smallest peak.

    Args:
        way: Everything but the policy.
        hardware: The machine; its host memory is what this run may use.
        free: Bytes of a GPU that tensors of the run can have.
        layout: Layout of the sequence; some layouts exclude policies that keep a part of attention.
        policies: The policies to choose from; policies of the first layers are added (`first_layer_candidates`).
    """
    room = with_usable_memory(hardware, free, way.task)
    ways = [replace(way, recompute=name) for name in policies if _is_possible(name, layout, way.sequence)]
    ways += first_layer_candidates(way, room, policies)
    found = [predict(each, room) for each in ways]
    fitting = [each for each in found if each.memory.fits]
    in_host = [each for each in found if each.memory.in_host <= each.memory.host_capacity]
    best = _fastest(fitting) if fitting else min(in_host or found, key=lambda each: each.memory.total)
    peak, most = (best.memory.total - reserved_memory(way.task, hardware)) / GIB, free / GIB
    name = best.candidate.recompute
    why = "the fastest that fits" if fitting else "none fits by this estimate, it needs least"
    hosted = best.memory.in_host / GIB
    more = f" and {hosted:.1f} GiB of each host's" if hosted else ""
    return RecomputeChoice(
        name, f"recompute: {name} ({why}: {peak:.1f} of {most:.1f} GiB that are free on each GPU{more})"
    )


def _fastest(found: Sequence[Prediction]) -> Prediction:
    """Return the fastest; of equal speed the one with the least host memory, then recomputation, then GPU memory."""
    least = min(each.seconds for each in found)
    alike = [each for each in found if each.seconds <= least * (1 + ALIKE)]
    return min(alike, key=lambda each: (each.memory.in_host, each.time.recompute, each.memory.total))


def _is_possible(name: str, layout: str, ranks: int) -> bool:
    try:
        require_end(Policy.parse(name).attention, layout, ranks)
    except UserError:
        return False
    return True
