"""FlashAttention-2 as torch ships it for NVIDIA GPUs, with its log-sum-exp."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
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
from bmburst_ops.flash.memory import aligned
from bmburst_ops.flash.varlen import Told, told_flash_attention_2
from bmburst_ops.merge import surrogate_out
from bmburst_ops.pattern import Need, Pattern


class TorchKernel:
    """`Kernel` over `aten._flash_attention_forward`: fp16 and bf16, Ampere or newer, head dim up to 256."""

    name = "torch"
    recordable = False
    takes_delta = False

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        return unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_ampere(q) or unless_able(needs, PACKED)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, scale: float, into: Partial | None = None
    ) -> Partial:
        """See `Kernel.forward`."""

        def part(q: Tensor, k: Tensor, v: Tensor, seen: blind.Shape, into: Partial | None) -> Partial:
            call = told_flash_attention_2(seen, q, k)
            result, lse, *_ = torch.ops.aten._flash_attention_forward(
                *(aligned(call.flat(t)) for t in (q, k, v)),
                *(call.queries, call.keys, call.longest_queries, call.longest_keys, 0.0, call.causal, False),
                scale=scale,
                **_window(call),
            )
            return call.partial(result, lse, q, into)

        return blind.forward(part, q, k, v, without_cells(pattern, self.name), into)

    def backward(
        self, given: Given, *, pattern: Pattern, scale: float, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        unused = torch.empty(0, dtype=torch.int64, device=given.q.device)  # random state of a dropout that is zero

        def part(given: Given, seen: blind.Shape, into: Gradients | None) -> Gradients:
            call = told_flash_attention_2(seen, given.q, given.k)
            grad_out, q, k, v = (aligned(call.flat(t)) for t in given[:4])
            out = call.flat(surrogate_out(given.grad_out, given.delta))
            statistic = call.flat_statistic(given.lse).contiguous()
            lengths = call.queries, call.keys, call.longest_queries, call.longest_keys
            with _torch_deterministic() if deterministic else nullcontext():
                gradients = torch.ops.aten._flash_attention_backward(
                    *(grad_out, q, k, v, out, statistic, *lengths, 0.0, call.causal, unused, unused),
                    scale=scale,
                    **_window(call),
                )
            return call.gradients(Gradients(*gradients), given.q.shape[0], into)

        return blind.backward(part, given, without_cells(pattern, self.name), into)


def _window(call: Told) -> dict[str, int]:
    """Return the window as the operations name it; without one they are called as they always were."""
    left, right = call.window
    return {} if left == right == -1 else {"window_size_left": left, "window_size_right": right}


@contextmanager
def _torch_deterministic() -> Iterator[None]:
    """Set torch's switch for this block; the operation takes no argument for it."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
