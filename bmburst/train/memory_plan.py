"""Memory decisions before a run: `recompute auto` from free GPU memory, and whether host memory is large enough."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from bmburst.amounts import GIB
from bmburst.comm.objects import gather_objects
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from bmburst.plan.candidates import Candidate, Task, with_attention_choice
from bmburst.plan.counts import ITEMSIZE, adam_bytes
from bmburst.plan.memory import HOST_SHARE, memory_of
from bmburst.plan.search import choose_recompute
from bmburst.recompute.policy import AUTO, POLICIES, Policy
from bmburst.schedule.hardware import Hardware, hardware_like
from bmburst.train.config import TrainConfig

_MEMORY = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def state_bytes(config: TrainConfig, world_size: int, local_size: int) -> int:
    """Return the bytes of AdamW state in the memory of a host that runs `local_size` of the job's ranks."""
    return adam_bytes(ITEMSIZE[config.dtype]) * config.model.num_parameters * local_size // world_size


def available_bytes() -> int | None:
    """Return the free bytes of this host, at most its container's limit; None where Linux does not tell."""
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        # Not less what the container uses: that counts the cache of files, which is given up on demand.
        return min(free, int(_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or none with a limit
        return free


def require_host_memory(config: TrainConfig, mesh: Mesh, local_size: int) -> None:
    """Check that each host has room for AdamW's state; every rank calls it.

    Raises:
        UserError: One has not; on all ranks, or the others would wait for those of a short host.
    """
    needed, available = state_bytes(config, mesh.shape.size, local_size), available_bytes()
    if mesh.sum(float(available is not None and available < needed)):
        raise _shortage(needed, available)


def _shortage(needed: int, available: int | None) -> UserError:
    """Return why `optimizer.offload` cannot work; `available` is of this host, which may be another than the short."""
    here = "" if available is None or available >= needed else f": {available / GIB:.1f} are free on this one"
    return UserError(
        f"optimizer.offload needs {needed / GIB:.1f} GiB of each host's memory, and one has less{here}\n"
        "fix: leave --optimizer.offload out, or share the model among more hosts"
    )


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
        recompute=_UNDECIDED if config.recompute == AUTO else config.recompute,
        zero=parallel.zero_level,
        transport="nccl" if parallel.transport in ("nccl", "gloo") else "peer",
    )
    return with_attention_choice(way, parallel.strategy, parallel.head_parallel, hardware)


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
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    everywhere = gather_objects(mesh.world, [_free(local_size), available_bytes(), device, local_size])
    free = min(float(each[0]) for each in everywhere)
    known = [float(each[1]) for each in everywhere if each[1] is not None]
    # Of the first rank: GPUs and hosts may differ, and then each rank would decide by its own.
    _, _, device, per_host = everywhere[0]
    hardware = hardware_like(device)
    hardware = replace(hardware, host_memory=min(known)) if known else hardware
    ranks = mesh.shape.size
    way = planned(config, ranks, 1 if ranks % per_host else ranks // per_host, hardware)
    if is_auto:
        on_gpu = torch.cuda.is_available()
        policies = POLICIES if on_gpu else [name for name in POLICIES if "offload" not in name]
        choice = choose_recompute(way, hardware, free, layout=config.parallel.layout, policies=policies)
        if mesh.rank == 0:
            sys.stderr.write(f"{choice.message}\n")
        return choice.name
    needed = memory_of(way, hardware).in_host
    if known and needed > HOST_SHARE * min(known):
        raise UserError(
            f"recompute {config.recompute} needs {needed / GIB:.1f} GiB of each host's memory; one has "
            f"{min(known) / GIB:.1f} free, of which {1 - HOST_SHARE:.0%}, {(1 - HOST_SHARE) * min(known) / GIB:.1f} "
            "GiB, are kept in reserve\nfix: --recompute block-keep-attention:0.5, or auto, which takes what fits"
        )
    return config.recompute


def _free(local_size: int) -> float:
    """Return the bytes that tensors to come can have on this rank's device."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return (available_bytes() or 2**40) / local_size
