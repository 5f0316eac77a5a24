"""Memory of kernels: alignment for vector loads and TMA, delivery of results, and a pattern's index vectors on a GPU.

The vectors of a pattern are copied once, without blocking the host, and can be used on any stream.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.pattern import IntArray

_VECTOR = 16  # bytes: a vector load, and the unit of TMA's addresses and strides


def is_aligned(tensor: Tensor, unit: int = _VECTOR) -> bool:
    """Return whether rows are dense, start at multiples of `unit` bytes, and no dimension is expanded."""
    *strides, last = tensor.stride()
    step = unit // tensor.element_size()
    return last == 1 and tensor.data_ptr() % unit == 0 and all(s > 0 and s % step == 0 for s in strides)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor if GPU kernels can read it, else an aligned copy."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def writable(target: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the target if a GPU kernel with results in the dtype of `like` can write to it directly, else None."""
    return target if target is not None and target.dtype is like.dtype and is_aligned(target) else None


def writable_statistic(target: Tensor | None) -> Tensor | None:
    """Return the target if a GPU kernel that stores fp32 statistics element by element can write to it, else None."""
    fits = target is not None and target.dtype is torch.float32 and is_aligned(target, target.element_size())
    return target if fits else None


def deliver(result: Tensor, target: Tensor | None) -> Tensor:
    """Return the result in `target`, copied unless it is already there; without a target return it as it is."""
    if target is None:
        return result
    return target if _is_same(result, target) else target.copy_(result)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if a is b:
        return True
    if a.dtype is not b.dtype or a.shape != b.shape or not a.data_ptr() == b.data_ptr() != 0:
        return False
    # The stride of a dimension of size 1 is arbitrary: it may change when a tensor is flattened and unflattened.
    return all(mine == theirs or size == 1 for size, mine, theirs in zip(a.shape, a.stride(), b.stride(), strict=True))


def deliver_partial(result: Partial, into: Partial | None) -> Partial:
    """Return output and log-sum-exp in `into`; see `deliver`."""
    return result if into is None else Partial(*map(deliver, result, into))


def deliver_gradients(results: Gradients, into: Gradients | None) -> Gradients:
    """Return the gradients in `into`; see `deliver`."""
    return results if into is None else Gradients(*map(deliver, results, into))


def gradient_memory(q: Tensor, k: Tensor, v: Tensor, into: Gradients | None) -> Gradients:
    """Return tensors for a kernel's gradients: those of `into` that it can write to, else new ones."""
    targets = (None, None, None) if into is None else into
    written = (writable(target, like) for target, like in zip(targets, (q, k, v), strict=True))
    return Gradients(*(torch.empty_like(x) if t is None else t for t, x in zip(written, (q, k, v), strict=True)))


_ALIGNED = 4  # elements: every vector starts at a multiple of 16 bytes


class DeviceVectors(NamedTuple):
    """Vectors on a device; on a GPU with the stream that copies or computes them, and an event after that."""

    vectors: tuple[Tensor, ...]
    stream: torch.cuda.Stream | None
    arrived: torch.cuda.Event | None

    def here(self) -> tuple[Tensor, ...]:
        """Return the vectors, ready for use on the current stream."""
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
def collect_vectors() -> Iterator[list[DeviceVectors]]:
    """Return a context that collects all vectors used inside it in a list. Inside, none is waited for or may be copied.

    It is for CUDA graph capture: a graph reads vectors at their addresses, and cannot wait for outside events.
    """
    vectors = list[DeviceVectors]()
    token = _holder.set(vectors)
    try:
        yield vectors
    finally:
        _holder.reset(token)


_holder: ContextVar[list[DeviceVectors] | None] = ContextVar("bmburst_vectors", default=None)


def copy_to_device(
    arrays: Sequence[IntArray | NDArray[np.bool_]], device: torch.device, dtype: torch.dtype = torch.int32
) -> DeviceVectors:
    """Copy arrays to a device, each as a flat vector of the dtype, in one non-blocking transfer."""
    assert _holder.get() is None
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.size // _ALIGNED) * _ALIGNED)
    numbers = torch.zeros(starts[-1], dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=False):
        numbers[start : start + array.size] = torch.from_numpy(array.ravel())
    memory = numbers.to(device, non_blocking=True)
    vectors = tuple(memory[start : start + array.size] for array, start in zip(arrays, starts, strict=False))
    return vectors_of_stream(vectors)


def vectors_of_stream(vectors: tuple[Tensor, ...]) -> DeviceVectors:
    """Return vectors that the current stream computes (at least one, all on one device), with an event after them."""
    device = vectors[0].device
    if device.type != "cuda":
        return DeviceVectors(vectors, None, None)
    stream, arrived = torch.cuda.current_stream(device), torch.cuda.Event()
    arrived.record(stream)
    return DeviceVectors(vectors, stream, arrived)
