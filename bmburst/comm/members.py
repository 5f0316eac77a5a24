"""Some ranks of a group, as a group: no communicator of its own, the same transport."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from bmburst.comm.hop import hop
from bmburst.comm.protocol import BlockMover, Transfer
from bmburst.schedule.exchange import Exchange


class Members:
    """The given ranks of a group, this one among them. Every rank is in one such part, and all make the same calls.

    Satisfies `BlockMover`. Parts are of equal size.

    Args:
        comm: The group.
        ranks: The ranks of this part, in its order.
    """

    def __init__(self, comm: BlockMover, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, tuple(ranks)
        self.rank, self.size, self.transport = self._ranks.index(comm.rank), len(self._ranks), comm.transport

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`. A part of a ring is no ring of the group's: tensors go through an outbox."""
        return hop(self, tensors, shift)

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`."""
        return self._comm.outbox(nbytes, lane)

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        return self._comm.pull(self._spread(exchange), outbox, targets, lane)

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.inbox`."""
        return self._comm.inbox(nbytes, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        return self._comm.push(self._spread(exchange), sources, inbox, lane)

    def _spread(self, exchange: Exchange) -> Exchange:
        return _spread(exchange, self._comm.size, self._ranks)


class EveryNth(Members):
    """The ranks `rank % n`, `rank % n + n`, ... of a group, whose ring is one of the group's with longer hops."""

    def __init__(self, comm: BlockMover, n: int) -> None:
        super().__init__(comm, range(comm.rank % n, comm.size, n))
        self._n = n

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        return self._comm.ring(*tensors, shift=shift * self._n)


@lru_cache(maxsize=1024)
def _spread(exchange: Exchange, size: int, ranks: tuple[int, ...]) -> Exchange:
    """Return the exchange between ranks of the whole group."""
    place = {rank: i for i, rank in enumerate(ranks)}
    return Exchange(
        ranks[exchange.rank],
        exchange.nbytes,
        sends=tuple(exchange.sends[place[peer]] if peer in place else () for peer in range(size)),
        receives=tuple(exchange.receives[place[peer]] if peer in place else () for peer in range(size)),
    )
