"""Ring self-attention of Li et al. 2021 (arXiv:2105.13120): a rank's rows of scores, whole and materialised."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import Cell
from benchmarks.attention.methods.method import Attend, Method, Setting, applied
from benchmarks.attention.work import Traffic, sizes
from benchmarks.engine.group import RankGroup


class RingLi(Method):
    """K goes around for the scores, V for the output. Memory is quadratic, and a causal mask saves no work."""

    name = "ring-li-2021"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: K and V around; backward V and K around again, dV and dK reduce-scattered."""
        once = 2.0 * sizes(cell).k * (cell.ranks - 1)
        return Traffic(once, 3 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: at the peak the weights, their gradient, and its product, each tokens^2 / P a head."""
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
        grad_v = _home(group, weights, grads)
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
        grad_k = _home(group, inner, queries)
        return _by_token(grad_q, shape), _by_token(grad_k, kv_shape), _by_token(grad_v, kv_shape), None, None, None


def _visits(group: RankGroup, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's block with its owner, the own one first; the next travels while this one is used."""
    for step in range(group.size):
        arriving = group.rotate(block) if step + 1 < group.size else None
        yield (group.rank - step) % group.size, block
        if arriving is not None:
            block, works = arriving
            for work in works:
                work.wait()


def _home(group: RankGroup, weights: Tensor, rows: Tensor) -> Tensor:
    """Return this rank's keys' share of `weights^T rows`, summed over the ranks."""
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
