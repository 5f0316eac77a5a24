"""Predicts and orders all ways to train, and chooses the recompute policy of `--recompute auto`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from bmburst.amounts import GIB, gib
from bmburst.optim.config import smaller_states
from bmburst.plan.candidates import ZERO, ZERO_GROUPS, Candidate, Offload, Task
from bmburst.plan.counts import CURRENT, Operators
from bmburst.plan.memory import HOST_SHARE, Memory, memory_of, reserved_memory
from bmburst.plan.step import StepTime, step_time, utilisation
from bmburst.plan.ways import (
    ALL_ATTENTION,
    askable,
    candidates,
    ending_alike,
    require_possible,
    with_attention_choice,
    with_policies,
)
from bmburst.recompute.policy import POLICIES
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy import ALIKE as ALIKE_STRATEGIES
from bmburst_ops import ATTENTION_BACKWARD

Value = TypeVar("Value")
ALIKE = 1e-3
"""Step times that differ by a smaller fraction count as equal. The way with less memory is then better."""
MLP_GAIN = 1e-2
"""Fraction of a step that outputs of MLPs in host memory must save over other ways, because formulas have errors."""
GROUP_GAIN = 1e-2
"""Fraction of a step that ZeRO within nodes must save over ZeRO over all ranks, which takes less memory."""
MARGIN = 0.05
"""Fraction of the free memory that is reserved for fragmentation and errors of the formulas."""
_PLENTY = float(1 << 50)
"""Bytes of host memory that are enough for any model."""


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
        """Seconds per step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second and GPU."""
        task = self.candidate.task
        return task.batch * task.sequence / self.seconds / task.gpus

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: half of full attention, backward twice the forward, without recomputation."""
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
    recompute: Sequence[str] = POLICIES,
    zero: Sequence[int] = ZERO,
    groups: Sequence[str] = ZERO_GROUPS,
    tensor: Sequence[int] | None = None,
    pipe: Sequence[int] = (1,),
    data: Sequence[int] | None = None,
    sequence: Sequence[int] | None = None,
    offload: Sequence[Offload] = tuple(Offload),
) -> list[Prediction]:
    """Return the predictions of all ways: those that fit, fastest first, then the others, least memory first.

    Ways of equal speed are ordered by memory. Policies for the first layers and by segments are added to `recompute`.

    Args:
        task: The training task.
        hardware: The machine.
        recompute: Recompute policies to try.
        zero: ZeRO stages to try.
        groups: Ranks over which ZeRO may shard, of `ZERO_GROUPS`. Those of a node are tried only where ZeRO over all
            ranks takes `GROUP_GAIN` of a step: they can save no more.
        tensor: Tensor parallel degrees to try; by default all that fit in a node.
        pipe: Numbers of stages to try.
        data: Data parallel degrees to try; by default all.
        sequence: Sequence parallel degrees to try; by default all.
        offload: Kinds of offload to try. Offload is tried only if attention of all layers cannot be kept otherwise.

    Raises:
        UserError: There is no way to train the task.
    """
    room = with_usable_memory(hardware, hardware.memory - reserved_memory(task, hardware), task)
    enough = [ALL_ATTENTION] if ALL_ATTENTION in recompute else recompute
    every = candidates(task, recompute=recompute[:1], zero=zero, tensor=tensor, pipe=pipe, data=data, sequence=sequence)
    spreads = askable(every, hardware)  # mesh, strategy and stage
    require_possible(recompute, spreads)

    def predictions(way: Candidate) -> Iterator[Prediction]:
        possible = ending_alike(recompute, way.layout, way.sequence)
        for moved in (each for each in offload if each is not Offload.WEIGHTS or (way.zero == 3 and way.pipe == 1)):
            placed = replace(way, offload=moved)
            yield from (predict(each, hardware) for each in with_policies(placed, room, possible))
            if moved is Offload.NOTHING and any(
                memory_of(replace(placed, recompute=name), room).fits for name in enough
            ):
                break

    found: list[Prediction] = []
    for way in spreads:
        over_all = list(predictions(way)) if "world" in groups or task.nodes == 1 or way.pipe > 1 else []
        waits = any(each.memory.fits and each.time.zero > GROUP_GAIN * each.seconds for each in over_all)
        if task.nodes > 1 and way.pipe == 1 and "node" in groups and (waits or "world" not in groups):
            found += predictions(replace(way, zero_ranks=task.gpus_per_node))
        found += over_all
    found.sort(key=lambda each: (each.memory.lacking, _ordered_by(each) if each.memory.fits else each.memory.total))
    return _own_choice_first(_frugal_first(found))


def _ordered_by(found: Prediction) -> float:
    """Return the seconds by which a way that fits is ordered."""
    way = found.candidate
    seconds = found.seconds * (1 + MLP_GAIN if way.policy.offloads_mlp else 1)
    return seconds * (1 + GROUP_GAIN if way.shards < way.task.gpus else 1)


def _own_choice_first(found: list[Prediction]) -> list[Prediction]:
    """Put the strategy that `burst_attention` selects on a mesh first among its ways, if it fits and is as fast."""
    ordered: list[Prediction] = []
    begun: dict[tuple[int, ...], Prediction] = {}
    for each in found:
        way = each.candidate
        mesh = way.pipe, way.data, way.tensor
        if mesh not in begun:
            taken = with_attention_choice(way, "auto", None, each.hardware)
            spread = (*mesh, taken.ulysses_degree, taken.outer)
            same = (one for one in found if _spread(one) == spread and one.memory.fits == each.memory.fits)
            own = next((one for one in same if one.seconds <= each.seconds * (1 + ALIKE_STRATEGIES)), each)
            begun[mesh] = own
            ordered.append(own)
        if each is not begun[mesh]:
            ordered.append(each)
    return ordered


def _spread(found: Prediction) -> tuple[object, ...]:
    way = found.candidate
    return way.pipe, way.data, way.tensor, way.ulysses_degree, way.outer


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
    shown: dict[tuple[object, ...], Prediction] = {}
    for each in found:
        shown.setdefault(_spread(each), each)
    return list(shown.values())[:most]


@dataclass(frozen=True, slots=True)
class Choice(Generic[Value]):
    """What "auto" stands for in a run.

    Attributes:
        value: The chosen value.
        message: One line with the reason for the choice.
    """

    value: Value
    message: str


def choose_zero_group(over_all: Prediction, over_nodes: Prediction) -> Choice[int | None]:
    """Return the ZeRO group of `--parallel.zero_group auto`: that of nodes where it fits and saves `GROUP_GAIN`.

    The value is the ranks of a group; None: all ranks.
    """
    ranks = over_nodes.candidate.shards
    times = f"predicted {over_nodes.seconds:.3g} s a step, {over_all.seconds:.3g} s over all ranks"
    if not over_nodes.memory.fits:
        return Choice(None, f"zero_group auto: world, because ZeRO over the {ranks} ranks of a node does not fit")
    if over_nodes.seconds * (1 + GROUP_GAIN) < over_all.seconds or not over_all.memory.fits:
        return Choice(ranks, f"zero_group auto: node, ZeRO over {ranks} ranks: {times}")
    return Choice(None, f"zero_group auto: world; ZeRO over the {ranks} ranks of a node: {times}")


def choose_zero_level(kept: Prediction, gathered: Prediction) -> Choice[Literal[2, 3]]:
    """Return the ZeRO stage of `--parallel.zero_level auto`: 2 where it fits and is not slower.

    Stage 2 makes fewer gathers. Where the GPU waits for the host, that saves time which the planner does not count.

    Args:
        kept: Prediction of stage 2.
        gathered: Prediction of the same run with stage 3.
    """
    times = f"predicted {kept.seconds:.3g} s a step with 2, {gathered.seconds:.3g} s with 3"
    if not kept.memory.fits:
        return Choice(3, "zero_level auto: 3, because whole weights do not fit")
    if kept.seconds <= gathered.seconds * (1 + ALIKE) or not gathered.memory.fits:
        return Choice(2, f"zero_level auto: 2; {times}")
    return Choice(3, f"zero_level auto: 3; {times}")


def with_usable_memory(hardware: Hardware, free: float, task: Task) -> Hardware:
    """Return a machine whose GPUs have the memory that a plan may use: the free bytes less `MARGIN`.

    Args:
        hardware: The machine.
        free: Bytes of a GPU that are available for tensors of the run.
        task: The training task.
    """
    return replace(hardware, memory=free * (1 - MARGIN) + reserved_memory(task, hardware))


def choose_recompute(
    way: Candidate,
    hardware: Hardware,
    free: float,
    *,
    layout: str,
    policies: Sequence[str] = POLICIES,
    taken: float = 0.0,
) -> Choice[str]:
    """Return the fastest policy that fits; if none fits, the one with the smallest peak.

    Args:
        way: The candidate without its policy.
        hardware: The machine, with the host memory that this run may use.
        free: Bytes of a GPU that are available for tensors of the run.
        layout: Layout of the sequence; some layouts do not support policies that keep a fraction of attention.
        policies: The policies to choose from; policies for some layers are added (`with_policies`).
        taken: Bytes of a GPU that other programs use, for the message.
    """
    room = with_usable_memory(hardware, free, way.task)
    ways = list(with_policies(way, room, ending_alike(policies, layout, way.sequence)))
    found = best(ways, room)
    peak = gib(found.memory.total - reserved_memory(way.task, hardware))
    name = found.candidate.recompute
    why = "the fastest that fits" if found.memory.fits else "none fits by this estimate, it needs least"
    more = f" and {gib(found.memory.in_host)} GiB of each host's" if found.memory.in_host else ""
    more += f"; other programs have {gib(taken)} GiB of a GPU" if taken else ""
    return Choice(name, f"recompute: {name} ({why}: {peak} of {gib(free)} GiB that are free on each GPU{more})")


def best(ways: Sequence[Candidate], hardware: Hardware) -> Prediction:
    """Return the fastest way that fits; if none fits, the one with the smallest peak."""
    found = [predict(each, hardware) for each in ways]
    fitting = [each for each in found if each.memory.fits]
    in_host = [each for each in found if each.memory.in_host <= each.memory.host_capacity]
    return _fastest(fitting) if fitting else min(in_host or found, key=lambda each: each.memory.total)


def fastest(ways: Sequence[Candidate], hardware: Hardware, policies: Sequence[str], *, gain: float) -> int | None:
    """Return the index of the way with the most tokens per second under its best policy, or None if none fits.

    Args:
        ways: Candidates without their policies, the simplest first.
        hardware: The machine.
        policies: The recompute policies to choose from.
        gain: Fraction of the time that a way must save over simpler ones.
    """
    rates: list[float] = []
    for way in ways:
        room = with_usable_memory(hardware, hardware.memory - reserved_memory(way.task, hardware), way.task)
        found = best(list(with_policies(way, room, policies)), room)
        rates.append(found.tokens_per_second if found.memory.fits else 0.0)
    most = max(rates, default=0.0)
    return next(i for i, rate in enumerate(rates) if rate >= most * (1 - gain)) if most else None


def remedy(task: Task, hardware: Hardware, **tried: Any) -> str:
    """Return what a task that does not fit needs, for "it needs ...". The arguments are those of `search`."""

    def fitting(asked: Task, machine: Hardware) -> list[float]:
        return [each.memory.in_host for each in search(asked, machine, **tried) if each.memory.fits]

    words = []
    if hosts := fitting(task, replace(hardware, host_memory=_PLENTY)):
        more = min(hosts) / HOST_SHARE - hardware.host_memory
        words.append(f"{more / GIB:,.0f} GiB more of host memory" + (" a node" if task.nodes > 1 else ""))
    for state in smaller_states(task.state):
        if fitting(replace(task, state=state), hardware):
            words.append(f"--optimizer.state {state}")
            break
    return ", or ".join(words) or "more GPUs, a shorter sequence or a smaller model"


def _fastest(found: Sequence[Prediction]) -> Prediction:
    """Return the fastest way; among equal ones the least host memory, then recomputation, then GPU memory decides."""
    least = min(each.seconds for each in found)
    alike = [each for each in found if each.seconds <= least * (1 + ALIKE)]
    return min(alike, key=lambda each: (each.memory.in_host, each.time.recompute, each.memory.total))
