"""An exchange over transports that send messages: one message to each rank, laid out and unpacked on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmburst.comm.exchange import Block, Exchange
from bmburst.comm.protocol import Transfer

Swap = Callable[[Sequence[Tensor], Sequence[Tensor]], Transfer]
"""Starts sending message r to rank r and receiving the message of rank r into buffer r; empty ones do not move."""


def exchange_messages(exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], swap: Swap) -> Transfer:
    """Start an exchange as messages; what a rank keeps for itself is copied at once."""
    outgoing = [_message(outbox, blocks) for blocks in exchange.sends]
    pieces = [[_view(targets[move.target.buffer], move.target) for move in moves] for moves in exchange.receives]
    kept, own = outgoing[exchange.rank], pieces[exchange.rank]
    _scatter(kept, own)
    outgoing[exchange.rank], pieces[exchange.rank] = outbox.new_empty(0), []
    incoming = [_buffer(outbox, views) for views in pieces]
    return _Scattering(swap(outgoing, incoming), incoming, pieces, tuple(targets))


@dataclass(slots=True)
class _Scattering:
    """Messages under way; when they are here, they are copied to their places."""

    transfer: Transfer
    incoming: list[Tensor]
    pieces: list[list[Tensor]]
    targets: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        self.transfer.wait()
        for message, views in zip(self.incoming, self.pieces, strict=True):
            _scatter(message, views)
        self.incoming, self.pieces = [], []
        return self.targets


def _scatter(message: Tensor, views: list[Tensor]) -> None:
    start = 0
    for view in views:
        part = message[start : start + view.numel()]
        start += view.numel()
        if part.data_ptr() != view.data_ptr():  # else it arrived in place
            view.copy_(part.view(view.shape))


def _buffer(like: Tensor, views: list[Tensor]) -> Tensor:
    """Return where a message may arrive: in place if it is one run of bytes."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    return like.new_empty(sum(view.numel() for view in views))


def _message(outbox: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    """Return the blocks' bytes one after another, without a copy where they are so in the outbox."""
    if not blocks:
        return outbox.new_empty(0)
    ends = [block.offset + block.nbytes for block in blocks]
    starts = [block.offset for block in blocks]
    if all(block.dense for block in blocks) and starts[1:] == ends[:-1]:
        return outbox[starts[0] : ends[-1]]
    return torch.cat([_view(outbox, block).reshape(-1) for block in blocks])


def _view(tensor: Tensor, block: Block) -> Tensor:
    """Return the block's bytes as uint8 `[rows, width]`, in the memory of a contiguous tensor."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    return flat.as_strided(
        (block.rows, block.width), (block.pitch or block.width, 1), flat.storage_offset() + block.offset
    )
