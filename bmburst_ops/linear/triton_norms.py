"""Division of queries and keys by their norms, in Triton; source: `F.normalize`, but with `sqrt(sum(x * x) + 1e-6)`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.linear.kernel import EPSILON
from bmburst_ops.linear.tiles import divided

_ROWS = 16  # for a program


def divide_by_norms(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor `[..., dim]` with its rows divided by their norms."""
    found = torch.empty_like(tensor)
    _launch(_divide_kernel, tensor, found)
    return found


def before_norms(tensor: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient of rows before `divide_by_norms`, given that of its results; in the memory of the latter.

    Args:
        tensor: The rows before, `[..., dim]`.
        grads: Gradient of the results, shaped alike.
    """
    _launch(_gradient_kernel, tensor, grads)
    return grads


def _launch(kernel, tensor: Tensor, other: Tensor) -> None:
    dim = tensor.shape[-1]
    count = tensor.numel() // dim
    sizes = {"dim": dim, "block": _ROWS, "width": triton.next_power_of_2(dim)}
    kernel[triton.cdiv(count, _ROWS),](tensor, other, count, EPSILON, **sizes)


@triton.jit
def _divide_kernel(
    tensor, found, count, epsilon, dim: tl.constexpr, block: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    rows, columns = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block), tl.arange(0, width)
    mask = (rows < count)[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    tl.store(found + at, divided(tl.load(tensor + at, mask=mask, other=0.0), epsilon)[1], mask=mask)


@triton.jit
def _gradient_kernel(
    tensor, grads, count, epsilon, dim: tl.constexpr, block: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    rows, columns = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block), tl.arange(0, width)
    mask = (rows < count)[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    norm, unit = divided(tl.load(tensor + at, mask=mask, other=0.0).to(tl.float32), epsilon)
    grad = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
    grad = norm[:, None] * (grad - unit * tl.sum(unit * grad, 1)[:, None])
    tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=mask)
