"""A `BlockMover` that counts the bytes that a rank receives."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bmburst.comm.communicator import Transfer
from bmburst.schedule.exchange import Exchange


class Counting:
    """Passes every call on to another mover."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.received = 0  # bytes from other ranks so far

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        if shift % self._comm.size:
            self.received += sum(tensor.nbytes for tensor in tensors)
        return self._comm.ring(*tensors, shift=shift)

    def all_to_all_here(self, tensor: Tensor) -> Tensor:
        """See `OnCurrentStream.all_to_all_here`."""
        self.received += tensor.nbytes // self._comm.size * (self._comm.size - 1)
        received: Tensor = self._comm.all_to_all_here(tensor)
        return received

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        self.received += _from_others(exchange)
        return self._comm.pull(exchange, outbox, targets, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        self.received += _from_others(exchange)
        return self._comm.push(exchange, sources, inbox, lane)


def _from_others(exchange: Exchange) -> int:
    others = (moves for peer, moves in enumerate(exchange.receives) if peer != exchange.rank)
    return sum(move.source.nbytes for moves in others for move in moves)
