"""Rotary position embedding (arXiv:2104.09864), in Triton where `fused.triton_twin` allows it, else in plain torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, first_order
from bmburst_ops.fused import triton_twin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False, out: Tensor | None = None) -> Tensor:
    """Return `apply_rotary`, without autograd.

    Args:
        x: See `apply_rotary`.
        cos: See `apply_rotary`.
        sin: See `apply_rotary`.
        back: Whether to rotate by the negative angles: the inverse, and the gradient.
        out: Receives the result, the shape and dtype of x; may be x itself. Default: a new tensor.
    """
    if fused := _fused(x, cos, sin):
        turned: Tensor = fused.rotate(x, cos, sin, back=back, out=out)
        return turned
    wide = torch.promote_types(x.dtype, cos.dtype)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), (-sin if back else sin).unsqueeze(-2)  # the same angle for every head
    result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return result if out is None else out.copy_(result)


def _fused(x: Tensor, cos: Tensor, sin: Tensor) -> Any | None:
    """Return `triton_elementwise` if it supports these tensors, else None."""
    fused = triton_twin("triton_elementwise", x, cos, sin)
    is_taken = cos.dtype == sin.dtype == torch.float32
    return fused if fused and is_taken and x.shape[-1] <= fused.WIDEST_HEAD else None


class _Rotary(torch.autograd.Function):
    """Backward is the rotation by the negative angles, so the inputs need not be saved."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        return tuple([rotate(x, cos, sin) for x in inputs])

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = [None if grad is None else rotate(grad, cos, sin, back=True) for grad in reversed(grads)]
        return None, None, *reversed(turned)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature i together with feature i + head_dim / 2 by the angle of its token.

    This is the pairing of Hugging Face's LLaMA weights (the original LLaMA release pairs neighbours instead).

    Args:
        x: `[batch, tokens, heads, head_dim]`, queries, keys, or both; any strides, for example a slice of the heads.
        cos: `[batch, tokens, head_dim / 2]`, fp32 or wider; cos and sin may have a common factor.
        sin: As `cos`.

    Returns:
        The shape and dtype of x; the products are computed in the dtype of `cos`, or x's if wider.

    Raises:
        ValueError: The shapes do not fit.
    """
    return apply_rotary_to((x,), cos, sin)[0]


def apply_rotary_to(inputs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `apply_rotary` for several inputs, as one operation of autograd: queries and keys."""
    for x in inputs:
        expected = (*x.shape[:2], x.shape[-1] // 2)
        if x.dim() != 4 or x.shape[-1] % 2 or cos.shape != expected or sin.shape != expected:
            raise ValueError(
                f"rotary needs x [batch, tokens, heads, even head_dim] and cos, sin [batch, tokens, head_dim / 2]; "
                f"got {tuple(x.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
            )
    if not torch.is_grad_enabled():  # without the host time of autograd
        return tuple([rotate(x, cos, sin) for x in inputs])
    results: tuple[Tensor, ...] = _Rotary.apply(cos, sin, *inputs)  # type: ignore[no-untyped-call]
    return results
