"""A hop of a ring as an exchange, for groups that move blocks."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bmburst.comm.messages import tensor_in
from bmburst.comm.protocol import BlockMover, Transfer
from bmburst.schedule.exchange import Block, Exchange, Move, make_exchange, placed


def hop(comm: BlockMover, tensors: Sequence[Tensor], shift: int) -> Transfer:
    """Pass tensors to rank + shift through an outbox; see `BlockMover.ring`."""
    sent = [t.detach() for t in tensors]
    exchange, starts = hop_exchange(comm.rank, comm.size, shift % comm.size, tuple(t.nbytes for t in sent))
    outbox = comm.outbox(exchange.nbytes)
    for tensor, start in zip(sent, starts, strict=True):
        tensor_in(outbox, start, tensor.shape, tensor.dtype).copy_(tensor)
    received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in sent]
    return comm.pull(exchange, outbox, received)


@lru_cache(maxsize=1024)
def hop_exchange(rank: int, size: int, shift: int, sizes: tuple[int, ...]) -> tuple[Exchange, tuple[int, ...]]:
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
