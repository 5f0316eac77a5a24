"""Repeated work of inference as CUDA graphs: a token of decoding, and the prefill of short prompts.

Launching the kernels of a layer takes the host about a millisecond. A token, or a short prompt, takes the GPU less.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Replay:
    """Work on tensors that stay in place: called the first time, captured the second time, and replayed from then on.

    The first call compiles kernels and allocates their memory, which a capture cannot.

    Args:
        work: Launches the kernels, without waiting for the device, and returns the result.
        pool: Memory that graphs share which never run at the same time; see `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, work: Callable[[], Tensor], pool: Any = None) -> None:
        self._work, self._pool = work, pool
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        """Return the result, in a tensor that the next call may overwrite."""
        if not self._has_run:
            self._has_run = True
            return self._work()
        if self._graph is None or self._result is None:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # thread_local: other threads, such as NCCL's watchdog, may use CUDA during the capture.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._result = self._work()
        self._graph.replay()
        return self._result
