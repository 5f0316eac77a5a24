"""An exchange over transports that send messages: one message to each rank, laid out and unpacked on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmburst.comm.exchange import Block, Exchange, Move
from bmburst.comm.protocol import Transfer

Swap = Callable[[Sequence[Tensor], Sequence[Tensor]], Transfer]
"""Starts sending message r to rank r and receiving the message of rank r into buffer r; empty ones do not move."""


def exchange_messages(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor], swap: Swap) -> Transfer:
    """Start an exchange as messages; what a rank keeps for itself is copied at once."""
    copy_own(exchange, sources, targets)
    nothing = torch.empty(0, dtype=torch.uint8, device=sources[0].device)
    outgoing, incoming, places = [], [], []
    for peer, (sent, received) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
        views = [] if peer == exchange.rank else [view_of(targets[m.target.buffer], m.target) for m in received]
        places.append(views)
        outgoing.append(nothing if peer == exchange.rank else _message(sources, sent, nothing))
        incoming.append(_buffer(views, nothing))
    return _Scattering(swap(outgoing, incoming), incoming, places, tuple(targets))


def copy_own(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy, on the current stream, what a rank keeps for itself."""
    moves = exchange.receives[exchange.rank]
    if moves:
        from_bytes, to_bytes = ([_storage_of(t) for t in tensors] for tensors in (sources, targets))
        pairs = [
            _widened(_block(*to_bytes[target.buffer], target), _block(*from_bytes[source.buffer], source))
            for source, target in moves
        ]
        torch._foreach_copy_([into for into, _ in pairs], [what for _, what in pairs])


def view_of(tensor: Tensor, block: Block) -> Tensor:
    """Return the block's bytes as uint8 `[rows, width]`, in the tensor's memory."""
    return _block(*_storage_of(tensor), block)


def _storage_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the whole memory behind a tensor as uint8 `[bytes]`, and where its first element is."""
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return data, int(tensor.storage_offset()) * tensor.element_size()


def _block(data: Tensor, start: int, block: Block) -> Tensor:
    assert block.rows == 1 or not block.pitch or block.pitch >= block.width
    return data.as_strided((block.rows, block.width), (block.pitch or block.width, 1), start + block.offset)


def _widened(*views: Tensor) -> list[Tensor]:
    """Return views of equal bytes in the widest elements that all of them allow: a copy is as fast as it has few."""
    for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if all(n % size == 0 for v in views for n in (v.data_ptr(), v.storage_offset(), v.shape[1], v.stride(0))):
            return [v.view(dtype) for v in views]
    return list(views)


@dataclass(slots=True)
class _Scattering:
    """Messages under way; when they are here, they are copied to their places."""

    transfer: Transfer
    incoming: list[Tensor]
    places: list[list[Tensor]]
    targets: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        self.transfer.wait()
        for message, views in zip(self.incoming, self.places, strict=True):
            start = 0
            for view in views:
                part = message[start : start + view.numel()].view(view.shape)
                start += view.numel()
                if part.data_ptr() != view.data_ptr():  # else it arrived in place
                    into, what = _widened(view, part)
                    into.copy_(what)
        self.incoming, self.places = [], []
        return self.targets


def _buffer(views: list[Tensor], nothing: Tensor) -> Tensor:
    """Return where a message may arrive: in place if it is one run of bytes."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    return nothing.new_empty(sum(view.numel() for view in views))


def _message(sources: Sequence[Tensor], moves: tuple[Move, ...], nothing: Tensor) -> Tensor:
    """Return the blocks' bytes one after another, without a copy where they are so already."""
    if not moves:
        return nothing
    blocks = [move.source for move in moves]
    ends = [(block.buffer, block.offset + block.nbytes) for block in blocks]
    starts = [(block.buffer, block.offset) for block in blocks]
    if all(block.dense for block in blocks) and starts[1:] == ends[:-1]:
        first = blocks[0]
        return view_of(sources[first.buffer], Block(first.offset, sum(b.nbytes for b in blocks))).view(-1)
    message = nothing.new_empty(sum(block.nbytes for block in blocks))
    start = 0
    for block in blocks:
        part = message[start : start + block.nbytes].view(block.rows, block.width)
        start += block.nbytes
        into, what = _widened(part, view_of(sources[block.buffer], block))
        into.copy_(what)
    return message
