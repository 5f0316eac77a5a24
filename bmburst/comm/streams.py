"""CUDA streams at low host cost, and transfers that run on a side stream.

Attention queries the current stream about forty times per call, so the overhead of torch's wrappers matters.
"""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

FIRST = -3
"""The highest stream priority that torch supports."""


def current_stream(device: int) -> Any:
    """Return the current stream of the GPU with this index. Passing the index saves torch a lookup."""
    return torch.cuda.current_stream(device)


class StreamOrder:
    """Makes streams wait for streams with one reused event; `Stream.wait_stream` creates an event for each wait.

    Not thread-safe: another thread could record the event between `record` and `wait_event`.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def after(self, stream: Any, *others: Any) -> None:
        """Make a stream wait for all work launched so far on the others."""
        for other in others:
            self._event.record(other)
            stream.wait_event(self._event)


class CurrentStream:
    """Context manager that sets the current stream, in a quarter of the host time of `torch.cuda.stream`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._before: Any = None
        self._device = 0

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)


class SideStreamTransfer:
    """A `Transfer` that runs on a side stream and holds every tensor that it reads or writes.

    The tensors are held until the stream that made them has waited for the transfer, and are then freed normally.
    `record_stream` would also keep them alive, but the allocator reuses such memory only after the host has seen the
    side stream finish. In a ring the host runs ahead of the GPU and would allocate new memory for every block.

    Args:
        side: The side stream.
        received: The tensors that `wait` returns.
        sent: The tensors that are only read.
    """

    def __init__(self, side: Any, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        self.done: Any = None
        """The event after the operations; the owner sets it when they are launched."""
        self.waited = False
        """Whether `wait` was called."""
        self.side, self._maker = side, current_stream(side.device_index)
        self._received, self._sent = received, sent

    def wait(self) -> tuple[Tensor, ...]:
        """See `Transfer.wait`."""
        here = current_stream(self.side.device_index)
        here.wait_event(self.done)
        if here != self._maker:
            here.wait_stream(self._maker)  # it may have made the copies inside this rank
            self._mark(here)  # the maker stream, which may reuse the memory, has not waited
        self.waited, self._sent = True, ()
        return self._received

    def __del__(self) -> None:
        if not self.waited:  # after an exception, `wait` is not called
            self._mark(self.side)

    def _mark(self, stream: Any) -> None:
        for tensor in (*self._received, *self._sent):
            tensor.record_stream(stream)
