"""LLaMA's MLP, down(silu(gate(x)) * up(x)), a chunk of tokens at a time: `gated_mlp`.

The activation between the matrices is `[tokens, width]`, with a width of 3.5 times the hidden size in LLaMA-3. For
131,072 tokens it takes 3.5 GiB in 16 bits, and an unchunked backward holds four such tensors. Here only those of one
chunk exist. Forward saves only the input. Backward recomputes gate and up of a chunk (2 of the 3 products of forward),
and accumulates the weight gradients in fp32.

Under activation checkpointing this costs no extra product. Backward reads only the input, so the recomputation can skip
the forward: callers pass `is_needed=False`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bmburst_ops.errors import KernelError, first_order
from bmburst_ops.linears import (
    Adapter,
    GradientSum,
    LowRank,
    add_outputs,
    add_product,
    inner_products,
    low_rank_backward,
    product,
    restored,
)
from bmburst_ops.swiglu import swiglu


class _GatedMLP(torch.autograd.Function):
    """Saves the parameters as they are: ZeRO-3 frees their data after forward and gathers it again for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        chunk: int,
        is_needed: bool,
        terms: Sequence[LowRank | None],
        *adapters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, gate, up, down, *adapters)
        ctx.chunk, ctx.terms = chunk, [term and term.settings for term in terms]
        out = x.new_empty((*x.shape[:-1], len(down)))
        if is_needed:
            parts = zip(_chunks(x, chunk), _chunks(out, chunk), strict=True)
            for number, (states, result) in enumerate(parts):
                of_chunk = [term and term.at(_tokens(number, chunk)) for term in terms]
                inner = swiglu(*gate_and_up(states, gate, up, of_chunk))
                torch.mm(inner, down.t(), out=result)
                add_outputs([result], inner, of_chunk[2:])
                del inner  # frees the tensors of this chunk before the next one
        return out

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *adapters = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:4]
        wide = torch.promote_types(x.dtype, torch.float32)
        matrices = (gate, up, down)
        sums = [GradientSum(wide, each) if wanted else None for each, wanted in zip(matrices, wants, strict=True)]
        rest = iter(zip(adapters, ctx.needs_input_grad[7:], strict=True))
        terms = [kept and restored(kept, rest, wide) for kept in ctx.terms]
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants_x else None
        results = [None] * -(-x[..., 0].numel() // ctx.chunk) if grad_x is None else _chunks(grad_x, ctx.chunk)
        parts = zip(_chunks(x, ctx.chunk), _chunks(grad_output, ctx.chunk), results, strict=True)
        for number, part in enumerate(parts):
            tokens = _tokens(number, ctx.chunk)
            chunk_backward(*part, gate, up, down, sums, [each and (each[0].at(tokens), each[1]) for each in terms])
        sums += [each for term in terms if term for each in term[1]]
        weights = [None if each is None else each.gradient(gate.dtype) for each in sums]
        return grad_x, *weights[:3], None, None, None, *weights[3:]


def gate_and_up(
    states: Tensor,
    gate: Tensor,
    up: Tensor,
    terms: Sequence[LowRank | None],
    keep: Callable[[Tensor], object] = lambda _: None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of gate and up for a chunk, `[rows, width]` each; see `gated_mlp`.

    Args:
        states: The chunk of the MLP's input, `[rows, features]`.
        gate: See `gated_mlp`.
        up: See `gated_mlp`.
        terms: The low-rank terms of gate and up; further ones are not read.
        keep: Called with gate's output before the kernels of up are launched, then with up's.
    """
    results = []
    inners = inner_products(states, terms[:2])
    for weight, term, inner in zip((gate, up), terms[:2], inners, strict=True):
        result = linear(states, weight)
        if term is not None and inner is not None:
            term.add_output(result, inner)
        keep(result)
        results.append(result)
    return results[0], results[1]


def chunk_backward(
    states: Tensor,
    grads: Tensor,
    result: Tensor | None,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    sums: Sequence[GradientSum | None],
    adapters: Sequence[Adapter | None] = (None, None, None),
    outputs: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Accumulate the weight gradients of a chunk, and write the gradient of its input.

    A separate function, so that the tensors of a chunk are freed before the next chunk.

    Args:
        states: The chunk of the MLP's input, `[rows, features]`.
        grads: The gradient of the MLP's result, `[rows, features]`.
        result: Memory for the gradient of `states`; None if it is not needed.
        gate: See `gated_mlp`.
        up: See `gated_mlp`.
        down: See `gated_mlp`.
        sums: Accumulated gradients of gate, up and down; None for a frozen weight.
        adapters: The low-rank terms of gate, up and down with their accumulated gradients; None for no term.
        outputs: What `gate_and_up` returned, which is overwritten. None: it is computed again.
    """
    if outputs is None:
        outputs = gate_and_up(states, gate.detach(), up.detach(), [each and each[0] for each in adapters])
    grad_gate, grad_up, inner = _of_activation(outputs, grads, down, adapters[2])
    del outputs
    for total, rows, columns in zip(sums, (grad_gate, grad_up, grads), (states, states, inner), strict=True):
        if total is not None:
            total.add_product(rows.t(), columns)
    if result is not None:
        del inner, columns
        both = product(grad_gate, gate, torch.promote_types(states.dtype, torch.float32))
        add_product(both, grad_up, up)
        result.copy_(both)
    low_rank_backward(states, (grad_gate, grad_up), adapters[:2], result)


def _of_activation(
    pair: tuple[Tensor, Tensor], grads: Tensor, down: Tensor, adapter: Adapter | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the outputs of gate and up for a chunk, and the activation."""
    with torch.enable_grad():
        inner = swiglu(*(given.requires_grad_() for given in pair), overwrite_grad=True)
    of_inner = grads @ down
    low_rank_backward(inner.detach(), (grads,), (adapter,), of_inner)
    grad_gate, grad_up = torch.autograd.grad(inner, pair, of_inner)
    return grad_gate, grad_up, inner.detach()


def _chunks(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Return the rows of `[..., features]`, `chunk` at a time."""
    return tuple(x.reshape(-1, x.shape[-1]).split(chunk))


def _tokens(number: int, chunk: int) -> slice:
    """Return the tokens of a chunk of `_chunks`."""
    return slice(number * chunk, (number + 1) * chunk)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    chunk: int,
    is_needed: bool = True,
    adapters: Sequence[LowRank | None] = (None, None, None),
) -> Tensor:
    """Return silu(x @ gate.T) * (x @ up.T) @ down.T.

    Args:
        x: `[..., features]`, one row per token.
        gate: `[width, features]`, in the dtype of x.
        up: As `gate`.
        down: `[features, width]`.
        chunk: Number of rows that are computed at once.
        is_needed: False leaves the result undefined, for a recomputation that ends here; gradients are the same.
        adapters: The low-rank terms of gate, up and down; None for no term.

    Returns:
        `[..., features]` in x's dtype. Weight gradients are summed over chunks in fp32, or x's dtype if wider, and
        rounded once. The gradient of x is also rounded once.

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
    matrices = [each for term in adapters if term for each in (term.a, term.b)]
    result: Tensor = _GatedMLP.apply(  # type: ignore[no-untyped-call]
        *(x, gate, up, down, chunk, is_needed, adapters), *matrices
    )
    return result
