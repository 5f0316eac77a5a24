"""Decoding in Triton, the twin of `decode`: attention over the KV cache, and writing a new token to the cache.

Attention has one kernel over splits of the cache, and one that merges the splits. Importing this file needs Triton.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding. With one query per sequence, programs over batch and KV
heads are too few to fill a GPU, so the tokens of a sequence are split as well. Partial results are merged by
log-sum-exp in a fixed order, without atomics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.flash.triton import Table, block_sizes_for, is_interpreted, padded_head_dim, widths_of
from bmburst_ops.flash.triton_forward import LN_2, add_dot, capped, dot, load_rows
from bmburst_ops.merge import accumulation_dtype, dense_rows
from bmburst_ops.triton_launch import after_previous, dependent_launch


class Tuning(NamedTuple):
    """Launch configuration of the kernel over the cache."""

    tokens: int
    """Tokens per block; keys and values are loaded separately. At least 16."""
    heads: int
    """Most query heads per program. More query heads of a KV head need more programs, which read the cache again. At
    least 16."""
    warps: int
    stages: int
    """Software pipelining stages of the loads."""
    programs: int
    """Most programs per multiprocessor; sets the number of splits."""


# Tables by dtype and device; each row starts with the largest padded head dim that it supports.
_HOPPER: Table[Tuning] = (  # near the fastest of those tried on an H200, for 4K to 128K tokens
    (64, Tuning(128, 64, 4, 4, 2)),
    (128, Tuning(64, 64, 2, 4, 2)),
    (256, Tuning(32, 64, 4, 4, 2)),
)
_SMALL: Table[Tuning] = (
    (64, Tuning(64, 64, 4, 3, 8)),
    (128, Tuning(32, 64, 4, 3, 8)),
    (256, Tuning(16, 64, 4, 3, 8)),
)
_FP32: Table[Tuning] = ((64, Tuning(32, 16, 4, 2, 8)), (256, Tuning(16, 16, 4, 2, 8)))
_INTERPRETED: Table[Tuning] = ((256, Tuning(16, 16, 4, 1, 8)),)  # small, so that small tensors cover every path
_INTERPRETED_MULTIPROCESSORS = 2
_MAX_SPLITS = 256  # of the automatic choice: one program of the merge holds the log-sum-exps of all splits
_MERGE_NUMBERS = 4096  # elements of partial outputs that a program of the merge holds at once
_MERGE_COLUMNS = 32  # columns of the head dim per program of the merge: there are few heads, so several share one
_NOT_SPECIALIZED = ("capacity", "group", "tiles", "splits", "heads")  # one compilation serves all


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    scale: float,
    out_dtype: torch.dtype,
    num_splits: int | None = None,
    tuning: Tuning | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See `bmburst_ops.decode.decode_attention`. The default tuning depends on device, dtype and head dim."""
    q = dense_rows(q)
    (batch, heads, head_dim), kv_heads = q.shape, keys.shape[2]
    out = torch.empty(batch, heads, values.shape[3], dtype=out_dtype, device=q.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    tuning = tuning or block_sizes_for(
        max(keys, values, key=lambda cache: cache.shape[3]),
        split_kernel,
        hopper=_HOPPER,
        small=_SMALL,
        fp32=_FP32,
        interpreted=_INTERPRETED,
    )
    group = heads // kv_heads
    rows = min(padded_head_dim(group), tuning.heads)  # tensor cores need at least 16
    tiles = triton.cdiv(group, rows)
    splits = num_splits or splits_for(keys, batch * kv_heads * tiles, tuning)
    parts, part_lse = out[None], lse[None]
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, batch, heads, dtype=torch.float32, device=q.device)
    precision = "interpreter" if IS_INTERPRETED else "ieee" if q.dtype == torch.float32 else "tf32"
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        split_kernel[(kv_heads * tiles, splits, batch)](  # heads first: neighbours in memory run together
            q, keys, values, lengths, starts, parts, part_lse, q.stride()[:2], keys.stride()[:3], values.stride()[:3],
            keys.shape[1], group, tiles, splits, heads, scale, None if softcap is None else softcap / scale,
            HEAD_DIM=head_dim, DIM=padded_head_dim(head_dim), **widths_of(values), ROWS=rows, TOKENS=tuning.tokens,
            WINDOWED=starts is not None, PRECISION=precision, num_warps=tuning.warps, num_stages=tuning.stages,
            **dependent_launch(q.device),
        )  # fmt: skip
    return (out, lse) if splits == 1 else _merge_into(parts, part_lse, out, lse)


def splits_for(keys: Tensor, rows: int, tuning: Tuning) -> int:
    """Return the number of splits that fills the device. It depends on the capacity: lengths are on the device.

    Args:
        keys: `[batch, capacity, kv_heads, head_dim]`.
        rows: Number of programs per split.
        tuning: Launch configuration of the kernel.
    """
    multiprocessors = _INTERPRETED_MULTIPROCESSORS
    if keys.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(keys.device).multi_processor_count
    wanted = multiprocessors * tuning.programs // rows
    blocks: int = triton.cdiv(keys.shape[1], tuning.tokens)
    return max(1, min(wanted, blocks, _MAX_SPLITS))


def merge_decode(outs: Tensor, lses: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `merge_decode`."""
    out = torch.empty(outs.shape[1:], dtype=out_dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=accumulation_dtype(outs.dtype), device=outs.device)
    if not outs.shape[0]:
        return out.zero_(), lse.fill_(-torch.inf)
    return _merge_into(outs, lses, out, lse) if out.numel() else (out, lse)


def _merge_into(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    count, batch, heads, head_dim = parts.shape
    all_parts, columns = triton.next_power_of_2(count), min(padded_head_dim(head_dim), _MERGE_COLUMNS)
    with torch.cuda.device_of(out):
        merge_kernel[(triton.cdiv(head_dim, columns), heads, batch)](
            parts, part_lse, out, lse, parts.stride()[:3], part_lse.stride(), out.stride()[:2], lse.stride(), count,
            HEAD_DIM=head_dim, COLUMNS=columns, ALL=all_parts, PARTS=min(all_parts, _MERGE_NUMBERS // columns),
            **dependent_launch(out.device),
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def split_kernel(
    q, keys, values, lengths, starts, parts, part_lse, q_strides, key_strides, value_strides,
    capacity, group, tiles, splits, heads, scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: up to ROWS query heads of one KV head over one split of a sequence.

    Grid: (KV heads * tiles, splits, batch). Strides of q are of (batch, head), those of the cache of (batch, token,
    head). parts `[splits, batch, heads, VALUE_HEAD_DIM]` and part_lse `[splits, batch, heads]` are contiguous. The part
    of a split without tokens is not written, unless it is the only one. cap is as in `capped`, or None.
    """
    after_previous(DEPENDENT)
    kv_head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = 0
    if WINDOWED:
        start = tl.maximum(tl.load(starts + batch), 0).to(tl.int32)
    stop = tl.minimum(tl.load(lengths + batch), capacity).to(tl.int32)
    start, stop = _part(start, stop, split, splits, TOKENS)

    rows, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (rows < group)[:, None] & (columns < HEAD_DIM)[None, :]
    head = (kv_head * group + rows).to(tl.int64)
    query = tl.load(q + batch * q_strides[0] + head[:, None] * q_strides[1] + columns[None, :], mask=inside, other=0.0)
    key_matrix = keys + batch * key_strides[0] + kv_head.to(tl.int64) * key_strides[2]
    value_matrix = values + batch * value_strides[0] + kv_head.to(tl.int64) * value_strides[2]
    key_stride, value_stride = tl.cast(key_strides[1], tl.int64), tl.cast(value_strides[1], tl.int64)
    bits_scale = scale * 1.4426950408889634  # log2(e), for exp2

    acc = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for first in tl.range(start, stop, TOKENS):
        # Rows beyond the stop are zero and not read: memory there may hold NaN, and 0 times NaN is NaN.
        key = load_rows(key_matrix, first, key_stride, stop, HEAD_DIM, TOKENS, DIM, True)
        scores = dot(query, tl.trans(key), PRECISION)
        if cap is not None:
            scores = capped(scores, cap)
        scores = tl.where((first + tl.arange(0, TOKENS) < stop)[None, :], scores * bits_scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, 1)
        value = load_rows(value_matrix, first, value_stride, stop, VALUE_HEAD_DIM, TOKENS, VALUE_DIM, True)
        acc = add_dot(acc * fade[:, None], weights.to(value.dtype), value, PRECISION)
        peak = higher

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    sequence = split.to(tl.int64) * tl.num_programs(2) + batch
    row = sequence * heads + head
    columns = tl.arange(0, VALUE_DIM)
    written = (rows < group)[:, None] & (columns < VALUE_HEAD_DIM)[None, :] & ((start < stop) | (splits == 1))
    tl.store(parts + row[:, None] * VALUE_HEAD_DIM + columns[None, :], acc.to(parts.dtype.element_ty), mask=written)
    tl.store(part_lse + row, (peak + tl.log2(total)) * LN_2, mask=rows < group)


@triton.jit
def _part(start, stop, split, splits, TOKENS: tl.constexpr):
    """Return the tokens of a split: equal shares in multiples of 16, at least one block, so that few are not spread."""
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), splits), 16) * 16
    share = tl.maximum(share, TOKENS)
    first = start + tl.minimum(split * share, tl.maximum(stop - start, 0))
    return first, tl.minimum(first + share, stop)


@triton.jit(do_not_specialize=["count"])
def merge_kernel(
    parts, part_lse, out, lse, part_strides, part_lse_strides, out_strides, lse_strides, count,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ALL: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one head of one sequence. Grid: (blocks of columns, heads, batch).

    Strides are of (part, batch, head) and (batch, head). Parts whose log-sum-exp is -inf are not read.
    """
    after_previous(DEPENDENT)
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    part_lse += batch * part_lse_strides[1] + head * part_lse_strides[2]
    index = tl.arange(0, ALL)
    at = part_lse + index.to(tl.int64) * part_lse_strides[0]
    every = tl.load(at, mask=index < count, other=float("-inf")).to(tl.float32)
    peak = tl.max(every, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # no part has seen a token: -inf - -inf is NaN
    total = tl.sum(tl.exp(every - peak), 0)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    parts += batch * part_strides[1] + head * part_strides[2]
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, count, PARTS):
        some = (first + tl.arange(0, PARTS)).to(tl.int64)
        own = tl.load(part_lse + some * part_lse_strides[0], mask=some < count, other=float("-inf")).to(tl.float32)
        read = (own != float("-inf"))[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(parts + some[:, None] * part_strides[0] + columns[None, :], mask=read, other=0.0)
        acc += tl.sum(part.to(tl.float32) * tl.exp(own - peak)[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    at = out + batch * out_strides[0] + head * out_strides[1] + columns
    tl.store(at, acc.to(out.dtype.element_ty), mask=columns < HEAD_DIM)
    if block == 0:
        tl.store(lse + batch * lse_strides[0] + head * lse_strides[1], peak + tl.log(total))


IS_INTERPRETED = is_interpreted(split_kernel)
"""Whether the kernels run in Triton's interpreter."""


def append_rotated(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, rows: Tensor
) -> Tensor:
    """See `bmburst_ops.decode.append_rotated`. One program per head."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, heads, head_dim = q.shape
    kv_heads, pairs = k.shape[1], head_dim // 2
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        _append_kernel[(batch, heads + 2 * kv_heads)](
            q, k, v, cos, sin, out, keys, values, rows,
            q.stride(), k.stride(), v.stride(), cos.stride(), sin.stride(), out.stride(), keys.stride(),
            values.stride(), rows.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, PAIRS=pairs, BLOCK=triton.next_power_of_2(pairs), num_warps=1,
            **dependent_launch(q.device),
        )  # fmt: skip
    return out


@triton.jit
def _append_kernel(
    q, k, v, cos, sin, out, keys, values, rows,
    q_strides, k_strides, v_strides, cos_strides, sin_strides, out_strides, keys_strides, values_strides, rows_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    after_previous(DEPENDENT)
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
    """Write a head, rotated by the angles of its pairs."""
    inside = pair < PAIRS
    first = tl.load(source + pair * step, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + (pair + PAIRS) * step, mask=inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + pair * to_step, (first * cosines - second * sines).to(kind), mask=inside)
    tl.store(target + (pair + PAIRS) * to_step, (second * cosines + first * sines).to(kind), mask=inside)
