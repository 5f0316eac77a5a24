"""Replaces what scripts ask of `torch.cuda` on a machine without CUDA: streams, facts of the device, counters, NVTX.

The device that scripts see is the CPU: its memory is the host's, its compute capability 0.0, and each rank of this host
counts as one device. `torch.cuda.is_available()` stays False, and torch's own modules are told that there is no device.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bmburst.runtime.host.streams import Streams

NAME = "CPU (bmburst's host runtime)"
_TYPES = ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int", "Long", "Bool")
_DO_NOTHING = (
    "empty_cache", "init", "ipc_collect", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns: the fields that scripts read.

    Attributes:
        name: Says that this is the CPU.
        total_memory: The host's memory, bytes.
        multi_processor_count: The host's logical CPUs.
        major: Of the compute capability: 0, below that of any GPU.
        minor: Likewise.
        warp_size: Of NVIDIA's GPUs.
        is_integrated: Whether memory is the host's: 1.
        is_multi_gpu_board: Whether several GPUs share a board: 0.
    """

    name: str = NAME
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0
    warp_size: int = 32
    is_integrated: int = 1
    is_multi_gpu_board: int = 0


class Device(contextlib.AbstractContextManager[None]):
    """Replaces the contexts `torch.cuda.device` and `torch.cuda.device_of`. There is one device to be on."""

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
    """Make the functions of the GPU's random numbers those of the CPU's: every tensor is drawn there."""
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
    """Let ranges of NVTX and the calls that bound a profile do nothing."""
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name, _returning(0))
    cuda.profiler.start, cuda.profiler.stop = _returning(None), _returning(None)
    runtime = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    cuda.cudart = lambda: runtime


def _bytes(pages: str) -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)


def _returning(value: object) -> Callable[..., object]:
    """Return a new function that does nothing. Each name has its own: torch.compile knows functions by identity."""

    def ignore(*_: object, **__: object) -> object:
        return value

    return ignore


def _constructor(name: str) -> type:
    """Return a class that makes CPU objects. No object is an instance of it, as none is of the CUDA class."""
    host = getattr(torch, name)

    def make(cls: type, *args: object, **kwargs: object) -> object:
        del cls
        return host(*args, **kwargs)

    return type(name, (), {"__new__": make, "__module__": "torch.cuda"})
