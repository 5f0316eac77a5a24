"""torch's flash attention for CPUs. Its causal mask is top-left."""

import torch
from torch import Tensor

from bmburst_ops.flash import top_left
from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.merge import dense_rows, surrogate_out

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

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, out: Tensor | None = None
    ) -> Partial:
        """See `Kernel.forward`."""

        def part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
            heads_first = (_heads_first(t) for t in (q, k, v))
            result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads_first, 0.0, causal, scale=scale
            )
            return Partial(result.transpose(1, 2), lse)

        return top_left.forward(part, q, k, v, causal, out)

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
        into: Gradients | None = None,
    ) -> Gradients:
        """See `Kernel.backward`."""
        del deterministic  # always: each (batch, head) is one thread's
        grad, queries, result = (_heads_first(t) for t in (grad_out, q, surrogate_out(grad_out, delta)))
        lse = lse.contiguous()

        def part(k: Tensor, v: Tensor, causal: bool) -> Gradients:
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, queries, _heads_first(k), _heads_first(v), result, lse, 0.0, causal, scale=scale
            )
            return Gradients(*(t.transpose(1, 2) for t in gradients))

        return top_left.backward(part, q, k, v, causal, into)


def _heads_first(tensor: Tensor) -> Tensor:
    """`[batch, tokens, heads, head_dim]` as torch's kernel wants it; it takes a strided head_dim for a dense one."""
    return dense_rows(tensor).transpose(1, 2)
