"""Matrix products that accumulate in fp32, and linear layers that share one input, with low-rank terms.

Linear layers that share an input run as one autograd operation. Its backward adds the gradients of the input inside the
matrix products (addmm), in fp32. With separate operations autograd would round each product and add the rounded
tensors: 18 bytes an element in a 16-bit LLaMA block instead of 6.

The weights stay separate tensors. One fused product would need them side by side in memory, which is a copy on each
use, because they are separate parameters that ZeRO gathers one by one.

A low-rank term of a frozen layer (LoRA, arXiv:2106.09685) is scale * (x @ a.T) @ b.T.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, first_order


def product(a: Tensor, b: Tensor, wide: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return a @ b accumulated in, and never rounded below, the wide dtype; in `out`, if that is given."""
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide, out=out)
    return torch.mm(a.to(wide), b.to(wide), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a wide total in place: a second tensor of the weight's size would cost its memory and traffic."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class GradientSum:
    """The gradient of a weight, added up over chunks of tokens.

    Args:
        dtype: Of the sum: that of the chunks' numbers, or wider.

    Attributes:
        total: The sum so far; None before the first chunk.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.total: Tensor | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b, accumulated in fp32 or wider."""
        if self.total is not None:
            add_product(self.total, a, b)
        else:
            self.total = a @ b if a.dtype == self.dtype else product(a, b, self.dtype)

    def add(self, share: Tensor) -> None:
        """Add a chunk's gradient."""
        self.total = share.to(self.dtype) if self.total is None else self.total.add_(share)


@dataclass(frozen=True, eq=False, slots=True)
class LowRank:
    """The low-rank term of a linear layer.

    Attributes:
        a: `[rank, in]`.
        b: `[out, rank]`; of its rows `rows` are used.
        scale: alpha / rank.
        rows: The outputs that are computed.
    """

    a: Tensor
    b: Tensor
    scale: float
    rows: slice


class _Linears(torch.autograd.Function):
    """`F.linear` with some rows of each weight, that keeps the parameters themselves for its backward.

    torch's own keeps the transpose, a view of the numbers gathered by ZeRO-3 for the forward pass: every layer's would
    stay in memory until its backward pass. BMTrain gathers them again, into the same parameter, so nothing is lost.

    Low-rank terms are added in place, forward to the results and backward to the input's gradient: as operations of
    their own they would take a tensor of its size, and autograd another for the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Sequence[slice],
        is_needed: bool,
        terms: Sequence[LowRank | None],
        *matrices: Tensor,
    ) -> tuple[Tensor, ...]:
        reads_x = any(ctx.needs_input_grad[4:])  # frozen weights have no gradient
        ctx.save_for_backward(*((x,) if reads_x else ()), *matrices)
        ctx.rows, ctx.shape, ctx.reads_x = rows, x.shape, reads_x
        ctx.scales = [None if term is None else term.scale for term in terms]
        parts = [weight[own] for weight, own in zip(matrices, rows, strict=False)]
        if not is_needed:
            return tuple(x.new_empty((*x.shape[:-1], len(part))) for part in parts)
        return tuple(_result(x, part, term) for part, term in zip(parts, terms, strict=True))

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: torch's checkpoint refuses the second time
        weights, of_terms = saved[ctx.reads_x :][: len(ctx.rows)], iter(saved[ctx.reads_x + len(ctx.rows) :])
        states: Any = saved[0].flatten(0, -2) if ctx.reads_x else None
        grads = [grad.flatten(0, -2) for grad in grad_outputs]
        parts = [weight[own] for weight, own in zip(weights, ctx.rows, strict=True)]
        grad_x = sum_of_products(grads, parts) if ctx.needs_input_grad[0] else None
        of_weights = [
            _in_rows(grad.t() @ states, weight, own) if wanted else None
            for grad, weight, own, wanted in zip(grads, weights, ctx.rows, ctx.needs_input_grad[4:], strict=False)
        ]
        for grad, own, scale in zip(grads, ctx.rows, ctx.scales, strict=True):
            if scale is not None:
                term = LowRank(next(of_terms), next(of_terms), scale, own)
                wanted = ctx.needs_input_grad[4 + len(of_weights) :][:2]
                sums = [GradientSum(grad.dtype) if each else None for each in wanted]
                low_rank_backward(states, grad, term, sums, grad_x)
                of_a, of_b = (None if each is None else each.total for each in sums)
                of_weights += [of_a, None if of_b is None else _in_rows(of_b, term.b, own)]
        return None if grad_x is None else grad_x.view(ctx.shape), None, None, None, *of_weights


def _result(x: Tensor, weight: Tensor, term: LowRank | None) -> Tensor:
    product = torch.nn.functional.linear(x, weight)
    return product if term is None else product.add_(low_rank_product(x, term))


def sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of grad @ weight, in their dtype: the gradient of the input that linear layers share."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total


def _in_rows(gradient: Tensor, weight: Tensor, rows: slice) -> Tensor:
    """Return the gradient of all of a weight, of that of some rows."""
    if gradient.shape == weight.shape:
        return gradient
    whole = torch.zeros_like(weight)
    whole[rows] = gradient
    return whole


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[slice] | None = None,
    terms: Sequence[LowRank | None] | None = None,
    *,
    is_needed: bool = True,
) -> tuple[Tensor, ...]:
    """Return x @ weight[rows].T for each weight, with a low-rank term where it has one.

    Args:
        x: `[..., features]`.
        weights: At least one, each `[width, features]` in the dtype of x.
        rows: Of each weight, those that are used. Default: all of each.
        terms: Of each weight, for the same rows; None for one without. Default: none has.
        is_needed: False leaves the results undefined, for a recomputation that goes no further; gradients are the same.

    Returns:
        For each weight `[..., width]` in x's dtype, its width that of its rows.
    """
    chosen = [slice(None)] * len(weights) if rows is None else rows
    added = [None] * len(weights) if terms is None else terms
    matrices = [each for term in added if term for each in (term.a, term.b)]
    results: tuple[Tensor, ...] = _Linears.apply(  # type: ignore[no-untyped-call]
        *(x, chosen, is_needed, added), *weights, *matrices
    )
    return results


def low_rank_product(x: Tensor, term: LowRank, rows: slice = slice(None)) -> Tensor:
    """Return some outputs of a term without a graph: `[tokens, outputs]` for `[tokens, in]`."""
    return ((x @ term.a.t()) * term.scale) @ term.b[term.rows][rows].t()


def low_rank_backward(
    x: Tensor, grad: Tensor, term: LowRank, sums: Sequence[GradientSum | None], of_x: Tensor | None
) -> None:
    """Add the gradients of a term to those of its input and of a and b, in place.

    Args:
        x: The input, `[tokens, in]`; not read if a and b need no gradient.
        grad: The gradient of the layer's result, `[tokens, rows]`.
        term: The term.
        sums: Of the gradients of a and of the used rows of b; None for one that needs none.
        of_x: The gradient of `x`; None if it needs none.
    """
    of_a, of_b = sums
    of_inner = (grad @ term.b[term.rows]) * term.scale
    if of_x is not None:
        of_x.addmm_(of_inner, term.a)
    if of_b is not None:
        of_b.add_product(grad.t(), (x @ term.a.t()) * term.scale)
    if of_a is not None:
        of_a.add_product(of_inner.t(), x)
