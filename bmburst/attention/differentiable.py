"""What every attention that is one differentiable function over ranks shares: signature, precision, and delta."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.merge import row_dots


def gradient_signature(*inputs: Tensor) -> str:
    """Return whether there will be a backward, for `Checked.decided`: one that a rank ran alone would wait for ever."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return f"{'with' if differentiable else 'without'} gradient"


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which the inputs' dtype decides, and sums are fp32 or wider; mostly it is so already."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def output_gradients(out: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what a kernel's backward takes for the gradients of an output and its log-sum-exp.

    Args:
        out: `[batch, tokens, heads, head_dim]`.
        grad_out: Shaped as `out`, any strides, or None for zero.
        grad_lse: `[batch, heads, tokens]`, or None for zero.

    Returns:
        The output's gradient, dense, and delta `[batch, heads, tokens]` in fp32 or wider.
    """
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
    delta = row_dots(grad_out, out)
    if grad_lse is not None:
        # dS = P * (dO V^T - delta + dlse): the gradient of the log-sum-exp is a smaller delta. It may be non-zero
        # where dO is zero.
        delta = delta - grad_lse.to(delta.dtype)
    return grad_out, delta
