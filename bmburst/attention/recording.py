"""Kernel calls as CUDA graphs: what is called again and again on the same memory is then started in one step.

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
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from bmburst.comm.streams import On
from bmburst_ops.flash.vectors import held

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


@lru_cache(maxsize=256)
def recording(*_: object) -> Recording:
    """Return the recording of some work: the same for equal arguments, which say which work, where and on what stream.

    The oldest are let go, as where each step of a training has documents of its own.
    """
    return Recording()


def forget() -> None:
    """Let go of all recordings and of the memory that their graphs share: what comes next is called again first."""
    recording.cache_clear()
    _studio.cache_clear()


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
    stream, pool = _studio(current)
    graph = torch.cuda.CUDAGraph()
    with On(stream), held() as vectors:
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            if varying:  # at once free again: the work's tensors are cut from it
                torch.empty(int(varying * _SPARE), dtype=torch.uint8, device=stream.device)
            work()
        finally:
            graph.capture_end()
    return graph, vectors


@lru_cache(maxsize=64)
def _studio(stream: Any) -> tuple[Any, Any]:
    """Return where work of a stream is recorded: a stream like it, and memory for its graphs, which never overlap."""
    return torch.cuda.Stream(stream.device, priority=stream.priority), torch.cuda.MemPool()
