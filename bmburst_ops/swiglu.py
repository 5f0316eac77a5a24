"""SwiGLU, the activation of LLaMA's MLP (arXiv:2002.05202): Triton where `fused.triton_twin` allows it, else torch."""

from typing import Any

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, first_order
from bmburst_ops.fused import triton_twin


class _SwiGLU(torch.autograd.Function):
    """Saves only the two inputs: recomputing the sigmoid is cheaper than saving it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.overwrite = overwrite
        return _forward(gate, up)

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        # An expanded gradient, such as that of a sum, must not be overwritten: elements share memory.
        overwrite = ctx.overwrite and grad_output.is_contiguous()
        fused = triton_twin("triton_elementwise", gate, up)
        grad_gate, grad_up = (fused.swiglu_backward if fused else _backward)(grad_output, gate, up, overwrite=overwrite)
        return grad_gate, grad_up, None


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    if fused := triton_twin("triton_elementwise", gate, up):
        result: Tensor = fused.swiglu(gate, up)
        return result
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _backward(grad_output: Tensor, gate: Tensor, up: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate.dtype, torch.float32)
    grad, gate_wide = grad_output.to(wide), gate.to(wide)
    sigmoid = torch.sigmoid(gate_wide)
    grad_gate = grad * up.to(wide) * sigmoid * (1 + gate_wide * (1 - sigmoid))
    of_gate, of_up = grad_gate.to(gate.dtype), (grad * gate_wide * sigmoid).to(up.dtype)
    return grad_output.copy_(of_gate) if overwrite else of_gate, of_up


def swiglu(gate: Tensor, up: Tensor, *, overwrite_grad: bool = False) -> Tensor:
    """Return silu(gate) * up, computed in fp32 or the inputs' dtype if wider.

    Args:
        gate: Any shape.
        up: Same shape and dtype as `gate`.
        overwrite_grad: Whether the gradient of `gate` may overwrite that of the result, if it is dense. Set it only if
            nothing else reads that gradient: the result has one user, whose backward allocates it.

    Returns:
        The same shape and dtype as the inputs.

    Raises:
        ValueError: The shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu needs two like tensors, got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    if not torch.is_grad_enabled():  # without the host time of autograd
        return _forward(gate, up)
    result: Tensor = _SwiGLU.apply(gate, up, overwrite_grad)  # type: ignore[no-untyped-call]
    return result
