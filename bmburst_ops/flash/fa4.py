"""FlashAttention-4: the package flash-attn-4, kernels in CuTe DSL that are compiled when first used."""

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.limits import unless_half_on_gpu, unless_head_dim
from bmburst_ops.flash.memory import aligned, deliver, deliver_gradients, gradient_memory, writable
from bmburst_ops.flash.packages import load, version_of

_MODULE = "flash_attn.cute.interface"
_TILE = 64  # every tile has a multiple of this many rows
# Largest head dim by the first digit of the compute capability. On Blackwell the package has wider ones, but only with
# other head dims for V or with a backward that takes no dLSE.
_WIDEST = {9: 256, 10: 128, 11: 128, 12: 128}


class FlashAttention4Kernel:
    """`Kernel` over `_flash_attn_fwd` and `_flash_attn_bwd` of flash-attn-4 (4.0.0b36): fp16 and bf16.

    A head dim, mask, GQA ratio and dtype takes seconds to compile when first seen; the package's own
    `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1` keeps the result on disk.
    """

    name = "fa4"
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q)) is not None:
            return reason
        generation = torch.cuda.get_device_capability(q.device)[0]
        if generation not in _WIDEST:
            return f"needs Hopper or Blackwell, got {torch.cuda.get_device_name(q.device)}"
        if (reason := unless_head_dim(q, _WIDEST[generation], " here")) is not None:
            return reason
        return "needs the package flash-attn-4" if version_of("flash-attn-4") is None else None

    def nondeterminism(self, q: Tensor) -> str | None:
        """See `NotAlwaysDeterministic`."""
        if torch.cuda.get_device_capability(q.device)[0] == 12:
            return f"has no deterministic backward for {torch.cuda.get_device_name(q.device)}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, out: Tensor | None = None
    ) -> Partial:
        """See `Kernel.forward`."""
        q, k, v = (aligned(t) for t in (q, k, v))
        with torch.cuda.device_of(q):
            result, lse, *_ = load(_MODULE, self.name)._flash_attn_fwd(
                *(q, k, v),
                softmax_scale=scale,
                causal=causal,
                # Query heads of a KV head share a tile, unless they do not fill it: it would be loaded without TMA.
                pack_gqa=None if _TILE % (q.shape[2] // k.shape[2]) == 0 else False,
                return_lse=True,
                out=writable(out, q),
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
        """See `Kernel.backward`.

        The package computes rowsum(dO * O) - dLSE in fp32 before the kernel proper. With O = 0 and dLSE = -delta that
        is delta, bit for bit, also where dO is zero; the surrogate output would read and write a tensor of dO's size
        to say it in 16 bits. O is one row of zeros for every token and head, so that reading it moves no memory.
        """
        grad_out, q, k, v = (aligned(t) for t in (grad_out, q, k, v))
        gradients = gradient_memory(q, k, v, into)
        with torch.cuda.device_of(q):
            load(_MODULE, self.name)._flash_attn_bwd(
                q,
                k,
                v,
                q.new_zeros(q.shape[-1]).expand(q.shape),
                grad_out,
                lse.float(),
                softmax_scale=scale,
                causal=causal,
                deterministic=deterministic,
                dq=gradients.q,
                dk=gradients.k,
                dv=gradients.v,
                dlse=-delta.float(),
            )
        return deliver_gradients(gradients, into)
