"""The recompute policy of a run: "auto" decided from the memory that is free, and room in the hosts' memory checked."""

import sys
from dataclasses import replace

import torch

from bmburst.amounts import GIB
from bmburst.comm.objects import gather_objects
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from bmburst.plan.choice import choose
from bmburst.plan.hardware import hardware_like
from bmburst.plan.memory import HOST_SHARE, memory_of
from bmburst.recompute_policy import AUTO, POLICIES, Policy
from bmburst.train.config import TrainConfig
from bmburst.train.host_memory import available_bytes
from bmburst.train.planned import planned


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
        choice = choose(way, hardware, free, layout=config.parallel.layout, policies=policies)
        if mesh.rank == 0:
            sys.stderr.write(f"{choice.said}\n")
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
