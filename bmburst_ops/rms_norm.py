"""Root mean square normalisation (arXiv:1910.07467): plain torch, and Triton where `fused` says so."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmburst_ops.fused import triton_twin


class _RMSNorm(torch.autograd.Function):
    """Saves the input in its own dtype and one number a row, where autograd would keep three wide copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        fused = _fused(x, weight)
        result, inverse_rms = fused.forward(x, weight, eps) if fused else _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        fused = _fused(x, weight)
        grad_x, grad_weight = (fused.backward if fused else _backward)(grad_output, x, weight, inverse_rms)
        return grad_x, grad_weight, None


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    inverse_rms = torch.rsqrt(x_wide.square().mean(dim=-1, keepdim=True) + eps)
    return (x_wide * inverse_rms * weight.to(wide)).to(x.dtype), inverse_rms


def _backward(grad_output: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad_output.to(inverse_rms.dtype)
    normed = x.to(inverse_rms.dtype) * inverse_rms
    grad_normed = grad * weight.to(grad.dtype)
    along = (grad_normed * normed).mean(dim=-1, keepdim=True)
    grad_x = (inverse_rms * (grad_normed - normed * along)).to(x.dtype)
    return grad_x, (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)


def _fused(x: Tensor, weight: Tensor) -> Any | None:
    """Return `triton_rms_norm` if it takes these tensors here."""
    fused = triton_twin("triton_rms_norm", x, weight)
    return fused if fused and x.shape[-1] <= fused.WIDEST else None


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
