"""FlashAttention-2 of the package flash-attn (arXiv:2307.08691), which is newer than the one inside torch."""

from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.limits import unless_ampere, unless_half_on_gpu, unless_head_dim
from bmburst_ops.flash.memory import aligned, deliver, deliver_gradients, gradient_memory
from bmburst_ops.flash.packages import load, version_of
from bmburst_ops.merge import surrogate_out

_MODULE = "flash_attn.flash_attn_interface"


class FlashAttention2Kernel:
    """`Kernel` over `_flash_attn_forward` and `_flash_attn_backward` of flash-attn 2.7 or newer: fp16 and bf16."""

    name = "fa2"
    takes_delta = False

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_ampere(q)) is not None:
            return reason
        version = version_of("flash-attn")
        if version is None:
            return "needs the package flash-attn"
        if version < (2, 7):
            return f"needs flash-attn 2.7 or newer, got {'.'.join(map(str, version))}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, out: Tensor | None = None
    ) -> Partial:
        """See `Kernel.forward`. The package cannot write into given memory: `out` is a copy."""
        result, lse, *_ = load(_MODULE, self.name)._flash_attn_forward(
            *(aligned(t) for t in (q, k, v)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
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
        grad_out, q, k, v = (aligned(t) for t in (grad_out, q, k, v))
        gradients = gradient_memory(q, k, v, into)
        load(_MODULE, self.name)._flash_attn_backward(
            grad_out,
            q,
            k,
            v,
            surrogate_out(grad_out, delta),
            lse.contiguous(),
            *gradients,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=deterministic,
        )
        return deliver_gradients(gradients, into)
