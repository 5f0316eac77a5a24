"""SwiGLU, rotary embedding and cross entropy in Triton: what goes over numbers or rows once and multiplies no matrices.

The twins of `bmburst_ops.swiglu`, `bmburst_ops.rotary` and `linear_cross_entropy.cross_entropy_`. The first two read
and write their tensors once a pass. Importing it needs Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SWIGLU_NUMBERS = 2048  # of each tensor, that a program holds
WIDEST = 4096
"""Head dimension that a program of the rotation holds."""
_PAIRS = 2048  # that it holds
_LOGITS = 4096  # of a row, that a program of cross entropy holds


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_swiglu_kernel, (gate, up, out))
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate, in the place of the result's if that may be overwritten, and of up; contiguous."""
    grad_gate = grad if overwrite else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _launch(_swiglu_backward_kernel, (grad, gate, up, grad_gate, grad_up))
    return grad_gate, grad_up


def _launch(kernel: Any, tensors: tuple[Tensor, ...]) -> None:
    """Run a program for each block of numbers: of all of them where they are dense, else of each row."""
    if not tensors[0].numel():
        return
    is_dense = all(t.is_contiguous() for t in tensors)
    rows = [t.view(1, -1) if is_dense else t.reshape(-1, t.shape[-1]) for t in tensors]  # results are never copied
    count, columns = rows[0].shape
    strides = [stride for each in rows for stride in each.stride()]
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[(count * triton.cdiv(columns, _SWIGLU_NUMBERS),)](
            *rows, *strides, columns, BLOCK=_SWIGLU_NUMBERS, num_warps=4
        )


@triton.jit
def _swiglu_kernel(
    gate, up, out, gate_row, gate_column, up_row, up_column, out_row, out_column, width, BLOCK: tl.constexpr
):  # fmt: skip
    row, columns = _block(width, BLOCK)
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
    row, columns = _block(width, BLOCK)
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
def _block(width, BLOCK: tl.constexpr):
    """Return row and columns `[BLOCK]`, in 64 bits."""
    program = tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    return (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Return x turned, contiguous. A program turns a tile of tokens and heads: a token's angles are read once for all.

    Args:
        x: `[batch, tokens, heads, head_dim]`, any strides.
        cos: fp32 `[batch, tokens, head_dim / 2]`, any strides.
        sin: As `cos`.
        back: By the negative angles.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    batch, tokens, heads, head_dim = x.shape
    pairs = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(heads), max(1, _PAIRS // pairs))
    tile_tokens = max(1, _PAIRS // (pairs * tile_heads))
    programs = batch * triton.cdiv(tokens, tile_tokens) * triton.cdiv(heads, tile_heads)
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
        _rotate_kernel[(programs,)](
            x, cos, sin, out, x.stride(), cos.stride(), sin.stride(), out.stride(), tokens, heads,
            BACK=back, PAIRS=head_dim // 2, TOKENS=tile_tokens, HEADS=tile_heads, BLOCK=pairs, num_warps=8,
        )  # fmt: skip
    return out


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


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    """See `bmburst_ops.linear_cross_entropy.cross_entropy_`. Logits are read twice, the gradient is written once.

    The normalizer is found in one reading (Milakov and Gimelshein, arXiv:1805.02867).
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
        tl.debug_barrier()  # the gradient may lie where the target was read
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(at + columns, mask=columns < width, other=float("-inf"))
            p = tl.exp(x - log_normalizer)
            p = tl.where(columns == label, p - 1.0, p)
            p = tl.where(is_valid, p, 0.0)
            tl.store(gradient + row * width + columns, p.to(gradient.dtype.element_ty), mask=columns < width)
