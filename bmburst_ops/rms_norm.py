"""Root mean square normalisation (arXiv:1910.07467)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """Saves the input in its own dtype and one number a row, where autograd would keep three wide copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide)
        inverse_rms = torch.rsqrt(x_wide.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (x_wide * inverse_rms * weight.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grad_output.to(inverse_rms.dtype)
        normed = x.to(inverse_rms.dtype) * inverse_rms
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_normed = grad * weight.to(grad.dtype)
            along = (grad_normed * normed).mean(dim=-1, keepdim=True)
            grad_x = (inverse_rms * (grad_normed - normed * along)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, computed in fp32 or the input's dtype if wider.

    Args:
        x: `[..., features]`.
        weight: `[features]`.
        eps: Added to the mean square, in the square of x's unit.

    Returns:
        `[..., features]` in x's dtype, rounded once.

    Raises:
        ValueError: weight is not one number a feature.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"the weight of a norm over {x.shape[-1]} features has shape {tuple(weight.shape)}")
    result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result
