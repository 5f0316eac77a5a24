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
from bmtrain.zero_context import ZeroContext
from torch import Tensor

from bmburst.blocks.layers import with_graph
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
    """

    def __init__(self, module: torch.nn.Module, copies: ShardCopies, order: int) -> None:
        super().__init__(module, zero_level=3)
        self._copies, self._visible = copies, False
        self._shards = [HostShard(each, order, copies.memory) for each in self._storage_params.values()]
        self._point_to_shards()

    def shard_bytes(self, *, trained: bool = False) -> list[int]:
        """Return the bytes of each shard of the weights; `trained`: only of those that require a gradient."""
        return [each.weights.nbytes for each in self._shards if each.parameter.requires_grad or not trained]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block; after its kernels are launched, prefetch the weights of the next block."""
        found = super().forward(with_graph(hidden), *args, **kwargs)
        if not self._is_last_layer:
            self._next_module.prefetch()
        return found

    def pre_hook(self, *args: Any) -> list[Any]:
        """Gather the weights before the forward pass."""
        self._show()
        found: list[Any] = super().pre_hook(*args)
        self._hide()
        return found

    def post_hook(self, out: Any) -> Any:
        """Release the weights after the forward pass."""
        found = super().post_hook(out)
        if isinstance(found, Tensor):
            return _ShownInBackward.apply(self, found)[0]  # type: ignore[no-untyped-call]
        return _ShownInBackward.apply(self, *found)  # type: ignore[no-untyped-call]

    def prefetch(self) -> None:
        """Start to copy the weights to the GPU."""
        if not self._ready:
            self._copies.prefetch(self._shards)

    def release_next_module(self, flag: int) -> None:
        """Reduce the gradient of the next block. BMTrain's backward calls this after gathering this block's weights."""
        self._hide()
        super().release_next_module(flag)
        if not self._is_first_layer:
            self._pre_module.prefetch()

    def begin_scatter(self) -> None:
        """Copy the gradient of micro-batches before to the GPU."""
        self._copies.bring_gradients(self._shards)

    def end_scatter(self, writer: Any) -> None:
        """Copy the gradient to host memory."""
        self._copies.send_gradients(self._shards, writer)
        self._point_to_shards()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights for the duration of the context, outside of the block's forward and backward."""
        self._show()
        context = ZeroContext(self, self._layer_dict)
        context.enter()
        self._hide()
        if not self._is_last_layer:
            self._next_module.prefetch()
        try:
            yield
        finally:
            context.exit()

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
        self._point_to_shards()
        try:
            yield
        finally:
            for each in self._shards:
                each.weights.copy_(each.parameter.data)
                each.parameter.data = each.weights
                each.version += 1
            self._point_to_shards()

    def _show(self) -> None:
        if not self._ready:
            self._visible = True
            self._copies.show(self._shards, bmt.config["load_stream"])

    def _hide(self) -> None:
        if self._visible:
            self._visible = False
            self._copies.hide(self._shards, bmt.config["load_stream"])

    def _point_to_shards(self) -> None:
        """Make the block's parameters views of its shards, as BMTrain does after each pass."""
        for info in self._param_info:
            storage = self._storage_params[info["kw_name"]]
            parameter = info["parameter"]
            parameter.grad = None
            if "begin" not in info:
                parameter.data = storage.data.new_empty(0)
                continue
            run = slice(info["begin"], info["begin"] + info["end"][0])
            parameter.data = storage.data[run]
            if storage.grad is not None and parameter.requires_grad:
                parameter.grad = storage.grad[run]


class _ShownInBackward(torch.autograd.Function):
    """Copies a block's weights to the GPU in backward, before BMTrain's hook gathers them."""

    @staticmethod
    def forward(ctx: Any, block: StreamedBlock, *out: Tensor) -> tuple[Tensor, ...]:
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.block._show()
        return None, *grads
