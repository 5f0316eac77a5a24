"""Megatron's first tensor parallelism (arXiv:1909.08053), in the trainer's model.

The trainer's tensor ranks hold their own tokens between the matrices (arXiv:2205.05198). Here each rank of a tensor
group has all tokens in all blocks. The stream is gathered before the first block and split after the last one.
Attention and MLP sum their results with an all-reduce in forward, and their input's gradient with one in backward
(Megatron's g and f). Embedding, last norm, head and loss are those of the trainer, with each token on one rank.
Megatron shards these by the vocabulary, which is the same work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmburst.blocks.layers import RMSNorm, TensorGroup
from bmburst.blocks.model import Llama
from bmburst.blocks.transformer import Batch, TransformerBlock
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import communicator

Map = Callable[[Tensor], Tensor]


def replicate(model: Llama) -> None:
    """Give every tensor parallel rank all tokens inside the model's blocks, in place. Call it before the first step."""
    if model.tensor.size == 1:
        return
    comm = communicator(bmt.config["tp_comm"])
    group = _Replicated(comm)
    for wrapped in model.model.layers:
        block: TransformerBlock = wrapped._module  # `modules()` of a bmt.Block omits it
        block.self_attn.tensor = block.mlp.tensor = group
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            setattr(norm, "scale", _SharedScale(norm, comm.size))  # noqa: B010  # mypy: a method
    model.model.layers = _Between(model.model.layers, comm)


class _Replicated(TensorGroup):
    """A tensor group whose ranks have all tokens: inputs are not gathered, partial results are all-reduced."""

    def __init__(self, comm: CheckedCommunicator) -> None:
        super().__init__(comm)
        self._sum = comm

    def gather(self, x: Tensor, tokens: int) -> Tensor:
        """Return x; backward sums the gradients of the ranks."""
        del tokens
        return _pair(x, lambda x: x.view_as(x), partial(_summed, comm=self._sum))

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; backward returns the gradient unchanged, since all ranks have it."""
        return _pair(x, partial(_summed, comm=self._sum), lambda grad: grad)


class _SharedScale:
    """A norm's weight. Each rank has the complete gradient and ZeRO sums it, so it is divided by the ranks."""

    def __init__(self, norm: RMSNorm, ranks: int) -> None:
        self._norm, self._ranks = norm, ranks

    def __call__(self) -> Tensor:
        # A view would keep the block's whole gathered buffer alive.
        return _pair(self._norm.weight, torch.clone, lambda grad: grad / self._ranks)


class _Between(torch.nn.Module):
    """The blocks, with an all-gather of tokens before the first one and a split after the last one."""

    def __init__(self, layers: torch.nn.Module, comm: CheckedCommunicator) -> None:
        super().__init__()
        self.layers, self._comm = layers, comm

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the output of the blocks for this rank's tokens, `[batch, own tokens, hidden_size]`."""
        assert hidden.shape[1] * self._comm.size == batch.cos.shape[1]  # lengths of cells divide by the ranks
        gathered, cut = (partial(function, comm=self._comm) for function in (_gathered, _cut))
        return _pair(self.layers(_pair(hidden, gathered, cut), batch), cut, gathered)


def _gathered(x: Tensor, comm: CheckedCommunicator) -> Tensor:
    (parts,) = comm.all_gather(x).wait()
    return parts.movedim(0, 1).flatten(1, 2).contiguous()


def _cut(x: Tensor, comm: CheckedCommunicator) -> Tensor:
    return x.chunk(comm.size, 1)[comm.rank].contiguous()


def _summed(x: Tensor, comm: CheckedCommunicator) -> Tensor:
    (total,) = comm.all_reduce(x.contiguous()).wait()
    return total


class _Pair(torch.autograd.Function):
    """`(x, forward, backward) -> forward(x)`, whose gradient is `backward` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None


def _pair(x: Tensor, forward: Map, backward: Map) -> Tensor:
    result: Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result
