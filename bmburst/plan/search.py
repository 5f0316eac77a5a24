"""Predicts and orders all ways to train, and chooses the recompute policy of `--recompute auto`.

Between recomputing no layer and recomputing all layers are policies for the first N layers. For each kind only the
smallest N that fits is tried. It is the fastest, because every further layer is recomputed too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bmburst.amounts import GIB
from bmburst.errors import UserError
from bmburst.plan.candidates import RECOMPUTE, ZERO, Candidate, Offload, Task
from bmburst.plan.counts import CURRENT, Operators
from bmburst.plan.memory import HOST_SHARE, Memory, block_bytes, memory_of, reserved_memory
from bmburst.plan.step import StepTime, step_time, utilisation
from bmburst.plan.ways import candidates, with_attention_choice
from bmburst.recompute.policy import FIRST, MIXED, POLICIES, Policy, require_end
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy import ALIKE as ALIKE_STRATEGIES
from bmburst_ops import ATTENTION_BACKWARD

ALIKE = 1e-3
"""Step times that differ by a smaller fraction count as equal. The way with less memory is then better."""
_ALL_ATTENTION = "block-keep-attention"
MARGIN = 0.05
"""Fraction of the free memory that is reserved for fragmentation and errors of the formulas."""


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
    recompute: Sequence[str] = RECOMPUTE,
    zero: Sequence[int] = ZERO,
    tensor: Sequence[int] | None = None,
    offload: Sequence[Offload] = tuple(Offload),
) -> list[Prediction]:
    """Return the predictions of all ways: those that fit, fastest first, then the others, least memory first.

    Ways of equal speed are ordered by memory. Policies for the first layers and by segments are added to `recompute`.

    Args:
        task: The training task.
        hardware: The machine.
        recompute: Recompute policies to try.
        zero: ZeRO stages to try.
        tensor: Tensor parallel degrees to try; by default all that fit in a node.
        offload: Kinds of offload to try. Offload is tried only if attention of all layers cannot be kept otherwise.

    Raises:
        UserError: There is no way to train the task.
    """
    room = with_usable_memory(hardware, hardware.memory - reserved_memory(task, hardware), task)
    ways: list[Candidate] = []
    enough = [_ALL_ATTENTION] if _ALL_ATTENTION in recompute else recompute
    spreads = candidates(task, recompute=recompute[:1], zero=zero, tensor=tensor)  # mesh, strategy and stage
    for way in spreads:
        for moved in (each for each in offload if each is not Offload.WEIGHTS or way.zero == 3):
            placed = replace(way, offload=moved)
            ways += with_policies(placed, room, recompute)
            if moved is Offload.NOTHING and any(
                memory_of(replace(placed, recompute=name), room).fits for name in enough
            ):
                break
    require_possible(recompute, spreads)
    found = [predict(candidate, hardware) for candidate in ways]
    found.sort(key=lambda each: (each.memory.lacking, each.seconds if each.memory.fits else each.memory.total))
    return _own_choice_first(_frugal_first(found))


def _own_choice_first(found: list[Prediction]) -> list[Prediction]:
    """Put the strategy that `burst_attention` selects on a mesh first among its ways, if it fits and is as fast."""
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
        free: Bytes of a GPU that are available for tensors of the run.
        task: The training task.
    """
    return replace(hardware, memory=free * (1 - MARGIN) + reserved_memory(task, hardware))


def require_possible(policies: Sequence[str], ways: Sequence[Candidate]) -> None:
    """Check that at least one way supports one of the policies.

    Raises:
        UserError: No way supports any of them.
    """
    if not any(way.tensor == 1 or Policy.parse(name).every == 1 for way in ways for name in policies):
        Policy.parse(policies[0]).require_tensor(min(way.tensor for way in ways))


def with_policies(way: Candidate, room: Hardware, policies: Sequence[str]) -> Iterator[Candidate]:
    """Yield a candidate with each policy, and with policies for some layers: the first ones, or by segments.

    Policies that do not support the tensor parallelism of `way` are skipped.

    Args:
        way: The candidate without its policy.
        room: The machine in which policies for some layers must fit, from `with_usable_memory`.
        policies: The policies.
    """
    yield from (replace(way, recompute=name) for name in policies if way.tensor == 1 or Policy.parse(name).every == 1)
    yield from first_layer_candidates(way, room, policies)
    yield from segment_candidates(way, room, policies)


def first_layer_candidates(way: Candidate, room: Hardware, policies: Sequence[str]) -> list[Candidate]:
    """Return candidates that recompute only the first layers, with policies of `MIXED`; empty if "none" fits.

    Args:
        way: The candidate without its policy.
        room: The machine in which they must fit, from `with_usable_memory`.
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
    """Return the candidate that recomputes the fewest layers with a policy and fits, or None.

    Args:
        whole: The candidate that recomputes no layer.
        name: The policy.
        total: Peak bytes of `whole`.
        room: See `first_layer_candidates`.
    """
    each = replace(whole, recompute=name)
    # Memory peaks after the forward of all layers: each recomputed layer lowers the peak by the same bytes.
    fewest = max(1, math.ceil((total - room.memory) / (_kept(whole) - _kept(each))))
    counts = range(fewest, min(fewest + 2, whole.task.model.num_layers))
    tried = (replace(whole, recompute=f"{name}{FIRST}{count}") for count in counts)
    return next((one for one in tried if memory_of(one, room).fits), None)


SEGMENT_LAYERS = (1, 2, 3, 4, 5, 6, 8)
"""Numbers of layers per segment to try. One input is kept per segment, and in backward the inputs of one segment."""


def segment_candidates(way: Candidate, room: Hardware, policies: Sequence[str]) -> list[Candidate]:
    """Return candidates that save few inputs and keep attention of as many last layers as fit; see `Policy`.

    The result is empty if attention and inputs of all layers fit.

    Args:
        way: The candidate without its policy.
        room: The machine in which they must fit, from `with_usable_memory`.
        policies: The policies to try. Both "block" and "block-keep-attention" must be among them.
    """
    layers = way.task.model.num_layers
    if layers == 1 or not {"block", _ALL_ATTENTION} <= set(policies):
        return []
    if memory_of(replace(way, recompute=_ALL_ATTENTION), room).fits:
        return []
    found = []
    most = layers if way.tensor == 1 else 2  # +every-K does not support tensor parallelism
    for every in (each for each in SEGMENT_LAYERS if each < most):
        for is_hosted in (False, True) if "block+offload" in policies else (False,):
            hosted = _hosted_layers(way, every, room) if is_hosted else 0
            if hosted or not is_hosted:
                found += _most_attention(way, every, hosted, room)
    return [each for each in found if each.recompute not in policies]


def _hosted_layers(way: Candidate, every: int, room: Hardware) -> int:
    """Return the number of first layers whose saved inputs fit in host memory."""
    layers = way.task.model.num_layers
    used = memory_of(replace(way, recompute="block"), room).in_host
    each = block_bytes(way).input * way.task.gpus_per_node
    most = int((HOST_SHARE * room.host_memory - used) // each)
    return min(layers, (most - 1) * every + 1) if most > 0 else 0


def _most_attention(way: Candidate, every: int, hosted: int, room: Hardware) -> list[Candidate]:
    """Return the candidate that fits and keeps attention of the most last layers on the GPU; empty if none fits.

    If all inputs are in host memory, a second candidate keeps attention of more layers there, of as many as fit.
    """
    layers = way.task.model.num_layers

    def keeping(last: int, *, on_gpu: int = layers) -> Candidate:
        policy = Policy(
            attention=1.0 if last == layers else 0.0,
            every=every,
            keeps_last=0 if last == layers else last,
            offloads_first=hosted,
            offloads_attention=layers - on_gpu,
        )
        return replace(way, recompute=policy.name)

    none = memory_of(keeping(0), room)
    if not none.fits:
        return []
    attended = block_bytes(way).attended
    most = min(layers, int((room.memory - none.total) // attended) + every)
    on_gpu = next(last for last in range(most, -1, -1) if memory_of(keeping(last), room).fits)
    found = [keeping(on_gpu)]
    if hosted < layers:
        return found
    memory = memory_of(found[0], room)
    more = int((memory.host_capacity - memory.in_host) // (attended * way.task.gpus_per_node))
    tried = (keeping(last, on_gpu=on_gpu) for last in range(min(layers, on_gpu + more), on_gpu, -1))
    second = next((each for each in tried if memory_of(each, room).fits), None)
    return found if second is None else [*found, second]


def _kept(way: Candidate) -> float:
    """Return the bytes that a layer keeps for its backward."""
    return way.policy.kept(block_bytes(way))


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The recompute policy of a run.

    Attributes:
        name: The policy.
        message: One line with the reason for the choice.
    """

    name: str
    message: str


def choose_recompute(
    way: Candidate,
    hardware: Hardware,
    free: float,
    *,
    layout: str,
    policies: Sequence[str] = POLICIES,
    taken: float = 0.0,
) -> RecomputeChoice:
    """Return the fastest policy that fits; if none fits, the one with the smallest peak.

    Args:
        way: The candidate without its policy.
        hardware: The machine, with the host memory that this run may use.
        free: Bytes of a GPU that are available for tensors of the run.
        layout: Layout of the sequence; some layouts do not support policies that keep a fraction of attention.
        policies: The policies to choose from; policies for the first layers are added (`first_layer_candidates`).
        taken: Bytes of a GPU that other programs use, for the message.
    """
    room = with_usable_memory(hardware, free, way.task)
    ways = list(with_policies(way, room, [name for name in policies if _is_possible(name, layout, way.sequence)]))
    found = best(ways, room)
    peak, most = (found.memory.total - reserved_memory(way.task, hardware)) / GIB, free / GIB
    name = found.candidate.recompute
    why = "the fastest that fits" if found.memory.fits else "none fits by this estimate, it needs least"
    hosted = found.memory.in_host / GIB
    more = f" and {hosted:.1f} GiB of each host's" if hosted else ""
    more += f"; other programs have {taken / GIB:.1f} GiB of a GPU" if taken else ""
    return RecomputeChoice(
        name, f"recompute: {name} ({why}: {peak:.1f} of {most:.1f} GiB that are free on each GPU{more})"
    )


def best(ways: Sequence[Candidate], hardware: Hardware) -> Prediction:
    """Return the fastest way that fits; if none fits, the one with the smallest peak."""
    found = [predict(each, hardware) for each in ways]
    fitting = [each for each in found if each.memory.fits]
    in_host = [each for each in found if each.memory.in_host <= each.memory.host_capacity]
    return _fastest(fitting) if fitting else min(in_host or found, key=lambda each: each.memory.total)


def _fastest(found: Sequence[Prediction]) -> Prediction:
    """Return the fastest way; among equal ones the least host memory, then recomputation, then GPU memory decides."""
    least = min(each.seconds for each in found)
    alike = [each for each in found if each.seconds <= least * (1 + ALIKE)]
    return min(alike, key=lambda each: (each.memory.in_host, each.time.recompute, each.memory.total))


def _is_possible(name: str, layout: str, ranks: int) -> bool:
    try:
        require_end(Policy.parse(name).attention, layout, ranks)
    except UserError:
        return False
    return True
