"""Runs a function on several ranks, each a thread of this process."""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import Transfer
from bmburst.comm.groups import single_rank_group
from bmburst.comm.memory import MessageMover
from bmburst.mesh import Mesh, MeshShape

T = TypeVar("T")
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


class ThreadCommunicator(MessageMover):
    """`Communicator` between threads of one process.

    Args:
        rank: The rank of this thread.
        queues: `queues[a][b]` carries messages from rank a to rank b.
    """

    transport = "threads"

    def __init__(self, rank: int, queues: Sequence[Sequence[MessageQueue]]) -> None:
        self.rank, self.size, self._device = rank, len(queues), torch.device("cpu")
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


def run_ranks(size: int, body: Callable[..., T], *args: object) -> list[T]:
    """Call `body(communicator, *args)` on `size` ranks, one thread each, and return all results.

    Raises:
        Exception: The failure of the lowest failed rank, after all ranks have ended. `LostRank` is raised only if no
            rank failed in another way.
    """
    queues = [[MessageQueue() for _ in range(size)] for _ in range(size)]

    def run(rank: int) -> T:
        try:
            return body(CheckedCommunicator(ThreadCommunicator(rank, queues), torch.device("cpu")), *args)
        finally:
            for queue in queues[rank]:
                queue.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    failed = [future for future in futures if future.exception() is not None]
    for future in sorted(failed, key=lambda future: isinstance(future.exception(), LostRank)):
        future.result()
    return [future.result() for future in futures]


def on_ranks(
    size: int | None = None, run: Callable[..., object] = run_ranks, **options: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that every one of `size` ranks runs: its first argument is the rank's communicator.

    Args:
        size: Number of ranks; None: the test's argument `size`.
        run: Calls a function on that many ranks, with what the first argument is to be.
        options: Options of `run`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def start(**arguments: Any) -> None:
            run(arguments["size"] if size is None else size, partial(test, **arguments), **options)

        signature = inspect.signature(test)
        _, *given = signature.parameters.values()  # what pytest gives
        start.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
        return start

    return decorate


def past_first_calls(comm: CheckedCommunicator) -> CheckedCommunicator:
    """Return a communicator whose first calls, which ranks compare on GPUs too, are over."""
    comm._state.compared = defaultdict(lambda: sys.maxsize)
    return comm


def mesh_of(comm: CheckedCommunicator | None = None) -> Mesh:
    """Return the mesh of ranks that share one sequence; None: of one rank."""
    comm = comm or single_rank_group()
    return Mesh(MeshShape(1, comm.size, 1), comm.rank, comm, comm, single_rank_group())
