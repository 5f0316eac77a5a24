"""LLaMA's MLP, down(silu(gate(x)) * up(x)), a chunk of tokens at a time.

Between the matrices stands a tensor of the tokens times the MLP's width, 3.5 times the hidden size in LLaMA-3: at
131,072 tokens 3.5 GiB in 16 bits, and four of them live in its backward. Here only those of one chunk do. Forward
keeps the input alone; backward forms gate and up of a chunk again (2 of the forward's 3 products) and adds the
chunk's share of the weights' gradients up in fp32.

Inside of a checkpoint this costs no product: a recomputation needs what backward reads, which is the input, so the
caller has it leave the forward out (`is_needed`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bmburst_ops.errors import KernelError
from bmburst_ops.first_order import first_order
from bmburst_ops.linears import add_product, product
from bmburst_ops.swiglu import swiglu


class _GatedMLP(torch.autograd.Function):
    """Keeps the parameters themselves, as ZeRO-3 needs it: their numbers may be gone until backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, chunk: int, is_needed: bool) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        ctx.chunk = chunk
        out = x.new_empty((*x.shape[:-1], len(down)))
        if is_needed:
            for states, result in zip(_chunks(x, chunk), _chunks(out, chunk), strict=True):
                inner = swiglu(linear(states, gate), linear(states, up))
                torch.mm(inner, down.t(), out=result)
                del inner  # nothing of a chunk lives while the next one is at work
        return out

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:4]
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = [
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted else None
            for weight, wanted in zip((gate, up, down), wants, strict=True)
        ]
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants_x else None
        results = [None] * -(-x[..., 0].numel() // ctx.chunk) if grad_x is None else _chunks(grad_x, ctx.chunk)
        parts = zip(_chunks(x, ctx.chunk), _chunks(grad_output, ctx.chunk), results, strict=True)
        for part in parts:
            _add_chunk(sums, *part, gate, up, down)
        weights = [None if total is None else total.to(gate.dtype) for total in sums]
        return grad_x, *weights, None, None


def _add_chunk(
    sums: Sequence[Tensor | None],
    states: Tensor,
    grads: Tensor,
    result: Tensor | None,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
) -> None:
    """Add a chunk's share to the sums of the weights' gradients, and write its input's gradient.

    A function of its own: nothing of a chunk may live while the next one is at work.
    """
    grad_gate, grad_up, inner = _of_activation(states, grads, gate, up, down)
    for total, rows, columns in zip(sums, (grad_gate, grad_up, grads), (states, states, inner), strict=True):
        if total is not None:
            add_product(total, rows.t(), columns)
    if result is not None:
        del inner, columns
        both = product(grad_gate, gate, torch.promote_types(states.dtype, torch.float32))
        add_product(both, grad_up, up)
        result.copy_(both)


def _of_activation(
    states: Tensor, grads: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of what gate and up gave for a chunk, and the activation."""
    with torch.enable_grad():
        pair = [linear(states, weight.detach()).requires_grad_() for weight in (gate.detach(), up.detach())]
        inner = swiglu(*pair, overwrite_grad=True)
    grad_gate, grad_up = torch.autograd.grad(inner, pair, grads @ down)
    return grad_gate, grad_up, inner.detach()


def _chunks(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Return the rows of `[..., features]`, `chunk` at a time."""
    return tuple(x.reshape(-1, x.shape[-1]).split(chunk))


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, chunk: int, is_needed: bool = True) -> Tensor:
    """Return silu(x @ gate.T) * (x @ up.T) @ down.T.

    Args:
        x: `[..., features]`, one row a token.
        gate: `[width, features]`, the dtype of x.
        up: As `gate`.
        down: `[features, width]`.
        chunk: Rows whose width exists at one time.
        is_needed: False leaves the result undefined, for a recomputation that goes no further; gradients are the same.

    Returns:
        `[..., features]` in x's dtype. Gradients of the weights are summed over chunks in fp32, or x's dtype if wider,
        and rounded once; so are x's.

    Raises:
        ValueError: Shapes or dtypes do not fit, or `chunk` is not positive.
    """
    fits = gate.dim() == 2 and up.shape == gate.shape == down.t().shape and x.shape[-1:] == gate.shape[1:]
    if not fits or len({t.dtype for t in (x, gate, up, down)}) > 1 or chunk < 1:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, gate, up, down))
        raise ValueError(
            f"gated_mlp needs x [..., features], gate and up [width, features], down [features, width] of one dtype "
            f"and a positive chunk; got {shapes} and {chunk}"
        )
    result: Tensor = _GatedMLP.apply(x, gate, up, down, chunk, is_needed)  # type: ignore[no-untyped-call]
    return result
