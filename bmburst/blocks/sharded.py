"""A `bmtrain.Block` that tells when backward has scattered its gradient."""

from collections.abc import Callable, Collection
from typing import Any

import bmtrain as bmt
import torch

AfterScatter = Callable[[Collection[torch.nn.Parameter]], Any]
"""Gets the storages of a block, whose gradients the load stream scatters; returns the stream that completes them."""


class ShardedBlock(bmt.Block):  # type: ignore[misc]  # BMTrain has no types
    """A block without BMTrain's checkpointing: `bmburst.recompute` replaces it, which would run the ring twice.

    Args:
        module: The module to wrap, as in `bmtrain.Block`.
        zero_level: BMTrain's ZeRO stage, 2 or 3.

    Attributes:
        after_scatter: Called in backward for each block; None: the gradient is complete when it is scattered.
    """

    def __init__(self, module: torch.nn.Module, *, zero_level: int) -> None:
        super().__init__(module, use_checkpoint=False, zero_level=zero_level)
        self.after_scatter: AfterScatter | None = None

    def release(self, flag: int) -> None:
        """Release the weights. After a backward pass, also scatter the gradient."""
        context = self._backward_block_ctx
        scatters = context is not None and context._need_release
        if scatters:
            self.begin_scatter()
        super().release(flag)
        if scatters:
            storages = self._storage_params.values()
            self.end_scatter(bmt.config["load_stream"] if self.after_scatter is None else self.after_scatter(storages))

    def begin_scatter(self) -> None:
        """Prepare for the gradient to be scattered and added to that of micro-batches before."""

    def end_scatter(self, writer: Any) -> None:
        """Use the gradient, which is complete after the work of stream `writer`."""
