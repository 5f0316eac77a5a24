"""DeepSpeed-Ulysses (arXiv:2309.14509): all-to-all from tokens to heads, one kernel call, all-to-all back."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import MASKS, Cell
from benchmarks.attention.masks import pattern_of
from benchmarks.attention.methods.local import ForBackward, Shape
from benchmarks.attention.methods.method import Attend, Method, Setting, applied, heads_refusal
from benchmarks.attention.work import Traffic, sizes
from benchmarks.engine.group import RankGroup
from bmburst.recompute import keep


class Ulysses(Method):
    """q, k and v leave together in one all-to-all; nothing overlaps.

    Inside of `bmburst.recompute.checkpoint` the kernel's results are kept, and only its transfers are done again.
    """

    name = "ulysses"
    masks = MASKS

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return heads_refusal(cell)

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: of every tensor all but the own part; backward moves dO, dQ, dK and dV."""
        own = sizes(cell)
        once = (2 * own.q + 2 * own.k) * (cell.ranks - 1) / cell.ranks
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: shares by tokens and by heads, both, and the buffers of an all-to-all."""
        own = sizes(cell)
        return 2 * own.held + own.q * own.wide

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_Ulysses, setting, pattern_of(cell.mask, cell.tokens), cell.head_dim**-0.5)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting, pattern: Shape, scale: float) -> Tensor:
        q, k, v = to_heads(setting.group, q, k, v)
        out, lse = keep(lambda: setting.kernel.forward(q, k, v, pattern, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = setting, pattern, scale
        return to_tokens(setting.group, out)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting, pattern, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        (mine,) = to_heads(setting.group, grad)
        grads = setting.kernel.backward(q, k, v, ForBackward(mine, out, lse), pattern, scale)
        return *to_tokens(setting.group, *grads), None, None, None


def to_heads(group: RankGroup, *tensors: Tensor) -> list[Tensor]:
    """Turn shares by tokens `[batch, tokens / P, heads, dim]` into shares by heads `[batch, tokens, heads / P, dim]`.

    All tensors travel in one all-to-all. With one sequence the results are views of what arrived.
    """
    batch, _, _, dim = tensors[0].shape
    packed = torch.cat([t.unflatten(2, (group.size, -1)) for t in tensors], 3)  # [batch, n, P, heads of all, dim]
    arrived = group.all_to_all(packed.permute(2, 0, 1, 3, 4).contiguous())  # [P, batch, n, heads, dim]
    whole = arrived.transpose(0, 1).reshape(batch, -1, arrived.shape[3], dim)
    return list(whole.split([t.shape[2] // group.size for t in tensors], 2))


def to_tokens(group: RankGroup, *tensors: Tensor) -> list[Tensor]:
    """Turn shares by heads back into shares by tokens, in one all-to-all."""
    packed = torch.cat(tensors, 2) if len(tensors) > 1 else tensors[0]
    parts = packed.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()  # [P, batch, n, heads of all, dim]
    arrived = group.all_to_all(parts).permute(1, 2, 0, 3, 4)  # [batch, n, P, heads of all, dim]
    heads = [t.shape[2] for t in tensors]
    return [part.flatten(2, 3) for part in arrived.split(heads, 3)]
