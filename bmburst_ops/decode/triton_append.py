"""The Triton twin of `bmburst_ops.decode.attention.append_rotated`: a program a head. Importing it needs Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor


def append_rotated(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, rows: Tensor
) -> Tensor:
    """See `bmburst_ops.decode.attention.append_rotated`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, heads, head_dim = q.shape
    kv_heads, pairs = k.shape[1], head_dim // 2
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        _append_kernel[(batch, heads + 2 * kv_heads)](
            q, k, v, cos, sin, out, keys, values, rows,
            q.stride(), k.stride(), v.stride(), cos.stride(), sin.stride(), out.stride(), keys.stride(),
            values.stride(), rows.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, PAIRS=pairs, BLOCK=triton.next_power_of_2(pairs), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _append_kernel(
    q, k, v, cos, sin, out, keys, values, rows,
    q_strides, k_strides, v_strides, cos_strides, sin_strides, out_strides, keys_strides, values_strides, rows_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    row = tl.load(rows + batch * rows_stride).to(tl.int64)
    cosines = tl.load(cos + batch * cos_strides[0] + pair * cos_strides[1], mask=inside, other=0.0)
    sines = tl.load(sin + batch * sin_strides[0] + pair * sin_strides[1], mask=inside, other=0.0)
    if head < HEADS:
        source = q + batch * q_strides[0] + head * q_strides[1]
        target = out + batch * out_strides[0] + head * out_strides[1]
        _rotate(source, q_strides[2], target, out_strides[2], cosines, sines, pair, PAIRS)
    elif head < HEADS + KV_HEADS:
        source = k + batch * k_strides[0] + (head - HEADS) * k_strides[1]
        target = keys + batch * keys_strides[0] + row * keys_strides[1] + (head - HEADS) * keys_strides[2]
        _rotate(source, k_strides[2], target, keys_strides[3], cosines, sines, pair, PAIRS)
    else:
        head = head - HEADS - KV_HEADS
        source = v + batch * v_strides[0] + head * v_strides[1]
        target = values + batch * values_strides[0] + row * values_strides[1] + head * values_strides[2]
        for half in range(2):
            feature = pair + half * PAIRS
            number = tl.load(source + feature * v_strides[2], mask=inside, other=0.0)
            tl.store(target + feature * values_strides[3], number, mask=inside)


@triton.jit
def _rotate(source, step, target, to_step, cosines, sines, pair, PAIRS: tl.constexpr):
    """Write a head turned by the angles of its pairs."""
    inside = pair < PAIRS
    first = tl.load(source + pair * step, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + (pair + PAIRS) * step, mask=inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + pair * to_step, (first * cosines - second * sines).to(kind), mask=inside)
    tl.store(target + (pair + PAIRS) * to_step, (second * cosines + first * sines).to(kind), mask=inside)
