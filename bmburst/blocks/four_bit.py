"""Blocks whose frozen matrices are in 4 bits (QLoRA, arXiv:2305.14314), sharded and gathered as bytes by ZeRO.

A `Linear` with `quantize()` has the parameter `nf4`, packed as in `bmburst_ops.nf4`, instead of `weight`. BMTrain
shards it over all ranks as it shards any other parameter of the block, and gathers it before forward and before
backward. Right after, the block dequantizes its matrices; `weight` of each is then a plain tensor, until BMTrain
releases the block. So all operations of a block are those of frozen 16-bit weights, under every recompute policy and
ZeRO stage, and with weights in host memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bmtrain.zero_context import ZeroContext

from bmburst.blocks.layers import NF4, Linear
from bmburst.blocks.sharded import ShardedBlock
from bmburst.blocks.streamed import StreamedBlock
from bmburst_ops import nf4


def quantized_linears(module: torch.nn.Module) -> dict[str, Linear]:
    """Return the linear layers of a module with weights in 4 bits, by the names of their parameters."""
    named = module.named_modules()
    return {f"{name}.{NF4}": each for name, each in named if isinstance(each, Linear) and each.is_quantized}


class _Dequantizes:
    """Mixin for a `bmtrain.Block`: dequantizes its matrices after each gather, and frees them with what was gathered.

    The order in backward matters for memory: the gradients and weights of the next block go first.
    """

    _module: torch.nn.Module
    _ready: bool  # BMTrain's: whether the block is gathered

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._linears = list(quantized_linears(self._module).values())

    def pre_hook(self, *args: Any) -> list[Any]:
        """Gather the weights before the forward pass."""
        found: list[Any] = super().pre_hook(*args)  # type: ignore[misc]
        self._follow()
        return found

    def post_hook(self, out: Any) -> Any:
        """Release the weights after the forward pass."""
        found = super().post_hook(out)  # type: ignore[misc]
        self._follow()
        return found

    def release_next_module(self, flag: int) -> None:
        """Reduce the gradient of the next block. BMTrain's backward calls this after gathering this block's weights."""
        super().release_next_module(flag)  # type: ignore[misc]
        self._follow()

    def release(self, flag: int) -> None:
        """Release the weights, after a backward pass with its gradient."""
        super().release(flag)  # type: ignore[misc]
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Dequantize the matrices if the block is gathered, else free them."""
        for linear in self._linears:
            if not self._ready:
                linear.weight.data = linear.weight.new_empty(0)
            elif not linear.weight.numel():
                linear.weight.data = nf4.dequantize(linear.nf4.data, linear.shape, linear.weight.dtype)


class FourBitBlock(_Dequantizes, ShardedBlock):
    """A block with matrices in 4 bits, without BMTrain's checkpointing.

    Args:
        module: The module to wrap, as in `bmtrain.Block`.
        zero_level: ZeRO stage. Stage 2 keeps the bytes gathered from forward to backward, not the matrices.
    """

    def __init__(self, module: torch.nn.Module, zero_level: int) -> None:
        super().__init__(module, zero_level=zero_level)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather and dequantize the weights for the duration of the context, outside of forward and backward."""
        flag = 2 if self._zero_level == 2 else 0  # 2: use what the forward pass left gathered
        context = ZeroContext(self, self._layer_dict)
        context.enter(flag)
        self._follow()
        try:
            yield
        finally:
            context.exit(flag)
            self._follow()


class StreamedFourBitBlock(_Dequantizes, StreamedBlock):
    """A block with matrices in 4 bits whose shards are in host memory; see `StreamedBlock`."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See `FourBitBlock.gathered`."""
        try:
            with super().gathered():
                self._follow()
                yield
        finally:
            self._follow()
