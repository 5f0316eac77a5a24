"""Repeated work of inference as CUDA graphs: a token of decoding, and short prompts.

No graph has a collective of NCCL: `ncclCommDestroy` waits until each graph that captured one is destroyed, so that
`torch.distributed.destroy_process_group` would not return as long as a program holds a session. Work is divided into
graphs between its collectives.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.communicator import Communicator
from bmburst.comm.streams import paused_collector

Exchange = Callable[[], object]
"""Reads and writes tensors that stay in place."""
Phases = Generator[Exchange, None, Tensor]
"""Work that returns its result, and yields the exchanges that must be done before it continues."""


def once(work: Callable[[], Tensor]) -> Phases:
    """Return work without an exchange."""
    yield from ()
    return work()


def gathered(comm: Communicator, tensor: Tensor) -> Phases:
    """Return work that all-gathers a tensor: `[ranks, ...]`."""
    sent = tensor.contiguous()
    parts = sent.new_empty((comm.size, *sent.shape))
    yield lambda: parts.copy_(comm.all_gather(sent).wait()[0])
    return parts


def summed(comm: Communicator, tensor: Tensor) -> Phases:
    """Return work that sums a tensor over the ranks."""
    sent = tensor.contiguous()
    total = torch.empty_like(sent)
    yield lambda: total.copy_(comm.all_reduce(sent).wait()[0])
    return total


def result_of(phases: Phases) -> Tensor:
    """Do work to its end and return its result."""
    while True:
        try:
            exchange = next(phases)
        except StopIteration as end:
            result: Tensor = end.value
            return result
        exchange()


class Replay:
    """Work on tensors that stay in place: called the first time, captured the second time, and replayed from then on.

    The first call compiles kernels and lets libraries allocate, which a capture does not allow.

    Args:
        work: Launches kernels, without waiting for the device.
        pool: Memory of graphs that never run at the same time; see `torch.cuda.graph_pool_handle`. Default: its own.
        temporary: Bytes of the temporary memory of the largest graph of the pool. Graphs that are captured from small
            to large then share one block of it, instead of adding a block each.
    """

    def __init__(self, work: Callable[[], Phases], pool: Any = None, temporary: int = 0) -> None:
        self._work, self._pool, self._temporary = work, pool, temporary
        self._has_run = False
        self._replayed: list[Exchange] = []
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        """Return the result, in a tensor that the next call may overwrite."""
        if not self._has_run:
            self._has_run = True
            return result_of(self._work())
        if self._result is None:
            self._result = self._captured()
        for part in self._replayed:
            part()
        return self._result

    def _captured(self) -> Tensor:
        """Capture the work between exchanges. What it holds then stays in place: nothing else runs in the pool."""
        phases, pool = self._work(), self._pool or torch.cuda.graph_pool_handle()
        self._replayed.clear()  # of a capture that failed
        while True:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # thread_local: other threads, such as NCCL's watchdog, may use CUDA during the capture.
            capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
            result = exchange = None
            with paused_collector(), capture:
                if self._temporary and not self._replayed:  # freed at once: the work is served from this block
                    torch.empty(self._temporary, dtype=torch.uint8, device="cuda")
                try:
                    exchange = next(phases)
                except StopIteration as end:
                    result = end.value
            self._replayed.append(graph.replay)
            if exchange is None:
                assert isinstance(result, Tensor)
                return result
            self._replayed.append(exchange)
