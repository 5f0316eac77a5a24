"""The Triton twin of `bmburst_ops.rms_norm`: each pass reads and writes its tensors once. Importing it needs Triton.

A tile of whole rows is held at once. Backward runs a number of programs that depends on the sizes alone; each adds up
its rows' share of the weight's gradient in fp32, and the shares are added in a fixed order: the same bits every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384
"""Features of a row that a program holds."""
_NUMBERS = 4096  # of each tensor, that a program holds at least
_NUMBERS_OF_WARP = 512
_PROGRAMS = 1056  # backward: 8 for each multiprocessor of an H100 or H200; their shares are 0.3 % of 128K rows


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, contiguous, and 1 / sqrt(mean(x^2) + eps), fp32 `[..., 1]`."""
    return _run_forward(x, None, 0.0, weight, eps)[1:]


def add_forward(x: Tensor, added: Tensor, factor: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + factor * added, rounded to the dtype of x, contiguous, and what `forward` returns of it."""
    return _run_forward(x, added, factor, weight, eps)


def _run_forward(
    x: Tensor, added: Tensor | None, factor: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    more = rows if added is None else added.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = x if added is None else torch.empty_like(out)
    inverse_rms = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    tile = _tile(rows)
    programs = triton.cdiv(len(rows), tile["ROWS"])
    strides = (*rows.stride(), *more.stride(), weight.stride(0))
    arguments = (rows, more, weight, stream, out, inverse_rms, *strides, len(rows), eps, factor)
    _launch(_forward_kernel, programs, arguments, tile | {"ADDS": added is not None})
    return stream, out, inverse_rms


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    beside: Tensor | None = None,
    *,
    wants_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x, contiguous, plus `beside`, and of the weight if wanted, each in its dtype."""
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
    more = rows if beside is None else beside.reshape(-1, x.shape[-1])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = _tile(rows)
    programs = min(_PROGRAMS, triton.cdiv(len(rows), tile["ROWS"]))
    shares = torch.empty(programs * wants_weight, rows.shape[1], dtype=torch.float32, device=x.device)
    strides = (*grad_rows.stride(), *rows.stride(), *more.stride(), weight.stride(0))
    arguments = (grad_rows, rows, more, weight, inverse_rms.view(-1), grad_x, shares, *strides, len(rows))
    _launch(_backward_kernel, programs, arguments, tile | {"ADDS": beside is not None, "SHARES": wants_weight})
    return grad_x, shares.sum(0).to(weight.dtype) if wants_weight else None


def _tile(rows: Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(rows.shape[1])
    count = max(1, _NUMBERS // block)
    warps = min(32, count * block // _NUMBERS_OF_WARP)
    return {"FEATURES": rows.shape[1], "ROWS": count, "BLOCK": block, "num_warps": warps}


def _launch(kernel: Any, programs: int, arguments: tuple[Any, ...], tile: dict[str, Any]) -> None:
    if not programs:
        return
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs,)](*arguments, **tile)


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x, added, weight, stream, out, inverse_rms,
    x_row, x_column, added_row, added_column, weight_step, count, eps, factor,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    numbers = _load(x, rows, columns, x_row, x_column, count, FEATURES).to(tl.float32)
    if ADDS:
        numbers += factor * _load(added, rows, columns, added_row, added_column, count, FEATURES).to(tl.float32)
        numbers = numbers.to(stream.dtype.element_ty).to(tl.float32)  # the norm is that of what the stream holds
        _store(stream, numbers, rows, columns, count, FEATURES)
    weights = tl.load(weight + columns * weight_step, mask=columns < FEATURES, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 1) / FEATURES + eps)
    tl.store(inverse_rms + rows, inverse, mask=rows < count)
    _store(out, numbers * inverse[:, None] * weights[None, :], rows, columns, count, FEATURES)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(
    grad, x, beside, weight, inverse_rms, grad_x, shares,
    grad_row, grad_column, x_row, x_column, beside_row, beside_column, weight_step, count,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    columns = tl.arange(0, BLOCK)
    weights = tl.load(weight + columns * weight_step, mask=columns < FEATURES, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    rows = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    next_grads = _load(grad, rows, columns, grad_row, grad_column, count, FEATURES)
    next_numbers = _load(x, rows, columns, x_row, x_column, count, FEATURES)
    next_inverse = tl.load(inverse_rms + rows, mask=rows < count, other=0.0)
    for _ in range(program * ROWS, count, step):
        grads, normed = next_grads.to(tl.float32), next_numbers.to(tl.float32) * next_inverse[:, None]
        inverse, own = next_inverse, rows
        rows += step  # the next tile is on its way while this one's sum is taken
        next_grads = _load(grad, rows, columns, grad_row, grad_column, count, FEATURES)
        next_numbers = _load(x, rows, columns, x_row, x_column, count, FEATURES)
        next_inverse = tl.load(inverse_rms + rows, mask=rows < count, other=0.0)
        weighted = grads * weights[None, :]
        along = tl.sum(weighted * normed, 1) / FEATURES
        result = inverse[:, None] * (weighted - normed * along[:, None])
        if ADDS:
            result += _load(beside, own, columns, beside_row, beside_column, count, FEATURES).to(tl.float32)
        _store(grad_x, result, own, columns, count, FEATURES)
        if SHARES:
            share += grads * normed
    if SHARES:
        tl.store(shares + program.to(tl.int64) * FEATURES + columns, tl.sum(share, 0), mask=columns < FEATURES)


@triton.jit
def _load(tensor, rows, columns, row_stride, column_stride, count, FEATURES: tl.constexpr):
    inside = (rows < count)[:, None] & (columns < FEATURES)[None, :]
    return tl.load(tensor + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def _store(tensor, numbers, rows, columns, count, FEATURES: tl.constexpr):
    """Into a contiguous tensor."""
    inside = (rows < count)[:, None] & (columns < FEATURES)[None, :]
    at = tensor + rows[:, None] * FEATURES + columns[None, :]
    tl.store(at, numbers.to(tensor.dtype.element_ty), mask=inside)
