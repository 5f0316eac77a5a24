"""CUDA streams and events where there is no CUDA.

Operations on CPU tensors run at once, so all that a stream has to keep in order are the messages received on it:
whoever waits for the stream waits for them. What is received on the default stream is complete before the call
returns, since the torch operation that follows reads it.

One thing differs from a GPU: a torch operation inside `with torch.cuda.stream(side)` does not wait for what was
received on `side`. Wait for the stream, or for an event recorded on it, before reading.
"""

import ctypes
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


def view(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the `count` elements at `address` as a tensor that shares their memory and does not keep it alive.

    Args:
        address: First byte, as from `Tensor.data_ptr`. May be 0 where `count` is 0.
        count: Number of elements, at least 0.
        dtype: What the memory holds.
    """
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


DEFAULT_HANDLE = 0  # as cudaStreamLegacy in the CUDA runtime


class PendingMessage(Protocol):
    """A message on its way in."""

    @property
    def finished(self) -> bool:
        """Whether `finish` has returned."""

    def finish(self) -> None:
        """Block until the message has arrived and its memory holds it. Doing it again does nothing."""

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether the message goes into some of these bytes."""


class Stream:
    """Stands for `torch.cuda.Stream`: the messages received on it that nobody has waited for yet."""

    streams: ClassVar["Streams"]  # set on the subclass that each `Streams` makes
    device_index = 0

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = self.streams.enter(self)
        self._pending: list[PendingMessage] = []
        self._kept: list[Tensor] = []

    @property
    def pending(self) -> tuple[PendingMessage, ...]:
        """The messages that have not been waited for."""
        self._pending = [transfer for transfer in self._pending if not transfer.finished]
        if not self._pending:
            self._kept.clear()
        return tuple(self._pending)

    def add(self, transfer: PendingMessage) -> None:
        """Put a message that is on its way in on this stream."""
        self._pending = [*self.pending, transfer]

    def depend_on(self, transfers: Sequence[PendingMessage]) -> None:
        """Let everything that follows on this stream come after `transfers`."""
        if self is self.streams.default or self is self.streams.current():
            for transfer in transfers:
                transfer.finish()
        else:
            self._pending = [*self.pending, *transfers]

    def settle(self, address: int, nbytes: int) -> None:
        """Finish what was received on this stream into memory that the next operation on it reads or writes."""
        for transfer in self.pending:
            if transfer.overlaps(address, nbytes):
                transfer.finish()

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` until nothing is pending on this stream (`Tensor.record_stream`)."""
        if self.pending:
            self._kept.append(tensor)

    def wait_stream(self, stream: "Stream") -> None:
        """See `torch.cuda.Stream.wait_stream`."""
        self.depend_on(stream.pending)

    def wait_event(self, event: "Event") -> None:
        """See `torch.cuda.Stream.wait_event`."""
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """See `torch.cuda.Stream.record_event`."""
        event = self.streams.Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """See `torch.cuda.Stream.synchronize`."""
        for transfer in self.pending:
            transfer.finish()
        self._kept.clear()

    def query(self) -> bool:
        """Return True, after waiting: gloo cannot say whether a message has arrived."""
        self.synchronize()
        return True


class Event:
    """Stands for `torch.cuda.Event`: what was pending on a stream when it was recorded."""

    streams: ClassVar["Streams"]  # set on the subclass that each `Streams` makes

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del enable_timing, blocking, interprocess  # every event has a time; none blocks; none is shared
        self._transfers: tuple[PendingMessage, ...] = ()
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """See `torch.cuda.Event.record`."""
        self._transfers = (stream or self.streams.current()).pending
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """See `torch.cuda.Event.wait`."""
        (stream or self.streams.current()).depend_on(self._transfers)

    def synchronize(self) -> None:
        """See `torch.cuda.Event.synchronize`."""
        for transfer in self._transfers:
            transfer.finish()

    def query(self) -> bool:
        """Return True, after waiting: gloo cannot say whether a message has arrived."""
        self.synchronize()
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from when this event was recorded to when `end` was."""
        return (end._seconds - self._seconds) * 1e3


class Streams:
    """Every stream of the process, and which one is current in each thread."""

    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._next_handle = DEFAULT_HANDLE
        self._threads = threading.local()
        self.Stream: type[Stream] = type("Stream", (Stream,), {"streams": self})
        self.Event: type[Event] = type("Event", (Event,), {"streams": self})
        self.default = self.Stream()

    def enter(self, stream: Stream) -> int:
        """Register a new stream; return its handle, unlike that of any other stream of the process."""
        handle = self._next_handle
        self._next_handle += 1
        self._living[handle] = stream
        return handle

    def of(self, handle: int) -> Stream:
        """Return the stream that C functions are given as `handle`."""
        return self._living[handle]

    def current(self, device: object = None) -> Stream:
        """See `torch.cuda.current_stream`."""
        del device
        current: Stream = getattr(self._threads, "current", self.default)
        return current

    def default_stream(self, device: object = None) -> Stream:
        """See `torch.cuda.default_stream`."""
        del device
        return self.default

    def set_stream(self, stream: Stream) -> None:
        """See `torch.cuda.set_stream`."""
        self._threads.current = stream

    def use(self, stream: Stream | None) -> AbstractContextManager[Any]:
        """See `torch.cuda.stream`."""
        return self._use(self.current() if stream is None else stream)

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: object = None) -> None:
        """See `torch.cuda.synchronize`."""
        del device
        for stream in list(self._living.values()):
            stream.synchronize()
