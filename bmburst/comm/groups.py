"""Makes communicators: over a process group, over BMTrain's communicator, over the world, or for a single rank.

A single rank has a `SingleRank`, which needs no library.
"""

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.collectives import BMTrainCommunicator, ProcessGroupCommunicator
from bmburst.comm.communicator import Communicator, CompletedTransfer, Transfer, device_of
from bmburst.comm.memory import MessageMover, contiguous
from bmburst.errors import UserError

Split = Callable[[Sequence[Sequence[int]]], CheckedCommunicator]
"""Maps a partition, the global ranks of every group, to the communicator of this rank's group."""


def communicator(group: object) -> CheckedCommunicator:
    """Return the communicator of a group.

    Args:
        group: A `torch.distributed` process group, a `bmtrain.nccl` communicator, a `Communicator`, or None for the
            world: BMTrain's if it was started, else torch.distributed's default group, else this process alone.

    Raises:
        UserError: `group` is none of these, or this rank is not in it; or a launcher started several ranks, and `group`
            is None before this process has joined them.
    """
    if group is None:
        group = _world()
    if isinstance(group, CheckedCommunicator):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # torch's result of new_group on ranks outside the group
        raise UserError(
            f"rank {dist.get_rank()} is not in the given process group\nfix: call this only on the ranks of the group"
        )
    if isinstance(group, dist.ProcessGroup):
        return _over_process_group(weakref.ref(group))
    nccl = sys.modules.get("bmtrain.nccl")
    if nccl is not None and isinstance(group, nccl.NCCLCommunicator):
        return _over_bmtrain(group)
    if isinstance(group, Communicator):
        return _checked(group)
    got = type(group).__name__
    raise UserError(
        f"group must be a torch.distributed process group, a bmt.nccl communicator or None, got {got}\n"
        "fix: pass mesh.sequence of a bmburst.Mesh, mesh.get_group(dimension) of a torch DeviceMesh"
    )


def bmtrain_groups() -> tuple[CheckedCommunicator, Split]:
    """Return BMTrain's world and a function that splits it. Every rank must call it with the same partition.

    Raises:
        UserError: BMTrain was not started.
    """
    config = _bmtrain_config()
    if config is None:
        raise UserError("BMTrain is not running\nfix: call bmburst.start() (or bmtrain.init_distributed()) first")
    world = _over_bmtrain(config["comm"])
    inner = world.inner
    assert isinstance(inner, BMTrainCommunicator)

    def split(groups: Sequence[Sequence[int]]) -> CheckedCommunicator:
        if [list(ranks) for ranks in groups] == _neighbours(world.size, bmtrain_tensor_degree()):
            return _over_bmtrain(config["tp_comm"])  # made by BMTrain already; another one would need more memory
        return _own_group(world, groups, lambda _: _checked(inner.split(groups)))

    return world, split


def bmtrain_tensor_degree() -> int:
    """Return BMTrain's tensor parallel degree; 1 if BMTrain was not started."""
    config = _bmtrain_config()
    return 1 if config is None else int(config["tp_size"])


def bmtrain_pipe_degree() -> int:
    """Return BMTrain's number of pipeline stages; 1 if BMTrain was not started."""
    config = _bmtrain_config()
    return 1 if config is None else int(config["pipe_size"])


def single_rank_group(world: CheckedCommunicator | None = None) -> CheckedCommunicator:
    """Return the communicator of a group of this rank only, for tensors on the device of `world`, or on CPUs.

    It uses no communication library: NCCL would allocate GPU memory for it.
    """
    device, always = (torch.device("cpu"), True) if world is None else (world.device, world.always)
    return CheckedCommunicator(SingleRank(device), device, always=always)


def process_groups() -> tuple[CheckedCommunicator, Split]:
    """Return torch.distributed's world and a function that splits it. Every rank must call it with the same partition.

    Raises:
        UserError: No process group was initialised.
    """
    if not dist.is_initialized():
        raise UserError("torch.distributed is not initialised\nfix: call torch.distributed.init_process_group first")
    world = communicator(dist.group.WORLD)

    def split(groups: Sequence[Sequence[int]]) -> CheckedCommunicator:
        def make(mine: Sequence[int]) -> CheckedCommunicator:
            made = [dist.new_group(list(ranks)) for ranks in groups]  # every rank makes all groups in the same order
            return communicator(made[groups.index(mine)])

        return _own_group(world, groups, make)

    return world, split


def _own_group(
    world: CheckedCommunicator, groups: Sequence[Sequence[int]], make: Callable[[Sequence[int]], CheckedCommunicator]
) -> CheckedCommunicator:
    """Return this rank's group of a partition. `make` is not called for groups of all ranks or of single ranks."""
    if len(groups) == 1:
        return world
    if all(len(ranks) == 1 for ranks in groups):
        return single_rank_group(world)
    return make(next(ranks for ranks in groups if world.rank in ranks))


def _neighbours(world_size: int, degree: int) -> list[list[int]]:
    """Return the ranks of BMTrain's tensor groups; an empty list if there are none."""
    starts = range(0, world_size, degree) if degree > 1 else ()
    return [list(range(first, first + degree)) for first in starts]


def _world() -> object:
    config = _bmtrain_config()
    if config is not None:
        return config["comm"]
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    ranks = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1:
        # Alone, each rank would take its part for the whole sequence, or the whole sequence for its part.
        raise UserError(
            f"a launcher started {ranks} ranks, but this process is not connected to the others\n"
            "fix: torch.distributed.init_process_group(), or bmburst.start() for BMTrain, before its first call"
        )
    return single_rank_group()


def is_connected() -> bool:
    """Return whether this process has joined other ranks, by BMTrain or torch.distributed."""
    return _bmtrain_config() is not None or (dist.is_available() and dist.is_initialized())


def _bmtrain_config() -> dict[str, Any] | None:
    """Return BMTrain's configuration if this program has imported and started it. Does not import it."""
    module = sys.modules.get("bmtrain.global_var")
    return module.config if module is not None and module.config.get("initialized") else None


# One communicator per group for all calls of attention: each may own streams and shared memory.
@lru_cache(maxsize=64)
def _over_process_group(reference: "weakref.ref[dist.ProcessGroup]") -> CheckedCommunicator:
    group = reference()
    assert group is not None  # the caller holds a reference
    return _checked(ProcessGroupCommunicator(group))


@lru_cache(maxsize=64)
def _over_bmtrain(handle: object) -> CheckedCommunicator:
    return _checked(BMTrainCommunicator(handle, on_host=not torch.cuda.is_available()))


def _checked(inner: Communicator) -> CheckedCommunicator:
    device = device_of(inner)
    return CheckedCommunicator(inner, device, always=device.type == "cpu")


class SingleRank(MessageMover):
    """`Communicator` of a rank alone: what it sends to itself arrives at once.

    Args:
        device: The device of its outboxes and inboxes.
    """

    rank, size, transport = 0, 1, "none"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        del shift
        return CompletedTransfer(contiguous(tensors))

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        return self.ring(tensor)

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        return self.ring(tensor[None])

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        return self.ring(tensor[0])

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        return self.ring(tensor.clone())

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], held: tuple[Tensor, ...]) -> Transfer:
        del held
        return CompletedTransfer((incoming[0].copy_(outgoing[0]),))


def in_group(work: Callable[[], int]) -> int:
    """Run `work` with torch.distributed initialized, and return its exit status.

    Raises:
        UserError: GLOO_SOCKET_IFNAME names a network interface that is not there.
    """
    from bmburst.host.stores import require_interfaces

    require_interfaces()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
    try:
        return work()
    finally:
        dist.destroy_process_group()
