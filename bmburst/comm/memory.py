"""Views of tensor memory: contiguous tensors, raw bytes, and the copies that an exchange makes inside one rank."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst.schedule.exchange import Block, Exchange


def contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors detached and contiguous, as libraries send them."""
    return tuple(t.detach().contiguous() for t in tensors)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 `[bytes]`, for transfers that do not depend on the dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one number any stride is contiguous


WIDE = {dtype.itemsize: dtype for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)}
"""Dtypes by element size in bytes. A copy with wider elements has fewer of them and is faster."""


class _View(NamedTuple):
    """A strided view of a buffer in elements of `width` bytes; `start` is in elements as well."""

    buffer: int
    width: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


_Pair = tuple[_View, _View]  # (target, source)


def copy_own(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy the blocks that a rank sends to itself, in one call on the current stream."""
    if exchange.receives[exchange.rank]:
        into, what = _views(exchange, math.gcd(max(WIDE), *(_first_bytes(t) for t in (*sources, *targets))))
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
    """Return the size and the strides of a block in elements of `width` bytes."""
    assert block.rows == 1 or block.step >= block.width
    return (block.rows, block.width // width), (block.step // width, 1)


def whole_memory(tensor: Tensor, width: int) -> tuple[Tensor, int]:
    """Return the storage of a tensor in elements of `width` bytes, and the index of its first element there."""
    memory = torch.empty(0, dtype=WIDE[width], device=tensor.device).set_(tensor.untyped_storage())
    return memory, tensor.storage_offset() * tensor.element_size() // width


@lru_cache(maxsize=1024)
def _views(exchange: Exchange, aligned: int) -> tuple[list[_View], list[_View]]:
    """Return the targets and the sources of the moves from a rank to itself.

    Args:
        exchange: The exchange.
        aligned: A common divisor of the addresses of all buffers, in bytes.
    """
    pairs: list[_Pair] = []
    for source, target in exchange.receives[exchange.rank]:
        numbers = (n for block in (source, target) for n in (block.offset, block.width, block.step))
        width = math.gcd(aligned, *numbers)
        pair = _view(target, width), _view(source, width)
        both = _joined(pairs[-1], pair) if pairs else None
        if both is not None:
            pairs[-1] = both
        else:
            pairs.append(pair)
    return [into for into, _ in pairs], [what for _, what in pairs]


def _view(block: Block, width: int) -> _View:
    size, strides = shape_of(block, width)
    return _View(block.buffer, width, size, strides, block.offset // width)


def _joined(before: _Pair, after: _Pair) -> _Pair | None:
    """Merge two copies of equal geometry into one, such as the two halves of a zigzag; None if they differ."""
    distances = [two.start - one.start for one, two in zip(before, after, strict=True)]
    if min(distances) <= 0 or any(one._replace(start=two.start) != two for one, two in zip(before, after, strict=True)):
        return None
    into, what = (
        view._replace(size=(2, *view.size), strides=(distance, *view.strides))
        for view, distance in zip(before, distances, strict=True)
    )
    return into, what
