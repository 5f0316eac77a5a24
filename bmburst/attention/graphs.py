"""CUDA graphs of kernel calls that repeat on the same memory, and the streams on which units of heads run.

FlashAttention-4's Python takes the host of an H200 0.15 to 0.25 ms for a forward and 0.25 to 0.4 ms for a backward
before its kernels start; starting a graph takes it 0.01 ms. A GPU that has short kernels, or none before, waits for it.
Recording one takes the host longer than a call does, so what is called a few times is not recorded: a model of few
layers calls a mask of a step's own documents as often as it has layers, and then never again.

A graph reads and writes where its kernels did when it was recorded. So only work on memory that stays where it is comes
here, and by its addresses it is found again. What kernels need in between is taken from memory that all graphs of a
stream share, and that nobody else gets: about 4 bytes for each number of the queries' gradient, up to six times that
under masks of several tiles. Torch gives no part of it back: where each step of a training has documents of its own,
one that needs a little more than all before it would add all that it needs. So it is taken in one piece, with room to
spare.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from bmburst.comm.streams import CurrentStream, StreamOrder
from bmburst.comm.transports import PEER_GROUPS
from bmburst_ops.flash.memory import collect_vectors

# Bytes: during a recording torch's cache does not give way. Masks of several tiles take five or six times the sums that
# `records_kernels` allows: three gradients in fp32, a tile's three, and what the kernel takes itself.
_ROOM = 3 << 30
_SPARE = 1.25  # a document pads sums by a block of up to 128 tokens: one of 500 tokens by a quarter
# Calls of some work before it is recorded. On 2 H200s, 16K tokens in documents that are new in each step: 4 layers
# took 18.3 ms without graphs, 22.2 recorded behind the second call, 18.3 behind the fourth; 32 layers 97.1, 82.4, 82.2.
CALLS = 4
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # set where programs are looked for errors of memory


class Recording:
    """Some work of the current stream that is asked for again and again."""

    def __init__(self) -> None:
        self._runs = 0
        self._graph: Any = None
        self._held: object = None

    def run(self, work: Callable[[], None], varying: int = 0) -> None:
        """Do the work; once it has been called `CALLS` times, without calling it.

        By then its kernels are compiled. It is recorded right behind a call: all is on the device that it wants to find
        there.

        Args:
            work: The work.
            varying: About how many bytes it takes for itself, where other such work will take a little more or less.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        work()
        self._runs += 1
        if self._runs == CALLS and _has_room():
            self._graph, self._held = _record(work, varying)


class Recordings:
    """The recordings of a process, by what the work is, where its memory lies and on what stream it runs.

    The least recently used are dropped, as where each step of a training has documents of its own.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._recordings: OrderedDict[tuple[object, ...], Recording] = OrderedDict()

    def get(self, *work: object) -> Recording:
        """Return the recording of some work: the same for equal arguments."""
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
        """Drop all recordings and the memory that their graphs share: work is called again before it is recorded."""
        with self._lock:
            self._recordings.clear()
        _capture_resources.cache_clear()


RECORDINGS = Recordings(most=256)


def _has_room() -> bool:
    """Whether torch's allocator can set memory aside for graphs, and may take some that it need not give back."""
    is_torchs_own = torch.cuda.get_allocator_backend() == "native"
    return is_torchs_own and _NO_CACHE not in os.environ and _free_nbytes() >= _ROOM


def _free_nbytes() -> float:
    """Return how much more of the device torch's allocator can take: what is free, of the share that it may have."""
    free, total = torch.cuda.mem_get_info()
    return min(free, torch.cuda.get_per_process_memory_fraction() * total - torch.cuda.memory_reserved())


def _record(work: Callable[[], None], varying: int) -> tuple[Any, object]:
    """Return a graph of the work, which is not done, and what must live as long; `varying` as above."""
    current = torch.cuda.current_stream()
    stream, pool = _capture_resources(current)
    graph = torch.cuda.CUDAGraph()
    with CurrentStream(stream), collect_vectors() as vectors:
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            if varying:  # at once free again: the work's tensors are cut from it
                torch.empty(int(varying * _SPARE), dtype=torch.uint8, device=stream.device)
            work()
        finally:
            graph.capture_end()
    return graph, vectors


@lru_cache(maxsize=64)
def _capture_resources(stream: Any) -> tuple[Any, Any]:
    """Return where work of a stream is recorded: a stream like it, and memory for its graphs, which never overlap."""
    return torch.cuda.Stream(stream.device, priority=stream.priority), torch.cuda.MemPool()


_PRIORITIES = (-1, -2, -2)
"""Of the turns before the last one, from the end, two streams alternating further ahead. Copies between ranks have a
higher one."""


class UnitStreams:
    """A stream for each turn, the last one's being the current stream; on CPUs, or for one turn alone, nothing.

    What is launched in a turn comes after everything launched before this was made. Its results may be used after
    `join`.

    Args:
        device: Where the kernels run.
        turns: How many there will be.
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
        if (stream := self._before[i]) not in self._begun:  # not before: what comes first is not to wait for the host
            self._begun.add(stream)
            stream.wait_event(self._beginning)
        return CurrentStream(stream)

    def join(self) -> None:
        """Let the current stream wait for all that was launched."""
        if self._before:
            StreamOrder().after(self._current, *set(self._before))


def _place(turns: int, turn: int) -> int:
    """Return which stream a turn before the last has."""
    ahead = turns - 2 - turn
    return ahead if ahead < 1 else 1 + (ahead - 1) % 2


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[Any, ...]:
    """Return a device's streams: always the same, since torch keeps free memory for each stream apart."""
    return tuple(torch.cuda.Stream(device, priority=priority) for priority in _PRIORITIES)


def empty_cache() -> None:
    """Give back the GPU memory that calls of `burst_attention` keep for the next, and what torch's cache holds.

    Attention keeps the buffers of transport "peer", which are outside of torch's cache and as large as the largest call
    so far needed them, and the memory of CUDA graphs of its kernels. Call this between phases of a program where one
    has longer sequences or more ranks a group than the next, before the groups of the last are destroyed: buffers of a
    destroyed group stay until the process ends. Later calls allocate new memory.

    Every rank must call it, at the same point of the program. It waits for the GPU.
    """
    PEER_GROUPS.release()
    RECORDINGS.clear()
    torch.cuda.empty_cache()
