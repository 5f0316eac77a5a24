"""torch's flash attention for CPUs. It aligns causal rectangles top-left; here they are adapted to bottom-right."""

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.merge import accumulation_dtype, dense_rows, merge_partials_, surrogate_out

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuKernel:
    """`Kernel` over `aten._scaled_dot_product_flash_attention_for_cpu`."""

    name = "cpu"
    takes_delta = False

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if q.device.type != "cpu":
            return f"runs on the CPU only, and the tensors are on {q.device}"
        if q.dtype not in _DTYPES:
            return f"takes float64, float32, bfloat16 and float16 only, got {q.dtype}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Partial:
        """See `Kernel.forward`."""
        hidden = k.shape[1] - q.shape[1]
        if not causal or hidden == 0:
            return _forward(q, k, v, causal, scale)
        seen, square = (_forward(q, k[:, part], v[:, part], c, scale) for part, c in _cut(hidden))
        out = seen.out.to(accumulation_dtype(q.dtype), copy=True)
        merge_partials_(out, seen.lse, square.out, square.lse)
        return Partial(out, seen.lse)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        causal: bool,
        scale: float,
        deterministic: bool,
    ) -> Gradients:
        """See `Kernel.backward`."""
        del deterministic  # always: each (batch, head) is one thread's
        out = surrogate_out(grad_out, delta)
        hidden = k.shape[1] - q.shape[1]
        if not causal or hidden == 0:
            return _backward(grad_out, q, k, v, out, lse, causal, scale)
        parts = [_backward(grad_out, q, k[:, part], v[:, part], out, lse, c, scale) for part, c in _cut(hidden)]
        dtype = accumulation_dtype(q.dtype)
        grad_q = parts[0].q.to(dtype) + parts[1].q.to(dtype)
        return Gradients(grad_q, *(torch.cat([getattr(part, name) for part in parts], 1) for name in ("k", "v")))


def _cut(hidden: int) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """A bottom-right causal rectangle is a full one over the first `hidden` keys and a causal square over the rest."""
    return (slice(0, hidden), False), (slice(hidden, None), True)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Partial:
    heads_first = (_heads_first(t) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, scale=scale)
    return Partial(out.transpose(1, 2), lse)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    grad, *inputs, result = (_heads_first(t) for t in (grad_out, q, k, v, out))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *inputs, result, lse.contiguous(), 0.0, causal, scale=scale
    )
    return Gradients(*(t.transpose(1, 2) for t in gradients))


def _heads_first(tensor: Tensor) -> Tensor:
    """`[batch, tokens, heads, head_dim]` as torch's kernel wants it; it takes a strided head_dim for a dense one."""
    return dense_rows(tensor).transpose(1, 2)
