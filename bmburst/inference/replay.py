"""Repeated work of inference as CUDA graphs: a token of decoding, and short prompts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.streams import paused_collector


class Replay:
    """Work on tensors that stay in place: called the first time, captured the second time, and replayed from then on.

    The first call compiles kernels and lets libraries allocate, which a capture does not allow.

    Args:
        work: Launches kernels, without waiting for the device, and returns the result.
        pool: Memory of graphs that never run at the same time; see `torch.cuda.graph_pool_handle`. Default: its own.
        temporary: Bytes of the temporary memory of the largest graph of the pool. Graphs that are captured from small
            to large then share one block of it, instead of adding a block each.
    """

    def __init__(self, work: Callable[[], Tensor], pool: Any = None, temporary: int = 0) -> None:
        self._work, self._pool, self._temporary = work, pool, temporary
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        """Return the result, in a tensor that the next call may overwrite."""
        if not self._has_run:
            self._has_run = True
            return self._work()
        if self._graph is None or self._result is None:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # thread_local: other threads, such as NCCL's watchdog, may use CUDA during the capture.
            capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with paused_collector(), capture:
                if self._temporary:  # freed at once: the work is served from this block
                    torch.empty(self._temporary, dtype=torch.uint8, device="cuda")
                self._result = self._work()
            self._graph = graph
        self._graph.replay()
        return self._result
