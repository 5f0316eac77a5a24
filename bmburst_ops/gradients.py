"""Backward from gradients that are known: `seed`.

`torch.autograd.grad(results, inputs, grads)` compares shapes with functions of a module that imports sympy: 0.45 s of
CPU time in the first step of each rank. Backward from a scalar, with an implicit gradient of one, does not need them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *results: Tensor) -> Tensor:
        ctx.grads = grads
        return results[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, ()  # autograd frees each one as soon as it has used it
        return None, *grads


def seed(results: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a scalar without a value, whose backward gives each of `results` its gradient. It can run once.

    Args:
        results: Tensors of any shapes, of which one at least has an autograd graph.
        grads: Their gradients: the same shapes, dtypes and devices.

    Returns:
        `[]`, uninitialized, for `torch.autograd.grad(seed(results, grads), inputs)` or `.backward()`.

    Raises:
        ValueError: A gradient has another shape than its result.
    """
    for result, grad in zip(results, grads, strict=True):
        if result.shape != grad.shape:
            raise ValueError(f"a result of shape {tuple(result.shape)} has a gradient of shape {tuple(grad.shape)}")
    with torch.enable_grad():  # also in backward of a torch.autograd.Function
        scalar: Tensor = _Seed.apply(tuple(grads), *results)  # type: ignore[no-untyped-call]
    return scalar
