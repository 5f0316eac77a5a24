"""Enumerates the ways to train a task: meshes, attention strategies, recompute policies and ZeRO stages.

Between recomputing no layer and recomputing all layers are policies for the first N layers. For each kind only the
smallest N that fits is listed. It is the fastest, because every further layer is recomputed too.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from bmburst.errors import UserError, first_line
from bmburst.plan.candidates import ZERO, Candidate, Offload, Task
from bmburst.plan.memory import HOST_SHARE, block_bytes, memory_of
from bmburst.recompute.policy import POLICIES, Policy, require_end
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.parallelism import STRATEGIES, can_share, divisors, name_of
from bmburst.schedule.strategy import choose_strategy, possible_strategies

ALL_ATTENTION = "block-keep-attention"
"""The policy that recomputes blocks without their attention."""
MIXED = (
    ("block-keep-attention", "block-keep-attention+offload", "block-keep-attention+offload-all"),
    ("block", "block+offload"),
)
"""Policies that the planner and "auto" also compare for the first N layers only, with the smallest N that fits.

In each row, the other policies, which need host memory, are tried only if the first one does not fit. If the first one
fits, the formulas predict that an offload needs up to an eighth fewer layers and saves at most 1 % of a step, less than
their error. Fractions of attention are left out: at any length they free less memory per second of recompute.
"""


def candidates(
    task: Task,
    *,
    recompute: Sequence[str] = POLICIES,
    zero: Sequence[int] = ZERO,
    tensor: Sequence[int] | None = None,
    pipe: Sequence[int] = (1,),
    data: Sequence[int] | None = None,
    sequence: Sequence[int] | None = None,
) -> list[Candidate]:
    """Return every sensible candidate.

    Args:
        task: The training task.
        recompute: Recompute policies to try.
        zero: ZeRO stages to try.
        tensor: Tensor parallel degrees to try; by default all that fit in a node.
        pipe: Numbers of stages to try.
        data: Data parallel degrees to try; by default all.
        sequence: Sequence parallel degrees to try; by default all.

    Raises:
        UserError: There is no candidate, or a policy is unknown or names too many layers.
    """
    for policy in recompute:
        Policy.parse(policy).require_layers(task.model.num_layers)
    if task.lora is not None:
        task.lora.require_tensor(1 if tensor is None else min(tensor))
        task.lora.require_stages(min(pipe), max(zero))
    meshes = [
        Candidate(task=task, data=groups, tensor=degree, pipe=stages, ulysses_degree=1, outer="ring")
        for stages in pipe
        for groups, degree in _meshes(task, tensor, stages)
    ]
    found = [
        replace(each, recompute=policy, zero=stage)
        for mesh in _asked(meshes, data, sequence)
        for each in _attention_candidates(mesh)
        for policy, stage in product(recompute, zero)
        if task.lora is None or task.lora.allows_stages(mesh.pipe, stage)
    ]
    if not found:
        raise _none(task, tensor, pipe)
    return found


def _asked(meshes: list[Candidate], data: Sequence[int] | None, sequence: Sequence[int] | None) -> list[Candidate]:
    """Return the meshes with the asked degrees; UserError if there are meshes, but none with them."""
    options = {"data": data, "sequence": sequence}
    asked = {name: degrees for name, degrees in options.items() if degrees is not None}
    found = [mesh for mesh in meshes if all(getattr(mesh, name) in degrees for name, degrees in asked.items())]
    if found or not meshes:
        return found
    words = " ".join(f"--{name}-parallel {','.join(map(str, degrees))}" for name, degrees in asked.items())
    task, there = meshes[0].task, sorted({(mesh.data, mesh.sequence) for mesh in meshes})
    raise UserError(
        f"{words} is not possible on {task.gpus} GPUs with --batch-size {task.batch}\n"
        f"allowed: data x sequence of {', '.join(f'{groups} x {ranks}' for groups, ranks in there)}\n"
        f"fix: --data-parallel {there[-1][0]} --sequence-parallel {there[-1][1]}, or a --batch-size that divides by "
        "more groups"
    )


def _meshes(task: Task, tensor: Sequence[int] | None, stages: int = 1) -> Iterator[tuple[int, int]]:
    model, passes = task.model, task.batch // task.micro_batch
    if stages < 1 or task.gpus % stages or stages > model.num_layers or (stages > 1 and task.pairs):
        return
    for degree in divisors(task.gpus_per_node):
        wanted = tensor is None or degree in tensor
        if not wanted or model.intermediate_size % degree:
            continue
        if not can_share(degree, model.num_heads, model.num_kv_heads):
            continue
        if degree > 1 and (not model.shares_matrices or (task.lora is not None and task.lora.is_4bit)):
            continue
        rest = task.gpus // stages // degree
        if (task.gpus // stages) % degree:
            continue
        for data in divisors(passes):
            if rest % data == 0 and rest // data <= task.sequence and passes // data >= stages:
                yield data, degree


def _attention_candidates(mesh: Candidate) -> Iterator[Candidate]:
    """Yield a candidate for each attention strategy that a mesh can run."""
    for strategy in possible_strategies(STRATEGIES["auto"], mesh.shapes, mesh.mask, mesh.placement):
        yield mesh.with_strategy(strategy.ulysses_degree, strategy.outer)


def with_attention_choice(
    candidate: Candidate, strategy: str, ulysses_degree: int | None, hardware: Hardware
) -> Candidate:
    """Return a candidate with the attention strategy that `burst_attention` selects on its mesh.

    Args:
        candidate: The candidate; its strategy is ignored.
        strategy: One of `bmburst.schedule.parallelism.STRATEGIES`.
        ulysses_degree: Ulysses degree; None for the fastest degree.
        hardware: The machine for which "auto" selects the fastest strategy.
    """
    asked = candidate.problem(hardware)
    try:
        chosen = choose_strategy(
            strategy, asked.shapes, asked.length, asked.mask, asked.placement, hardware, ulysses_degree
        )
    except UserError:  # burst_attention will refuse it
        return candidate.with_strategy(1, "ring")
    return replace(candidate.with_strategy(chosen.ulysses_degree, chosen.outer), ring_tensors=chosen.ring_tensors)


def askable(ways: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    """Return the ways whose strategy a command can ask for: by its name, or since "auto" selects it for the degree."""
    found = []
    for way in ways:
        named = name_of(way.ulysses_degree, way.sequence, way.outer) != "auto" or way.sequence == 1
        if named or with_attention_choice(way, "auto", way.ulysses_degree, hardware).outer == way.outer:
            found.append(way)
    return found


def _none(task: Task, tensor: Sequence[int] | None, pipe: Sequence[int]) -> UserError:
    if 1 not in pipe:
        fitting = [n for n in pipe if 1 < n <= task.model.num_layers and task.gpus % n == 0 and not task.pairs]
        least = min(fitting, default=0) * task.micro_batch
        more = f", or --batch-size {least}" if least > task.batch else ""
        return UserError(
            f"--pipeline-parallel {','.join(map(str, pipe))} is not possible for {task.model.num_layers} layers on "
            f"{task.gpus} GPUs with --batch-size {task.batch}"
            f"{', and not for preference pairs' if task.pairs else ''}\n"
            "allowed: divisors of the GPUs, at most the layers and the micro-batches of a data parallel group\n"
            f"fix: --pipeline-parallel 1{more}"
        )
    if tensor is not None and not any(True for _ in _meshes(task, None)):
        tensor = None
    if tensor is not None:
        return UserError(
            f"--tensor-parallel {','.join(map(str, tensor))}: no such degree divides this model over "
            f"{task.gpus_per_node} GPUs a node\n"
            "fix: divisors of the GPUs a node that divide the attention heads and intermediate_size"
        )
    return UserError(
        f"--sequence-length {task.sequence} with --batch-size {task.batch} leaves some of {task.gpus} GPUs without a "
        "token\n"
        "fix: a longer --sequence-length, a larger --batch-size, or a smaller --nproc"
    )


def require_possible(policies: Sequence[str], ways: Sequence[Candidate]) -> None:
    """Check that at least one way supports one of the policies.

    Raises:
        UserError: No way supports any of them.
    """
    if any(_is_allowed(name, way) for way in ways for name in ending_alike(policies, way.layout, way.sequence)):
        return
    first = Policy.parse(policies[0])
    first.require_tensor(min(way.tensor for way in ways))
    first.require_stages(min(way.pipe for way in ways))
    try:
        for way in ways:
            require_end(first.attention, way.layout, way.sequence)
    except UserError as error:
        fix = "--recompute block-keep-attention, or leave --recompute out"
        raise UserError(f"--recompute {policies[0]}: {first_line(error)}\nfix: {fix}") from None


def ending_alike(policies: Sequence[str], layout: str, ranks: int) -> list[str]:
    """Return the policies by which all ranks of a sequence save as much (`bmburst.recompute.policy.require_end`)."""

    def is_possible(name: str) -> bool:
        try:
            require_end(Policy.parse(name).attention, layout, ranks)
        except UserError:
            return False
        return True

    return [name for name in policies if is_possible(name)]


def _is_allowed(name: str, way: Candidate) -> bool:
    policy = Policy.parse(name)
    return policy.allows_tensor(way.tensor) and (way.pipe == 1 or policy.allows_stages())


def with_policies(way: Candidate, room: Hardware, policies: Sequence[str]) -> Iterator[Candidate]:
    """Yield a candidate with each policy, and with policies for some layers: the first ones, or by segments.

    Policies that do not support the tensor parallelism or the pipeline of `way` are skipped. In a pipeline, only those
    of `policies` are yielded.

    Args:
        way: The candidate without its policy.
        room: The machine in which policies for some layers must fit, from `with_usable_memory`.
        policies: The policies.
    """
    yield from (replace(way, recompute=name) for name in policies if _is_allowed(name, way))
    if way.pipe > 1:
        return
    some = first_layer_candidates(way, room, policies)
    yield from some
    yield from mlp_output_candidates(way, room, policies, some)
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
    tried = (replace(whole, recompute=replace(each.policy, layers=count).name) for count in counts)
    return next((one for one in tried if memory_of(one, room).fits), None)


_MLP_GPUS = 2
"""GPUs of a host that may copy MLP outputs at once: so many were measured. More share the bandwidth of its memory."""

_LEAST_MLPS = 1 / 2
"""Fraction of the layers whose MLP outputs must fit in host memory: fewer save less than 2 % of a step of 128K."""


def mlp_output_candidates(
    way: Candidate, room: Hardware, policies: Sequence[str], some: Sequence[Candidate]
) -> list[Candidate]:
    """Return candidates that keep outputs of the MLP in host memory, of as many layers as fit; empty if "none" fits.

    The outputs are those of the gate and up matrices, which backward then does not compute again. The candidates extend
    those that keep attention of all layers on the GPU. Ways whose optimizer is in host memory are left out: its copies
    and these would share the link, which is not measured. So are hosts with more than `_MLP_GPUS` GPUs.

    Args:
        way: The candidate without its policy.
        room: The machine in which they must fit, from `with_usable_memory`.
        policies: The policies to try. "block-keep-attention+offload" must be among them.
        some: Candidates that recompute only the first layers.
    """
    allowed = {"none", ALL_ATTENTION, f"{ALL_ATTENTION}+offload"} <= set(policies)
    if not allowed or way.tensor > 1 or way.offload is not Offload.NOTHING or way.task.gpus_per_node > _MLP_GPUS:
        return []
    if memory_of(replace(way, recompute="none"), room).fits:
        return []
    found, layers = [], way.task.model.num_layers
    for each in (replace(way, recompute=ALL_ATTENTION), *some):
        policy = each.policy
        if policy.attention < 1 or policy.offloads:
            continue
        memory = memory_of(each, room)
        affordable = int((memory.host_capacity - memory.in_host) // (block_bytes(each).mlp * way.task.gpus_per_node))
        most = min(affordable, policy.layers or layers)
        counts = range(most, math.ceil(_LEAST_MLPS * layers) - 1, -1)
        tried = (replace(each, recompute=replace(policy, offloads_mlp=count).name) for count in counts)
        if one := next((one for one in tried if memory_of(one, room).fits), None):
            found.append(one)
    return found


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
    if layers == 1 or not {"block", ALL_ATTENTION} <= set(policies):
        return []
    if memory_of(replace(way, recompute=ALL_ATTENTION), room).fits:
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
