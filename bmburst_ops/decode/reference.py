"""Decode attention in plain torch, any float dtype and device: what the Triton kernel is tested against."""

import torch
from torch import Tensor

from bmburst_ops.merge import accumulation_dtype, merge_partials_


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` in fp32 or wider; see `decode_attention`.

    On CPUs the lengths are read, so the cost is that of the visible tokens. On other devices reading them would wait
    for the device and could not be captured in a CUDA graph, so the whole capacity is scored and then masked.
    """
    if q.device.type != "cpu":
        return attend_visible(q, keys, values, visible_tokens(lengths, starts, keys.shape[1]), scale, softcap)
    stops = lengths.tolist()
    firsts = [0] * len(stops) if starts is None else starts.clamp(min=0).tolist()
    out = q.new_empty(q.shape, dtype=accumulation_dtype(q.dtype))
    lse = out.new_empty(q.shape[:2])
    for i, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
        one, seen = slice(i, i + 1), slice(first, max(first, stop))  # cut at the capacity, as slices are
        out[one], lse[one] = attend_visible(q[one], keys[one, seen], values[one, seen], None, scale, softcap)
    return out, lse


def visible_tokens(lengths: Tensor, starts: Tensor | None, capacity: int) -> Tensor:
    """Return which tokens of the cache each sequence sees, `[batch, capacity]`. Lengths stay on the device."""
    tokens = torch.arange(capacity, device=lengths.device)
    visible = tokens < lengths[:, None]
    return visible if starts is None else visible & (tokens >= starts[:, None])


def attend_visible(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` in fp32 or wider over the tokens that are visible.

    Args:
        q: `[batch, heads, head_dim]`.
        keys: `[batch, tokens, kv_heads, head_dim]`. The query heads of a KV head share it as a dimension of the
            product: it is not repeated in memory.
        values: As keys.
        visible: `[batch, tokens]`, or None where all are. Other tokens may hold NaN.
        scale: Factor on the scores.
        softcap: See `decode_attention`.
    """
    dtype = accumulation_dtype(q.dtype)
    queries = q.to(dtype).unflatten(1, (keys.shape[2], -1))
    scores = torch.einsum("bkgd,bnkd->bkgn", queries, keys.to(dtype)) * scale
    if softcap is not None:
        scores = scores.div(softcap).tanh() * softcap
    values = values.to(dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        values = values.masked_fill(~visible[:, :, None, None], 0.0)  # a weight of 0 times NaN is NaN
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bkgn,bnkd->bkgd", weights, values)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge_decode(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` in fp32 or wider; see `merge_decode`."""
    out = outs.new_zeros(outs.shape[1:], dtype=accumulation_dtype(outs.dtype))
    lse = lses.new_full(lses.shape[1:], -torch.inf, dtype=out.dtype)
    for part, part_lse in zip(outs, lses, strict=True):
        merge_partials_(out.unsqueeze(1), lse.unsqueeze(2), part.unsqueeze(1), part_lse.unsqueeze(2))
    return out, lse
