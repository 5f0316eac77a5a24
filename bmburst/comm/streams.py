"""CUDA streams and CUDA graphs at low host cost, and transfers that run on a side stream.

Attention queries the current stream about forty times per call, so the overhead of torch's wrappers matters.

A graph runs kernel calls that repeat on the same memory. FlashAttention-4's Python takes the host of an H200 0.15 to
0.25 ms for a forward and 0.25 to 0.4 ms for a backward before its kernels start; launching a graph takes 0.01 ms. With
short kernels the GPU waits for the host. Capturing a graph takes the host longer than a call does, so rarely repeated
work is not captured: where each training step has its own documents, a mask is called once for each layer and never
again.

A graph reads and writes fixed addresses. So only work on memory that stays in place is captured, and the addresses are
part of its key. Temporary memory of the kernels comes from a pool that all graphs of a stream share: about 4 bytes for
each element of the queries' gradient, up to six times that under masks of several tiles. Torch never returns parts of
this pool. Where each training step has its own documents, a graph that needs slightly more than all before it would add
its full size to the pool. So the memory is allocated in one piece, with a margin.
"""

import gc
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from bmburst.comm.memory import tensor_in
from bmburst.schedule.exchange import offsets_of
from bmburst_ops.flash.inputs import collect_vectors

T = TypeVar("T")

FIRST = -3
"""The highest stream priority that torch supports."""


def current_stream(device: int) -> Any:
    """Return the current stream of the GPU with this index.

    Torch makes a new object at each call of its function, which takes the host of an H100 up to 24 microseconds.
    """
    handle = _raw_handle(device)
    return torch.cuda.current_stream(device) if handle is None else _stream_at(device, handle)


def current_handle(device: int) -> int:
    """Return the handle of the current stream of the GPU with this index."""
    handle = _raw_handle(device)
    return int(torch.cuda.current_stream(device).cuda_stream) if handle is None else handle


def _raw_handle(device: int) -> int | None:
    """Return the handle of the current stream; None if a host runtime stands in for CUDA."""
    if getattr(torch.cuda.current_stream, "__module__", None) != torch.cuda.__name__:
        return None
    found: int = torch._C._cuda_getCurrentRawStream(device)
    return found


@lru_cache(maxsize=256)
def _stream_at(device: int, handle: int) -> Any:
    """Return the current stream, whose handle is the key."""
    del handle
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


_PRIORITIES = (-1, -2, -2)
"""Stream priorities of the turns before the last one, counted from the end: one stream for the first, then two that
alternate. Copies between ranks have a higher priority."""


class UnitStreams:
    """A stream for each turn; the last turn uses the current stream. Does nothing on CPUs or for a single turn.

    Kernels of a turn run after everything launched before construction. Their results may be used after `join`.

    Args:
        device: Where the kernels run.
        turns: Number of turns.
    """

    def __init__(self, device: torch.device, turns: int) -> None:
        self._current: Any = None
        self._before: tuple[Any, ...] = ()
        if device.type == "cuda" and turns > 1:
            self._current = torch.cuda.current_stream(device)
            streams = _streams(device)
            self._before = tuple(streams[_place(turns, turn)] for turn in range(turns - 1))
            self._beginning = self._current.record_event()
            self._begun = set[Any]()

    def turn(self, i: int) -> AbstractContextManager[None]:
        """Return a context in which the stream of turn `i` is the current one."""
        if i >= len(self._before):
            return nullcontext()
        if (stream := self._before[i]) not in self._begun:  # lazily: the first kernel should not wait for the host
            self._begun.add(stream)
            stream.wait_event(self._beginning)
        return CurrentStream(stream)

    def join(self) -> None:
        """Make the current stream wait for the kernels of all turns."""
        if self._before:
            StreamOrder().after(self._current, *set(self._before))


def _place(turns: int, turn: int) -> int:
    """Return the index of the stream for a turn before the last."""
    ahead = turns - 2 - turn
    return ahead if ahead < 1 else 1 + (ahead - 1) % 2


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[Any, ...]:
    """Return a device's streams: always the same, since torch's allocator caches memory per stream."""
    return tuple(torch.cuda.Stream(device, priority=priority) for priority in _PRIORITIES)


class SideStreamTransfer:
    """A `Transfer` that runs on a side stream and holds every tensor that it reads or writes.

    The tensors are held until the stream that made them has waited for the transfer, and are then freed normally.
    `record_stream` would also keep them alive, but the allocator reuses such memory only after the host has seen the
    side stream finish. In a ring the host runs ahead of the GPU and would allocate new memory for every block.

    Args:
        side: The side stream.
        received: The tensors that `wait` returns.
        sent: The tensors that are only read.
        current: Returns the current stream of a device.
    """

    def __init__(
        self,
        side: Any,
        received: tuple[Tensor, ...],
        sent: tuple[Tensor, ...],
        current: Callable[[int], Any] = current_stream,
    ) -> None:
        self.done: Any = None
        """The event after the operations; the owner sets it when they are launched."""
        self.waited = False
        """Whether `wait` was called."""
        self.side, self._current, self._maker = side, current, current(side.device_index)
        self._received, self._sent = received, sent

    def wait(self) -> tuple[Tensor, ...]:
        """See `Transfer.wait`."""
        here = self._current(self.side.device_index)
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


# Bytes: torch's cache cannot be freed during capture. Masks of several tiles take five or six times the sums that
# `records_kernels` allows: three gradients in fp32, three of a tile, and the kernel's own temporary memory.
_ROOM = 3 << 30
_SPARE = 1.25  # a document pads sums by a block of up to 128 tokens: one of 500 tokens by a quarter
# Calls before work is captured. On 2 H200s, 16K tokens in documents that are new in each step: 4 layers took 18.3 ms
# without graphs, 22.2 with capture after the second call, 18.3 after the fourth; 32 layers 97.1, 82.4, 82.2.
CALLS = 4
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # set to debug memory errors


class Recording:
    """Repeated work of the current stream, as a CUDA graph after its first `CALLS` calls.

    Args:
        cuda: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._runs = 0
        self._graph: Any = None
        self._held: object = None

    def run(self, work: Callable[[], None], varying: int = 0) -> None:
        """Run the work: call it the first `CALLS` times, replay its graph afterwards.

        Capture follows a call immediately: by then the kernels are compiled, and the data they expect is on the device.

        Args:
            work: Launches the kernels.
            varying: Approximate bytes of temporary memory, if similar work takes slightly more or less; else 0.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        work()
        self._runs += 1
        if self._runs == CALLS and free_nbytes(self._cuda) >= _ROOM:
            self._graph, self._held = _record(self._cuda, work, varying)


class Recordings:
    """LRU cache of a process's recordings, by work, memory addresses and stream.

    Args:
        most: Maximum number of recordings.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._recordings: OrderedDict[tuple[object, ...], Recording] = OrderedDict()

    def get(self, *work: object) -> Recording:
        """Return the recording of this work: the same for equal arguments."""
        with self._lock:
            found = self._recordings.get(work)
            if found is None:
                found = self._recordings[work] = Recording()
                if len(self._recordings) > self._most:
                    self._recordings.popitem(last=False)
            else:
                self._recordings.move_to_end(work)
            return found

    def clear(self) -> None:
        """Drop all recordings and the memory that their graphs share. Calls of work are counted from 0 again."""
        with self._lock:
            self._recordings.clear()
        _capture_resources.cache_clear()


RECORDINGS = Recordings(most=256)


def is_capturing() -> bool:
    """Return whether the current stream is captured in a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Return a context without Python's cyclic garbage collector, for the capture of a CUDA graph.

    A capture fails if an object that is freed during it makes a call that captures do not allow. Another graph is one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FixedBuffers:
    """Buffers of a process that stay in place from call to call, one for each device, stream (thread) and name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], tuple[Tensor, dict[_Kinds, tuple[Tensor, ...]]]] = {}

    def get(self, device: torch.device, name: str, *kinds: tuple[tuple[int, ...], torch.dtype]) -> tuple[Tensor, ...]:
        """Return tensors of these shapes and dtypes: in the same memory until more is requested on the current stream.

        The tensors of a request are one behind another, those of two requests in the same place.
        """
        key = device, name, current_stream(device.index) if device.type == "cuda" else threading.get_ident()
        memory, views = self._buffers.get(key, (None, {}))
        found = views.get(kinds)
        if found is None:
            starts, nbytes = offsets_of([math.prod(shape) * dtype.itemsize for shape, dtype in kinds])
            with torch.inference_mode(False):  # the caller may be in inference mode, later users may not be
                if memory is None or memory.numel() < nbytes:
                    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
                    views = {}
                elif len(views) >= _MOST_VIEWS:
                    views.clear()
                places = zip(starts, kinds, strict=True)
                found = views[kinds] = tuple([tensor_in(memory, start, *kind) for start, kind in places])
            self._buffers[key] = memory, views
        return found

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()


_Kinds = tuple[tuple[tuple[int, ...], torch.dtype], ...]
_MOST_VIEWS = 64
"""Most requests whose tensors a buffer keeps: making views of its memory takes time of the host at each call."""
BUFFERS = FixedBuffers()


def free_nbytes(cuda: Any) -> float:
    """Return how many bytes torch's allocator can still take for graphs; 0 if it has no pools of memory for them.

    That is free memory, limited by the process's memory fraction.
    """
    if cuda.get_allocator_backend() != "native" or _NO_CACHE in os.environ:
        return 0.0
    free, total = cuda.mem_get_info()
    share: float = cuda.get_per_process_memory_fraction() * total - cuda.memory_reserved()
    return min(float(free), share)


def _record(cuda: Any, work: Callable[[], None], varying: int) -> tuple[Any, object]:
    """Capture the work without running it; return the graph and the objects that must live as long."""
    stream, pool = _capture_resources(cuda, cuda.current_stream())

    def in_one_block() -> None:
        if varying:  # freed at once: the pool then serves the work's tensors from this block
            torch.empty(int(varying * _SPARE), dtype=torch.uint8, device=stream.device)
        work()

    with collect_vectors() as vectors:
        graph, _ = captured(cuda, stream, pool, in_one_block)
    return graph, vectors


def captured(cuda: Any, stream: Any, pool: Any, work: Callable[[], T]) -> tuple[Any, T]:
    """Capture work on a stream without running it; return the CUDA graph and what the work returned.

    Args:
        cuda: `torch.cuda`, or what stands in for it.
        stream: The stream, not the default one.
        pool: The `torch.cuda.MemPool` of what the work allocates.
        work: Launches kernels, without waiting for the device.
    """
    graph = cuda.CUDAGraph()
    with cuda.stream(stream), paused_collector():
        # thread_local: other threads, such as NCCL's watchdog, may use CUDA during the capture.
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            found = work()
        finally:
            graph.capture_end()
    return graph, found


@lru_cache(maxsize=64)
def _capture_resources(cuda: Any, stream: Any) -> tuple[Any, Any]:
    """Return a capture stream like this stream, and the memory pool of its graphs, which never run concurrently."""
    return cuda.Stream(stream.device, priority=stream.priority), cuda.MemPool()
