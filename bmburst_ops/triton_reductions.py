"""Reductions in Triton: merges of partial attention, cross entropy, and a one-shot all-reduce. Importing needs Triton.

- The twins of `bmburst_ops.merge` read and write their tensors once. Tensors are `[batch, tokens, heads, head_dim]` and
  statistics `[batch, heads, tokens]`, with any strides, in fp32 or 16 bits.
- `cross_entropy_` and `scaled` are twins of those of `bmburst_ops.linear_cross_entropy`.
- `add_up` sums a tensor over ranks, in one kernel over peer memory of the GPUs of a host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 4096  # elements of each tensor that a program of a merge holds
_LOGITS = 4096  # logits of a row that a program of cross entropy holds at once
_BLOCK = 1024  # elements per program of the all-reduce


def merge_partials_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """See `merge.merge_partials_`."""
    strides = (out.stride(), _of_rows(lse), part.stride(), _of_rows(part_lse))
    _launch(_merge_kernel, out, (out, lse, part, part_lse, *strides))


def row_dots(grad_out: Tensor, out: Tensor) -> Tensor:
    """See `merge.row_dots`."""
    batch, tokens, heads, _ = out.shape
    delta = torch.empty(batch, heads, tokens, dtype=torch.float32, device=out.device)
    _launch(_dots_kernel, out, (grad_out, out, delta, grad_out.stride(), out.stride(), _of_rows(delta)))
    return delta


def surrogate_out(grad_out: Tensor, delta: Tensor) -> Tensor:
    """See `merge.surrogate_out`."""
    out = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    _launch(_surrogate_kernel, out, (grad_out, delta, out, grad_out.stride(), _of_rows(delta), out.stride()))
    return out


def add_(total: Tensor, share: Tensor) -> None:
    """See `merge.add_`."""
    _launch(_add_kernel, total, (total, share, total.stride(), share.stride()))


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """See `merge.sum_parts`."""
    _launch(_sum_kernel, out, (parts, out, parts.stride(0), parts.stride()[1:], out.stride()), PARTS=parts.shape[0])


def _launch(kernel: Any, like: Tensor, arguments: tuple[Any, ...], **constants: int) -> None:
    """Launch one program for each block of tokens of each head of a tensor shaped as `like`."""
    batch, tokens, heads, head_dim = like.shape
    if not like.numel():
        return
    dim = triton.next_power_of_2(head_dim)
    rows = max(1, min(_NUMBERS // dim, triton.next_power_of_2(tokens)))
    with torch.cuda.device_of(like):  # Triton launches on the current device, wherever the tensors are
        kernel[(batch * triton.cdiv(tokens, rows) * heads,)](
            *arguments, tokens, heads, HEAD_DIM=head_dim, ROWS=rows, DIM=dim, **constants
        )


def _of_rows(statistic: Tensor) -> tuple[int, ...]:
    """Strides of (batch, token, head)."""
    return statistic.transpose(1, 2).stride()


@triton.jit(do_not_specialize=["tokens"])
def _merge_kernel(
    out, lse, part, part_lse, out_strides, lse_strides, part_strides, part_lse_strides, tokens, heads,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, rows, head, inside = _block(tokens, heads, ROWS)
    columns, vectors_inside = _columns(inside, HEAD_DIM, DIM)
    lse_at = _numbers(lse, lse_strides, batch, rows, head)
    part_lse_at = _numbers(part_lse, part_lse_strides, batch, rows, head)
    mine = tl.load(lse_at, mask=inside, other=float("-inf")).to(tl.float32)
    other = tl.load(part_lse_at, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.maximum(mine, other)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # neither side has seen a key: -inf - -inf is NaN
    mine = tl.exp(mine - peak)
    other = tl.exp(other - peak)
    total = mine + other
    merged_lse = peak + tl.log(total)
    total = tl.where(total == 0.0, 1.0, total)
    out_at = _vectors(out, out_strides, batch, rows, head, columns)
    part_at = _vectors(part, part_strides, batch, rows, head, columns)
    merged = tl.load(out_at, mask=vectors_inside, other=0.0).to(tl.float32) * (mine / total)[:, None]
    merged += tl.load(part_at, mask=vectors_inside, other=0.0).to(tl.float32) * (other / total)[:, None]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=vectors_inside)
    tl.debug_barrier()  # several warps read the old statistic: all must read it before it is overwritten
    tl.store(lse_at, merged_lse, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _dots_kernel(
    grad, out, delta, grad_strides, out_strides, delta_strides, tokens, heads,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, rows, head, inside = _block(tokens, heads, ROWS)
    columns, vectors_inside = _columns(inside, HEAD_DIM, DIM)
    grads = tl.load(_vectors(grad, grad_strides, batch, rows, head, columns), mask=vectors_inside, other=0.0)
    outs = tl.load(_vectors(out, out_strides, batch, rows, head, columns), mask=vectors_inside, other=0.0)
    dots = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(_numbers(delta, delta_strides, batch, rows, head), dots, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _surrogate_kernel(
    grad, delta, out, grad_strides, delta_strides, out_strides, tokens, heads,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, rows, head, inside = _block(tokens, heads, ROWS)
    columns, vectors_inside = _columns(inside, HEAD_DIM, DIM)
    grads = tl.load(_vectors(grad, grad_strides, batch, rows, head, columns), mask=vectors_inside, other=0.0)
    dots = tl.load(_numbers(delta, delta_strides, batch, rows, head), mask=inside, other=0.0).to(tl.float32)
    wide = grads.to(tl.float32)
    # Scale by the row's largest magnitude: in fp32 the square of a gradient as small as 1e-23 is zero.
    peak = tl.max(tl.abs(wide), 1)
    empty = peak == 0.0
    unit = wide / tl.where(empty, 1.0, peak)[:, None]
    squared = peak * tl.sum(unit * unit, 1)
    factor = tl.where(empty, 0.0, dots / tl.where(empty, 1.0, squared))
    at = _vectors(out, out_strides, batch, rows, head, columns)
    tl.store(at, (unit * factor[:, None]).to(out.dtype.element_ty), mask=vectors_inside)


@triton.jit(do_not_specialize=["tokens"])
def _add_kernel(
    total, share, total_strides, share_strides, tokens, heads,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    batch, rows, head, inside = _block(tokens, heads, ROWS)
    columns, vectors_inside = _columns(inside, HEAD_DIM, DIM)
    total_at = _vectors(total, total_strides, batch, rows, head, columns)
    shares = tl.load(_vectors(share, share_strides, batch, rows, head, columns), mask=vectors_inside, other=0.0)
    totals = tl.load(total_at, mask=vectors_inside, other=0.0).to(tl.float32) + shares.to(tl.float32)
    tl.store(total_at, totals.to(total.dtype.element_ty), mask=vectors_inside)


@triton.jit(do_not_specialize=["tokens"])
def _sum_kernel(
    parts, out, part_stride, parts_strides, out_strides, tokens, heads,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    batch, rows, head, inside = _block(tokens, heads, ROWS)
    columns, vectors_inside = _columns(inside, HEAD_DIM, DIM)
    at = _vectors(parts, parts_strides, batch, rows, head, columns)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(at + tl.cast(part, tl.int64) * part_stride, mask=vectors_inside, other=0.0).to(tl.float32)
    out_at = _vectors(out, out_strides, batch, rows, head, columns)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=vectors_inside)


@triton.jit
def _block(tokens, heads, ROWS: tl.constexpr):
    """Return batch, tokens `[ROWS]`, head and which tokens exist. Heads first: neighbours in memory run together."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, ROWS)
    rows = program // heads % blocks * ROWS + tl.arange(0, ROWS)
    return (program // heads // blocks).to(tl.int64), rows.to(tl.int64), (program % heads).to(tl.int64), rows < tokens


@triton.jit
def _columns(inside, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    columns = tl.arange(0, DIM)
    if HEAD_DIM == DIM:
        vectors_inside = tl.broadcast_to(inside[:, None], [inside.shape[0], DIM])
    else:
        vectors_inside = inside[:, None] & (columns < HEAD_DIM)[None, :]
    return columns, vectors_inside


@triton.jit
def _vectors(tensor, strides, batch, rows, head, columns):
    """Return pointers to `[rows, columns]`."""
    return tensor + batch * strides[0] + head * strides[2] + rows[:, None] * strides[1] + columns[None, :] * strides[3]


@triton.jit
def _numbers(statistic, strides, batch, rows, head):
    """Return pointers to `[rows]`."""
    return statistic + batch * strides[0] + head * strides[2] + rows * strides[1]


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    """See `bmburst_ops.linear_cross_entropy.cross_entropy_`. Logits are read twice, the gradient is written once.

    The normalizer is computed in one pass (online softmax; Milakov and Gimelshein, arXiv:1805.02867).
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=logits.dtype, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
            _cross_entropy_kernel[(rows,)](
                *(logits, labels, losses, logits if gradient is None else gradient, width, ignore_index),
                WITH_GRADIENT=gradient is not None,
                BLOCK=min(_LOGITS, triton.next_power_of_2(width)),
                num_warps=8,
            )
    return losses


@triton.jit
def _cross_entropy_kernel(
    logits, labels, losses, gradient, width, ignore_index, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    label = tl.load(labels + row)
    is_valid = label != ignore_index
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(at + columns, mask=columns < width, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    log_normalizer = largest + tl.log(total)
    target = tl.load(at + label, mask=is_valid, other=0.0)
    tl.store(losses + row, tl.where(is_valid, log_normalizer - target, 0.0))
    if WITH_GRADIENT:
        tl.debug_barrier()  # the gradient may overwrite the logits: read the target's first
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(at + columns, mask=columns < width, other=float("-inf"))
            p = tl.exp(x - log_normalizer)
            p = tl.where(columns == label, p - 1.0, p)
            p = tl.where(is_valid, p, 0.0)
            tl.store(gradient + row * width + columns, p.to(gradient.dtype.element_ty), mask=columns < width)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """See `bmburst_ops.linear_cross_entropy.scaled`. torch's product of two dtypes takes 3.4 times as long."""
    assert x.is_contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
            _scale_kernel[(triton.cdiv(x.numel(), _NUMBERS),)](x, factor, out, x.numel(), BLOCK=_NUMBERS, num_warps=4)
    return out


@triton.jit
def _scale_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=at < count)


def programs_for(numbers: int) -> int:
    """Return the number of programs for an all-reduce of this many elements."""
    return int(triton.cdiv(numbers, _BLOCK))


def add_up(x: Tensor, boxes: Tensor, flags: Tensor, calls: Tensor, rank: int, most: int) -> Tensor:
    """Return the sum of a tensor over ranks, computed in fp32 and rounded once. Every rank calls it, in the same order.

    Each program of a rank writes its elements to a buffer that all ranks can read, and sends the number of the call to
    its counterpart on each rank. It waits until all counterparts have sent theirs, and sums the parts in rank order, so
    results are bitwise equal on all ranks. Each rank has two buffers and alternates between them. When a rank reuses a
    buffer, all counterparts have signaled the call in between, so they have finished reading that buffer.

    Args:
        x: Contiguous, fp32 or 16 bits, at most `most` elements.
        boxes: `[ranks]` int64: the address of each rank's two adjacent buffers of `most` elements each.
        flags: `[ranks]` int64: the address of each rank's int32 flags `[programs_for(most), ranks]`, initially zero.
        calls: `[programs_for(most)]` int32 on this GPU, initially zero: the number of calls of each program so far.
        rank: This rank.
        most: See `boxes`.
    """
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
        _add_up_kernel[(programs_for(x.numel()),)](
            x, out, boxes, flags, calls, rank, x.numel(), most, RANKS=len(boxes), BLOCK=_BLOCK, num_warps=4
        )
    return out


@triton.jit
def _add_up_kernel(x, out, boxes, flags, calls, rank, numbers, most, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    place = (call % 2).to(tl.int64) * most + at
    kind = tl.pointer_type(x.dtype.element_ty)
    tl.store(tl.load(boxes + rank).to(kind) + place, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all elements must be written before the flags
    for peer in tl.static_range(RANKS):
        if peer != rank:
            word = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
            tl.atomic_xchg(word, call, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != rank:
            word = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * RANKS + peer
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") < call:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        part = tl.load(tl.load(boxes + peer).to(kind) + place, mask=inside, other=0.0, volatile=True)
        total += part.to(tl.float32)
    tl.store(out + at, total.to(x.dtype.element_ty), mask=inside)
    tl.store(calls + program, call)
