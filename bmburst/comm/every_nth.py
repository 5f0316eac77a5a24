"""Every n-th rank of a group, as a group: no communicator of its own, the same transport."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from bmburst.comm.exchange import Exchange
from bmburst.comm.protocol import BlockMover, Transfer


class EveryNth:
    """The ranks `rank % n`, `rank % n + n`, ... of a group. All n such groups must make the same calls.

    Satisfies `BlockMover`.
    """

    def __init__(self, comm: BlockMover, n: int) -> None:
        self._comm, self._n = comm, n
        self.rank, self.size, self.transport = comm.rank // n, comm.size // n, comm.transport

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        return self._comm.ring(*tensors, shift=shift * self._n)

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`."""
        return self._comm.outbox(nbytes, lane)

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        return self._comm.pull(_spread(exchange, self._comm.rank, self._n), outbox, targets, lane)

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.inbox`."""
        return self._comm.inbox(nbytes, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        return self._comm.push(_spread(exchange, self._comm.rank, self._n), sources, inbox, lane)


@lru_cache(maxsize=1024)
def _spread(exchange: Exchange, rank: int, n: int) -> Exchange:
    """Return the exchange between ranks of the whole group."""
    size = len(exchange.sends) * n
    mine = [peer // n if peer % n == rank % n else None for peer in range(size)]
    return Exchange(
        rank,
        exchange.nbytes,
        sends=tuple(() if peer is None else exchange.sends[peer] for peer in mine),
        receives=tuple(() if peer is None else exchange.receives[peer] for peer in mine),
    )
