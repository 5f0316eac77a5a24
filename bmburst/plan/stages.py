"""Predicts a pipeline: a stage is predicted as a model of its layers, which is trained on its GPUs.

Embedding and head are counted as one table each on every stage.
"""

from bmburst.plan.candidates import Candidate
from bmburst.plan.counts import held_block, table
from bmburst.plan.moments import Lines, StepMoments
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.pipeline import PipelineSchedule, leaves_weights


def ends(candidate: Candidate) -> tuple[int, int]:
    """Return the first stage, which has the most layers and micro-batches in flight, and the last, with the head."""
    return 0, candidate.pipe - 1


def stages_per_node(candidate: Candidate) -> float:
    """Return the number of stages that share the host memory of a node, at least 1."""
    return max(1.0, candidate.task.gpus_per_node * candidate.pipe / candidate.task.gpus)


def schedule_of(candidate: Candidate) -> PipelineSchedule:
    """Return the schedule of a pipeline, of as many micro-batches as are enough to tell how it begins and ends."""
    splits = any(splitting_layers(candidate, number) for number in range(candidate.pipe))
    return PipelineSchedule(candidate.pipe, min(candidate.micro_steps, 4 * candidate.pipe), splits)


def splitting_layers(candidate: Candidate, number: int) -> int:
    """Return the number of layers of a stage whose backward leaves gradients of weights for later."""
    stage, is_frozen = candidate.stages[number], candidate.task.lora is not None
    policies = stage.policy.of_layers(stage.task.model.num_layers)
    return sum(leaves_weights(number, recomputes=each.recomputes, is_frozen=is_frozen) for each in policies)


def kept_by_stage(candidate: Candidate, number: int, moments: StepMoments) -> Lines:
    """Return the bytes that a stage holds in addition to those of a model of its layers.

    Args:
        candidate: The pipeline.
        number: Number of the stage.
        moments: Those of a block of the stage.
    """
    stage = candidate.stages[number]
    policies = stage.policy.of_layers(stage.task.model.num_layers)
    kept = sum(policy.kept(moments.block) for policy in policies)
    left = splitting_layers(candidate, number) * moments.left_for_later()
    sides = (number > 0) + (number < candidate.pipe - 1)  # input and output
    # A model of these layers holds one micro-batch. Where its backward leaves more than it frees, that counts.
    lines = {
        "micro-batches in flight": max(
            (alive - 1) * kept + alive * sides * moments.hidden + later * left + (max(0.0, left - kept) if alive else 0)
            for alive, later in schedule_of(candidate).held(number)
        )
    }
    if stage.zero == 2:
        task = stage.task
        blocks = held_block(task.model, stage.tensor) * task.model.num_layers * task.trained_in_blocks
        whole = blocks / max(1, task.parameters) + 2 * table(task.model)
        lines["whole gradients, tables (ZeRO-2)"] = whole * task.itemsize
    return lines


def send_seconds(candidate: Candidate, hardware: Hardware) -> float:
    """Return the seconds that a stage's transfers take in a step. They do not overlap with its passes.

    Hidden states and gradients pass a boundary at the same time, in opposite directions.
    """
    task = candidate.task
    nbytes = candidate.rows / candidate.tensor * task.model.hidden_size * task.itemsize
    is_near = task.nodes == 1
    bandwidth = hardware.collective_bandwidth if is_near else hardware.inter_bandwidth
    latency = hardware.nccl_latency if is_near else hardware.inter_latency
    boundaries = 1 if candidate.pipe == 2 else 2
    return candidate.micro_steps * 2 * boundaries * (nbytes / bandwidth + latency)
