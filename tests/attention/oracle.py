"""Attention in one piece, written as its definition: what a split sequence must equal."""

from functools import lru_cache

import numpy as np
import torch

from bmburst.schedule.mask import make_mask
from tests.mask_oracle import visible


def attention(q, k, v, mask, scale=None, softcap=None, sink=None):
    """q `[batch, tokens, heads, head_dim]`, k and v with their own heads, v with its own head dim -> out, lse.

    The log-sum-exp is `[batch, heads, tokens]`. A sink, `[heads]`, is one more logit of every row, without a value.
    A mask may be what each query sees, bool `[queries, keys]`. Where a query sees nothing, the output is zero, the
    log-sum-exp -inf, and gradients are zero.
    """
    group = q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    is_matrix = isinstance(mask, np.ndarray | torch.Tensor)
    seen = torch.as_tensor(mask if is_matrix else visible(make_mask(mask), q.shape[1]))
    sees = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    scores = scores.masked_fill(~sees, 0)  # any numbers: those of -inf alone would be none
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(~seen, 0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return out, scores.logsumexp(-1).masked_fill(~sees[..., 0], -torch.inf)


def draw(seed, batch, tokens, heads, kv_heads, head_dim, dtype=torch.float64, spread=1.0, value_dim=None):
    """Return q, k, v, dO and dLSE of a whole sequence, in fp64 values that `dtype` represents exactly."""
    rng = torch.Generator().manual_seed(seed)
    of_values = head_dim if value_dim is None else value_dim
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, of_values), (heads, of_values)
    shapes = [(batch, tokens, *size) for size in sizes] + [(batch, heads, tokens)]
    q, k, v, grad, grad_lse = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    return tuple(t.to(dtype).double() for t in (q * spread, k * spread, v, grad, grad_lse))


def reference(q, k, v, grad, mask, grad_lse=None, scale=None, softcap=None, sink=None):
    """Return out, lse, dq, dk, dv and, with a sink, its gradient, of the definition in the inputs' dtype."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *(() if sink is None else (sink,)))]
    out, lse = attention(*leaves[:3], mask, scale, softcap, *leaves[3:])
    objective = (out * grad).sum() + (0 if grad_lse is None else (lse * grad_lse).sum())
    return out.detach(), lse.detach(), *torch.autograd.grad(objective, leaves)


@lru_cache(maxsize=256)
def problem(tokens, heads, kv_heads, mask, with_lse=True, value_dim=8):
    """Return what `draw` gives of two samples and a head_dim of 8, and its `reference`: the same for every rank.

    Nobody writes into them: layouts, strategies and ranks are compared with one computation.
    """
    whole = draw(0, 2, tokens, heads, kv_heads, 8, value_dim=value_dim)
    return whole, reference(*whole[:4], mask, whole[4] if with_lse else None)
