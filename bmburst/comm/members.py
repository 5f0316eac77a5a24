"""Some ranks of a group, as a group: no communicator of its own, the same transport."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bmburst.comm.exchange import Block, Exchange, Move, make_exchange, placed
from bmburst.comm.messages import tensor_in
from bmburst.comm.protocol import BlockMover, Transfer


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
        sent = [t.detach() for t in tensors]
        exchange, starts = _hop(self.rank, self.size, shift % self.size, tuple(t.nbytes for t in sent))
        outbox = self.outbox(exchange.nbytes)
        for tensor, start in zip(sent, starts, strict=True):
            tensor_in(outbox, start, tensor.shape, tensor.dtype).copy_(tensor)
        received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in sent]
        return self.pull(exchange, outbox, received)

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


@lru_cache(maxsize=1024)
def _hop(rank: int, size: int, shift: int, sizes: tuple[int, ...]) -> tuple[Exchange, tuple[int, ...]]:
    """Return the exchange of a hop, and where each tensor starts in the outbox."""
    starts, total = placed(sizes)

    def route(source: int, target: int) -> list[Move]:
        if (source + shift) % size != target:
            return []
        return [
            Move(Block(start, nbytes), Block(0, nbytes, buffer=i))
            for i, (start, nbytes) in enumerate(zip(starts, sizes, strict=True))
            if nbytes
        ]

    return make_exchange(rank, size, total, route), starts
