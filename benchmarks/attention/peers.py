"""Reimplementations of other methods: Ulysses and ring self-attention."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import MASKS, Cell, Traffic, pattern_of, sizes
from benchmarks.attention.method import Attend, ForBackward, Method, PackedPattern, Setting, applied, heads_refusal
from benchmarks.engine.machine import RankGroup
from bmburst.recompute import keep


class Ulysses(Method):
    """DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all of q, k and v, one kernel call, an all-to-all of the output.

    Transfers do not overlap with the kernel. Inside `bmburst.recompute.checkpoint` the kernel's results are kept, and
    only transfers are repeated.
    """

    name = "ulysses"
    masks = MASKS

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return heads_refusal(cell)

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: each tensor without the rank's own part; backward moves dO, dQ, dK and dV."""
        own = sizes(cell)
        once = (2 * own.q + 2 * own.k) * (cell.ranks - 1) / cell.ranks
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: tensors sharded by tokens and by heads, and the buffers of an all-to-all."""
        own = sizes(cell)
        return 2 * own.held + own.q * own.wide

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_Ulysses, setting, pattern_of(cell.mask, cell.tokens), cell.head_dim**-0.5)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting, pattern: PackedPattern, scale: float
    ) -> Tensor:
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
    """Reshard from tokens, `[batch, tokens / P, heads, dim]`, to heads, `[batch, tokens, heads / P, dim]`.

    All tensors are exchanged in one all-to-all. For one sequence the results are views of the received buffer.
    """
    batch, _, _, dim = tensors[0].shape
    packed = torch.cat([t.unflatten(2, (group.size, -1)) for t in tensors], 3)  # [batch, n, P, heads of all, dim]
    arrived = group.all_to_all(packed.permute(2, 0, 1, 3, 4).contiguous())  # [P, batch, n, heads, dim]
    whole = arrived.transpose(0, 1).reshape(batch, -1, arrived.shape[3], dim)
    return list(whole.split([t.shape[2] // group.size for t in tensors], 2))


def to_tokens(group: RankGroup, *tensors: Tensor) -> list[Tensor]:
    """Reshard from heads back to tokens, in one all-to-all."""
    packed = torch.cat(tensors, 2) if len(tensors) > 1 else tensors[0]
    parts = packed.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()  # [P, batch, n, heads of all, dim]
    arrived = group.all_to_all(parts).permute(1, 2, 0, 3, 4)  # [batch, n, P, heads of all, dim]
    heads = [t.shape[2] for t in tensors]
    return [part.flatten(2, 3) for part in arrived.split(heads, 3)]


class RingLi(Method):
    """Ring self-attention of Li et al. (arXiv:2105.13120): K moves around a ring for the scores, V for the output.

    Each rank stores whole rows of scores: memory is quadratic. A causal mask saves no FLOPs.
    """

    name = "ring-li-2021"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: a round of K and V in forward and backward, and a reduce-scatter of dV and dK."""
        once = 2.0 * sizes(cell).k * (cell.ranks - 1)
        return Traffic(once, 3 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: at the peak, four matrices of weights and gradients, each tokens^2 / P per head."""
        own = sizes(cell)
        scores = own.q / cell.head_dim * cell.tokens
        return own.held + 4 * scores + 2 * own.k * cell.ranks

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_RingLi, setting.group, cell.is_causal, cell.head_dim**-0.5)


class _RingLi(torch.autograd.Function):
    """Tensors are `[batch, kv_heads, group x tokens, dim]`: one product serves all query heads of a KV head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: RankGroup, causal: bool, scale: float) -> Tensor:
        queries, keys, values = _by_kv_head(q, k.shape[2]), _by_kv_head(k, k.shape[2]), _by_kv_head(v, k.shape[2])
        local = k.shape[1]
        scores = queries.new_empty((*queries.shape[:3], local * group.size))
        for owner, block in _visits(group, keys):
            torch.matmul(queries * scale, block.mT, out=scores[..., owner * local : (owner + 1) * local])
        if causal:
            _hide(scores, local, group.rank * local)
        weights = torch.softmax(scores, -1)
        del scores
        out = torch.zeros_like(queries)
        for owner, block in _visits(group, values):
            out += weights[..., owner * local : (owner + 1) * local] @ block
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.call = group, scale, q.shape
        return _by_token(out, q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, scale, shape = ctx.call
        queries, keys, values, weights = ctx.saved_tensors
        kv_shape, local = (shape[0], shape[1], keys.shape[1], shape[3]), shape[1]
        grads = _by_kv_head(grad, keys.shape[1])
        grad_v = _reduced(group, weights, grads)
        inner = torch.empty_like(weights)
        for owner, block in _visits(group, values):
            torch.matmul(grads, block.mT, out=inner[..., owner * local : (owner + 1) * local])
        inner -= (
            (inner * weights)
            .sum(-1, keepdim=True, dtype=torch.promote_types(inner.dtype, torch.float32))
            .to(inner.dtype)
        )
        inner *= weights
        inner *= scale
        grad_q = torch.zeros_like(queries)
        for owner, block in _visits(group, keys):
            grad_q += inner[..., owner * local : (owner + 1) * local] @ block
        grad_k = _reduced(group, inner, queries)
        return _by_token(grad_q, shape), _by_token(grad_k, kv_shape), _by_token(grad_v, kv_shape), None, None, None


def _visits(group: RankGroup, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's block with its owner, starting with this rank's, while the next block is transferred."""
    for step in range(group.size):
        arriving = group.rotate(block) if step + 1 < group.size else None
        yield (group.rank - step) % group.size, block
        if arriving is not None:
            block, works = arriving
            for work in works:
                work.wait()


def _reduced(group: RankGroup, weights: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of `weights^T rows` for this rank's keys, summed over the ranks."""
    whole = weights.mT @ rows  # [batch, kv_heads, tokens, dim]
    return group.reduce_scatter(whole.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4).contiguous())


def _hide(scores: Tensor, local: int, first: int) -> None:
    rows = torch.arange(first, first + local, device=scores.device)
    hidden = rows[:, None] < torch.arange(scores.shape[-1], device=scores.device)
    scores.unflatten(2, (-1, local)).masked_fill_(hidden, -torch.inf)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    grouped: Tensor = x.unflatten(2, (kv_heads, -1))
    return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()


def _by_token(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    grouped: Tensor = x.unflatten(2, (-1, shape[1]))
    return grouped.permute(0, 3, 1, 2, 4).reshape(shape)
