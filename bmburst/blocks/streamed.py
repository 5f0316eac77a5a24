"""A `bmtrain.Block` that offloads its weights and gradients to host memory and copies them to the GPU when it runs.

BMTrain gathers a block's weights before forward and before backward, and reduces its gradient after backward. The
shards are on the GPU only around these three operations. Parameter names, hooks, `bmtrain.save` and `bmtrain.load` work
as in BMTrain; results are bitwise equal to those of a block without offload.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.blocks.gathering import GatherMemory
from bmburst.blocks.sharded import ShardedBlock
from bmburst.comm.host_memory import HostShard, ShardCopies


class StreamedBlock(ShardedBlock):
    """A ZeRO-3 block whose shards are in host memory. Put blocks into a `bmtrain.TransformerBlockList`.

    Train it with `bmburst.optim.AdamW(offload=True)`, which updates the shards in host memory: BMTrain's optimizers
    need them on the GPU.

    Args:
        module: The module to wrap, as in `bmtrain.Block`.
        copies: Buffers and streams, shared by all blocks of a model.
        order: Index of the block in the model.
        memory: See `ShardedBlock`.
        is_written: Whether the module's parameters have their numbers, which are then copied to host memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        copies: ShardCopies,
        order: int,
        memory: GatherMemory,
        *,
        is_written: bool = True,
    ) -> None:
        super().__init__(module, zero_level=3, memory=memory)
        self._copies, storages = copies, self._storage_params.values()
        self._shards = [HostShard(each, order, copies.memory, is_written=is_written) for each in storages]
        self._point_to_shards()

    def shard_bytes(self, *, trained: bool = False) -> list[int]:
        """Return the bytes of each shard of the weights; `trained`: only of those that require a gradient."""
        return [each.weights.nbytes for each in self._shards if each.parameter.requires_grad or not trained]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block; after its kernels are launched, copy the weights of the next block to the GPU."""
        found = super().forward(hidden, *args, **kwargs)
        if not self._is_last_layer:
            self._next_module.prefetch()
        return found

    def gather(self) -> None:
        """Copy the weights to the GPU and gather them."""
        load = bmt.config["load_stream"]
        self._copies.show(self._shards, load)
        super().gather()
        self._copies.hide(self._shards, load)

    def prepare(self, neighbour: ShardedBlock | None) -> None:
        """Leave the weights of the next block in host memory until the kernels of this one are launched."""

    def before_backward(self) -> None:
        """See `ShardedBlock.before_backward`; then copy the weights of the block before this one to the GPU."""
        super().before_backward()
        if not self._is_first_layer:
            self._pre_module.prefetch()

    def put_gradient_aside(self) -> None:
        """Leave the gradient to the optimizer, which drops it: its place in host memory is the shard's."""

    def begin_scatter(self) -> None:
        """Copy the gradient of micro-batches before to the GPU."""
        self._copies.bring_gradients(self._shards)

    def end_scatter(self, writer: Any) -> None:
        """Copy the gradient to host memory."""
        self._copies.send_gradients(self._shards, writer)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See `ShardedBlock.gathered`; meanwhile, copy the weights of the next block to the GPU."""
        with super().gathered():
            if not self._is_last_layer:
                self._next_module.prefetch()
            yield

    def prefetch(self) -> None:
        """Start to copy the weights to the GPU."""
        if self._slot is None and not self._ready:
            self._copies.prefetch(self._shards)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `bmtrain.Block`."""
        with self._on_gpu():
            return super().state_dict(*args, **kwargs)

    def init_parameters(self) -> None:
        """See `bmtrain.Block`."""
        with self._on_gpu():
            super().init_parameters()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._on_gpu():
            super()._load_from_state_dict(*args, **kwargs)

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        """Move the shards to the GPU for the duration of the context, for BMTrain to read and write."""
        for each in self._shards:
            each.settle()
            each.parameter.data = each.weights.to(each.device, copy=True)
        for parameter in self._ordered:
            parameter.grad = None  # it is in host memory
        self._views.show()
        try:
            yield
        finally:
            for each in self._shards:
                each.weights.copy_(each.parameter.data)
                each.parameter.data = each.weights
                each.version += 1
            self._point_to_shards()

    def _point_to_shards(self) -> None:
        self._views.show()
        self._views.show_gradients()
