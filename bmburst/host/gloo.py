"""Implements a NCCL communicator over gloo: collectives, and messages that stay in order between two ranks."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.host.cuda import view

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
}
_TAGS = 1 << 31  # gloo's tags are non-negative 32-bit integers
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class HostRuntimeError(RuntimeError):
    """An exchange between ranks failed: a rank ended, or nothing arrived within BMBURST_TIMEOUT."""


class Operation:
    """A pending operation, and a function to call after it.

    Args:
        what: Its name, for messages.
        work: Gloo's handle; None: nothing is pending.
        then: Called once, when the operation is complete.
        address: Address of the memory that `finish` writes to.
        nbytes: Bytes of that memory; 0: of no interest to later operations.
    """

    def __init__(
        self, what: str, work: dist.Work | None, then: Callable[[], None], address: int = 0, nbytes: int = 0
    ) -> None:
        self._what = what
        self._work = work
        self._then = then
        self._address = address
        self._nbytes = nbytes
        self.finished = False

    def finish(self) -> None:
        """Block until the operation is complete; HostRuntimeError if it failed. A second call does nothing."""
        if self.finished:
            return
        if self._work is not None:
            _wait(self._what, self._work)
        self._then()
        self.finished, self._work = True, None

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Return whether `finish` writes to a range of memory."""
        return address < self._address + self._nbytes and self._address < address + nbytes


class GlooCommunicator:
    """The communicator of one rank of a group.

    Args:
        store: A torch.distributed `Store` that only the ranks of this group use. Not used if `size` is 1.
        rank: This rank.
        size: Number of ranks.
        options: A `ProcessGroupGloo._Options`. Not used if `size` is 1.
    """

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self.rank = rank
        self.size = size
        self._sent = [0] * size
        self._received = [0] * size
        self._to_self: dict[int, Tensor] = {}
        self._outbox: _Outbox | None = None
        self._gloo: Any = None
        if size > 1:
            gloo: Any = dist.ProcessGroupGloo
            self._gloo = gloo(store, rank, size, options)

    def send(self, data: Tensor, peer: int) -> Operation:
        """Send a copy of `data` (uint8) to `peer` without waiting for the receive."""
        copy, number = data.clone(), self._sent[peer]
        self._sent[peer] = (number + 1) % _TAGS
        if peer == self.rank:
            self._to_self[number] = copy
        else:
            if self._outbox is None:
                self._outbox = _Outbox(f"rank {self.rank} of {self.size}", self._gloo)
            self._outbox.put(self._start(f"send to rank {peer}", lambda gloo: gloo.send([copy], peer, number)), copy)
        return _done()

    def receive(self, data: Tensor, peer: int, *, later: bool) -> Operation:
        """Receive the next message from `peer` into `data` (uint8).

        Args:
            data: Its memory must stay allocated until the operation has finished.
            peer: Rank of the sender.
            later: Write to `data` only in `finish`. Otherwise `data` may be written to at any time before that.
        """
        number = self._received[peer]
        self._received[peer] = (number + 1) % _TAGS
        address, nbytes = data.data_ptr(), data.numel()
        if peer == self.rank:
            return Operation("", None, lambda: self._take_own(data, number), address, nbytes)
        what = f"receive from rank {peer}"
        arriving = torch.empty_like(data) if later else data
        work = self._start(what, lambda gloo: gloo.recv([arriving], peer, number))
        # The operation may outlive the memory of `data`, so it keeps the address and not a view.
        then = (lambda: _copy_to(address, arriving)) if later else _nothing
        return Operation(self._name(what), work, then, address, nbytes)

    def all_reduce(self, source: Tensor, target: Tensor, reduction: str) -> Operation:
        """Reduce over all ranks. fp16 and bf16 are accumulated in fp32."""
        total = source.float() if source.dtype in _LOW_PRECISION else target
        if total is target:
            _copy(source, target)

        def store() -> None:
            if reduction == "avg":
                _average(total, self.size)
            _copy(total, target)

        if self._gloo is None:
            return _done(store)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[reduction]
        work = self._start("all_reduce", lambda gloo: gloo.allreduce([total], options))
        return Operation(self._name("all_reduce"), work, store)

    def reduce(self, source: Tensor, target: Tensor, reduction: str, root: int) -> Operation:
        """Reduce over all ranks into `target` on rank `root`. fp16 and bf16 are accumulated in fp32."""
        total = source.float() if source.dtype in _LOW_PRECISION else source.clone()

        def store() -> None:
            if self.rank == root:
                if reduction == "avg":
                    _average(total, self.size)
                target.copy_(total)

        if self._gloo is None:
            return _done(store)
        options: Any = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = REDUCTIONS[reduction], root, 0
        work = self._start("reduce", lambda gloo: gloo.reduce([total], options))
        return Operation(self._name("reduce"), work, store)

    def reduce_scatter(self, source: Tensor, target: Tensor, reduction: str) -> Operation:
        """Reduce `[size, n]` over all ranks in rank order. This rank gets row `rank`.

        Rows are sent in their own dtype and then reduced. fp16 and bf16 are accumulated in fp32, and take half the
        bytes that a sum in fp32 would.
        """
        if self._gloo is None:
            return _done(lambda: _copy(source[0], target))
        rows = torch.empty_like(source)
        ours, theirs = rows.view(torch.uint8), source.contiguous().view(torch.uint8)
        options = dist.AllToAllOptions()
        work = self._start("reduce_scatter", lambda gloo: gloo.alltoall_base(ours, theirs, [], [], options))
        return Operation(self._name("reduce_scatter"), work, lambda: _copy(_fold(rows, reduction), target))

    def all_gather(self, source: Tensor, target: Tensor) -> Operation:
        """Write the `source` of rank r to row r of `target` (uint8, `[size, n]`), on all ranks."""
        if self._gloo is None:
            return _done(lambda: _copy(source, target[0]))
        rows = list(target.unbind())  # gloo gathers into a buffer of its own, so `source` may be one of the rows
        work = self._start("all_gather", lambda gloo: gloo.allgather([rows], [source]))
        return Operation(self._name("all_gather"), work, _nothing)

    def broadcast(self, source: Tensor, target: Tensor, root: int) -> Operation:
        """Write the `source` of rank `root` to `target` on all ranks (uint8)."""
        if self.rank == root:
            _copy(source, target)
        if self._gloo is None:
            return _done()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = self._start("broadcast", lambda gloo: gloo.broadcast([target], options))
        return Operation(self._name("broadcast"), work, _nothing)

    def close(self, patience: float) -> None:
        """Wait at most `patience` seconds for pending sends, then close the connections."""
        if self._outbox is not None:
            self._outbox.close(patience)
        self._outbox = self._gloo = None

    def _start(self, what: str, launch: Callable[[Any], dist.Work]) -> dist.Work:
        if self._gloo is None:
            raise HostRuntimeError(f"{self._name(what)}: the communicator is closed")
        if self._outbox is not None:
            self._outbox.check()
        try:
            return launch(self._gloo)
        except RuntimeError as error:
            raise HostRuntimeError(f"{self._name(what)}: {_first_line(error)}") from None

    def _take_own(self, data: Tensor, number: int) -> None:
        if number not in self._to_self:
            raise HostRuntimeError(f"{self._name('receive from itself')}: nothing was sent")
        _copy(self._to_self.pop(number), data)

    def _name(self, what: str) -> str:
        return f"rank {self.rank} of {self.size}: {what}"


class _Outbox:
    """Holds the handles of pending sends: gloo drops a message whose handle is freed."""

    def __init__(self, sender: str, gloo: object) -> None:
        self._sender = sender
        # The thread holds a reference while it waits. If the last one were dropped earlier, the connections would close
        # and end its wait. If Python is finalizing by then, the thread cannot take the GIL, and the process aborts.
        self._gloo = gloo
        self._under_way: queue.SimpleQueue[tuple[dist.Work, Tensor] | None] = queue.SimpleQueue()
        self._error = ""
        self._thread = threading.Thread(target=self._watch, name="bmburst-outbox", daemon=True)
        self._thread.start()

    def put(self, work: dist.Work, data: Tensor) -> None:
        self._under_way.put((work, data))

    def check(self) -> None:
        """Raise HostRuntimeError if a send failed."""
        if self._error:
            raise HostRuntimeError(self._error)

    def close(self, patience: float) -> None:
        self._under_way.put(None)
        self._thread.join(patience)

    def _watch(self) -> None:
        while (entry := self._under_way.get()) is not None:
            try:
                _wait(f"{self._sender}: send", entry[0])
            except HostRuntimeError as error:
                self._error = str(error)


def _wait(what: str, work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise HostRuntimeError(f"{what}: {_first_line(error)}") from None


def _first_line(error: RuntimeError) -> str:
    """Return the first sentence of gloo's message, without the source location."""
    line = str(error).partition("\n")[0].partition(". ")[0]
    return line.partition("] ")[2] or line if line.startswith("[/") else line


def _fold(rows: Tensor, reduction: str) -> Tensor:
    """Reduce `[ranks, n]` over its rows."""
    wide = rows.float() if rows.dtype in _LOW_PRECISION else rows
    if reduction in ("max", "min"):
        return wide.amax(0) if reduction == "max" else wide.amin(0)
    total = wide[0].clone()
    for row in wide[1:]:
        total = total.mul_(row) if reduction == "prod" else total.add_(row)
    if reduction == "avg":
        _average(total, len(rows))
    return total


def _average(total: Tensor, size: int) -> None:
    """Divide a sum, in place. Integers are rounded toward zero, as in NCCL."""
    total.div_(size, rounding_mode=None if total.is_floating_point() else "trunc")


def _copy_to(address: int, data: Tensor) -> None:
    _copy(data, view(address, data.numel(), torch.uint8))


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _nothing() -> None:
    """Do nothing."""


def _done(then: Callable[[], None] = _nothing) -> Operation:
    """Return an operation without pending transfers, of which only `then` remains to be called."""
    return Operation("", None, then)
