"""The attention kernels that torch ships for NVIDIA GPUs: FlashAttention-2, and cuDNN's fused attention.

cuDNN's causal mask is aligned at the top left, and it does not support GQA.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from bmburst_ops.flash.few_heads import backward_by_few_heads, forward_by_few_heads, near
from bmburst_ops.flash.few_segments import backward_by_few_segments, forward_by_few_segments
from bmburst_ops.flash.inputs import (
    LATENT_WIDTHS,
    PACKED,
    PackageArguments,
    aligned,
    band_of,
    causal_or_full,
    fa2_arguments,
    require_no_softcap,
    unless_able,
    unless_ampere,
    unless_half_on_gpu,
    unless_head_dim,
    unless_repeating,
    without_cells,
)
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Kernel, Partial, ReferenceKernel, Scoring
from bmburst_ops.flash.mask_corrections import (
    PackedPattern,
    backward_bottom_right,
    backward_seen,
    forward_bottom_right,
    forward_seen,
)
from bmburst_ops.merge import surrogate_out
from bmburst_ops.pattern import CAUSAL, FULL, Need


class TorchKernel(Kernel):
    """`Kernel` over `aten._flash_attention_forward`: fp16 and bf16, Ampere or newer, head dim up to 256."""

    name = "torch"

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        reason = unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_ampere(q, self._machine)
        return reason or unless_able(needs, PACKED) or _unless_replaced()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`."""
        pattern, scale = require_no_softcap(scoring, self.name)

        def part(q: Tensor, k: Tensor, v: Tensor, seen: PackedPattern, into: Partial | None) -> Partial:
            call = fa2_arguments(seen, q, k)
            result, lse, *_ = torch.ops.aten._flash_attention_forward(
                *(aligned(call.flat(t)) for t in (q, k, v)),
                *(call.queries, call.keys, call.longest_queries, call.longest_keys, 0.0, call.causal, False),
                scale=scale,
                **_window(call),
            )
            return call.partial(result, lse, q, into)

        return forward_seen(forward_by_few_segments(part), q, k, v, without_cells(pattern, self.name), into)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        pattern, scale = require_no_softcap(scoring, self.name)
        unused = torch.empty(0, dtype=torch.int64, device=given.q.device)  # random state of a dropout that is zero

        def part(given: BackwardInputs, seen: PackedPattern, into: Gradients | None) -> Gradients:
            call = fa2_arguments(seen, given.q, given.k)
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

        calls = backward_by_few_segments(backward_by_few_heads(self.name, part))
        return backward_seen(calls, given, without_cells(pattern, self.name), into)


def _unless_replaced() -> str | None:
    """Refuse operations that `torch.nn.attention.activate_flash_attention_impl` gave another implementation.

    Others have other rules: tiles that reach into the next document, or no deterministic backward.
    """
    attention = sys.modules.get("torch.nn.attention")  # who never imported it did not activate another
    current = getattr(attention, "current_flash_attention_impl", None)  # older releases have none
    name = None if current is None else current()
    return None if name is None else f"is replaced by {name} (torch.nn.attention.activate_flash_attention_impl)"


def _window(call: PackageArguments) -> dict[str, int]:
    """Return the window arguments of the operations; empty without a window."""
    left, right = call.window
    return {} if left == right == -1 else {"window_size_left": left, "window_size_right": right}


@contextmanager
def _torch_deterministic() -> Iterator[None]:
    """Return a context with torch's deterministic mode on: the operation has no argument for it."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


_OLDEST = 90501  # before cuDNN 9.5.1, dO had to have the strides of O
_WIDE_HEADS = 91000  # from cuDNN 9.10 on: head dims up to 256, on Hopper only


class CudnnKernel(Kernel):
    """`Kernel` over `aten._scaled_dot_product_cudnn_attention`: fp16 and bf16.

    For GQA, KV heads are expanded during a call. Tiles of one query or one key, which not every cuDNN supports, are
    computed in plain torch. cuDNN builds a plan for each new shape (once per thread). The operation is called directly,
    so it also works if `torch.backends.cudnn.enabled` is off. BMTrain turns off this switch for convolutions.
    """

    name = "cudnn"

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q) or unless_able(needs)) is not None:
            return reason
        version, capability = self._machine.cudnn(), self._machine.capability(q.device)
        if version < _OLDEST:
            return f"needs a torch with cuDNN 9.5.1 or newer, got {version or 'none'}"
        if capability < (9, 0):
            return f"needs Hopper or newer, got {self._machine.gpu(q.device)}"
        widest = 256 if capability == (9, 0) and version >= _WIDE_HEADS else 128
        return unless_head_dim(q, widest, " here")

    def nondeterminism(self, q: Tensor, needs: frozenset[Need] = frozenset()) -> str:
        """See `Kernel.nondeterminism`: torch does not ask cuDNN for its deterministic algorithm."""
        del q, needs
        return "has no deterministic backward in torch"

    def takes_widths(self, q: Tensor, k: Tensor, value_dim: int, needs: frozenset[Need] = frozenset()) -> bool:
        """See `Kernel.takes_widths`."""
        del k, needs
        return (q.shape[-1], value_dim) in LATENT_WIDTHS

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`."""
        pattern, scale = require_no_softcap(scoring, self.name)

        def part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
            if _is_single(q, k):
                return ReferenceKernel().forward(q, k, v, Scoring(CAUSAL if causal else FULL, scale))
            keys, values = (_expanded(t, q.shape[2]) for t in (k, v))
            result, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *(_heads_first(t) for t in (q, keys, values)), None, True, 0.0, causal, False, scale=scale
            )
            return Partial(result.transpose(1, 2), lse.flatten(2))  # [batch, heads, queries, 1] as cuDNN has it

        def rectangle(q: Tensor, k: Tensor, v: Tensor, seen: PackedPattern, into: Partial | None) -> Partial:
            return forward_bottom_right(part, q, k, v, causal_or_full(seen, self.name), into)

        return forward_seen(forward_by_few_heads(self.name, rectangle), q, k, v, band_of(pattern, self.name), into)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        pattern, scale = require_no_softcap(scoring, self.name)
        unless_repeating(deterministic, self.name, self.nondeterminism(given.q))

        def rectangle(given: BackwardInputs, seen: PackedPattern, into: Gradients | None) -> Gradients:
            return _rectangle_backward(given, causal_or_full(seen, self.name), scale, into)

        return backward_seen(backward_by_few_heads(self.name, rectangle), given, band_of(pattern, self.name), into)


def _rectangle_backward(given: BackwardInputs, causal: bool, scale: float, into: Gradients | None) -> Gradients:
    grad_out, q, k, v, lse, delta = given
    grad, queries, result = (_heads_first(t) for t in (grad_out, q, surrogate_out(grad_out, delta)))
    statistics = lse.float().contiguous()[..., None]
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # random state of a dropout that is zero

    def part(k: Tensor, v: Tensor, causal: bool) -> Gradients:
        if _is_single(q, k):
            scoring = Scoring(CAUSAL if causal else FULL, scale)
            return ReferenceKernel().backward(given._replace(k=k, v=v), scoring, deterministic=False)
        keys, values = (_heads_first(_expanded(t, q.shape[2])) for t in (k, v))
        lengths = q.shape[1], k.shape[1]
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, queries, keys, values, result, statistics, unused, unused, None, None, None, *lengths, 0.0, causal),
            scale=scale,
        )
        grad_q, grad_k, grad_v = (t.transpose(1, 2) for t in grads)
        return Gradients(grad_q, *(_reduced(t, k.shape[2]) for t in (grad_k, grad_v)))

    return backward_bottom_right(part, q, k, v, causal, into)


def _is_single(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] == 1 or k.shape[1] == 1


def _expanded(tensor: Tensor, heads: int) -> Tensor:
    """Return K or V with KV heads expanded to one per query head."""
    group = heads // tensor.shape[2]
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=2)


def _reduced(gradient: Tensor, kv_heads: int) -> Tensor:
    """Return dK or dV summed over the query heads that share a KV head, in fp32 where there are several."""
    if gradient.shape[2] == kv_heads:
        return gradient
    return torch.sum(gradient.unflatten(2, (kv_heads, -1)), 3, dtype=torch.float32)


def _heads_first(tensor: Tensor) -> Tensor:
    return near(aligned(tensor)).transpose(1, 2)
