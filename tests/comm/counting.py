"""A group that counts the bytes and the calls of a rank."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import Transfer
from bmburst.schedule.exchange import Exchange


class Counting:
    """Passes every call on to another group.

    Attributes:
        sent: Bytes to other ranks so far.
        received: Bytes from other ranks so far.
        calls: Number of transfers so far.
        gathered: Bytes from other ranks by `all_gather`, which also compares calls: they are no part of the others.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.sent = self.received = self.calls = self.gathered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _count(self, sent: int, received: int) -> None:
        self.sent, self.received, self.calls = self.sent + sent, self.received + received, self.calls + 1

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        if shift % self._comm.size:
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._count(nbytes, nbytes)
        return self._comm.ring(*tensors, shift=shift)

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        self.gathered += tensor.nbytes * (self._comm.size - 1)
        return self._comm.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        nbytes = tensor.nbytes // self._comm.size * (self._comm.size - 1)
        self._count(nbytes, nbytes)
        return self._comm.all_to_all(tensor)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Refuse: nothing of attention may be reduced."""
        raise AssertionError(tensor)

    reduce_scatter = all_reduce

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        self._count(exchange.bytes_sent, _from_others(exchange))
        return self._comm.pull(exchange, outbox, targets, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        self._count(exchange.bytes_sent, _from_others(exchange))
        return self._comm.push(exchange, sources, inbox, lane)


def _from_others(exchange: Exchange) -> int:
    others = (moves for peer, moves in enumerate(exchange.receives) if peer != exchange.rank)
    return sum(move.source.nbytes for moves in others for move in moves)


def counted(comm: CheckedCommunicator) -> tuple[CheckedCommunicator, Counting]:
    """Return a group of the same ranks, whose first calls alone are compared, and its counts."""
    counting = Counting(comm.inner)
    return CheckedCommunicator(counting, comm.device, always=False), counting
