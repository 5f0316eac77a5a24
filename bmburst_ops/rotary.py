"""Rotary position embedding (arXiv:2104.09864), applied to one tensor of heads."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, cos.dtype)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angle for every head
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotary(torch.autograd.Function):
    """The transpose of a rotation is the rotation back, so x itself need not be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_output, cos, -sin), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature i together with feature i + head_dim / 2 by the angle of its token.

    This is the pairing of Hugging Face's LLaMA weights (the original LLaMA release pairs neighbours instead).

    Args:
        x: `[batch, tokens, heads, head_dim]`, queries or keys.
        cos: `[batch, tokens, head_dim / 2]`, fp32 or wider; may carry a common factor with `sin`.
        sin: As `cos`.

    Returns:
        As x, in x's dtype; the products are formed in the dtype of `cos`, or x's if wider.

    Raises:
        ValueError: The shapes do not fit.
    """
    expected = (*x.shape[:2], x.shape[-1] // 2)
    if x.dim() != 4 or x.shape[-1] % 2 or cos.shape != expected or sin.shape != expected:
        raise ValueError(
            f"rotary needs x [batch, tokens, heads, even head_dim] and cos, sin [batch, tokens, head_dim / 2]; "
            f"got {tuple(x.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    result: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result
