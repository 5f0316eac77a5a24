"""Subgroups that move blocks through the communicator of their parent group, and ring hops made of exchanges."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bmburst.comm.messages import tensor_in
from bmburst.comm.protocol import BlockMover, Transfer
from bmburst.schedule.exchange import Block, Exchange, Move, make_exchange, placed


def hop(comm: BlockMover, tensors: Sequence[Tensor], shift: int) -> Transfer:
    """Send tensors to rank + shift through an outbox; see `BlockMover.ring`."""
    sent = [t.detach() for t in tensors]
    exchange, starts = hop_exchange(comm.rank, comm.size, shift % comm.size, tuple(t.nbytes for t in sent))
    outbox = comm.outbox(exchange.nbytes)
    for tensor, start in zip(sent, starts, strict=True):
        tensor_in(outbox, start, tensor.shape, tensor.dtype).copy_(tensor)
    received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in sent]
    return comm.pull(exchange, outbox, received)


@lru_cache(maxsize=1024)
def hop_exchange(rank: int, size: int, shift: int, sizes: tuple[int, ...]) -> tuple[Exchange, tuple[int, ...]]:
    """Return the exchange of a hop, and the byte offset of each tensor in the outbox."""
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


class Members:
    """A subgroup of the given ranks, which include this one. A `BlockMover`.

    The subgroups partition the group into parts of equal size, and every rank makes the same calls.

    Args:
        comm: The parent group.
        ranks: The parent ranks of this subgroup, in order.
    """

    def __init__(self, comm: BlockMover, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, tuple(ranks)
        self.rank, self.size, self.transport = self._ranks.index(comm.rank), len(self._ranks), comm.transport

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`. The parent's ring does not connect these ranks, so tensors go through an outbox."""
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
    """The subgroup `rank % n`, `rank % n + n`, ...: its ring is the parent's ring with hops of `n`."""

    def __init__(self, comm: BlockMover, n: int) -> None:
        super().__init__(comm, range(comm.rank % n, comm.size, n))
        self._n = n

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        return self._comm.ring(*tensors, shift=shift * self._n)


@lru_cache(maxsize=1024)
def _spread(exchange: Exchange, size: int, ranks: tuple[int, ...]) -> Exchange:
    """Return an exchange of the subgroup in the ranks of the parent group."""
    place = {rank: i for i, rank in enumerate(ranks)}
    return Exchange(
        ranks[exchange.rank],
        exchange.nbytes,
        sends=tuple(exchange.sends[place[peer]] if peer in place else () for peer in range(size)),
        receives=tuple(exchange.receives[place[peer]] if peer in place else () for peer in range(size)),
    )
