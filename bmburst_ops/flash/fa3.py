"""FlashAttention-3 for Hopper (arXiv:2407.08608): module `flash_attn_interface`, built from flash-attention/hopper."""

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError
from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.limits import unless_half_on_gpu, unless_head_dim
from bmburst_ops.flash.memory import aligned, deliver, deliver_gradients, gradient_memory
from bmburst_ops.flash.packages import is_there, load
from bmburst_ops.merge import surrogate_out

_MODULE = "flash_attn_interface"
_FORWARD_OPTIONS = 20  # k_new to v_descale: arguments that some releases have no defaults for
_BACKWARD_OPTIONS = 6  # cu_seqlens_q to max_seqlen_k


class FlashAttention3Kernel:
    """`Kernel` over `_flash_attn_forward` and `_flash_attn_backward` of FlashAttention-3: fp16 and bf16.

    Releases differ in the names of arguments (`out` or `out_`, `causal` or `is_causal`, one window or two numbers) but
    not in their order up to the causal flag: what comes before it is passed by position, windows are left alone.
    """

    name = "fa3"
    takes_delta = False

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q) or unless_head_dim(q, 256)) is not None:
            return reason
        if torch.cuda.get_device_capability(q.device)[0] != 9:
            return f"is for Hopper alone, got {torch.cuda.get_device_name(q.device)}"
        if not is_there(_MODULE):
            return f"needs FlashAttention-3, whose module is {_MODULE}"
        return None

    def nondeterminism(self, q: Tensor) -> str:
        """See `NotAlwaysDeterministic`. Builds of 2025 drop the flag (flash-attention pull requests 1766 and 1893)."""
        del q
        return "cannot promise a deterministic backward: some builds of FlashAttention-3 ignore the request"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, out: Tensor | None = None
    ) -> Partial:
        """See `Kernel.forward`. `out` is a copy: newer releases are functional operations, which must not alias."""
        result, lse, *_ = load(_MODULE, self.name)._flash_attn_forward(
            *(aligned(t) for t in (q, k, v)), *(None,) * _FORWARD_OPTIONS, softmax_scale=scale, causal=causal
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
        if deterministic:
            raise KernelError(f"kernel '{self.name}' {self.nondeterminism(q)}\nchoose another kernel")
        grad_out, q, k, v = (aligned(t) for t in (grad_out, q, k, v))
        gradients = gradient_memory(q, k, v, into)
        load(_MODULE, self.name)._flash_attn_backward(
            grad_out,
            q,
            k,
            v,
            surrogate_out(grad_out, delta),
            lse.contiguous(),
            *(None,) * _BACKWARD_OPTIONS,
            *gradients,
            scale,
            causal,
        )
        return deliver_gradients(gradients, into)
