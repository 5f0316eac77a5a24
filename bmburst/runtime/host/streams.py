"""Replaces CUDA streams and events on a machine without CUDA.

Operations on CPU tensors run at once, so a stream has only received messages to keep in order. Waiting for a stream
waits for the messages received on it. A receive on the default stream is complete when its call returns, because the
next torch operation may read the message.

One thing differs from a GPU: a torch operation inside `with torch.cuda.stream(side)` does not wait for the messages
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
    """Return the `count` elements at `address` as a tensor that shares their memory but does not keep it allocated.

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
    """A message that is being received."""

    @property
    def finished(self) -> bool:
        """Whether `finish` has returned."""

    def finish(self) -> None:
        """Block until the message is in its memory. A second call does nothing."""

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Return whether the message is written to a range of memory."""


class Stream:
    """Replaces `torch.cuda.Stream`: holds the received messages that have not been waited for."""

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
        """Add a message that is being received on this stream."""
        self._pending = [*self.pending, transfer]

    def depend_on(self, transfers: Sequence[PendingMessage]) -> None:
        """Make what follows on this stream wait for `transfers`."""
        if self is self.streams.default or self is self.streams.current():
            for transfer in transfers:
                transfer.finish()
        else:
            self._pending = [*self.pending, *transfers]

    def settle(self, address: int, nbytes: int) -> None:
        """Finish the messages of this stream whose memory the next operation on it reads or writes."""
        for transfer in self.pending:
            if transfer.overlaps(address, nbytes):
                transfer.finish()

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` allocated until no message is pending on this stream (`Tensor.record_stream`)."""
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
        """Wait and return True: gloo cannot tell whether a message has arrived."""
        self.synchronize()
        return True


class Event:
    """Replaces `torch.cuda.Event`: holds the messages that were pending on a stream when it was recorded."""

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
        """Wait and return True: gloo cannot tell whether a message has arrived."""
        self.synchronize()
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between the recording of this event and of `end`."""
        return (end._seconds - self._seconds) * 1e3


class Streams:
    """All streams of the process, and the current stream of each thread."""

    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._next_handle = DEFAULT_HANDLE
        self._threads = threading.local()
        self.Stream: type[Stream] = type("Stream", (Stream,), {"streams": self})
        self.Event: type[Event] = type("Event", (Event,), {"streams": self})
        self.default = self.Stream()

    def enter(self, stream: Stream) -> int:
        """Register a new stream and return its handle, which is unique in the process."""
        handle = self._next_handle
        self._next_handle += 1
        self._living[handle] = stream
        return handle

    def of(self, handle: int) -> Stream:
        """Return the stream with a handle, as C functions get it."""
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
