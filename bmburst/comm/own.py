"""What a rank keeps for itself of an exchange: copies inside one device, prepared once."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst.schedule.exchange import Block, Exchange

WIDE = {dtype.itemsize: dtype for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)}
"""Elements by their bytes: a copy is as fast as it has few."""


class _View(NamedTuple):
    """One or two blocks as rows of a buffer in elements of `width` bytes, as which `start` counts too."""

    buffer: int
    width: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


_Pair = tuple[_View, _View]  # where to, and what


def copy_own(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy, in one call on the current stream, what a rank keeps for itself."""
    if exchange.receives[exchange.rank]:
        into, what = _views(exchange, math.gcd(max(WIDE), *(_first_bytes(t) for t in (*sources, *targets))))
        torch._foreach_copy_(_tensors(targets, into), _tensors(sources, what))


def _first_bytes(tensor: Tensor) -> int:
    """Return a number that is divided by what divides where a tensor begins in memory and in its storage."""
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
    """Return size and strides of a block as rows of elements of `width` bytes."""
    assert block.rows == 1 or block.step >= block.width
    return (block.rows, block.width // width), (block.step // width, 1)


def whole_memory(tensor: Tensor, width: int) -> tuple[Tensor, int]:
    """Return all memory behind a tensor in elements of `width` bytes, and where its own first one is."""
    memory = torch.empty(0, dtype=WIDE[width], device=tensor.device).set_(tensor.untyped_storage())
    return memory, tensor.storage_offset() * tensor.element_size() // width


@lru_cache(maxsize=1024)
def _views(exchange: Exchange, aligned: int) -> tuple[list[_View], list[_View]]:
    """Return the targets and the sources of a rank's moves to itself.

    Args:
        exchange: The exchange.
        aligned: What divides the address of every buffer's first element.
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
    """Return two copies of equal geometry as one, as are those of the two parts of a zigzag; else None."""
    distances = [two.start - one.start for one, two in zip(before, after, strict=True)]
    if min(distances) <= 0 or any(one._replace(start=two.start) != two for one, two in zip(before, after, strict=True)):
        return None
    into, what = (
        view._replace(size=(2, *view.size), strides=(distance, *view.strides))
        for view, distance in zip(before, distances, strict=True)
    )
    return into, what
