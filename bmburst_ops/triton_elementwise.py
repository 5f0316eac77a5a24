"""Memory-bound operations in Triton: RMSNorm, SwiGLU, rotary embedding and AdamW. Importing it needs Triton.

The first three are the twins of `bmburst_ops.rms_norm`, `bmburst_ops.swiglu` and `bmburst_ops.rotary`. Each pass reads
and writes its tensors once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.triton_launch import after_previous, dependent_launch

WIDEST_ROW = 16384
"""Most features of a row: a program of the norm holds a tile of whole rows."""
_NORM_NUMBERS = 4096  # elements of each tensor that a program of the norm holds, at least
_NORM_NUMBERS_OF_WARP = 512
_PROGRAMS = 1056  # of the norm's backward: 8 per multiprocessor of an H100 or H200; their shares are 0.3 % of 128K rows
_SWIGLU_NUMBERS = 2048  # elements of each tensor that a program holds
WIDEST_HEAD = 4096
"""Largest head dimension: a program of the rotation holds whole heads."""
_PAIRS = 2048  # pairs that a program of the rotation holds
_ADAMW_NUMBERS = 1024  # elements per program of AdamW: 8 for each of its 128 threads


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, contiguous, and 1 / sqrt(mean(x^2) + eps), fp32 `[..., 1]`."""
    return add_norm_forward(x, None, 0.0, weight, eps)[1:]


def add_norm_forward(
    x: Tensor, added: Tensor | None, factor: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + factor * added, rounded to the dtype of x, contiguous, and the results of `norm_forward` for it.

    If `added` is None, the first result is x itself.
    """
    rows = x.reshape(-1, x.shape[-1])
    more = rows if added is None else added.reshape(-1, x.shape[-1])
    out = _contiguous_like(x)
    stream = x if added is None else torch.empty_like(out)
    inverse_rms = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    tile = _norm_tile(rows.shape[1])
    programs = triton.cdiv(len(rows), tile["ROWS"])
    strides = (*rows.stride(), *more.stride(), weight.stride(0))
    arguments = (rows, more, weight, stream, out, inverse_rms, *strides, len(rows), eps, factor)
    options = {**tile, "ADDS": added is not None, **dependent_launch(x.device)}
    _launch_norm(_norm_kernel, programs, arguments, options)
    return stream, out, inverse_rms


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    beside: Tensor | None = None,
    *,
    wants_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x, contiguous, plus `beside`, and of the weight if wanted, each in its dtype.

    The number of programs depends only on the sizes. Each program sums the weight gradient of its rows in fp32, and the
    partial sums are added in a fixed order, so results are bitwise reproducible.
    """
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
    more = rows if beside is None else beside.reshape(-1, x.shape[-1])
    grad_x = _contiguous_like(x)
    tile = _norm_tile(rows.shape[1])
    programs = min(_PROGRAMS, triton.cdiv(len(rows), tile["ROWS"]))
    shares = x.new_empty((programs * wants_weight, rows.shape[1]), dtype=torch.float32)
    strides = (*grad_rows.stride(), *rows.stride(), *more.stride(), weight.stride(0))
    arguments = (grad_rows, rows, more, weight, inverse_rms.view(-1), grad_x, shares, *strides, len(rows))
    _launch_norm(
        _norm_backward_kernel, programs, arguments, {**tile, "ADDS": beside is not None, "SHARES": wants_weight}
    )
    return grad_x, shares.sum(0).to(weight.dtype) if wants_weight else None


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # half of the host time of torch.empty


@cache
def _norm_tile(features: int) -> Mapping[str, Any]:
    block = triton.next_power_of_2(features)
    count = max(1, _NORM_NUMBERS // block)
    warps = min(32, count * block // _NORM_NUMBERS_OF_WARP)
    return {"FEATURES": features, "ROWS": count, "BLOCK": block, "num_warps": warps}


def _launch_norm(kernel: Any, programs: int, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    if not programs:
        return
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs,)](*arguments, **options)


@triton.jit(do_not_specialize=["count"])
def _norm_kernel(
    x, added, weight, stream, out, inverse_rms,
    x_row, x_column, added_row, added_column, weight_step, count, eps, factor,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    after_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    numbers = _load_rows(x, rows, columns, x_row, x_column, count, FEATURES).to(tl.float32)
    if ADDS:
        numbers += factor * _load_rows(added, rows, columns, added_row, added_column, count, FEATURES).to(tl.float32)
        numbers = numbers.to(stream.dtype.element_ty).to(tl.float32)  # the norm of the stream as it is stored
        _store_rows(stream, numbers, rows, columns, count, FEATURES)
    weights = tl.load(weight + columns * weight_step, mask=columns < FEATURES, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 1) / FEATURES + eps)
    tl.store(inverse_rms + rows, inverse, mask=rows < count)
    _store_rows(out, numbers * inverse[:, None] * weights[None, :], rows, columns, count, FEATURES)


@triton.jit(do_not_specialize=["count"])
def _norm_backward_kernel(
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
    next_grads = _load_rows(grad, rows, columns, grad_row, grad_column, count, FEATURES)
    next_numbers = _load_rows(x, rows, columns, x_row, x_column, count, FEATURES)
    next_inverse = tl.load(inverse_rms + rows, mask=rows < count, other=0.0)
    for _ in range(program * ROWS, count, step):
        grads, normed = next_grads.to(tl.float32), next_numbers.to(tl.float32) * next_inverse[:, None]
        inverse, own = next_inverse, rows
        rows += step  # load the next tile while this one is summed
        next_grads = _load_rows(grad, rows, columns, grad_row, grad_column, count, FEATURES)
        next_numbers = _load_rows(x, rows, columns, x_row, x_column, count, FEATURES)
        next_inverse = tl.load(inverse_rms + rows, mask=rows < count, other=0.0)
        weighted = grads * weights[None, :]
        along = tl.sum(weighted * normed, 1) / FEATURES
        result = inverse[:, None] * (weighted - normed * along[:, None])
        if ADDS:
            result += _load_rows(beside, own, columns, beside_row, beside_column, count, FEATURES).to(tl.float32)
        _store_rows(grad_x, result, own, columns, count, FEATURES)
        if SHARES:
            share += grads * normed
    if SHARES:
        tl.store(shares + program.to(tl.int64) * FEATURES + columns, tl.sum(share, 0), mask=columns < FEATURES)


@triton.jit
def _load_rows(tensor, rows, columns, row_stride, column_stride, count, FEATURES: tl.constexpr):
    inside = (rows < count)[:, None] & (columns < FEATURES)[None, :]
    return tl.load(tensor + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def _store_rows(tensor, numbers, rows, columns, count, FEATURES: tl.constexpr):
    """Store rows of a contiguous tensor."""
    inside = (rows < count)[:, None] & (columns < FEATURES)[None, :]
    at = tensor + rows[:, None] * FEATURES + columns[None, :]
    tl.store(at, numbers.to(tensor.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    out = _contiguous_like(gate)
    _launch_swiglu(_swiglu_kernel, (gate, up, out))
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous. With `overwrite`, that of gate overwrites `grad`."""
    grad_gate = grad if overwrite else _contiguous_like(gate)
    grad_up = _contiguous_like(up)
    _launch_swiglu(_swiglu_backward_kernel, (grad, gate, up, grad_gate, grad_up))
    return grad_gate, grad_up


def _launch_swiglu(kernel: Any, tensors: tuple[Tensor, ...]) -> None:
    """Launch one program per block of elements: over the whole tensors if they are dense, else over each row."""
    if not tensors[0].numel():
        return
    is_dense = all(t.is_contiguous() for t in tensors)
    if is_dense:
        count, columns = 1, tensors[0].numel()
        strides = [columns, 1] * len(tensors)
    else:
        tensors = tuple([t.reshape(-1, t.shape[-1]) for t in tensors])  # results are never copied
        count, columns = tensors[0].shape
        strides = [stride for each in tensors for stride in each.stride()]
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[(count * triton.cdiv(columns, _SWIGLU_NUMBERS),)](
            *tensors, *strides, columns, BLOCK=_SWIGLU_NUMBERS, num_warps=4
        )


@triton.jit
def _swiglu_kernel(
    gate, up, out, gate_row, gate_column, up_row, up_column, out_row, out_column, width, BLOCK: tl.constexpr
):  # fmt: skip
    row, columns = _swiglu_block(width, BLOCK)
    inside = columns < width
    gates = tl.load(gate + row * gate_row + columns * gate_column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + columns * up_column, mask=inside, other=0.0).to(tl.float32)
    product = gates * tl.sigmoid(gates) * ups
    tl.store(out + row * out_row + columns * out_column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    grad, gate, up, grad_gate, grad_up, grad_row, grad_column, gate_row, gate_column, up_row, up_column,
    grad_gate_row, grad_gate_column, grad_up_row, grad_up_column, width, BLOCK: tl.constexpr
):  # fmt: skip
    row, columns = _swiglu_block(width, BLOCK)
    inside = columns < width
    grads = tl.load(grad + row * grad_row + columns * grad_column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + columns * gate_column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + columns * up_column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    of_gate = grads * ups * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    of_up = grads * gates * sigmoid
    tl.debug_barrier()  # grad_gate may be grad: no thread may find another's result there
    grad_gate_at = grad_gate + row * grad_gate_row + columns * grad_gate_column
    tl.store(grad_gate_at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * grad_up_row + columns * grad_up_column, of_up.to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_block(width, BLOCK: tl.constexpr):
    """Return the row and the columns `[BLOCK]` of a program, in 64 bits."""
    program = tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    return (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool, out: Tensor | None = None) -> Tensor:
    """Return x rotated. A program rotates a tile of tokens and heads: heads share the loads of angles.

    Args:
        x: `[batch, tokens, heads, head_dim]`, any strides.
        cos: fp32 `[batch, tokens, head_dim / 2]`, any strides.
        sin: As `cos`.
        back: Whether to rotate by the negative angles.
        out: Receives the result, any strides; may be x. Default: a new, contiguous tensor.
    """
    out = _contiguous_like(x) if out is None else out
    if not x.numel():
        return out
    batch, tokens, heads, head_dim = x.shape
    tile = _rotate_tile(heads, head_dim)
    programs = batch * triton.cdiv(tokens, tile["TOKENS"]) * triton.cdiv(heads, tile["HEADS"])
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
        _rotate_kernel[(programs,)](
            x, cos, sin, out, x.stride(), cos.stride(), sin.stride(), out.stride(), tokens, heads,
            BACK=back, num_warps=8, **tile,
        )  # fmt: skip
    return out


@cache
def _rotate_tile(heads: int, head_dim: int) -> Mapping[str, int]:
    pairs = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(heads), max(1, _PAIRS // pairs))
    tokens = max(1, _PAIRS // (pairs * tile_heads))
    return {"PAIRS": head_dim // 2, "TOKENS": tokens, "HEADS": tile_heads, "BLOCK": pairs}


@triton.jit(do_not_specialize=["tokens"])
def _rotate_kernel(
    x, cos, sin, out, x_strides, cos_strides, sin_strides, out_strides, tokens, heads,
    BACK: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head_blocks, token_blocks = tl.cdiv(heads, HEADS), tl.cdiv(tokens, TOKENS)
    head = (program % head_blocks * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    token = (program // head_blocks % token_blocks * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    batch = (program // head_blocks // token_blocks).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    has_angle = (token < tokens)[:, None] & (pair < PAIRS)[None, :]
    inside = has_angle[:, None, :] & (head < heads)[None, :, None]
    cosines = tl.load(_angles(cos, cos_strides, batch, token, pair), mask=has_angle, other=0.0)[:, None, :]
    sines = tl.load(_angles(sin, sin_strides, batch, token, pair), mask=has_angle, other=0.0)[:, None, :]
    if BACK:
        sines = -sines
    first_at = _halves(x, x_strides, batch, token, head, pair)
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + PAIRS * x_strides[3], mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # out may be x: no thread may find another's result there
    out_at = _halves(out, out_strides, batch, token, head, pair)
    tl.store(out_at, (first * cosines - second * sines).to(out.dtype.element_ty), mask=inside)
    turned = (second * cosines + first * sines).to(out.dtype.element_ty)
    tl.store(out_at + PAIRS * out_strides[3], turned, mask=inside)


@triton.jit
def _angles(table, strides, batch, token, pair):
    return table + batch * strides[0] + token[:, None] * strides[1] + pair[None, :] * strides[2]


@triton.jit
def _halves(x, strides, batch, token, head, pair):
    """Return pointers to the first numbers of pairs, `[tokens, heads, pairs]`."""
    rows = x + batch * strides[0] + token[:, None, None] * strides[1] + head[None, :, None] * strides[2]
    return rows + pair[None, None, :] * strides[3]


def adamw_(
    master: Tensor,
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    scale: float,
) -> None:
    """Take one step of AdamW (arXiv:1711.05101, algorithm 2) in place, on 16-bit weights with fp32 state.

    The arithmetic is that of BMTrain's kernel for bf16 weights (csrc/cuda/adam_cuda.cu, 1.0.1): the state is the same,
    and results differ only by the compiler's fused multiply-adds. A thread of BMTrain's kernel accesses one element of
    each tensor; here it accesses 16 bytes, because the kernel is bound by memory traffic, 28 bytes per element.

    Args:
        master: fp32 master weights; contiguous, as all tensors.
        weights: 16-bit weights, only written: the master rounded to nearest even.
        gradient: In the dtype of `weights`.
        mean: First moment, fp32.
        square: Second moment, fp32.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`.
        step: Number of steps taken, including this one.
        scale: The gradient is divided by it; the result is exact if it is a power of 2.
    """
    tensors = master, weights, gradient, mean, square
    assert all(t.is_contiguous() and t.numel() == master.numel() for t in tensors)
    if not master.numel():
        return
    kept = [_in_fp32(beta) for beta in betas]
    added = [_in_fp32(1 - beta) for beta in kept]  # as C subtracts floats: for 0.999 the error is 1e-5
    corrections = [1 - beta**step for beta in betas]
    numbers = (*kept, *added, eps, lr / corrections[0], 1 / corrections[1], lr * weight_decay, 1 / scale)
    with torch.cuda.device_of(master):  # Triton launches on the current device, wherever the tensors are
        _adamw_kernel[(triton.cdiv(master.numel(), _ADAMW_NUMBERS),)](
            *tensors, master.numel(), *numbers, BLOCK=_ADAMW_NUMBERS, num_warps=4
        )


def _in_fp32(value: float) -> float:
    return ctypes.c_float(value).value


@triton.jit
def _adamw_kernel(
    master, weights, gradient, mean, square, count,
    kept1, kept2, added1, added2, eps, rate, square_factor, decay, unscale, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * unscale
    m = kept1 * tl.load(mean + at, mask=inside, other=0.0) + added1 * g
    v = kept2 * tl.load(square + at, mask=inside, other=0.0) + added2 * g * g
    p = tl.load(master + at, mask=inside, other=0.0)
    p -= tl.div_rn(rate * m, tl.sqrt_rn(v * square_factor) + eps) + decay * p
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)
