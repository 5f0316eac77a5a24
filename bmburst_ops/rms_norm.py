"""Root mean square norm (arXiv:1910.07467), in Triton where `fused.triton_twin` allows it, else in plain torch.

`stream_norm` fuses the norm before attention or MLP with the residual stream: in forward with the addition to the
stream, in backward with the addition of the stream's gradient. The norm reads and writes these tensors anyway.
"""

from typing import Any

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, first_order, unknown_kernel
from bmburst_ops.fused import import_package, triton_twin
from bmburst_ops.machine import HERE, Machine


class CpmKernels:
    """RMSNorm forward with the package cpm-kernels (OpenBMB, 1.0.11), for fp16 where Triton's kernels do not run.

    Two of its kernels fit: `layernorm_step` without mean, for contiguous rows of features with sums in fp32, and
    `arith_batch_mul` for the weight. Its other norms, which have a backward, need the features in the middle,
    `[batch, features, tokens]`: with rows of features, 31 of 32 threads would be idle. It has no SiLU, no rotary
    embedding, and no cross entropy of fp32 logits. For sums and products of two tensors torch is as good.

    The package contains machine code for sm_61 to sm_86, without PTX that a driver could compile for newer GPUs.
    Importing it needs a driver, the CUDA runtime and cuBLASLt as system libraries, and `pkg_resources` (setuptools
    before 82). So it is imported at first use. We have not run it, because we have no GPU that it supports. Tests use a
    stand-in with the same signatures, which does the same as its published CUDA sources.

    Args:
        machine: Where it runs.
        most: Most elements per call: the package counts them in 32 bits.
    """

    name = "cpm-kernels"
    _MODULE = "cpm_kernels"
    _FROM, _BELOW = (7, 0), (9, 0)  # machine code runs on GPUs of the same major version, from its minor version on

    def __init__(self, machine: Machine = HERE, most: int = 2**31 - 1) -> None:
        self._machine, self._most = machine, most

    def refusal(self, x: Tensor, weight: Tensor) -> str | None:
        """Return why the package does not support these tensors, as a phrase; None if it does."""
        if not x.is_cuda or weight.device != x.device:
            return f"runs on NVIDIA GPUs only, and the tensors are on {x.device} and {weight.device}"
        found = self._machine.capability(x.device)
        if not self._FROM <= found < self._BELOW:
            return f"has machine code for compute capability 7.0 to 8.9 alone, and this GPU has {found[0]}.{found[1]}"
        if x.dtype != torch.float16:
            return f"takes float16 only, got {x.dtype}"
        if x.shape[-1] % 2 or x.shape[-1] > self._most:
            return f"takes an even number of features, got {x.shape[-1]}"
        if not self._machine.has(self._MODULE):
            return "is not installed: pip install bmburst[cpm-kernels]"
        return None

    def norm_forward(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, None]:
        """Return the norm of fp16 x, contiguous, rounded before and after the weight; it returns no statistic.

        Raises:
            KernelError: The package cannot be imported.
        """
        package = import_package(self._MODULE, self.name)
        features = x.shape[-1]
        rows = x.reshape(-1, features).contiguous()
        result = torch.empty_like(rows)
        factors = weight.to(torch.float16, copy=True)  # aligned: the kernel reads pairs of numbers
        stream = torch.cuda.current_stream(x.device).cuda_stream
        most = self._most // features
        with torch.cuda.device_of(x):  # the package launches on the current device
            for given, out in zip(rows.split(most), result.split(most), strict=True):
                if not len(given):
                    continue
                size = len(given), features
                package.layernorm_step(*size, given.data_ptr(), out.data_ptr(), eps, False, stream)
                package.arith_batch_mul(*size, out.data_ptr(), factors.data_ptr(), out.data_ptr(), stream)
        return result.view(x.shape), None


CPM_KERNELS = CpmKernels()

KERNELS = ("auto", "torch", "triton", CPM_KERNELS.name)
"""Values of `kernel`. auto: Triton if it supports the tensors, else torch."""


class _RMSNorm(torch.autograd.Function):
    """Saves the input in its own dtype and one number per row; autograd would save three wide copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernel: str) -> Tensor:
        result, inverse_rms = _norm(x, weight, eps, kernel)
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
        stream, normed, inverse_rms = _added_norm(x, added, factor, weight, eps, kernel)
        ctx.save_for_backward(stream, weight, inverse_rms)
        ctx.eps, ctx.is_plain, ctx.factor = eps, kernel == "torch", None if added is None else factor
        return stream, normed

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_stream: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = _gradients(ctx, grad_normed, grad_stream, wants_weight=ctx.needs_input_grad[3])
        grad_added = grad_x if ctx.factor in (None, 1) else grad_x * ctx.factor
        return grad_x, None if ctx.factor is None else grad_added, None, grad_weight, None, None


def _norm(x: Tensor, weight: Tensor, eps: float, kernel: str) -> tuple[Tensor, Tensor | None]:
    """Return the norm, and 1 / sqrt(mean(x^2) + eps) if the kernel returns it."""
    return _norm_by(choose_norm(kernel, x, weight), x, weight, eps)


def _added_norm(
    x: Tensor, added: Tensor | None, factor: float, weight: Tensor, eps: float, kernel: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the stream and the results of `_norm` for it."""
    module = choose_norm(kernel, x, weight)
    add_forward = getattr(module, "add_norm_forward", None)  # Triton's kernels have it
    if added is not None and add_forward:
        result: tuple[Tensor, Tensor, Tensor] = add_forward(x, added, factor, weight, eps)
        return result
    stream = x if added is None else torch.add(x, added, alpha=factor)
    return stream, *_norm_by(module, stream, weight, eps)


def _norm_by(module: Any | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = (module.norm_forward if module else _forward)(x, weight, eps)
    return result


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


def choose_norm(kernel: str, x: Tensor, weight: Tensor, cpm_kernels: CpmKernels = CPM_KERNELS) -> Any | None:
    """Return the module or kernel whose `norm_forward` computes the norm of such tensors; None: use plain torch.

    Args:
        kernel: One of `KERNELS`.
        x: As for `rms_norm`.
        weight: As for `rms_norm`.
        cpm_kernels: The kernel of the package.

    Raises:
        KernelError: The name is not in `KERNELS`, or the kernel does not support these tensors on this machine.
    """
    if kernel not in KERNELS:
        raise unknown_kernel(kernel, KERNELS)
    module: Any = cpm_kernels if kernel == cpm_kernels.name else None
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
    if not torch.is_grad_enabled():  # without the host time of autograd
        return _norm(x, weight, eps, kernel)[0]
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
    if not torch.is_grad_enabled():  # without the host time of autograd
        return _added_norm(x, added, factor, weight, eps, kernel)[:2]
    result: tuple[Tensor, Tensor] = _StreamNorm.apply(  # type: ignore[no-untyped-call]
        x, added, factor, weight, eps, kernel
    )
    return result


def _require_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"the weight of a norm over {x.shape[-1]} features has shape {tuple(weight.shape)}")
