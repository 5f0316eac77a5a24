"""Blocks whose frozen matrices are in 4 bits (QLoRA, arXiv:2305.14314), sharded and gathered as bytes by ZeRO.

A `Linear` with `quantize()` has the parameter `nf4`, packed as in `bmburst_ops.nf4`, instead of `weight`. BMTrain
shards it over all ranks as it shards any other parameter of the block, and gathers it before forward and before
backward. Right after, the block dequantizes its matrices; `weight` of each is then a plain tensor, until BMTrain
releases the block. So all operations of a block are those of frozen 16-bit weights, under every recompute policy and
ZeRO stage, and with weights in host memory.
"""

from typing import Any

import torch

from bmburst.blocks.layers import NF4, Linear
from bmburst.blocks.sharded import ShardedBlock
from bmburst.blocks.streamed import StreamedBlock
from bmburst_ops import nf4


def quantized_linears(module: torch.nn.Module) -> dict[str, Linear]:
    """Return the linear layers of a module with weights in 4 bits, by the names of their parameters."""
    named = module.named_modules()
    return {f"{name}.{NF4}": each for name, each in named if isinstance(each, Linear) and each.is_quantized}


class _Dequantizes:
    """Mixin for a `ShardedBlock`: dequantizes its matrices after each gather, and frees them with what was gathered.

    The order in backward matters for memory: the gradients and weights of the next block go first.
    """

    _module: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._linears = list(quantized_linears(self._module).values())

    @torch.no_grad()
    def entered(self) -> None:
        """Dequantize the matrices."""
        for linear in self._linears:
            if not linear.weight.numel():
                linear.weight.data = nf4.dequantize(linear.nf4.data, linear.shape, linear.weight.dtype)

    @torch.no_grad()
    def left(self) -> None:
        """Free the dequantized matrices."""
        for linear in self._linears:
            linear.weight.data = linear.weight.new_empty(0)


class FourBitBlock(_Dequantizes, ShardedBlock):
    """A `ShardedBlock` with matrices in 4 bits. ZeRO stage 2 keeps the bytes gathered, not the matrices."""


class StreamedFourBitBlock(_Dequantizes, StreamedBlock):
    """A block with matrices in 4 bits whose shards are in host memory; see `StreamedBlock`."""
