"""FlashAttention-2 of the package flash-attn (arXiv:2307.08691), which is newer than the one inside torch."""

from typing import Any

from torch import Tensor

from bmburst_ops.flash import blind
from bmburst_ops.flash.kernel import Given, Gradients, Partial
from bmburst_ops.flash.limits import (
    PACKED,
    unless_able,
    unless_ampere,
    unless_half_on_gpu,
    unless_head_dim,
    without_cells,
)
from bmburst_ops.flash.memory import aligned, gradient_memory
from bmburst_ops.flash.packages import load, version_of
from bmburst_ops.flash.varlen import Told, told_flash_attention_2
from bmburst_ops.merge import surrogate_out
from bmburst_ops.pattern import Need, Pattern

_MODULE = "flash_attn.flash_attn_interface"


class FlashAttention2Kernel:
    """`Kernel` over the private functions of flash-attn 2.7 or newer, dense and varlen: fp16 and bf16."""

    name = "fa2"
    recordable = False
    takes_delta = False

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (
            reason := unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_ampere(q) or unless_able(needs, PACKED)
        ) is not None:
            return reason
        version = version_of("flash-attn")
        if version is None:
            return "needs the package flash-attn"
        if version < (2, 7):
            return f"needs flash-attn 2.7 or newer, got {'.'.join(map(str, version))}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, scale: float, into: Partial | None = None
    ) -> Partial:
        """See `Kernel.forward`. The package cannot write into given memory: `into` gets copies."""
        package = load(_MODULE, self.name)

        def part(q: Tensor, k: Tensor, v: Tensor, seen: blind.Shape, into: Partial | None) -> Partial:
            call = told_flash_attention_2(seen, q, k)
            function = package._flash_attn_forward if call.queries is None else package._flash_attn_varlen_forward
            result, lse, *_ = function(
                *(aligned(call.flat(t)) for t in (q, k, v)), **_options(call, scale), return_softmax=False
            )
            return call.partial(result, lse, q, into)

        return blind.forward(part, q, k, v, without_cells(pattern, self.name), into)

    def backward(
        self, given: Given, *, pattern: Pattern, scale: float, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        package = load(_MODULE, self.name)

        def part(given: Given, seen: blind.Shape, into: Gradients | None) -> Gradients:
            call = told_flash_attention_2(seen, given.q, given.k)
            grad_out, q, k, v = (aligned(call.flat(t)) for t in given[:4])
            gradients = gradient_memory(q, k, v, call.flat_targets(into))
            function = package._flash_attn_backward if call.queries is None else package._flash_attn_varlen_backward
            function(
                grad_out,
                q,
                k,
                v,
                call.flat(surrogate_out(given.grad_out, given.delta)),
                call.flat_statistic(given.lse).contiguous(),
                *gradients,
                **_options(call, scale),
                deterministic=deterministic,
            )
            return call.gradients(gradients, given.q.shape[0], into)

        return blind.backward(part, given, without_cells(pattern, self.name), into)


def _options(call: Told, scale: float) -> dict[str, Any]:
    """Return what all functions of the package are told."""
    left, right = call.window
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": call.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        "alibi_slopes": None,
        **call.lengths,
    }
