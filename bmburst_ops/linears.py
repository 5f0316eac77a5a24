"""Matrix products that accumulate in fp32, and linear layers that share one input, with low-rank terms.

Linear layers that share an input run as one autograd operation. Its backward accumulates the input's gradient inside
the matrix products (addmm), in fp32. With separate operations, autograd would round each product and add the rounded
tensors: 18 bytes of memory traffic per element in a 16-bit LLaMA block, instead of 6.

The weights stay separate tensors. A single fused product would need them adjacent in memory, so a copy on each use:
they are separate parameters that ZeRO gathers one by one.

A low-rank term of a frozen layer (LoRA, arXiv:2106.09685) is scale * (dropout(x) @ a.T) @ b.T.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.autocast import no_autocast
from bmburst_ops.dropout import Dropout
from bmburst_ops.errors import KernelError, first_order


def product(a: Tensor, b: Tensor, wide: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return a @ b, accumulated and returned in the dtype `wide`; written to `out` if it is given.

    As `add_product`, it computes in the dtypes of its arguments, also under `torch.autocast`.
    """
    with no_autocast(a.device.type):
        if a.is_cuda and a.dtype != wide:
            return torch.mm(a, b, out_dtype=wide, out=out)
        return torch.mm(a.to(wide), b.to(wide), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a wide total in place, without a second tensor of the weight's size."""
    with no_autocast(a.device.type):
        if a.is_cuda and a.dtype != total.dtype:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))


def gradient_memory(weight: Tensor) -> Tensor | None:
    """Return memory for the gradient of a weight, in its shape and dtype; None: the gradient is a new tensor.

    The owner of a weight may set its attribute `gradient_memory`, a function, during a backward pass. It returns memory
    at most once a pass: a second part of the gradient must not overwrite the first one, to which autograd adds it.
    """
    take: Callable[[], Tensor | None] | None = getattr(weight, "gradient_memory", None)
    return None if take is None else take()


class GradientSum:
    """The gradient of a weight, accumulated over chunks of tokens.

    Args:
        dtype: dtype of the sum: that of the chunks, or wider.
        weight: The weight, in whose `gradient_memory` the gradient is: the sum itself if the dtype is the same, else
            what it is rounded to. None: the gradient is a new tensor.

    Attributes:
        total: The sum so far; None before the first chunk.
    """

    def __init__(self, dtype: torch.dtype, weight: Tensor | None = None) -> None:
        self.dtype, self._weight = dtype, weight
        self.total: Tensor | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b, accumulated in fp32 or wider."""
        if self.total is not None:
            add_product(self.total, a, b)
        else:
            self.total = product(a, b, self.dtype, out=self._memory(self.dtype))

    def _memory(self, dtype: torch.dtype) -> Tensor | None:
        weight = self._weight
        return None if weight is None or weight.dtype != dtype else gradient_memory(weight)

    def gradient(self, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient in the dtype of the weight; None if nothing was added."""
        if self.total is None or self.total.dtype == dtype:
            return self.total
        memory = self._memory(dtype)
        return self.total.to(dtype) if memory is None else memory.copy_(self.total)

    def add(self, share: Tensor) -> None:
        """Add a chunk's gradient."""
        self.total = share.to(self.dtype) if self.total is None else self.total.add_(share)


@dataclass(frozen=True, eq=False, slots=True)
class LowRank:
    """The low-rank term of a linear layer.

    Attributes:
        a: `[rank, in]`.
        b: `[out, rank]`; only its rows `rows` are used.
        scale: alpha / rank.
        rows: The rows of `b`, so the outputs, that are computed.
        dropout: Dropout of the input's tokens; None: no dropout.
    """

    a: Tensor
    b: Tensor
    scale: float
    rows: slice
    dropout: Dropout | None = None

    @property
    def settings(self) -> tuple[float, slice, Dropout | None]:
        """Scale, rows and dropout: what backward needs beside the matrices, which autograd saves."""
        return self.scale, self.rows, self.dropout

    def at(self, tokens: slice) -> "LowRank":
        """Return the term for some of the tokens."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.at(tokens))

    def inner(self, x: Tensor) -> Tensor:
        """Return scale * dropout(x) @ a.T, `[tokens, rank]` for `[tokens, in]`."""
        if self.dropout is None:
            return (x @ self.a.t()) * self.scale
        parts = [self.dropout.at(tokens)(x[tokens]) @ self.a.t() for tokens in self.dropout.chunks()]
        return torch.cat(parts) * self.scale

    def of_inner(self, grad: Tensor) -> Tensor:
        """Return the gradient of `inner` times `scale`, given that of the term's outputs."""
        return (grad @ self.b[self.rows]) * self.scale

    def add_output(self, total: Tensor, inner: Tensor, rows: slice = slice(None)) -> None:
        """Add `rows` of the outputs to `total`, `[tokens, outputs]`, in place.

        One kernel reads and writes the total. A product and a sum would move twice as many bytes.
        """
        total.addmm_(inner, self.b[self.rows][rows].t())

    def add_input_gradient(self, total: Tensor, of_inner: Tensor, columns: slice = slice(None)) -> None:
        """Add the gradient of some features of the input, given `of_inner`, in place."""
        a = self.a[:, columns]
        if self.dropout is None:
            total.addmm_(of_inner, a)
            return
        dropout = self.dropout.of_columns(columns)
        for tokens in dropout.chunks():
            total[tokens] += dropout.at(tokens)(of_inner[tokens] @ a)

    def add_a_gradient(self, total: GradientSum, of_inner: Tensor, x: Tensor) -> None:
        """Add the gradient of `a`, given `of_inner` and the input."""
        if self.dropout is None:
            total.add_product(of_inner.t(), x)
            return
        for tokens in self.dropout.chunks():
            total.add_product(of_inner[tokens].t(), self.dropout.at(tokens)(x[tokens]))


Adapter = tuple[LowRank, tuple[GradientSum | None, GradientSum | None]]
"""A low-rank term, and the accumulated gradients of `a` and of the used rows of `b`; None: it needs no gradient."""


def inner_products(x: Tensor, terms: Sequence[LowRank | None]) -> list[Tensor | None]:
    """Return `inner` of the terms of layers that share an input. It is read once, unless there is dropout."""
    found = [term for term in terms if term is not None]
    if len(found) < 2 or any(term.dropout is not None for term in found):
        return [None if term is None else term.inner(x) for term in terms]
    parts = iter((x @ torch.cat([term.a for term in found]).t()).split([len(term.a) for term in found], dim=1))
    return [None if term is None else next(parts) * term.scale for term in terms]


def add_outputs(results: Sequence[Tensor], x: Tensor, terms: Sequence[LowRank | None]) -> None:
    """Add the outputs of the terms of layers that share an input to the layers' results, `[tokens, outputs]`."""
    for result, term, inner in zip(results, terms, inner_products(x, terms), strict=True):
        if term is not None and inner is not None:
            term.add_output(result, inner)


def restored(
    kept: tuple[float, slice, Dropout | None], saved: Iterator[tuple[Tensor, bool]], wide: torch.dtype
) -> Adapter:
    """Return a term in backward, with sums of dtype `wide` for the gradients that are needed.

    Args:
        kept: Its `settings`.
        saved: Its a and b, each with whether it needs a gradient, and those of further terms.
        wide: dtype of the sums.
    """
    (a, of_a), (b, of_b) = ((each, GradientSum(wide) if wanted else None) for each, wanted in islice(saved, 2))
    return LowRank(a, b, *kept), (of_a, of_b)


@dataclass(frozen=True, eq=False, slots=True)
class WeightProduct:
    """The gradient of a weight that backward has not computed yet.

    Attributes:
        weight: The weight itself, which identifies it.
        shape: Its shape in backward.
        grad: The gradient of the layer's result, `[tokens, rows]`.
        states: The layer's input, `[tokens, in]`.
        rows: The rows of the weight that the layer uses.
    """

    weight: Tensor
    shape: torch.Size
    grad: Tensor
    states: Tensor
    rows: slice

    def gradient(self) -> Tensor:
        """Return the gradient of the whole weight."""
        memory = gradient_memory(self.weight) if self.rows == _ALL else None
        return _in_rows(torch.mm(self.grad.t(), self.states, out=memory), self.shape, self.rows)


class LaterProducts:
    """Collects the gradients of weights that backward passes leave for later, pass by pass.

    No other layer and no other rank needs the gradient of a weight, but some wait for that of an input: the stages of a
    pipeline (zero bubble, arXiv:2401.10241). Until then, the inputs of the layers and the gradients of their results
    stay in memory.

    Attributes:
        is_open: Whether backward leaves these gradients now.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._passes: deque[list[WeightProduct]] = deque()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Leave the gradients of weights in the backward pass inside the `with` block."""
        self._passes.append([])
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def add(self, product: WeightProduct) -> None:
        """Add a product of the pass that is running."""
        self._passes[-1].append(product)

    def take(self) -> list[WeightProduct]:
        """Return the products of the oldest pass, and forget them."""
        return self._passes.popleft()


class _Linears(torch.autograd.Function):
    """`F.linear` with some rows of each weight, which saves the parameters themselves for backward.

    torch's `F.linear` saves the transpose, a view of the data that ZeRO-3 gathered for forward. So the gathered weights
    of every layer would stay in memory until its backward. BMTrain gathers them again into the same parameter, so it is
    enough to save the parameter.

    Low-rank terms are added in place: in forward to the results, in backward to the input's gradient. Separate
    operations would need another tensor of that size, and autograd one more for the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Sequence[slice],
        is_needed: bool,
        terms: Sequence[LowRank | None],
        later: LaterProducts | None,
        *matrices: Tensor,
    ) -> tuple[Tensor, ...]:
        reads_x = any(ctx.needs_input_grad[_FIRST:])  # frozen weights have no gradient
        ctx.save_for_backward(*((x,) if reads_x else ()), *matrices)
        ctx.rows, ctx.shape, ctx.reads_x, ctx.later = rows, x.shape, reads_x, later
        # Without their matrices, which autograd saves: ZeRO-3 frees the data and gathers it again.
        ctx.terms = [term and term.settings for term in terms]
        parts = [_of_rows(weight, own) for weight, own in zip(matrices, rows, strict=False)]
        if not is_needed:
            return tuple(x.new_empty((*x.shape[:-1], len(part))) for part in parts)
        results = tuple(torch.nn.functional.linear(x, part) for part in parts)
        add_outputs([result.view(-1, result.shape[-1]) for result in results], x.flatten(0, -2), terms)
        return results

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: torch's checkpoint raises on a second read
        weights, of_terms = saved[ctx.reads_x :][: len(ctx.rows)], saved[ctx.reads_x + len(ctx.rows) :]
        states: Any = saved[0].flatten(0, -2) if ctx.reads_x else None
        grads = [grad.flatten(0, -2) for grad in grad_outputs]
        parts = [_of_rows(weight, own) for weight, own in zip(weights, ctx.rows, strict=True)]
        grad_x = sum_of_products(grads, parts) if ctx.needs_input_grad[0] else None
        of_weights: list[Tensor | None] = []
        for grad, weight, own, wanted in zip(grads, weights, ctx.rows, ctx.needs_input_grad[_FIRST:], strict=False):
            product = WeightProduct(weight, weight.shape, grad, states, own) if wanted else None
            if product is not None and ctx.later is not None and ctx.later.is_open:
                ctx.later.add(product)
                product = None
            of_weights.append(None if product is None else product.gradient())
        dtype, pairs = grads[0].dtype, zip(of_terms, ctx.needs_input_grad[_FIRST + len(weights) :], strict=True)
        adapters = [kept and restored(kept, pairs, _dtype_of_sums(dtype, kept[-1])) for kept in ctx.terms]
        low_rank_backward(states, grads, adapters, grad_x)
        for term, (of_a, of_b) in filter(None, adapters):
            for matrix, total, own in ((term.a, of_a, _ALL), (term.b, of_b, term.rows)):
                done = total is not None and total.total is not None
                of_weights.append(_in_rows(total.total.to(dtype), matrix.shape, own) if done else None)
        return None if grad_x is None else grad_x.view(ctx.shape), *[None] * (_FIRST - 1), *of_weights


_FIRST = 5  # arguments of `_Linears` before the matrices


def _dtype_of_sums(dtype: torch.dtype, dropout: Dropout | None) -> torch.dtype:
    """Return the dtype of gradients of low-rank terms: with dropout they are summed over chunks of tokens."""
    return dtype if dropout is None else torch.promote_types(dtype, torch.float32)


def sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of grad @ weight, in their dtype: the gradient of an input that several linear layers share."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total


def _of_rows(weight: Tensor, rows: slice) -> Tensor:
    """Return rows of a weight; all of them as the weight itself, since a view costs host time."""
    return weight if rows == _ALL else weight[rows]


_ALL = slice(None)


def _in_rows(gradient: Tensor, shape: torch.Size, rows: slice) -> Tensor:
    """Return the gradient of a whole weight, given that of some of its rows."""
    if gradient.shape == shape:
        return gradient
    whole = gradient.new_zeros(shape)
    whole[rows] = gradient
    return whole


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[slice] | None = None,
    terms: Sequence[LowRank | None] | None = None,
    *,
    is_needed: bool = True,
    later: LaterProducts | None = None,
) -> tuple[Tensor, ...]:
    """Return x @ weight[rows].T for each weight, plus its low-rank term if it has one.

    Args:
        x: `[..., features]`.
        weights: At least one, each `[width, features]` in the dtype of x.
        rows: For each weight, the rows that are used. Default: all rows.
        terms: For each weight, its low-rank term with the same rows, or None. Default: no terms.
        is_needed: False leaves the results undefined, for a recomputation that ends here; gradients are the same.
        later: Receives the gradients of the weights while it is open; those of low-rank terms are computed at once.

    Returns:
        For each weight `[..., width]` in x's dtype, where width is the number of its rows.
    """
    chosen = [_ALL] * len(weights) if rows is None else rows
    added = [None] * len(weights) if terms is None else terms
    matrices = [each for term in added if term for each in (term.a, term.b)]
    results: tuple[Tensor, ...] = _Linears.apply(  # type: ignore[no-untyped-call]
        *(x, chosen, is_needed, added, later), *weights, *matrices
    )
    return results


def low_rank_backward(
    x: Tensor, grads: Sequence[Tensor], adapters: Sequence[Adapter | None], of_x: Tensor | None
) -> None:
    """Backward of the low-rank terms of layers that share an input: add the gradients of x and of all a and b in place.

    Without dropout, `x` is read twice for all terms, and `of_x` is read and written once.

    Args:
        x: The input, `[tokens, in]`; not read if a and b need no gradient.
        grads: For each layer the gradient of its result, `[tokens, rows]`.
        adapters: For each layer its term with the accumulated gradients; None for a layer without one.
        of_x: The gradient of `x`; None if it is not needed.
    """
    found = [(grad, adapter) for grad, adapter in zip(grads, adapters, strict=True) if adapter is not None]
    if any(term.dropout is not None for _, (term, _) in found):  # each term has numbers of its own
        for each in found:
            _terms_backward(x, [each], of_x)
    elif found:
        _terms_backward(x, found, of_x)


def _terms_backward(x: Tensor, found: Sequence[tuple[Tensor, Adapter]], of_x: Tensor | None) -> None:
    """Backward of terms without dropout, or of one term."""
    terms, sums = zip(*(adapter for _, adapter in found), strict=True)
    of_inner = [term.of_inner(grad) for grad, (term, _) in found]
    wide = torch.cat(of_inner, dim=1) if len(terms) > 1 else of_inner[0]
    stacked = replace(terms[0], a=torch.cat([term.a for term in terms])) if len(terms) > 1 else terms[0]
    if of_x is not None:
        stacked.add_input_gradient(of_x, wide)
    if any(of_b is not None for _, of_b in sums):
        for (grad, (_, (_, of_b))), inner in zip(found, inner_products(x, terms), strict=True):
            if of_b is not None and inner is not None:
                of_b.add_product(grad.t(), inner)
    wanted = [of_a for of_a, _ in sums if of_a is not None]
    if wanted:
        total = GradientSum(wanted[0].dtype)
        stacked.add_a_gradient(total, wide, x)
        assert total.total is not None
        for (of_a, _), share in zip(sums, total.total.split([len(term.a) for term in terms]), strict=True):
            if of_a is not None:
                of_a.add(share)
