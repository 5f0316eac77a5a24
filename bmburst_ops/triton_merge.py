"""The Triton twins of `bmburst_ops.merge`: each reads and writes its tensors once. Importing this file needs Triton.

Tensors are `[batch, tokens, heads, head_dim]` and statistics `[batch, heads, tokens]`, with any strides, in fp32 or
16 bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 4096  # elements of each tensor that a program holds


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
