"""The gated activation of LLaMA's MLP (SwiGLU, arXiv:2002.05202)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SwiGLU(torch.autograd.Function):
    """Saves the two inputs only; the sigmoid is cheaper to repeat than to keep."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        wide = torch.promote_types(gate.dtype, torch.float32)
        return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        wide = torch.promote_types(gate.dtype, torch.float32)
        grad, gate_wide = grad_output.to(wide), gate.to(wide)
        sigmoid = torch.sigmoid(gate_wide)
        grad_gate = grad * up.to(wide) * sigmoid * (1 + gate_wide * (1 - sigmoid))
        return grad_gate.to(gate.dtype), (grad * gate_wide * sigmoid).to(up.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, computed in fp32 or the inputs' dtype if wider.

    Args:
        gate: Any shape.
        up: Same shape and dtype as `gate`.

    Returns:
        Same shape and dtype.

    Raises:
        ValueError: The shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu needs two like tensors, got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    result: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return result
