"""Makes communicators: over a process group, over BMTrain's communicator, over the world, or for a single rank.

A single rank has a `LocalCommunicator`, which needs no library. Ranks that are threads, as in tests, have one each.
"""

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.collectives import BMTrainCommunicator, ProcessGroupCommunicator
from bmburst.comm.communicator import Communicator, Transfer, device_of
from bmburst.comm.memory import MessageMover
from bmburst.errors import UserError

Split = Callable[[Sequence[Sequence[int]]], CheckedCommunicator]
"""Maps a partition, the global ranks of every group, to the communicator of this rank's group."""


def communicator(group: object) -> CheckedCommunicator:
    """Return the communicator of a group.

    Args:
        group: A `torch.distributed` process group, a `bmtrain.nccl` communicator, a `Communicator`, or None for the
            world: BMTrain's if it was started, else torch.distributed's default group, else this process alone.

    Raises:
        UserError: `group` is none of these, or this rank is not in it.
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
    return CheckedCommunicator(LocalCommunicator(0, [[MessageQueue()]], device), device, always=always)


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
    return single_rank_group()


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


_SECONDS = 60.0


class LostRank(RuntimeError):
    """An expected message will not arrive: its sender has ended, or called another operation."""


class MessageQueue:
    """Messages from one rank to another, each with the number of the call that sent it."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[tuple[int, tuple[Tensor, ...]] | None] = SimpleQueue()
        self._early: dict[int, tuple[Tensor, ...]] = {}

    def put(self, call: int, tensors: Sequence[Tensor]) -> None:
        """Send copies of `tensors`."""
        copies = tuple(t.detach().clone(memory_format=torch.contiguous_format) for t in tensors)
        self._messages.put((call, copies))

    def close(self) -> None:
        """Tell the receiver that no more messages will come."""
        self._messages.put(None)

    def get(self, call: int) -> tuple[Tensor, ...]:
        """Return the tensors of the sender's call of that number; calls may be waited for in any order.

        Raises:
            LostRank: The sender closed the queue, or sent nothing for a minute.
        """
        while call not in self._early:
            try:
                message = self._messages.get(timeout=_SECONDS)
            except Empty:
                raise LostRank(f"no message from another rank for {_SECONDS:.0f} s: it skipped a call") from None
            if message is None:
                self.close()  # for the next receiver
                raise LostRank("no message from another rank: it ended, or skipped a call")
            number, tensors = message
            self._early[number] = tensors
        return self._early.pop(call)


@dataclass(slots=True)
class _Received:
    call: int
    queues: Sequence[MessageQueue]
    finish: Callable[[list[tuple[Tensor, ...]]], tuple[Tensor, ...]]
    arrived: tuple[Tensor, ...] | None = None

    def wait(self) -> tuple[Tensor, ...]:
        if self.arrived is None:
            self.arrived = self.finish([queue.get(self.call) for queue in self.queues])
        return self.arrived


class LocalCommunicator(MessageMover):
    """`Communicator` between threads of one process.

    Args:
        rank: The rank of this thread.
        queues: `queues[a][b]` carries messages from rank a to rank b.
        device: The device of its outboxes and inboxes.
    """

    transport = "threads"

    def __init__(
        self,
        rank: int,
        queues: Sequence[Sequence[MessageQueue]],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.rank, self.size, self._device = rank, len(queues), device
        self._to = queues[rank]
        self._from = [row[rank] for row in queues]
        self._calls = count()

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        call = next(self._calls)
        self._to[(self.rank + shift) % self.size].put(call, tensors)
        return _Received(call, [self._from[(self.rank - shift) % self.size]], lambda messages: messages[0])

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        return self._swapped(list(tensor), lambda parts: torch.stack(parts))

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        return self._swapped([tensor] * self.size, lambda parts: torch.stack(parts))

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        return self._swapped(list(tensor), lambda parts: torch.stack(parts).sum(0, dtype=tensor.dtype))

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        return self._swapped([tensor] * self.size, lambda parts: torch.stack(parts).sum(0, dtype=tensor.dtype))

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], held: tuple[Tensor, ...]) -> Transfer:
        del held  # sent tensors are copied at once

        def arrive(parts: list[Tensor]) -> Tensor:
            for buffer, part in zip(incoming, parts, strict=True):
                buffer.copy_(part)
            return incoming[0]

        return self._swapped(outgoing, arrive)

    def _swapped(self, parts: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor]) -> Transfer:
        call = next(self._calls)
        for queue, part in zip(self._to, parts, strict=True):
            queue.put(call, (part,))
        return _Received(call, self._from, lambda messages: (join([message[0] for message in messages]),))


def in_group(work: Callable[[], int]) -> int:
    """Run `work` with torch.distributed initialized, and return its exit status."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
    try:
        return work()
    finally:
        dist.destroy_process_group()
