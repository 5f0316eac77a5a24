"""Vectors of a pattern on a device: sent once without waiting, then used on any stream."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmburst_ops.pattern import IntArray

_ALIGNED = 4  # numbers: every vector starts at 16 bytes


class Sent(NamedTuple):
    """Tensors on a device, and on a GPU the stream that they came on and the event that says they are there."""

    vectors: tuple[Tensor, ...]
    stream: torch.cuda.Stream | None
    arrived: torch.cuda.Event | None

    def here(self) -> tuple[Tensor, ...]:
        """Return the vectors, ready for what the current stream is given next."""
        if self.stream is None or self.arrived is None:
            return self.vectors
        if (holder := _holder.get()) is not None:
            holder.append(self)
            return self.vectors
        current = torch.cuda.current_stream(self.vectors[0].device)
        if current != self.stream:
            current.wait_event(self.arrived)
            for vector in self.vectors:
                vector.record_stream(current)
        return self.vectors


@contextmanager
def held() -> Iterator[list[Sent]]:
    """Give a list that gets all vectors that are asked for inside, none of which is waited for or sent there.

    For a CUDA graph: it reads them where they are, and cannot wait for what is outside it.
    """
    vectors = list[Sent]()
    token = _holder.set(vectors)
    try:
        yield vectors
    finally:
        _holder.reset(token)


_holder: ContextVar[list[Sent] | None] = ContextVar("bmburst_vectors", default=None)


def send(
    arrays: Sequence[IntArray | NDArray[np.bool_]], device: torch.device, dtype: torch.dtype = torch.int32
) -> Sent:
    """Send arrays of numbers that the dtype holds, each as a flat vector, in a copy that the host does not wait for."""
    assert _holder.get() is None
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.size // _ALIGNED) * _ALIGNED)
    numbers = torch.zeros(starts[-1], dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=False):
        numbers[start : start + array.size] = torch.from_numpy(array.ravel())
    memory = numbers.to(device, non_blocking=True)
    vectors = tuple(memory[start : start + array.size] for array, start in zip(arrays, starts, strict=False))
    return made(vectors)


def made(vectors: tuple[Tensor, ...]) -> Sent:
    """Return vectors of one device, one or more, that the current stream is making."""
    device = vectors[0].device
    if device.type != "cuda":
        return Sent(vectors, None, None)
    stream, arrived = torch.cuda.current_stream(device), torch.cuda.Event()
    arrived.record(stream)
    return Sent(vectors, stream, arrived)
