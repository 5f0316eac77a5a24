"""Replaces `torch.cuda` without CUDA: streams and events, device properties, random numbers, NVTX.

Operations on CPU tensors run synchronously, so a stream only orders received messages. Waiting for a stream waits for
the messages received on it. A receive on the default stream is complete when its call returns, because the next torch
operation may read the message.

One thing differs from a GPU: a torch operation inside `with torch.cuda.stream(side)` does not wait for the messages
received on `side`. Wait for the stream, or for an event recorded on it, before reading.

The device that scripts see is the CPU: its memory is the host's, its compute capability 0.0, and each rank of this host
counts as one device. `torch.cuda.is_available()` stays False, and torch's own modules are told that there is no device.
"""

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bmburst.host.gloo import Operation

DEFAULT_HANDLE = 0  # as cudaStreamLegacy in the CUDA runtime
NAME = "CPU (bmburst's host runtime)"
_TYPES = ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int", "Long", "Bool")
_DO_NOTHING = (
    "empty_cache", "init", "ipc_collect", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction",
)  # fmt: skip


def view(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the `count` elements at `address` as a tensor that shares their memory but does not keep it allocated.

    Args:
        address: Address of the first byte, as from `Tensor.data_ptr`. May be 0 if `count` is 0.
        count: Number of elements, at least 0.
        dtype: dtype of the elements.
    """
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Stream:
    """Replaces `torch.cuda.Stream`: holds the received messages that have not been waited for."""

    streams: ClassVar["Streams"]  # set on the subclass that each `Streams` makes
    device_index = 0

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = self.streams.enter(self)
        self._pending: list[Operation] = []
        self._kept: list[Tensor] = []

    @property
    def pending(self) -> "tuple[Operation, ...]":
        """The messages that have not been waited for."""
        self._pending = [transfer for transfer in self._pending if not transfer.finished]
        if not self._pending:
            self._kept.clear()
        return tuple(self._pending)

    def add(self, transfer: "Operation") -> None:
        """Add a message that is being received on this stream."""
        self._pending = [*self.pending, transfer]

    def depend_on(self, transfers: "Sequence[Operation]") -> None:
        """Make later operations on this stream wait for `transfers`."""
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
        del enable_timing, blocking, interprocess  # events always have a time, and never block or are shared
        self._transfers: tuple[Operation, ...] = ()
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
        """Return the stream for a handle, the form in which C functions get it."""
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

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """See `torch.cuda.stream`."""
        before = self.current()
        self.set_stream(before if stream is None else stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: object = None) -> None:
        """See `torch.cuda.synchronize`."""
        del device
        for stream in list(self._living.values()):
            stream.synchronize()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProperties:
    """Result of `torch.cuda.get_device_properties`, with the fields that scripts read.

    Attributes:
        name: A name that tells that this is the CPU.
        total_memory: Bytes of the host's memory.
        multi_processor_count: Number of the host's logical CPUs.
        major: Major compute capability: 0, below that of any GPU.
        minor: Minor compute capability: 0.
        warp_size: 32, as on NVIDIA GPUs.
        is_integrated: 1: memory is shared with the host.
        is_multi_gpu_board: 0.
    """

    name: str = NAME
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0
    warp_size: int = 32
    is_integrated: int = 1
    is_multi_gpu_board: int = 0


class Device(AbstractContextManager[None]):
    """Replaces the contexts `torch.cuda.device` and `torch.cuda.device_of`. There is only one device."""

    def __init__(self, device: object) -> None:
        del device
        self.idx, self.prev_idx = 0, 0

    def __exit__(self, *_: object) -> None:
        """Leave the context."""


def patch_cuda_module(streams: Streams) -> None:
    """Replace functions and classes of `torch.cuda` in this process."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = streams.Stream, streams.Event
    cuda.stream, cuda.set_stream = streams.use, streams.set_stream
    cuda.current_stream, cuda.default_stream = streams.current, streams.default_stream
    cuda.synchronize = streams.synchronize
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_summary = lambda *_, **__: "no CUDA memory: bmburst's host runtime is in use"
    for name in _DO_NOTHING:
        setattr(cuda, name, _returning(None))
    _patch_random(cuda)
    _patch_device(cuda)
    _patch_profiling(cuda)
    for name in _TYPES:
        for kind in ("Storage", "Tensor"):
            setattr(cuda, f"{name}{kind}", _constructor(f"{name}{kind}"))


def _patch_device(cuda: Any) -> None:
    real_count: Callable[[], int] = cuda.device_count

    def device_count() -> int:
        caller: Callable[[int], Any] = sys._getframe
        asked_by = str(caller(1).f_globals.get("__name__", "")).partition(".")[0]
        return real_count() if asked_by == "torch" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    cuda.device_count = device_count
    cuda.current_device = lambda: 0
    cuda.device, cuda.device_of = Device, Device
    cuda.get_device_name = lambda *_, **__: NAME
    cuda.get_device_capability = lambda *_, **__: (0, 0)
    cuda.get_device_properties = lambda *_, **__: DeviceProperties(
        total_memory=_bytes("SC_PHYS_PAGES"), multi_processor_count=os.cpu_count() or 1
    )
    cuda.mem_get_info = lambda *_, **__: (_bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES"))
    cuda.can_device_access_peer = lambda *_, **__: False


def _patch_random(cuda: Any) -> None:
    """Redirect the functions for the GPU's random numbers to the CPU generator, which draws all tensors."""
    deferred = cuda.set_rng_state

    def set_state(state: Tensor, device: object = "cuda") -> None:
        # Without CUDA, torch defers this call until CUDA is initialised. A state of the CPU's size is set now.
        if state.numel() == torch.get_rng_state().numel():
            torch.set_rng_state(state)
        else:
            deferred(state, device)

    def set_states(states: Iterable[Tensor]) -> None:
        for state in states:
            set_state(state)

    def seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))  # not torch.manual_seed, which calls this function

    replaced: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": set_state,
        "set_rng_state_all": set_states,
        "manual_seed": seed,
        "manual_seed_all": lambda value: seed(value),
        "seed": lambda: torch.default_generator.seed(),
        "seed_all": lambda: torch.default_generator.seed(),
        "initial_seed": lambda: torch.initial_seed(),
    }
    for name, function in replaced.items():
        setattr(cuda, name, function)
        setattr(cuda.random, name, function)


def _patch_profiling(cuda: Any) -> None:
    """Make NVTX ranges and the calls that start and stop a profile do nothing."""
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name, _returning(0))
    cuda.profiler.start, cuda.profiler.stop = _returning(None), _returning(None)
    runtime = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    cuda.cudart = lambda: runtime


def _bytes(pages: str) -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)


def _returning(value: object) -> Callable[..., object]:
    """Return a new function that does nothing. Each name gets its own, because torch.compile compares identities."""

    def ignore(*_: object, **__: object) -> object:
        return value

    return ignore


def _constructor(name: str) -> type:
    """Return a class that creates CPU objects. As for the CUDA class, no object is an instance of it."""
    host = getattr(torch, name)

    def make(cls: type, *args: object, **kwargs: object) -> object:
        del cls
        return host(*args, **kwargs)

    return type(name, (), {"__new__": make, "__module__": "torch.cuda"})
