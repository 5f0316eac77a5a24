"""Low-rank terms of frozen linear layers (LoRA, arXiv:2106.09685): scale * (x @ a.T) @ b.T."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmburst_ops.linears import GradientSum, linears


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


def low_rank_terms(x: Tensor, terms: Sequence[LowRank], *, is_needed: bool = True) -> list[Tensor]:
    """Return each term of one input, with a graph: `[..., out]` for `[..., in]`; see `bmburst_ops.linears.linears`."""
    inner = linears(x, [each.a for each in terms])
    pairs = zip(inner, terms, strict=True)
    return [linears(z * each.scale, [each.b], [each.rows], is_needed=is_needed)[0] for z, each in pairs]


def low_rank_product(x: Tensor, term: LowRank, rows: slice = slice(None)) -> Tensor:
    """Return some outputs of a term without a graph: `[tokens, outputs]` for `[tokens, in]`."""
    return ((x @ term.a.t()) * term.scale) @ term.b[term.rows][rows].t()


def low_rank_backward(
    x: Tensor, grad: Tensor, term: LowRank, sums: tuple[GradientSum | None, GradientSum | None]
) -> Tensor:
    """Return the gradient that a term adds to its input's, `[tokens, in]`, and add those of a and b to their sums.

    Args:
        x: The input, `[tokens, in]`.
        grad: The gradient of the layer's result, `[tokens, out]`.
        term: All outputs of it are used.
        sums: Of the gradients of a and b; None for one that needs none.
    """
    of_a, of_b = sums
    of_inner = (grad @ term.b) * term.scale
    if of_b is not None:
        of_b.add_product(grad.t(), (x @ term.a.t()) * term.scale)
    if of_a is not None:
        of_a.add_product(of_inner.t(), x)
    return torch.mm(of_inner, term.a)
