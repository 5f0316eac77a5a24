"""Moves the blocks of an exchange: copies inside a rank, and one message to each other rank, over strided views."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst.comm.communicator import BlockMover, Transfer
from bmburst.schedule.exchange import Block, Exchange, Move, make_exchange, offsets_of


def contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors detached and contiguous, as communication libraries need them."""
    return tuple(t.detach().contiguous() for t in tensors)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 `[bytes]`, for transfers that do not depend on the dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


_DTYPES = {dtype.itemsize: dtype for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)}
"""Dtypes by element size in bytes. A copy is faster with fewer, wider elements."""


class _View(NamedTuple):
    """A strided view of a buffer in elements of `width` bytes; `start` is in elements as well."""

    buffer: int
    width: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


_ViewPair = tuple[_View, _View]  # (target, source)


def copy_own(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy the blocks that a rank sends to itself, in one call on the current stream."""
    if exchange.receives[exchange.rank]:
        into, what = _own_copies(exchange, math.gcd(max(_DTYPES), *(_first_bytes(t) for t in (*sources, *targets))))
        torch._foreach_copy_(_tensors(targets, into), _tensors(sources, what))


def _first_bytes(tensor: Tensor) -> int:
    """Return the greatest common divisor of a tensor's address and its offset in the storage, in bytes."""
    return math.gcd(tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())


def _tensors(buffers: Sequence[Tensor], views: Sequence[_View]) -> list[Tensor]:
    wholes: dict[tuple[int, int], tuple[Tensor, int]] = {}
    found = []
    for buffer, width, size, strides, start in views:
        if (buffer, width) not in wholes:
            wholes[buffer, width] = whole_memory(buffers[buffer], width)
        whole, first = wholes[buffer, width]
        found.append(whole.as_strided(size, strides, first + start))
    return found


def shape_of(block: Block, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shape and the strides of a block in elements of `width` bytes."""
    assert block.rows == 1 or block.step >= block.width
    return (block.rows, block.width // width), (block.step // width, 1)


def whole_memory(tensor: Tensor, width: int) -> tuple[Tensor, int]:
    """Return the storage of a tensor in elements of `width` bytes, and the index of its first element there."""
    memory = torch.empty(0, dtype=_DTYPES[width], device=tensor.device).set_(tensor.untyped_storage())
    return memory, tensor.storage_offset() * tensor.element_size() // width


@lru_cache(maxsize=1024)
def _own_copies(exchange: Exchange, aligned: int) -> tuple[list[_View], list[_View]]:
    """Return the targets and the sources of the moves from a rank to itself.

    Args:
        exchange: The exchange.
        aligned: A common divisor of the addresses of all buffers, in bytes.
    """
    pairs: list[_ViewPair] = []
    for source, target in exchange.receives[exchange.rank]:
        numbers = (n for block in (source, target) for n in (block.offset, block.width, block.step))
        width = math.gcd(aligned, *numbers)
        pair = _view_of(target, width), _view_of(source, width)
        both = _joined(pairs[-1], pair) if pairs else None
        if both is not None:
            pairs[-1] = both
        else:
            pairs.append(pair)
    return [into for into, _ in pairs], [what for _, what in pairs]


def _view_of(block: Block, width: int) -> _View:
    size, strides = shape_of(block, width)
    return _View(block.buffer, width, size, strides, block.offset // width)


def _joined(before: _ViewPair, after: _ViewPair) -> _ViewPair | None:
    """Merge two copies of equal geometry into one, such as the two halves of a zigzag; None if they differ."""
    distances = [two.start - one.start for one, two in zip(before, after, strict=True)]
    if min(distances) <= 0 or any(one._replace(start=two.start) != two for one, two in zip(before, after, strict=True)):
        return None
    into, what = (
        view._replace(size=(2, *view.size), strides=(distance, *view.strides))
        for view, distance in zip(before, distances, strict=True)
    )
    return into, what


class MessageMover(ABC):
    """`pull` and `push` of a `BlockMover`, for communicators that can exchange one message with each rank."""

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
        """Start an exchange; blocks from this rank to itself are copied at once."""
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
        """Start to send message r to rank r and to receive the message of rank r into buffer r; empty ones are skipped.

        Args:
            outgoing: Messages, uint8 `[bytes]`.
            incoming: Buffers, uint8 `[bytes]`.
            held: Tensors that must not be freed before the wait.
        """


def tensor_in(buffer: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the contiguous tensor that starts at byte `start` of an outbox or inbox."""
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


class _Memory(NamedTuple):
    """The storage of a tensor as uint8 `[bytes]`, and the offset of its first element."""

    data: Tensor
    start: int

    def view(self, block: Block, count: int = 1, distance: int = 0) -> Tensor:
        """Return `count` equal blocks, `distance` bytes apart, as uint8 `[count, rows, width]`."""
        size, strides = shape_of(block, 1)
        return self.data.as_strided((count, *size), (distance, *strides), self.start + block.offset)


_TensorPair = tuple[Tensor, Tensor]  # (target, source)


def _memories(tensors: Iterable[Tensor]) -> list[_Memory]:
    return [_Memory(*whole_memory(t, 1)) for t in tensors]


def _views(memories: Sequence[_Memory], blocks: Sequence[Block]) -> list[Tensor]:
    """Return views of the blocks in order. Equal blocks at equal distances, as in a batch, share one view."""
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


def _along(message: Tensor, views: Iterable[Tensor]) -> Iterator[_TensorPair]:
    """Yield each view with its part of a message that holds the views one after another."""
    start = 0
    for view in views:
        yield view, message[start : start + view.numel()].view(view.shape)
        start += view.numel()


def _copy(pairs: Sequence[_TensorPair]) -> None:
    """Copy all pairs in one call, each with the widest elements that its alignment allows."""
    if pairs:
        into, what = zip(*(_widened(*pair) for pair in pairs), strict=True)
        torch._foreach_copy_(into, what)


def _widened(into: Tensor, what: Tensor) -> tuple[Tensor, Tensor]:
    numbers = (n for v in (into, what) for n in (v.data_ptr(), v.storage_offset(), v.shape[-1], *v.stride()[:-1]))
    dtype = _DTYPES[math.gcd(max(_DTYPES), *numbers)]
    return into.view(dtype), what.view(dtype)


@dataclass(slots=True)
class _Scattering:
    """A transfer of messages that `wait` copies to their places in the targets."""

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
            if pair[0].data_ptr() != pair[1].data_ptr()  # else it was received in place
        ]
        _copy(parts)
        self.incoming, self.places = [], []
        return self.targets


def _buffer(views: list[Tensor], nothing: Tensor) -> Tensor:
    """Return the receive buffer of a message: the target itself if it is contiguous."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    return nothing.new_empty(sum(view.numel() for view in views))


def _message(sources: Sequence[_Memory], moves: Sequence[Move], nothing: Tensor) -> Tensor:
    """Return the bytes of the blocks one after another, without a copy if they are contiguous already."""
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


def ring_by_pull(comm: BlockMover, tensors: Sequence[Tensor], shift: int) -> Transfer:
    """Send tensors to rank + shift through an outbox: `BlockMover.ring` in terms of `pull`."""
    sent = [t.detach() for t in tensors]
    exchange, starts = ring_exchange(comm.rank, comm.size, shift % comm.size, tuple(t.nbytes for t in sent))
    outbox = comm.outbox(exchange.nbytes)
    for tensor, start in zip(sent, starts, strict=True):
        tensor_in(outbox, start, tensor.shape, tensor.dtype).copy_(tensor)
    received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in sent]
    return comm.pull(exchange, outbox, received)


@lru_cache(maxsize=1024)
def ring_exchange(rank: int, size: int, shift: int, sizes: tuple[int, ...]) -> tuple[Exchange, tuple[int, ...]]:
    """Return the exchange of a ring step, and the byte offset of each tensor in the outbox."""
    starts, total = offsets_of(sizes)

    def route(source: int, target: int) -> list[Move]:
        if (source + shift) % size != target:
            return []
        return [
            Move(Block(start, nbytes), Block(0, nbytes, buffer=i))
            for i, (start, nbytes) in enumerate(zip(starts, sizes, strict=True))
            if nbytes
        ]

    return make_exchange(rank, size, total, route), starts
