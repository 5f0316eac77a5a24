"""Predicts every way to train and orders them, and chooses the recompute policy of `--recompute auto`.

Between a policy for no layer and one for all layers lie policies that recompute the first N layers. Of each kind only
the smallest N that fits is tried: it is the fastest of its kind, since each layer it names is computed again.
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
from bmburst.recompute.policy import EVERY, FIRST, KEEP_LAST, MIXED, OFFLOAD_FIRST, POLICIES, Policy, require_end
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.strategy import ALIKE as ALIKE_STRATEGIES
from bmburst_ops.constants import ATTENTION_BACKWARD

ALIKE = 1e-3
"""Predictions of a step that differ by a smaller fraction are equal. The one with less memory is then the better."""
_ALL_ATTENTION = "block-keep-attention"
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
    offload: Sequence[Offload] = tuple(Offload),
) -> list[Prediction]:
    """Return the predictions of all ways: those that fit, the fastest first, then the others, the smallest first.

    Ways of equal speed are ordered by memory. Policies of the first layers and by segments are added to the given ones.

    Args:
        task: What is trained.
        hardware: The machine.
        recompute: Recompute policies to try.
        zero: ZeRO stages to try.
        tensor: Tensor parallel degrees to try; by default all that fit into a node.
        offload: What to try to have in host memory: anything only where attention of all layers has no room else.

    Raises:
        UserError: There is none.
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


def require_possible(policies: Sequence[str], ways: Sequence[Candidate]) -> None:
    """Check that there is a way whose ranks can follow one of the policies.

    Raises:
        UserError: There is none.
    """
    if not any(way.tensor == 1 or Policy.parse(name).every == 1 for way in ways for name in policies):
        Policy.parse(policies[0]).require_tensor(min(way.tensor for way in ways))


def with_policies(way: Candidate, room: Hardware, policies: Sequence[str]) -> Iterator[Candidate]:
    """Yield a candidate with each policy, and with those between: of the first layers, and by segments.

    There is none with a policy that ranks which share matrices cannot follow.

    Args:
        way: Everything but the policy.
        room: The machine that the policies between must fit, of `with_usable_memory`.
        policies: The policies.
    """
    yield from (replace(way, recompute=name) for name in policies if way.tensor == 1 or Policy.parse(name).every == 1)
    yield from first_layer_candidates(way, room, policies)
    yield from segment_candidates(way, room, policies)


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


SEGMENT_LAYERS = (1, 2, 3, 4, 5, 6, 8)
"""Layers of a segment that are tried. An input is kept for each segment, and inputs of a whole segment in backward."""


def segment_candidates(way: Candidate, room: Hardware, policies: Sequence[str]) -> list[Candidate]:
    """Return candidates that store few inputs and keep attention of as many last layers as fit; see `Policy`.

    There are none where attention of all layers fits beside all inputs.

    Args:
        way: Everything but the policy.
        room: The machine that they must fit, of `with_usable_memory`.
        policies: The policies to try: both that these lie between must be among them.
    """
    layers = way.task.model.num_layers
    if layers == 1 or not {"block", _ALL_ATTENTION} <= set(policies):
        return []
    if memory_of(replace(way, recompute=_ALL_ATTENTION), room).fits:
        return []
    found = []
    most = layers if way.tensor == 1 else 2  # blocks of a tensor group do not compute inputs again
    for every in (each for each in SEGMENT_LAYERS if each < most):
        for is_hosted in (False, True) if "block+offload" in policies else (False,):
            hosted = _hosted_layers(way, every, room) if is_hosted else 0
            if hosted or not is_hosted:
                found += _most_attention(way, every, hosted, room)
    return [each for each in found if each.recompute not in policies]


def _hosted_layers(way: Candidate, every: int, room: Hardware) -> int:
    """Return of how many first layers the inputs that are stored have room in host memory."""
    layers = way.task.model.num_layers
    used = memory_of(replace(way, recompute="block"), room).in_host
    each = block_bytes(way).input * way.task.gpus_per_node
    most = int((HOST_SHARE * room.host_memory - used) // each)
    return min(layers, (most - 1) * every + 1) if most > 0 else 0


def _most_attention(way: Candidate, every: int, hosted: int, room: Hardware) -> list[Candidate]:
    """Return the candidate that keeps attention of the most last layers and fits, if one does."""
    layers = way.task.model.num_layers
    options = (f"+{EVERY}-{every}" if every > 1 else "", f"+{OFFLOAD_FIRST}-{hosted}" if hosted else "")

    def keeping(last: int) -> Candidate:
        base = _ALL_ATTENTION if last == layers else "block"
        kept = f"+{KEEP_LAST}-{last}" if 0 < last < layers else ""
        return replace(way, recompute=f"{base}{options[0]}{kept}{options[1]}")

    none = memory_of(keeping(0), room)
    if not none.fits:
        return []
    most = min(layers, int((room.memory - none.total) // block_bytes(way).attended) + every)
    tried = (keeping(last) for last in range(most, -1, -1))
    return [next(each for each in tried if memory_of(each, room).fits)]


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
        way: Everything but the policy.
        hardware: The machine; its host memory is what this run may use.
        free: Bytes of a GPU that tensors of the run can have.
        layout: Layout of the sequence; some layouts exclude policies that keep a part of attention.
        policies: The policies to choose from; policies of the first layers are added (`first_layer_candidates`).
        taken: Bytes of a GPU that other programs have; the message tells of them.
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
