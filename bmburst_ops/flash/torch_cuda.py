"""FlashAttention-2 as torch ships it for NVIDIA GPUs, with its log-sum-exp."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.limits import unless_ampere, unless_half_on_gpu, unless_head_dim
from bmburst_ops.flash.memory import aligned, deliver, deliver_gradients
from bmburst_ops.merge import surrogate_out


class TorchKernel:
    """`Kernel` over `aten._flash_attention_forward`: fp16 and bf16, Ampere or newer, head dim up to 256."""

    name = "torch"
    takes_delta = False

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        del k
        return unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_ampere(q)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, out: Tensor | None = None
    ) -> Partial:
        """See `Kernel.forward`."""
        q, k, v = (aligned(t) for t in (q, k, v))
        result, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return Partial(deliver(result, out), lse)

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
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state of a dropout that is zero
        grad_out, q, k, v = (aligned(t) for t in (grad_out, q, k, v))
        out = surrogate_out(grad_out, delta)
        with _torch_deterministic() if deterministic else nullcontext():
            gradients = torch.ops.aten._flash_attention_backward(
                grad_out,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,
                None,
                q.shape[1],
                k.shape[1],
                0.0,
                causal,
                unused,
                unused,
                scale=scale,
            )
        return deliver_gradients(Gradients(*gradients), into)


@contextmanager
def _torch_deterministic() -> Iterator[None]:
    """Set torch's switch for this block; the operation takes no argument for it."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
