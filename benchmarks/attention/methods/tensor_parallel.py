"""Megatron's tensor parallelism around attention: every rank holds the whole sequence for its own heads.

Without projections there is nothing to communicate but what they would need, so the collectives run on tensors of the
hidden state's size `[batch, tokens, heads x dim]`: forward the sum of the row-parallel output projection, which is
done on the real output (each rank's heads in their place, zero elsewhere); backward that of the column-parallel input
projection, which is done on dQ in the place of dX. Q, K and V are there when the clock starts.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import MASKS, Cell
from benchmarks.attention.masks import pattern_of
from benchmarks.attention.methods.local import ForBackward, Shape
from benchmarks.attention.methods.method import Attend, Method, Setting, applied, heads_refusal
from benchmarks.attention.work import Traffic, sizes
from benchmarks.engine.group import RankGroup


class TensorParallelV1(Method):
    """An all-reduce behind attention, and another in backward (arXiv:1909.08053)."""

    name = "tensor-parallel-v1"
    masks = MASKS
    sequence_parallel = False

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return heads_refusal(cell)

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: an all-reduce is a reduce-scatter and an all-gather of the whole hidden state."""
        once = 2.0 * sizes(cell).q * (cell.ranks - 1)
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: own heads, and the whole hidden state as output, gradient, and both in transit."""
        own = sizes(cell)
        return own.held + own.q * own.wide + 4 * own.q * cell.ranks

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        scale = cell.head_dim**-0.5
        return applied(_TensorParallel, setting, self.sequence_parallel, pattern_of(cell.mask, cell.tokens), scale)

    def cut_input(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut_input`: own heads of all tokens."""
        return whole.chunk(cell.ranks, 2)[rank]

    def cut_output(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut_output`: all of it."""
        del cell, rank
        return whole

    def input_shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """See `Method.input_shape`."""
        return cell.batch, cell.tokens, heads // cell.ranks, cell.head_dim

    def output_shape(self, cell: Cell) -> tuple[int, ...]:
        """See `Method.output_shape`."""
        return cell.batch, cell.tokens, cell.heads, cell.head_dim


class TensorParallelV3(TensorParallelV1):
    """An all-gather before and a reduce-scatter behind attention, and the same in backward (arXiv:2205.05198)."""

    name = "tensor-parallel-v3"
    sequence_parallel = True

    def cut_output(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut_output`: own tokens."""
        return whole.chunk(cell.ranks, 1)[rank]

    def output_shape(self, cell: Cell) -> tuple[int, ...]:
        """See `Method.output_shape`."""
        return cell.batch, cell.tokens // cell.ranks, cell.heads, cell.head_dim


class _TensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting, split: bool, pattern: Shape, scale: float
    ) -> Tensor:
        if split:  # the input of the projections; what is in it does not matter
            batch, tokens, heads, dim = q.shape
            setting.group.all_gather(
                q.new_empty((batch, tokens // setting.group.size, heads * setting.group.size, dim))
            )
        out, lse = setting.kernel.forward(q, k, v, pattern, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = setting, split, pattern, scale
        return _sum(setting.group, out, split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting, split, pattern, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        group = setting.group
        whole = group.all_gather(grad).transpose(0, 1).flatten(1, 2) if split else grad
        mine = whole.chunk(group.size, 2)[group.rank]
        grads = setting.kernel.backward(q, k, v, ForBackward(mine, out, lse), pattern, scale)
        _sum(group, grads.q, split)  # stands for dX
        return *grads, None, None, None, None


def _sum(group: RankGroup, own: Tensor, split: bool) -> Tensor:
    """Return the sum over the ranks of `[batch, tokens, all heads, dim]` with a rank's heads in their place."""
    batch, tokens, heads, dim = own.shape
    if not split:
        whole = own.new_zeros((batch, tokens, heads * group.size, dim))
        whole[:, :, group.rank * heads : (group.rank + 1) * heads] = own
        return group.all_reduce(whole)
    parts = own.new_zeros((group.size, batch, tokens // group.size, heads * group.size, dim))
    rows = own.unflatten(1, (group.size, -1)).transpose(0, 1)
    parts[:, :, :, group.rank * heads : (group.rank + 1) * heads] = rows
    return group.reduce_scatter(parts)
