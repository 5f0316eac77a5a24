"""Rotates the queries and keys of new tokens, and writes keys and values to their rows of a KV cache."""

import torch
from torch import Tensor

from bmburst_ops.fused import triton_twin
from bmburst_ops.rotary import apply_rotary


@torch.no_grad()
def append_rotated(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, rows: Tensor
) -> Tensor:
    """Return the rotated queries of one new token per sequence; its rotated key and its value go to the cache.

    On NVIDIA GPUs where Triton is installed this is one kernel.

    Args:
        q: `[batch, heads, head_dim]`, any strides.
        k: `[batch, kv_heads, head_dim]`, any strides.
        v: As k.
        cos: `[batch, head_dim / 2]`, fp32 or wider.
        sin: As `cos`.
        keys: Cache `[batch, capacity, kv_heads, head_dim]`, any strides. Overwritten at `rows`.
        values: As keys.
        rows: `[batch]` int64, the row of each sequence that the token takes.
    """
    fused = triton_twin("decode.triton_append", q, k, v, keys, values)
    if fused and cos.dtype == sin.dtype == torch.float32:
        rotated: Tensor = fused.append_rotated(q, k, v, cos, sin, keys, values, rows)
        return rotated
    tables = cos[:, None], sin[:, None]
    sequences = torch.arange(len(rows), device=rows.device)
    keys.index_put_((sequences, rows), apply_rotary(k[:, None], *tables)[:, 0])
    values.index_put_((sequences, rows), v)
    return apply_rotary(q[:, None], *tables)[:, 0]
