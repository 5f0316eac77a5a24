"""Root mean square norm (arXiv:1910.07467), in Triton where `fused.triton_twin` allows it, else in plain torch.

`stream_norm` fuses the norm before attention or MLP with the residual stream: in forward with the addition to the
stream, in backward with the addition of the stream's gradient. The norm reads and writes these tensors anyway.
"""

from typing import Any

import torch
from torch import Tensor

from bmburst_ops import cpm_kernels
from bmburst_ops.errors import KernelError, first_order, unknown_kernel
from bmburst_ops.fused import triton_twin

KERNELS = ("auto", "torch", "triton", cpm_kernels.NAME)
"""Values of `kernel`. auto: Triton if it supports the tensors, else torch."""


class _RMSNorm(torch.autograd.Function):
    """Saves the input in its own dtype and one number per row; autograd would save three wide copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernel: str) -> Tensor:
        module = choose_norm(kernel, x, weight)
        result, inverse_rms = module.norm_forward(x, weight, eps) if module else _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.eps, ctx.is_plain = eps, kernel == "torch"
        return result

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = _gradients(ctx, grad_output, wants_weight=ctx.needs_input_grad[1])
        return grad_x, grad_weight, None, None


class _StreamNorm(torch.autograd.Function):
    """Saves the returned stream, which later operations save too, and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, factor: float, weight: Tensor, eps: float, kernel: str
    ) -> tuple[Tensor, Tensor]:
        module = choose_norm(kernel, x, weight)
        add_forward = getattr(module, "add_norm_forward", None)  # Triton's kernels have it
        if added is not None and add_forward:
            stream, normed, inverse_rms = add_forward(x, added, factor, weight, eps)
        else:
            stream = x if added is None else torch.add(x, added, alpha=factor)
            normed, inverse_rms = module.norm_forward(stream, weight, eps) if module else _forward(stream, weight, eps)
        ctx.save_for_backward(stream, weight, inverse_rms)
        ctx.eps, ctx.is_plain, ctx.factor = eps, kernel == "torch", None if added is None else factor
        return stream, normed

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_stream: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = _gradients(ctx, grad_normed, grad_stream, wants_weight=ctx.needs_input_grad[3])
        grad_added = grad_x if ctx.factor in (None, 1) else grad_x * ctx.factor
        return grad_x, None if ctx.factor is None else grad_added, None, grad_weight, None, None


def _gradients(
    ctx: Any, grad_output: Tensor, beside: Tensor | None = None, *, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the norm's input plus `beside`, and that of the weight; None if it is not needed."""
    x, weight, inverse_rms = ctx.saved_tensors
    if inverse_rms is None:
        inverse_rms = _inverse_rms(x.to(torch.promote_types(x.dtype, torch.float32)), ctx.eps)
    fused = None if ctx.is_plain else _fused(x, weight)
    result: tuple[Tensor, Tensor | None] = (fused.norm_backward if fused else _backward)(
        *(grad_output, x, weight, inverse_rms, beside), wants_weight=wants_weight
    )
    return result


def _inverse_rms(x_wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x_wide.square().mean(dim=-1, keepdim=True) + eps)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    inverse_rms = _inverse_rms(x_wide, eps)
    return (x_wide * inverse_rms * weight.to(wide)).to(x.dtype), inverse_rms


def _backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, beside: Tensor | None, *, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    grad = grad_output.to(inverse_rms.dtype)
    normed = x.to(inverse_rms.dtype) * inverse_rms
    grad_normed = grad * weight.to(grad.dtype)
    along = (grad_normed * normed).mean(dim=-1, keepdim=True)
    grad_x = inverse_rms * (grad_normed - normed * along)
    if beside is not None:
        grad_x += beside
    grad_weight = (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype) if wants_weight else None
    return grad_x.to(x.dtype), grad_weight


def _fused(x: Tensor, weight: Tensor) -> Any | None:
    """Return `triton_elementwise` if it supports these tensors, else None."""
    fused = triton_twin("triton_elementwise", x, weight)
    return fused if fused and x.shape[-1] <= fused.WIDEST_ROW else None


def choose_norm(kernel: str, x: Tensor, weight: Tensor) -> Any | None:
    """Return the module whose `norm_forward` computes the norm of such tensors; None: use plain torch.

    Raises:
        KernelError: The name is not in `KERNELS`, or the kernel does not support these tensors on this machine.
    """
    if kernel not in KERNELS:
        raise unknown_kernel(kernel, KERNELS)
    module: Any = cpm_kernels if kernel == cpm_kernels.NAME else None
    reason = cpm_kernels.refusal(x, weight) if module else None
    if kernel in ("auto", "triton"):
        module = _fused(x, weight)
    if kernel == "triton" and module is None:
        reason = "needs Triton, and rows in fp32 or 16 bits on an NVIDIA GPU from Ampere on"
    if reason:
        raise KernelError(f"norm kernel '{kernel}' {reason}\nfix: use 'auto', or one of {', '.join(KERNELS[1:])}")
    return module


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernel: str = "auto") -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, computed in fp32 or the input's dtype if wider.

    Args:
        x: `[..., features]`.
        weight: `[features]`.
        eps: Added to the mean square.
        kernel: One of `KERNELS`. "cpm-kernels" has only a forward; backward is then as with "auto".

    Returns:
        `[..., features]` in x's dtype, rounded once; with cpm-kernels also before the weight.

    Raises:
        ValueError: `weight` is not `[features]`.
        KernelError: The kernel is unknown, or does not support these tensors on this machine.
    """
    _require_weight(x, weight)
    result: Tensor = _RMSNorm.apply(x, weight, eps, kernel)  # type: ignore[no-untyped-call]
    return result


def stream_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, *, factor: float = 1.0, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the stream x + factor * added, and its `rms_norm`, with the same values as separate operations.

    Backward adds the stream's gradient to the norm's before rounding.

    Args:
        x: `[..., features]`, the stream.
        added: Addend in the shape and dtype of `x`; None: the stream is `x`.
        weight: `[features]`.
        eps: See `rms_norm`.
        factor: Factor on `added`.
        kernel: See `rms_norm`.

    Returns:
        The stream and its norm, both rounded to x's dtype.

    Raises:
        ValueError: `weight` is not `[features]`, or `added` differs from `x` in shape or dtype.
        KernelError: The kernel is unknown, or does not support these tensors on this machine.
    """
    _require_weight(x, weight)
    if added is not None and (added.shape != x.shape or added.dtype != x.dtype):
        raise ValueError(
            f"stream_norm needs added like x, {tuple(x.shape)} {x.dtype}, got {tuple(added.shape)} {added.dtype}"
        )
    result: tuple[Tensor, Tensor] = _StreamNorm.apply(  # type: ignore[no-untyped-call]
        x, added, factor, weight, eps, kernel
    )
    return result


def _require_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"the weight of a norm over {x.shape[-1]} features has shape {tuple(weight.shape)}")
