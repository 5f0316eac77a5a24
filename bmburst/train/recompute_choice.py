"""The recompute policy of a run: "auto" decided from the memory that is free, and room in the hosts' memory checked."""

import sys
from dataclasses import replace

import torch

from bmburst.comm.objects import gather_objects
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from bmburst.plan.candidates import Candidate
from bmburst.plan.choice import choose, way_of
from bmburst.plan.hardware import Hardware, load_hardware, shipped
from bmburst.plan.memory import HOST_SHARE, memory_of
from bmburst.plan.table import GIB
from bmburst.plan.task import Task
from bmburst.recompute_policy import AUTO, POLICIES, Policy
from bmburst.train.config import TrainConfig
from bmburst.train.host_memory import available_bytes

_LIKE = "h200"  # rates of a machine that is not known: policies differ by products and kernels, and by little else


def recompute_for(config: TrainConfig, mesh: Mesh, local_size: int) -> str:
    """Return the policy of a run, the same on all ranks; every rank must call it, before the model is made.

    For "auto" rank 0 says in a line what was taken.

    Args:
        config: The run.
        mesh: Its ranks.
        local_size: Ranks on this host.

    Raises:
        UserError: A host has less memory than the policy moves there.
    """
    is_auto = config.recompute == AUTO
    if not is_auto and Policy.parse(config.recompute).offload == "nothing":
        return config.recompute
    hardware = _hardware()
    here = [_free(local_size), available_bytes()]
    everywhere = gather_objects(mesh.world, here)
    free = min(float(each[0]) for each in everywhere)
    known = [float(each[1]) for each in everywhere if each[1] is not None]
    hardware = replace(hardware, host_memory=min(known)) if known else hardware
    parallel = config.parallel
    way = way_of(_candidate(config, mesh, local_size), parallel.strategy, parallel.head_parallel, hardware)
    if is_auto:
        on_gpu = torch.cuda.is_available()
        policies = POLICIES if on_gpu else [name for name in POLICIES if "offload" not in name]
        choice = choose(way, hardware, free, layout=parallel.layout, policies=policies)
        if mesh.rank == 0:
            sys.stderr.write(f"{choice.said}\n")
        return choice.name
    needed = memory_of(replace(way, recompute=config.recompute), hardware).in_host
    if known and needed > HOST_SHARE * min(known):
        raise UserError(
            f"recompute {config.recompute} needs {needed / GIB:.1f} GiB of each host's memory, and one has "
            f"{min(known) / GIB:.1f} free\nfix: --recompute block-keep-attention:0.5, or auto, which takes what fits"
        )
    return config.recompute


def _candidate(config: TrainConfig, mesh: Mesh, local_size: int) -> Candidate:
    shape = mesh.shape
    task = Task(
        model=config.model,
        sequence=config.sequence_length,
        gpus=shape.size,
        nodes=shape.size // local_size if shape.size % local_size == 0 else 1,
        batch=config.batch_size,
        micro_batch=config.micro_batch_size,
        dtype=config.dtype,
        loss_chunk=config.loss_chunk_tokens,
        mlp_chunk=config.mlp_chunk_tokens,
        host_optimizer=config.optimizer.offload,
    )
    transport = "nccl" if config.parallel.transport in ("nccl", "gloo") else "peer"
    return Candidate(
        task=task,
        data=shape.data,
        tensor=shape.tensor,
        heads=1,
        outer="none",
        zero=config.parallel.zero_level,
        transport=transport,
    )


def _hardware() -> Hardware:
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return load_hardware(next((machine for machine in shipped() if machine in name), _LIKE))


def _free(local_size: int) -> float:
    """Return the bytes that torch can have on this rank's device, with what it has."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return (available_bytes() or 2**40) / local_size
