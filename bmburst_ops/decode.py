"""Decoding: attention of one new token per sequence over the KV cache, and writing the token to the cache.

Computed with Triton (`triton_decode`), or with plain torch for any float dtype and device.
"""

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, unknown_kernel
from bmburst_ops.flash.triton import TritonKernel
from bmburst_ops.fused import triton_twin
from bmburst_ops.merge import accumulation_dtype, merge_partials_
from bmburst_ops.rotary import apply_rotary

KERNELS = ("auto", "triton", "reference")
_TRITON = TritonKernel()
_MAX_SPLITS = 1024  # one program of the merge holds the log-sum-exps of all splits


@torch.no_grad()
def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str = "auto",
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention of one new query per sequence over its cached keys and values. It has no gradient.

    On GPUs, lengths and starts are read on the device, without synchronization, and the launch depends on shapes only.
    So a call captured in a CUDA graph stays valid while lengths grow, and is bitwise equal to a call outside the graph.

    Args:
        q: Queries `[batch, heads, head_dim]`. Query head h reads KV head `h // (heads / kv_heads)`.
        keys: `[batch, capacity, kv_heads, head_dim]` in q's dtype, with a contiguous last dimension and otherwise any
            strides. Tokens that are not visible are never used and may be NaN.
        values: As keys, with their own head dim.
        lengths: Number of cached tokens of each sequence, `[batch]` int32 or int64, on q's device. A sequence without
            visible tokens (0 or less) has an output of zero and a log-sum-exp of `-inf`. Values above the capacity
            count as the capacity.
        starts: The first visible token of each sequence, as `lengths`, for sliding windows. Below 0 counts as 0; from
            the length on, no token is visible. Default: 0.
        scale: Factor on the scores, usually `head_dim ** -0.5`.
        softcap: Scaled scores become `softcap * tanh(score / softcap)`; above 0, or None.
        out_dtype: Dtype of the output; default q's. Use torch.float32 for a merge over ranks.
        kernel: "triton", "reference" (plain torch), or "auto": Triton on NVIDIA GPUs from Ampere on if it is installed
            and supports the inputs (fp32, bf16 and fp16, head dims up to 256), else the reference.
        num_splits: Number of parts into which the Triton kernel splits the visible tokens of a sequence, to fill the
            GPU; 1 to 1024. Default: by capacity, batch and heads. The reference does not split.

    Returns:
        The output `[batch, heads, value_dim]`, and the log-sum-exp of the scores `[batch, heads]` in nats, fp32
        (fp64 if q is fp64).

    Raises:
        KernelError: The kernel is unknown, or does not support these inputs on this machine.
        ValueError: Shapes, dtypes, devices or strides do not fit.
    """
    _check(q, keys, values, lengths, starts, num_splits)
    if runs_triton(kernel, max(keys, values, key=lambda cache: cache.shape[3])):
        from bmburst_ops import triton_decode

        return triton_decode.decode_attention(
            q, keys, values, lengths, starts, scale, out_dtype or q.dtype, num_splits, softcap=softcap
        )
    out, lse = _decode_plainly(q, keys, values, lengths, starts, scale, softcap)
    return out.to(out_dtype or q.dtype), lse


@torch.no_grad()
def merge_decode(
    outs: Tensor, lses: Tensor, *, out_dtype: torch.dtype | None = None, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return attention over the tokens of all parts, as if they shared one softmax.

    Ranks that merge the same parts in the same order get bitwise equal results.

    Args:
        outs: Outputs over disjoint tokens `[parts, batch, heads, head_dim]`, with a contiguous last dimension and
            otherwise any strides; fp32 loses no accuracy.
        lses: Their log-sum-exps `[parts, batch, heads]` in nats, any strides; `-inf` if a part saw no token.
        out_dtype: Dtype of the output; default that of `outs`.
        kernel: As for `decode_attention`.

    Returns:
        The output `[batch, heads, head_dim]` and the log-sum-exp `[batch, heads]`, as `decode_attention` returns them.

    Raises:
        KernelError: As for `decode_attention`.
        ValueError: The shapes do not fit.
    """
    if outs.dim() != 4 or lses.shape != outs.shape[:3] or outs.stride(-1) != 1:
        raise ValueError(
            f"a merge needs outputs [parts, batch, heads, head_dim] with a contiguous last dimension and log-sum-exps "
            f"[parts, batch, heads]; got {tuple(outs.shape)} with strides {outs.stride()}, {tuple(lses.shape)}"
        )
    if runs_triton(kernel, outs):
        from bmburst_ops import triton_decode

        return triton_decode.merge_decode(outs, lses, out_dtype or outs.dtype)
    out, lse = _merge_plainly(outs, lses)
    return out.to(out_dtype or outs.dtype), lse


def runs_triton(kernel: str, values: Tensor, triton: TritonKernel = _TRITON) -> bool:
    """Return whether the Triton kernel runs. It supports the same inputs as Triton's flash attention.

    Args:
        kernel: One of `KERNELS`.
        values: A tensor with the dtype, the device and, as last dimension, the head dim of the call.
        triton: Triton's flash attention.

    Raises:
        KernelError: The kernel is unknown, or "triton" does not support these inputs.
    """
    if kernel == "reference":
        return False
    if kernel not in KERNELS:
        raise unknown_kernel(kernel, KERNELS)
    if kernel == "auto" and not values.is_cuda:  # the interpreter is for tests, which select it by name
        return False
    reason = triton.refusal(values, values)
    if reason and kernel == "triton":
        raise KernelError(f"decode kernel 'triton' {reason}\nfix: use kernel='auto' or 'reference'")
    return reason is None


def _check(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor | None, num_splits: int | None
) -> None:
    """Refuse inputs that do not fit. Values of lengths are not checked, because they are on the device."""
    fits = q.dim() == 3 and keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3]
    if not (fits and keys.shape[::3] == q.shape[::2] and keys.shape[2] and q.shape[1] % keys.shape[2] == 0):
        raise ValueError(
            "decode attention needs q [batch, heads, head_dim] and keys, values [batch, capacity, kv_heads, head_dim] "
            f"with heads a multiple of kv_heads; got {tuple(q.shape)}, {tuple(keys.shape)}, {tuple(values.shape)}"
        )
    found = [f"{t.dtype} on {t.device}" for t in (q, keys, values)]
    if len(set(found)) > 1:
        raise ValueError(f"q, keys and values must have one dtype and device; got {', '.join(found)}")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"keys and values need a contiguous last dimension; got strides {keys.stride()}, {values.stride()}"
        )
    for name, counts in (("lengths", lengths), ("starts", starts)):
        if counts is None:
            continue
        if counts.shape != q.shape[:1] or counts.dtype not in (torch.int32, torch.int64) or counts.device != q.device:
            raise ValueError(
                f"{name} must be [{q.shape[0]}] int32 or int64 on {q.device}; "
                f"got {tuple(counts.shape)} {counts.dtype} on {counts.device}"
            )
    if num_splits is not None and not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits must be between 1 and {_MAX_SPLITS}; got {num_splits}")


@torch.no_grad()
def append_rotated(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, rows: Tensor
) -> Tensor:
    """Return the rotated queries of one new token per sequence, and write its rotated key and its value to the cache.

    On NVIDIA GPUs with Triton this is one kernel.

    Args:
        q: `[batch, heads, head_dim]`, any strides.
        k: `[batch, kv_heads, head_dim]`, any strides.
        v: As k.
        cos: `[batch, head_dim / 2]`, fp32 or wider.
        sin: As `cos`.
        keys: Cache `[batch, capacity, kv_heads, head_dim]`, any strides. Overwritten at `rows`.
        values: As keys.
        rows: `[batch]` int64, the index in the cache at which each sequence stores the token.
    """
    fused = triton_twin("triton_decode", q, k, v, keys, values)
    if fused and cos.dtype == sin.dtype == torch.float32:
        rotated: Tensor = fused.append_rotated(q, k, v, cos, sin, keys, values, rows)
        return rotated
    tables = cos[:, None], sin[:, None]
    sequences = torch.arange(len(rows), device=rows.device)
    keys.index_put_((sequences, rows), apply_rotary(k[:, None], *tables)[:, 0])
    values.index_put_((sequences, rows), v)
    return apply_rotary(q[:, None], *tables)[:, 0]


def _decode_plainly(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` in fp32 or wider; see `decode_attention`.

    On CPUs lengths are read, so the cost depends on the visible tokens. On other devices, reading them would
    synchronize and could not be captured in a CUDA graph, so the whole capacity is scored and then masked.
    """
    if q.device.type != "cpu":
        return attend_visible(q, keys, values, visible_tokens(lengths, starts, keys.shape[1]), scale, softcap)
    stops = lengths.tolist()
    firsts = [0] * len(stops) if starts is None else starts.clamp(min=0).tolist()
    out = q.new_empty((*q.shape[:2], values.shape[3]), dtype=accumulation_dtype(q.dtype))
    lse = out.new_empty(q.shape[:2])
    for i, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
        one, seen = slice(i, i + 1), slice(first, max(first, stop))  # slices end at the capacity
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
        keys: `[batch, tokens, kv_heads, head_dim]`. A KV head is not repeated in memory for its query heads.
        values: As keys, with their own head dim.
        visible: Mask `[batch, tokens]`; None if all tokens are visible. Other tokens may be NaN.
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


def _merge_plainly(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` in fp32 or wider; see `merge_decode`."""
    out = outs.new_zeros(outs.shape[1:], dtype=accumulation_dtype(outs.dtype))
    lse = lses.new_full(lses.shape[1:], -torch.inf, dtype=out.dtype)
    for part, part_lse in zip(outs, lses, strict=True):
        merge_partials_(out.unsqueeze(1), lse.unsqueeze(2), part.unsqueeze(1), part_lse.unsqueeze(2))
    return out, lse
