"""The parameters of LLaMA as BMTrain modules: matrix, norm and embedding table."""

from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmburst_ops.rms_norm import rms_norm

NO_DECAY = "no_decay"
"""BMTrain's parameter group of everything that weight decay leaves alone: vectors."""


def parameter(*shape: int, dtype: torch.dtype) -> bmt.DistributedParameter:
    """Return a parameter of undefined value, cut over all ranks: a vector without weight decay, a matrix with."""
    return bmt.DistributedParameter(torch.empty(shape, dtype=dtype), group=NO_DECAY if len(shape) == 1 else None)


class _Linear(torch.autograd.Function):
    """`F.linear` that keeps the parameter itself for its backward.

    torch's own keeps the transpose, a view of the numbers gathered by ZeRO-3 for the forward pass: every layer's would
    stay in memory until its backward pass. BMTrain gathers them again, into the same parameter, so nothing is lost.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_output @ weight if ctx.needs_input_grad[0] else None
        grad_weight = grad_output.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


class Linear(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """A matrix without bias: `[..., in_features]` to `[..., out_features]`. `weight` is `[out, in]`."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T."""
        result: Tensor = _Linear.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result


class RMSNorm(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Root mean square norm with a learned scale; statistics in fp32 or wider."""

    def __init__(self, features: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(features, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `[..., features]`."""
        return rms_norm(x, self.weight, self.eps)


class Table(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """One row a token id: the embedding, or the head. The caller reads `weight`, once a forward pass.

    Each read gathers the whole table from all ranks, and its gradient is reduced once for each read.
    """

    def __init__(self, rows: int, features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(rows, features, dtype=dtype)
