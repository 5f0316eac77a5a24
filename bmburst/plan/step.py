"""Predicts the seconds of a training step, part by part."""

import math
from dataclasses import dataclass, fields, replace

from bmburst.blocks.lora import LoRAConfig
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import (
    BACKWARD,
    CURRENT,
    DELTA,
    FOUR_BIT_BYTES,
    SCALED,
    WIDE,
    Operators,
    adam_bytes,
    adapter_elements,
    block_matrices,
    block_parameters,
    forward_flops,
    four_bit_saving,
    frozen_flops,
    held_block,
    mlp_matrix,
    projections,
    step_flops,
    table,
    vocabulary_matrices,
)
from bmburst.plan.graphs import issuing_seconds
from bmburst.plan.memory import block_bytes, keeps_graphs
from bmburst.plan.stages import schedule_of, send_seconds, splitting_layers
from bmburst.schedule.cost import AttentionCost
from bmburst.schedule.hardware import Hardware, sustained
from bmburst.schedule.pipeline import PassTimes

_OPTIMIZER_BYTES = 30  # per parameter: AdamW with fp32 moments 28, norm of the gradient 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Parts of a step, in seconds. Their sum is the time of the step.

    Attributes:
        attention: The kernel, forward and backward, and the merging of partial results.
        matmul: Products with the weights of blocks and head.
        elementwise: Norms, activation, rotary embedding, cross entropy, and sums of gradients over micro-batches.
        recompute: Recomputation in backward.
        attention_communication: Exposed transfers of attention.
        zero: Exposed transfers of weights and gradients, also between ZeRO groups.
        tensor: Exposed transfers of tensor parallelism.
        offload: Exposed copies between GPU and host memory, and AdamW on the host that forward waits for.
        optimizer: AdamW and the norm of the gradient.
        host: Time by which the host is slower than the GPU.
        reference: Forward pass of the reference model in preference training, else 0.
        pipeline: Stages that wait for others (the bubble), and transfers between stages.
    """

    attention: float
    matmul: float
    elementwise: float
    recompute: float
    attention_communication: float
    zero: float
    tensor: float
    offload: float
    optimizer: float
    host: float
    reference: float = 0.0
    pipeline: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(getattr(self, declared.name) for declared in fields(self)))


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of forward and backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(self.forward + other.forward, self.backward + other.backward)


def step_time(candidate: Candidate, hardware: Hardware, *, operators: Operators = CURRENT) -> StepTime:
    """Return the predicted seconds of a step of a long run."""
    hardware = sustained(hardware)
    if candidate.pipe > 1:
        return _pipeline_time(candidate, hardware, operators)
    graphs = keeps_graphs(candidate, hardware, operators=operators)
    return _step_time(candidate, hardware, operators, has_head=True, graphs=graphs)


def _pipeline_time(candidate: Candidate, hardware: Hardware, operators: Operators) -> StepTime:
    """Return the seconds of the slowest stage, and of what it waits for the others in their schedule."""
    times, passes, ends = [], [], []
    for number, stage in enumerate(candidate.stages):
        is_last = number == candidate.pipe - 1
        time = _step_time(stage, hardware, operators, has_head=is_last, sums_whole=stage.zero == 2)
        once = time.optimizer
        if stage.zero == 2:  # weights are gathered and gradients scattered once a step, and nothing hides it
            zero = 2 * stage.task.model.num_layers * _gather(stage, hardware)
            time = replace(time, zero=zero if stage.task.gpus > stage.tensor else 0.0)
            once += time.zero
        forward = _forward(stage, hardware, operators, has_head=is_last)
        later = splitting_layers(candidate, number) * _later(stage, hardware)
        passes.append(PassTimes(forward, (time.total - once) / candidate.micro_steps - forward - later, later))
        times.append(time)
        ends.append(once)
    schedule, slowest = schedule_of(candidate), max(range(candidate.pipe), key=lambda number: passes[number].total)
    waits = schedule.makespan(passes) - schedule.micro_batches * passes[slowest].total  # more of them add no waits
    waits += max(ends) - ends[slowest]  # a step ends on every stage
    return replace(times[slowest], pipeline=waits + send_seconds(candidate, hardware))


def _forward(stage: Candidate, hardware: Hardware, operators: Operators, *, has_head: bool) -> float:
    """Return the seconds of a stage's forward pass of a micro-batch. That of the head computes its gradients too."""
    seconds = 0.0
    for kind, count in stage.kinds:
        attention = _attention(kind, hardware, operators).forward.total
        seconds += count * (
            _products(kind, hardware).forward + _elements(kind, hardware, operators).forward + attention
        )
    outside = _outside_layers(stage, hardware, operators)
    return seconds + (outside["matmul"] + outside["elementwise"] if has_head else 0.0)


def _later(stage: Candidate, hardware: Hardware) -> float:
    """Return the seconds of a layer's gradients of weights that backward can leave for later."""
    model, rows = stage.task.model, stage.rows
    of_mlp = 3 * mlp_matrix(model, stage.tensor) if stage.mlp_rows < rows else 0  # an MLP in chunks leaves nothing
    return hardware.matmul_seconds(2.0 * rows * (block_matrices(model, stage.tensor) - of_mlp), rows)


def _step_time(
    candidate: Candidate,
    hardware: Hardware,
    operators: Operators,
    *,
    has_head: bool,
    sums_whole: bool = False,
    graphs: bool = False,
) -> StepTime:
    """Return the seconds of a step without a pipeline, or of a stage.

    Args:
        candidate: The way to train.
        hardware: The machine.
        operators: The operators between matrix products.
        has_head: Whether the head and the loss are computed.
        sums_whole: Whether each rank adds up whole gradients over micro-batches, and not its shards of them.
        graphs: Whether the blocks are CUDA graphs.
    """
    passes = candidate.micro_steps
    parts = _outside_layers(candidate, hardware, operators)
    if not has_head:
        parts = dict.fromkeys(parts, 0.0) | {"zero": parts["zero"]}
    issued = issuing_seconds(candidate, hardware, graphs=graphs)
    waits = 0.0  # of the GPU for the host in attention
    for kind, count in candidate.kinds:
        attention = _attention(kind, hardware, operators)
        for name, seconds in _layer(kind, hardware, operators, attention).items():
            parts[name] += count * seconds
        waits += 0.0 if graphs else count * sum(attention.waits)  # between graphs the host is ahead of the GPU
    parts = {name: passes * seconds for name, seconds in parts.items()}
    parts["elementwise"] += (passes - 1) * _gradient_sums(candidate, hardware, whole=sums_whole)
    # Attention counts with its own waits, so that ways compare as in `burst_attention`. The host waits for the passes
    # before the optimizer, which needs little of its time. It needs as long for forward as for backward, which is
    # longer on the GPU: at some lengths the GPU waits in forward only.
    others = sum(parts.values()) - parts["attention"] - parts["attention_communication"]
    forward = (others - parts["recompute"]) / (1 + BACKWARD)
    host = passes * waits + sum(max(0.0, passes * issued / 2 - each) for each in (forward, others - forward))
    parameters = candidate.task.trained / candidate.shards
    if candidate.offload is Offload.NOTHING:
        optimizer = hardware.memory_seconds(_optimizer_bytes(candidate.task) * parameters)
    else:
        behind = candidate.offload is Offload.WEIGHTS  # AdamW of blocks overlaps with the next forward
        optimizer = (parameters - (_trained_of_blocks(candidate) if behind else 0.0)) / hardware.host_adam
    return StepTime(**parts, optimizer=optimizer, host=host)


def _gradient_sums(candidate: Candidate, hardware: Hardware, *, whole: bool) -> float:
    """Return the seconds of adding the gradient of a micro-batch to that of those before: two reads and a write."""
    task = candidate.task
    of_blocks, of_tables = task.trained_in_blocks, task.trained - task.trained_in_blocks
    held = of_blocks / candidate.tensor + of_tables if whole else task.trained / candidate.shards
    return hardware.memory_seconds(3.0 * task.itemsize * held)


def _optimizer_bytes(task: Task) -> float:
    """Return the memory traffic of the norm and AdamW on the GPU per weight. Remainders need the weight too."""
    if task.state == "float32":
        return _OPTIMIZER_BYTES
    saved = adam_bytes(task.dtype, "float32") - adam_bytes(task.dtype, task.state)
    return _OPTIMIZER_BYTES - 2 * saved + (task.itemsize if task.dtype == "bfloat16" else 0)


def model_flops(task: Task, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a task's step, with causal attention over whole sequences, trees or the model's window.

    The forward pass of a reference model counts. Gradients of frozen weights do not.
    """
    counted = task.model, float(task.batch * task.sequence), task.query_key_pairs
    done = step_flops(*counted, attention_backward=attention_backward)
    done -= frozen_flops(*counted[:2], task.adapters, trains_head=task.lora is not None and task.lora.trains_head)
    return done + forward_flops(*counted) if task.pairs else done


def utilisation(candidate: Candidate, hardware: Hardware, seconds: float, *, attention_backward: float = 2.0) -> float:
    """Return model FLOPs utilisation of a step; see `model_flops`."""
    flops = model_flops(candidate.task, attention_backward=attention_backward)
    return flops / seconds / candidate.task.gpus / hardware.peak


def prefix_seconds(candidate: Candidate, hardware: Hardware, kept: float) -> float:
    """Return the seconds of attention forward over the prefix that a policy recomputes (`bmburst.attention.function`).

    If the prefix is split over groups of ranks, the last group has up to twice the mean work.
    """
    task = candidate.task
    tokens = max(candidate.sequence, round((1 - kept) * task.sequence))
    cost = replace(candidate, task=replace(task, sequence=tokens)).attention_cost(hardware).forward
    return cost.total + (1 - 1 / candidate.groups) * cost.kernel


def collective(hardware: Hardware, candidate: Candidate, nbytes: float, ranks: int) -> float:
    """Return the seconds of an all-gather to, or a reduce-scatter of, `nbytes` bytes on each of `ranks` ranks.

    The ranks are those of a ZeRO group, or some of them, spread evenly over its nodes. Links inside a node and the NICs
    of a node are used at the same time.
    """
    if ranks == 1 or not nbytes:
        return 0.0
    nodes = min(candidate.zero_nodes, ranks)
    near = ranks / nodes
    home = nbytes * (ranks - 1) / ranks / hardware.collective_bandwidth if near > 1 else 0.0
    groups = candidate.task.gpus_per_node / near  # number of such groups that share the NICs
    node = hardware.inter_bandwidth * candidate.task.gpus_per_node
    away = groups * nbytes * (nodes - 1) / nodes / node
    # A ring: its first byte passes every node.
    latency = (nodes - 1) * hardware.inter_latency / 2 + hardware.nccl_latency
    return max(home, away) + latency


def _attention(kind: Candidate, hardware: Hardware, operators: Operators) -> AttentionCost:
    """Return the seconds of one layer's attention, over all calls that it takes."""
    call = kind.at_once(operators)
    return call.attention_cost(hardware).times(kind.own_heads / call.own_heads)


def _layer(kind: Candidate, hardware: Hardware, operators: Operators, attention: AttentionCost) -> dict[str, float]:
    """Return the seconds of one layer, forward and backward."""
    products, elements = _products(kind, hardware), _elements(kind, hardware, operators)
    again = _again(kind, hardware, operators, attention, products, elements)
    passes = attention.forward.total + attention.waits[0], attention.backward.total + again + attention.waits[1]
    # Links work at the same time as kernels, and as each other: what waits for one of them hides transfers on the next.
    behind = products + elements + _Work(*passes)
    zero = _zero(kind, hardware, behind)
    behind += zero
    copies = _Work(*kind.policy.waiting(block_bytes(kind), hardware.host_bandwidth, behind.forward, behind.backward))
    streaming = _streaming(kind, hardware, behind + copies)
    kernels = attention.forward.kernel + attention.backward.kernel
    joining = attention.forward.joining + attention.backward.joining
    return {
        "attention": kernels + joining,
        "matmul": products.total,
        "elementwise": elements.total + _dequantization(kind, hardware),
        "recompute": again,
        "attention_communication": attention.forward.exposed + attention.backward.exposed,
        "zero": zero.total,
        "tensor": _tensor(kind, hardware),
        "offload": copies.total + streaming,
        "reference": _reference(kind, hardware, behind) if kind.task.pairs else 0.0,
    }


def _outside_layers(candidate: Candidate, hardware: Hardware, operators: Operators) -> dict[str, float]:
    """Return the seconds of embedding, head and loss, by part of `StepTime`."""
    lora = candidate.task.lora
    inside = ("attention", "recompute", "attention_communication", "tensor", "offload")
    return dict.fromkeys(inside, 0.0) | {
        "matmul": _logits(candidate, hardware, products=2 if lora and not lora.trains_head else 3),
        "elementwise": _loss(candidate, hardware, operators),
        "zero": _zero_of_tables(candidate, hardware),
        # the reference's logits, and those that backward computes again
        "reference": 2 * _logits(candidate, hardware, products=1) if candidate.task.pairs else 0.0,
    }


def _trained_of_blocks(candidate: Candidate) -> float:
    """Return the number of trained parameters of blocks in a rank's optimizer shard."""
    task = candidate.task
    return task.trained_in_blocks / candidate.shards


def _products(candidate: Candidate, hardware: Hardware) -> _Work:
    task, rows = candidate.task, candidate.rows
    seconds = hardware.matmul_seconds(2.0 * rows * block_matrices(task.model, candidate.tensor), rows)
    if task.lora is None:
        return _Work(seconds, BACKWARD * seconds)
    adapters = _adapters(candidate, hardware, task.lora)  # frozen matrices have no gradient
    return _Work(seconds + adapters.forward, (BACKWARD - 1) * seconds + adapters.backward)


def _adapters(candidate: Candidate, hardware: Hardware, lora: LoRAConfig) -> _Work:
    """Seconds of low-rank terms. Memory bounds their products unless ranks are large.

    Forward reads inputs and adds to outputs. Backward reads inputs and gradients of outputs twice, and adds to
    gradients of inputs (`bmburst_ops.linears.low_rank_backward`).
    """
    task, rows = candidate.task, candidate.rows
    inputs, outputs = lora.features(task.model, candidate.tensor)
    element = float(rows * task.itemsize)
    product = hardware.matmul_seconds(2.0 * rows * adapter_elements(task.model, lora, candidate.tensor), rows)
    return _Work(
        max(product, hardware.memory_seconds(element * (inputs + 2 * outputs))),
        max(BACKWARD * product, hardware.memory_seconds(element * (4 * inputs + 2 * outputs))),
    )


def _elements(candidate: Candidate, hardware: Hardware, operators: Operators) -> _Work:
    """Seconds of elementwise operations. Norms and stream run on a tensor rank's tokens, others on its features."""
    model, rows = candidate.task.model, candidate.rows
    hidden = rows / candidate.tensor * model.hidden_size
    inner = rows * model.intermediate_size / candidate.tensor
    turned = rows * (candidate.own_heads + candidate.own_kv_heads) * model.head_dim
    attended = rows * candidate.own_heads * model.head_dim
    forward = (2 * operators.norm_forward + operators.stream_forward) * hidden + operators.swiglu_forward * inner
    backward = (2 * operators.norm_backward + operators.stream_backward) * hidden + operators.swiglu_backward * inner
    backward += 0 if model.residual_scale == 1 else SCALED * hidden
    backward += operators.gradient_sums * rows * model.hidden_size + DELTA * attended
    if (
        candidate.mlp_rows < rows and not candidate.task.lora
    ):  # each chunk reads and writes the accumulated weight gradients
        backward += 3 * 2 * WIDE * mlp_matrix(model, candidate.tensor) * -(-rows // candidate.mlp_rows)
    turning = operators.rotary * turned
    return _Work(hardware.memory_seconds(forward + turning), hardware.memory_seconds(backward + turning))


def _dequantization(candidate: Candidate, hardware: Hardware) -> float:
    """Seconds in which a layer's matrices in 4 bits are dequantized: for forward, backward, and a segment's forward."""
    task = candidate.task
    if task.lora is None or not task.lora.is_4bit:
        return 0.0
    seconds = hardware.memory_seconds(block_matrices(task.model) * (FOUR_BIT_BYTES + task.itemsize))
    return (3 if candidate.policy.feeds_next else 2) * seconds


def _again(
    candidate: Candidate,
    hardware: Hardware,
    operators: Operators,
    attention: AttentionCost,
    products: _Work,
    elements: _Work,
) -> float:
    """Seconds of recomputation. An MLP in chunks recomputes gate and up in backward under every policy."""
    policy, matrix = candidate.policy, mlp_matrix(candidate.task.model, candidate.tensor)
    product = hardware.matmul_seconds(2.0 * candidate.rows * matrix, candidate.rows)
    if not policy.recomputes:
        activation = hardware.memory_seconds(
            operators.swiglu_forward * candidate.rows * matrix / candidate.task.model.hidden_size
        )
        return 2 * product + activation if candidate.mlp_rows < candidate.rows else 0.0
    forward = products.forward + elements.forward - (0.0 if operators.repeats_last else product)
    beginning = prefix_seconds(candidate, hardware, policy.attention) if 0 < policy.attention < 1 else 0.0
    seconds = policy.again(forward, attention.forward.total, beginning)
    if policy.offloads_mlp:
        seconds -= 2 * product
    if candidate.is_lean(operators):
        projected = hardware.matmul_seconds(2.0 * candidate.rows * projections(candidate.task.model), candidate.rows)
        if policy.feeds_next:  # its output is computed once more, without queries, keys and values if attention is kept
            seconds += products.forward + elements.forward - (projected if policy.attention == 1 else 0.0)
        elif candidate.at_once(operators) is not candidate and policy.attention < 1:
            seconds += projected  # by groups of heads, queries, keys and values are projected twice
    return seconds


def _logits(candidate: Candidate, hardware: Hardware, *, products: int) -> float:
    """Seconds of matrix products of the size of the head's, a chunk of tokens at a time."""
    rows = candidate.rows / candidate.tensor
    flops = 2.0 * products * rows * table(candidate.task.model)
    return hardware.matmul_seconds(flops, min(rows, candidate.task.loss_chunk))


def _reference(candidate: Candidate, hardware: Hardware, behind: _Work) -> float:
    """Seconds of a layer of the reference model: forward, with the exposed gathers and copies of its weights."""
    task, seconds = candidate.task, behind.forward
    if candidate.tensor > 1:
        seconds += _tensor(replace(candidate, recompute="none"), hardware) / 2
    if candidate.shards > candidate.tensor:
        plain = replace(candidate, task=replace(task, lora=None))
        gather = _gather(plain if task.second_model else candidate, hardware)
        share = hardware.nccl_exposed if candidate.zero_nodes == 1 else hardware.inter_exposed
        seconds += max(share * gather, gather - behind.forward)
    if candidate.offload is Offload.WEIGHTS:
        saved = 0.0 if task.second_model else task.four_bit_saving
        shard = (block_parameters(task.model) * task.itemsize - saved) / task.model.num_layers / candidate.shards
        seconds += max(0.0, shard / hardware.host_bandwidth - behind.forward)
    return seconds


def _loss(candidate: Candidate, hardware: Hardware, operators: Operators) -> float:
    model, rows = candidate.task.model, candidate.rows / candidate.tensor
    norm = (operators.norm_forward + operators.norm_backward) * rows * model.hidden_size
    gathered = candidate.task.loss_chunk * operators.gathered_chunks(candidate.task.itemsize)
    sums = (
        0 if candidate.task.lora else math.ceil(rows / gathered) * 2 * WIDE * table(model)
    )  # the head's gradient, read and written
    return hardware.memory_seconds(operators.loss * rows * model.vocab_size + norm + sums)


def _zero(candidate: Candidate, hardware: Hardware, behind: _Work) -> _Work:
    """Exposed seconds of a layer's weight gather and gradient scatter, which overlap with neighbouring layers.

    Sums of the gradient between ZeRO groups overlap with the last backward pass of a step.
    """
    task, layers = candidate.task, candidate.task.model.num_layers
    gather = _gather(candidate, hardware) if candidate.shards > candidate.tensor else 0.0
    share = hardware.nccl_exposed if candidate.zero_nodes == 1 else hardware.inter_exposed
    gradients = gather * candidate.task.trained / candidate.task.parameters if candidate.task.lora else gather
    moved = gradients + (gather if candidate.zero == 3 else 0.0)  # stage 3 gathers weights again
    forward = max(share * gather, gather - behind.forward)
    backward = max(share * moved, moved - behind.backward)
    sums = _sums(candidate, hardware, task.trained_in_blocks / layers)
    behind_sums = behind.backward + backward
    backward += max(hardware.inter_exposed * sums, sums - behind_sums) / candidate.micro_steps
    return _Work(forward, backward)


def _zero_of_tables(candidate: Candidate, hardware: Hardware) -> float:
    """Seconds of transfers of embedding, head, first block and last block, which do not overlap with anything."""
    task, model = candidate.task, candidate.task.model
    seconds = _sums(candidate, hardware, task.trained - task.trained_in_blocks) / candidate.micro_steps
    if candidate.shards == candidate.tensor:
        return seconds
    whole = collective(hardware, candidate, table(model) * task.itemsize, candidate.shards)
    return seconds + 2 * _gather(candidate, hardware) + (1 if task.lora else 2) * vocabulary_matrices(model) * whole


def _sums(candidate: Candidate, hardware: Hardware, parameters: float) -> float:
    """Seconds of summing gradients between ZeRO groups: an all-reduce of each rank's shard, of all ranks at once."""
    task = candidate.task
    groups = task.gpus // candidate.shards
    if groups == 1 or not parameters:
        return 0.0
    moved = 2 * (groups - 1) / groups * parameters / candidate.shards * task.itemsize
    if task.nodes == 1:
        return moved / hardware.collective_bandwidth + hardware.nccl_latency
    return moved / hardware.inter_bandwidth + (groups - 1) * hardware.inter_latency + hardware.nccl_latency


def _streaming(candidate: Candidate, hardware: Hardware, behind: _Work) -> float:
    """Exposed seconds of copies of a layer's shards and gradient, and of AdamW during the next forward."""
    if candidate.offload is not Offload.WEIGHTS:
        return 0.0
    task, passes = candidate.task, candidate.micro_steps
    layers = task.model.num_layers
    weights, trained = (
        block_parameters(task.model, task.lora) / layers / candidate.shards,
        _trained_of_blocks(candidate) / layers,
    )
    saved = task.four_bit_saving / layers / candidate.shards
    copy = (weights * task.itemsize - saved) / hardware.host_bandwidth
    back = trained * task.itemsize / hardware.host_bandwidth
    update = trained / hardware.host_adam
    first = (copy + update / passes) / layers  # those of the first layer are fully exposed
    # Only the first forward pass of a step waits for updates.
    forward = (max(0.0, max(copy, update) - behind.forward) + (passes - 1) * max(0.0, copy - behind.forward)) / passes
    return first + forward + max(0.0, max(copy, back) - behind.backward)


def _gather(candidate: Candidate, hardware: Hardware) -> float:
    """Seconds of gathering a block's weights, which may be in 4 bits."""
    task = candidate.task
    saved = four_bit_saving(task.model, task.lora, task.itemsize)
    block = held_block(task.model, candidate.tensor) * task.itemsize - saved
    return collective(hardware, candidate, block, candidate.shards // candidate.tensor)


def _tensor(candidate: Candidate, hardware: Hardware) -> float:
    """Seconds of gathering tokens before attention and MLP and scattering them after; they do not overlap."""
    if candidate.tensor == 1:
        return 0.0
    task = candidate.task
    whole = candidate.rows * task.model.hidden_size * task.itemsize
    near = whole * (candidate.tensor - 1) / candidate.tensor / hardware.collective_bandwidth + hardware.nccl_latency
    again = 3 if candidate.policy.recomputes else 0  # the last scatter of a block is not repeated
    return (8 + again) * (near + hardware.memory_seconds(4.0 * whole))
