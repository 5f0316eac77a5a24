"""A run as the planner knows it."""

from bmburst.plan.candidates import Candidate, way_of
from bmburst.plan.task import Task
from bmburst.recompute_policy import AUTO
from bmburst.schedule.hardware import Hardware
from bmburst.train.config import TrainConfig

_UNDECIDED = "block-keep-attention"


def planned(config: TrainConfig, ranks: int, nodes: int, hardware: Hardware) -> Candidate:
    """Return the way in which a run trains; packed documents are taken for whole sequences.

    Args:
        config: The run. Where its recompute policy is "auto", the way has the trainer's default.
        ranks: In all.
        nodes: On which they are.
        hardware: By which an attention strategy that is not named is the fastest.

    Raises:
        UserError: The ranks cannot run it.
    """
    config.validate(ranks)
    shape, parallel = config.mesh_shape(ranks), config.parallel
    task = Task(
        model=config.model,
        sequence=config.sequence_length,
        gpus=ranks,
        nodes=nodes,
        batch=config.batch_size,
        micro_batch=config.micro_batch_size,
        dtype=config.dtype,
        loss_chunk=config.loss_chunk_tokens,
        mlp_chunk=config.mlp_chunk_tokens,
        host_optimizer=config.optimizer.offload,
    )
    way = Candidate(
        task=task,
        data=shape.data,
        tensor=shape.tensor,
        heads=1,
        outer="none",
        recompute=_UNDECIDED if config.recompute == AUTO else config.recompute,
        zero=parallel.zero_level,
        transport="nccl" if parallel.transport in ("nccl", "gloo") else "peer",
    )
    return way_of(way, parallel.strategy, parallel.head_parallel, hardware)
