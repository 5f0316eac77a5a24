"""The NCCL half of `bmtrain.C`: the names, arguments and order of the C functions, over gloo.

As in NCCL, what is called between ncclGroupStart and the outermost ncclGroupEnd of a thread is launched together
there, and messages between two ranks of a communicator match in the order in which they were called. Unlike NCCL, a
collective is complete when its call, or the group that holds it, returns, and so is a receive on the default stream.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bmburst.runtime.host.gloo import Communicator, Operation
from bmburst.runtime.host.memory import view
from bmburst.runtime.host.rendezvous import Rendezvous
from bmburst.runtime.host.streams import Stream, Streams

# ncclDataType_t and ncclRedOp_t in nccl.h, as far as bmtrain.nccl names them. Its ncclBool is ncclInt8.
DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
OPERATORS = ("sum", "prod", "max", "min", "avg")


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call that has not been launched yet."""

    launch: Callable[[], Operation]
    stream: Stream
    touches: tuple[tuple[int, int], ...]  # address and bytes of what it reads and writes
    later: bool = False  # it may still be under way when the call returns


class _Group(threading.local):
    """The open group of each thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class Nccl:
    """NCCL's functions as `bmtrain.C` offers them; errors are raised, not returned."""

    def __init__(self, streams: Streams, rendezvous: Rendezvous) -> None:
        self._streams = streams
        self._rendezvous = rendezvous
        self._communicators: dict[int, Communicator] = {}
        self._next_handle = 1
        self._group = _Group()
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is around every launch, which blocks the host: a measurement."""

    def ncclGetUniqueId(self) -> bytes:
        """Return what one rank makes and every rank of a new communicator passes to `ncclCommInitRank`."""
        return self._rendezvous.unique_id()

    def ncclCommInitRank(self, unique_id: bytes, size: int, rank: int) -> int:
        """Meet the other ranks; return a handle."""
        if size > 1:
            communicator = Communicator(self._rendezvous.open(unique_id), rank, size, self._rendezvous.options())
        else:
            communicator = Communicator(None, rank, size, None)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._communicators[handle] = communicator
        return handle

    def ncclCommDestroy(self, handle: int) -> None:
        """Close a communicator once what was sent on it has left."""
        self._of(handle)
        self._communicators.pop(handle).close(self._rendezvous.timeout.total_seconds())

    def ncclCommCount(self, handle: int) -> int:
        """Return the number of ranks."""
        return self._of(handle).size

    def ncclCommUserRank(self, handle: int) -> int:
        """Return this process's rank."""
        return self._of(handle).rank

    def ncclGroupStart(self) -> None:
        """Hold back what this thread calls from now on. Groups nest."""
        self._group.depth += 1

    def ncclGroupEnd(self) -> None:
        """Launch together what was held back, at the end of the outermost group."""
        if self._group.depth == 0:
            raise RuntimeError("ncclGroupEnd without ncclGroupStart")
        self._group.depth -= 1
        if self._group.depth == 0:
            calls, self._group.calls = self._group.calls, []
            with self.waiting():
                _run(calls)

    def ncclAllReduce(self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: int) -> None:
        """Reduce over all ranks, on all ranks."""
        communicator, out = self._of(comm), _tensor(target, count, dtype)
        data, reduction = _tensor(source, count, dtype), _operator(op)
        self._call(lambda: communicator.all_reduce(data, out, reduction), stream, data, out)

    def ncclReduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int
    ) -> None:
        """Reduce over all ranks, on rank `root`."""
        communicator, reduction = self._of(comm), _operator(op)
        data = _tensor(source, count, dtype)
        out = _tensor(target, count, dtype) if communicator.rank == root else data  # not written elsewhere
        self._call(lambda: communicator.reduce(data, out, reduction, root), stream, data, out)

    def ncclBroadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        """Copy from rank `root` to all ranks."""
        communicator, out = self._of(comm), _bytes(target, count, dtype)
        data = _bytes(source, count, dtype) if communicator.rank == root else out
        self._call(lambda: communicator.broadcast(data, out, root), stream, data, out)

    def ncclAllGather(self, source: int, target: int, count: int, dtype: int, comm: int, stream: int) -> None:
        """Gather `count` elements of each rank, in order of ranks, on all ranks."""
        communicator = self._of(comm)
        data, out = _bytes(source, count, dtype), _bytes(target, count * communicator.size, dtype)
        rows = out.view(communicator.size, -1)
        self._call(lambda: communicator.all_gather(data, rows), stream, data, out)

    def ncclReduceScatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        """Reduce over all ranks; rank r gets the r-th `count` elements."""
        communicator, reduction = self._of(comm), _operator(op)
        data, out = _tensor(source, count * communicator.size, dtype), _tensor(target, count, dtype)
        rows = data.view(communicator.size, -1)
        self._call(lambda: communicator.reduce_scatter(rows, out, reduction), stream, data, out)

    def ncclSend(self, source: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        """Send to rank `peer`; returns at once, and the memory may be reused."""
        communicator, data = self._with(comm, peer), _bytes(source, count, dtype)
        self._call(lambda: communicator.send(data, peer), stream, data)

    def ncclRecv(self, target: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        """Receive from rank `peer`; on a stream that is not the default one, whoever waits for the stream waits."""
        communicator, out = self._with(comm, peer), _bytes(target, count, dtype)
        later = self._streams.of(stream) is not self._streams.default
        self._call(lambda: communicator.receive(out, peer, later=later), stream, out, later=later)

    def close(self, patience: float) -> None:
        """Close every communicator; wait for what is being sent, for at most `patience` seconds each."""
        for communicator in self._communicators.values():
            communicator.close(patience)
        self._communicators.clear()

    def _call(self, launch: Callable[[], Operation], stream: int, *data: Tensor, later: bool = False) -> None:
        if data[0].numel() == 0:
            return  # as NCCL: nothing moves, on no rank
        touches = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in data)
        call = _Call(launch=launch, stream=self._streams.of(stream), touches=touches, later=later)
        if self._group.depth:
            self._group.calls.append(call)
        else:
            with self.waiting():
                _run([call])

    def _with(self, handle: int, peer: int) -> Communicator:
        communicator = self._of(handle)
        if not 0 <= peer < communicator.size:
            raise RuntimeError(f"NCCL: rank {peer} is not one of this communicator's {communicator.size} ranks")
        return communicator

    def _of(self, handle: int) -> Communicator:
        if handle not in self._communicators:
            raise RuntimeError(f"NCCL: {handle} is not an open communicator")
        return self._communicators[handle]


def _run(calls: list[_Call]) -> None:
    """Launch all calls, then wait for those that must be complete."""
    for call in calls:
        for address, nbytes in call.touches:
            call.stream.settle(address, nbytes)
    started = [(call, call.launch()) for call in calls]
    for call, operation in started:
        if call.later:
            call.stream.add(operation)
    for call, operation in started:
        if not call.later:
            operation.finish()


def _tensor(address: int, count: int, dtype: int) -> Tensor:
    if dtype not in DTYPES:
        raise RuntimeError(f"NCCL: data type {dtype} is not one of those BMTrain uses: {sorted(DTYPES)}")
    return view(address, count, DTYPES[dtype])


def _bytes(address: int, count: int, dtype: int) -> Tensor:
    return _tensor(address, count, dtype).view(torch.uint8)


def _operator(op: int) -> str:
    if not 0 <= op < len(OPERATORS):
        raise RuntimeError(f"NCCL: operator {op} is not one of 0 to {len(OPERATORS) - 1}")
    return OPERATORS[op]
