"""An exchange over transports that send messages: one message to each rank, laid out and unpacked on the device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst.comm.memory import WIDE, copy_own, shape_of, whole_memory
from bmburst.comm.protocol import Transfer
from bmburst.schedule.exchange import Block, Exchange, Move


class MessageMover(ABC):
    """The verbs of a `BlockMover` that exchange blocks, for communicators that can swap messages."""

    _device: torch.device

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`."""
        del lane
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    inbox = outbox

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        del lane
        return self._exchange(exchange, (outbox,), targets)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        del lane
        return self._exchange(exchange, sources, (inbox,))

    def _exchange(self, exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Transfer:
        """Start an exchange; what a rank keeps for itself is copied at once."""
        copy_own(exchange, sources, targets)
        from_bytes, to_bytes = _memories(sources), _memories(targets)
        nothing = torch.empty(0, dtype=torch.uint8, device=sources[0].device)
        outgoing, incoming, places = [], [], []
        for peer, (sent, received) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            is_own = peer == exchange.rank
            views = [] if is_own else _views(to_bytes, [move.target for move in received])
            places.append(views)
            outgoing.append(nothing if is_own else _message(from_bytes, sent, nothing))
            incoming.append(_buffer(views, nothing))
        transfer = self._swap(outgoing, incoming, (*outgoing, *sources, *targets))
        return _Scattering(transfer, incoming, places, tuple(targets))

    @abstractmethod
    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], held: tuple[Tensor, ...]) -> Transfer:
        """Start sending message r to rank r and receiving the message of rank r into buffer r; empty ones do not move.

        Args:
            outgoing: Messages, uint8 `[bytes]`.
            incoming: Buffers, uint8 `[bytes]`.
            held: What must not be freed before the wait.
        """


def tensor_in(box: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the contiguous tensor that starts at a byte of an outbox or inbox."""
    return box[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


class _Memory(NamedTuple):
    """The whole memory behind a tensor as uint8 `[bytes]`, and where its first element is."""

    data: Tensor
    start: int

    def view(self, block: Block, count: int = 1, distance: int = 0) -> Tensor:
        """Return the bytes of `count` such blocks, `distance` bytes apart, as uint8 `[count, rows, width]`."""
        size, strides = shape_of(block, 1)
        return self.data.as_strided((count, *size), (distance, *strides), self.start + block.offset)


_Pair = tuple[Tensor, Tensor]  # where to, and what


def _memories(tensors: Iterable[Tensor]) -> list[_Memory]:
    return [_Memory(*whole_memory(t, 1)) for t in tensors]


def _views(memories: Sequence[_Memory], blocks: Sequence[Block]) -> list[Tensor]:
    """Return the blocks in order: like ones at equal distances, as those of a batch's samples are, as one view."""
    views, first = [], 0
    while first < len(blocks):
        block, count, distance = blocks[first], 1, 0
        for after in islice(blocks, first + 1, None):
            away = after.offset - block.offset
            distance = distance or away
            if distance <= 0 or away != count * distance or after[1:] != block[1:]:
                break
            count += 1
        views.append(memories[block.buffer].view(block, count, distance if count > 1 else 0))
        first += count
    return views


def _along(message: Tensor, views: Iterable[Tensor]) -> Iterator[_Pair]:
    """Yield each view with its part of a message, in which they follow one another."""
    start = 0
    for view in views:
        yield view, message[start : start + view.numel()].view(view.shape)
        start += view.numel()


def _copy(pairs: Sequence[_Pair]) -> None:
    """Copy them all, in one call, in the widest elements that each allows: a copy is as fast as it has few."""
    if pairs:
        into, what = zip(*(_widened(*pair) for pair in pairs), strict=True)
        torch._foreach_copy_(into, what)


def _widened(into: Tensor, what: Tensor) -> tuple[Tensor, Tensor]:
    numbers = (n for v in (into, what) for n in (v.data_ptr(), v.storage_offset(), v.shape[-1], *v.stride()[:-1]))
    dtype = WIDE[math.gcd(max(WIDE), *numbers)]
    return into.view(dtype), what.view(dtype)


@dataclass(slots=True)
class _Scattering:
    """Messages under way; when they are here, they are copied to their places."""

    transfer: Transfer
    incoming: list[Tensor]
    places: list[list[Tensor]]
    targets: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        self.transfer.wait()
        parts = [
            pair
            for message, views in zip(self.incoming, self.places, strict=True)
            for pair in _along(message, views)
            if pair[0].data_ptr() != pair[1].data_ptr()  # else it arrived in place
        ]
        _copy(parts)
        self.incoming, self.places = [], []
        return self.targets


def _buffer(views: list[Tensor], nothing: Tensor) -> Tensor:
    """Return where a message may arrive: in place if it is one run of bytes."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    return nothing.new_empty(sum(view.numel() for view in views))


def _message(sources: Sequence[_Memory], moves: Sequence[Move], nothing: Tensor) -> Tensor:
    """Return the blocks' bytes one after another, without a copy where they are so already."""
    if not moves:
        return nothing
    blocks = [move.source for move in moves]
    total = sum(block.nbytes for block in blocks)
    ends = [(block.buffer, block.offset + block.nbytes) for block in blocks]
    starts = [(block.buffer, block.offset) for block in blocks]
    if all(block.dense for block in blocks) and starts[1:] == ends[:-1]:
        return sources[blocks[0].buffer].view(Block(blocks[0].offset, total)).view(-1)
    message = nothing.new_empty(total)
    _copy([(part, view) for view, part in _along(message, _views(sources, blocks))])
    return message
