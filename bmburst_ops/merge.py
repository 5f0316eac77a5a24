"""Merging of partial attention results by their log-sum-exp, and sums of partial gradients.

The definitions here are plain torch. On NVIDIA GPUs with Triton, `triton_reductions` computes the same in one pass over
memory.
"""

from typing import Any

import torch
from torch import Tensor

from bmburst_ops.fused import triton_twin

_FUSED_HEAD_DIM = 4096  # a Triton program holds a whole row


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results for inputs of `dtype` are accumulated: fp32, or `dtype` if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def merge_partials_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a tile's attention into a running one, in place, as if they shared one softmax.

    Args:
        out: Running output `[batch, queries, heads, head_dim]`, any float dtype. The sum is computed in the dtype of
            `lse` and rounded once. Overwritten.
        lse: Running log-sum-exp of the scaled scores `[batch, heads, queries]` in nats, fp32 or wider; `-inf` where a
            query has seen no key. Overwritten.
        part: The tile's output, shaped as `out`, any float dtype.
        part_lse: The tile's log-sum-exp, shaped as `lse`.

    Source: Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1. Weights are `exp(lse - total)` with
        `total = logaddexp(lse, part_lse)`: `log(1 + exp(a - b))` would overflow fp32 once a - b > 88.
    """
    if fused := _fused(out, lse, part, part_lse):
        fused.merge_partials_(out, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    # If neither side has seen a key, both are -inf, and -inf - -inf is NaN. Any finite peak gives weights of zero.
    peak = total.masked_fill(total == -torch.inf, 0.0)
    wide = out.to(torch.promote_types(out.dtype, lse.dtype))
    wide.mul_(_by_query(torch.exp(lse - peak)))
    wide.addcmul_(part.to(wide.dtype), _by_query(torch.exp(part_lse - peak)))
    if wide is not out:
        out.copy_(wide)
    lse.copy_(total)


def row_dots(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return delta = rowsum(dO * O), `[batch, heads, queries]`, in fp32 or wider.

    Args:
        grad_out: dO, `[batch, queries, heads, head_dim]`.
        out: O, the same shape.

    Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, line 4.
    """
    if fused := _fused(grad_out, out):
        delta: Tensor = fused.row_dots(grad_out, out)
        return delta
    dtype = accumulation_dtype(grad_out.dtype)
    return (grad_out.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def surrogate_out(grad_out: Tensor, delta: Tensor) -> Tensor:
    """Return O' with rowsum(dO * O') = delta, for kernels that take O and compute delta themselves.

    O' = dO * delta / |dO|^2, zero where dO is zero. It is computed on the rank that uses it, and never sent. Delta does
    not depend on an O rounded to 16 bits, so gradients are at least as accurate as with the real O.

    Args:
        grad_out: dO, `[batch, queries, heads, head_dim]`.
        delta: rowsum(dO * O), `[batch, heads, queries]`, fp32 or wider; zero where dO is zero.

    Returns:
        O', shaped and typed as dO.
    """
    if fused := _fused(grad_out, delta):
        out: Tensor = fused.surrogate_out(grad_out, delta)
        return out
    wide = grad_out.to(delta.dtype)
    # Scale by the row's largest magnitude: in fp32 the square of a gradient as small as 1e-23 is zero.
    peak: Tensor = torch.linalg.vector_norm(wide, torch.inf, dim=-1, keepdim=True)
    unit = wide / peak.masked_fill(peak == 0, 1.0)
    squared = unit.square().sum(-1, keepdim=True)
    factor = delta.transpose(1, 2)[..., None] / (peak * squared)
    return (unit * factor.masked_fill(peak == 0, 0.0)).to(grad_out.dtype)


def add_(total: Tensor, share: Tensor) -> None:
    """Add a tile's gradient to a running one, in place.

    Args:
        total: Running gradient, `[batch, tokens, heads, head_dim]`, any strides, fp32 or wider. Overwritten.
        share: The tile's gradient, the same shape, any float dtype and strides.
    """
    if fused := _fused(total, share):
        fused.add_(total, share)
    else:
        total.add_(share)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Write the sum of partial results to `out`. It is computed in fp32 or wider and rounded once.

    Args:
        parts: `[parts, batch, tokens, heads, head_dim]`, any float dtype and strides.
        out: `[batch, tokens, heads, head_dim]`, any float dtype and strides. Overwritten; may be one of the parts.
    """
    if fused := _fused(parts[0], out):
        fused.sum_parts(parts, out)
    else:
        out.copy_(parts.sum(0, dtype=accumulation_dtype(parts.dtype)))


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor if its last dimension is contiguous, else a contiguous copy: kernels read whole vectors."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_query(statistic: Tensor) -> Tensor:
    """Return `[batch, heads, queries]` as `[batch, queries, heads, 1]`."""
    return statistic.transpose(1, 2)[..., None]


def _fused(values: Tensor, *others: Tensor) -> Any | None:
    """Return `triton_reductions` if it supports tensors, the first `[batch, tokens, heads, head_dim]`, else None."""
    is_shaped = values.ndim == 4 and values.shape[-1] <= _FUSED_HEAD_DIM
    return triton_twin("triton_reductions", values, *others) if is_shaped else None
