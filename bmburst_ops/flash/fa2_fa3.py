"""Kernels of the packages FlashAttention-2 and FlashAttention-3.

FlashAttention-2 (arXiv:2307.08691) is the package flash-attn; torch includes an older version. FlashAttention-3 for
Hopper (arXiv:2407.08608) is the module `flash_attn_interface`, built from flash-attention/hopper.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bmburst_ops.flash.few_heads import backward_by_few_heads
from bmburst_ops.flash.few_segments import backward_by_few_segments, forward_by_few_segments
from bmburst_ops.flash.inputs import (
    CAPPED,
    PackageArguments,
    aligned,
    fa2_arguments,
    gradient_memory,
    package_arguments,
    unless_able,
    unless_ampere,
    unless_half_on_gpu,
    unless_head_dim,
    unless_repeating,
    without_cells,
)
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Kernel, Partial, Scoring
from bmburst_ops.flash.mask_corrections import (
    PackedPattern,
    backward_seen,
    forward_seen,
    isolate_backward,
    isolate_forward,
)
from bmburst_ops.fused import import_package
from bmburst_ops.merge import surrogate_out
from bmburst_ops.pattern import Need

_MODULE_2 = "flash_attn.flash_attn_interface"


class FlashAttention2Kernel(Kernel):
    """`Kernel` over the private functions of flash-attn 2.7 or newer, dense and varlen: fp16 and bf16."""

    name = "fa2"

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        reason = unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_ampere(q, self._machine)
        if reason := reason or unless_able(needs, CAPPED):
            return reason
        version = self._machine.version("flash-attn")
        if version is None:
            return "needs the package flash-attn"
        if version < (2, 7):
            return f"needs flash-attn 2.7 or newer, got {'.'.join(map(str, version))}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`. The package cannot write to given memory, so results are copied to `into`."""
        package = import_package(_MODULE_2, self.name)

        def part(q: Tensor, k: Tensor, v: Tensor, seen: PackedPattern, into: Partial | None) -> Partial:
            call = fa2_arguments(seen, q, k)
            function = package._flash_attn_forward if call.queries is None else package._flash_attn_varlen_forward
            result, lse, *_ = function(
                *(aligned(call.flat(t)) for t in (q, k, v)), **_options(call, scoring), return_softmax=False
            )
            return call.partial(result, lse, q, into)

        return forward_seen(forward_by_few_segments(part), q, k, v, without_cells(scoring.pattern, self.name), into)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        package = import_package(_MODULE_2, self.name)

        def part(given: BackwardInputs, seen: PackedPattern, into: Gradients | None) -> Gradients:
            call = fa2_arguments(seen, given.q, given.k)
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
                **_options(call, scoring),
                deterministic=deterministic,
            )
            return call.gradients(gradients, given.q.shape[0], into)

        calls = backward_by_few_segments(backward_by_few_heads(self.name, part))
        return backward_seen(calls, given, without_cells(scoring.pattern, self.name), into)


def _options(call: PackageArguments, scoring: Scoring) -> dict[str, Any]:
    """Return the options that all functions of the package take."""
    left, right = call.window
    return {
        "dropout_p": 0.0,
        "softmax_scale": scoring.scale,
        "causal": call.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": scoring.softcap or 0.0,
        "alibi_slopes": None,
        **call.lengths,
    }


_MODULE_3 = "flash_attn_interface"
_FORWARD_OPTIONS = 20  # k_new to v_descale: arguments that some releases have no defaults for
_OFFSETS, _LENGTHS = slice(4, 6), slice(9, 11)  # of these, cu_seqlens_q and cu_seqlens_k, and max_seqlen_q and _k


class FlashAttention3Kernel(Kernel):
    """`Kernel` over `_flash_attn_forward` and `_flash_attn_backward` of FlashAttention-3: fp16 and bf16.

    Releases differ in the names of arguments (`out` or `out_`, `causal` or `is_causal`, one window or two numbers), but
    not in the order of the arguments up to the causal flag. So these are passed by position. A window is passed by the
    name that it has in the installed release.
    """

    name = "fa3"

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q) or unless_head_dim(q, 256) or unless_able(needs, CAPPED)) is not None:
            return reason
        if self._machine.capability(q.device)[0] != 9:
            return f"is for Hopper alone, got {self._machine.gpu(q.device)}"
        if not self._machine.has(_MODULE_3):
            return f"needs FlashAttention-3, whose module is {_MODULE_3}"
        return None

    def nondeterminism(self, q: Tensor, needs: frozenset[Need] = frozenset()) -> str:
        """See `Kernel.nondeterminism`. Builds of 2025 drop the flag (flash-attention pull requests 1766 and 1893)."""
        del q, needs
        return "cannot promise a deterministic backward: some builds of FlashAttention-3 ignore the request"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`. Results are copied to `into`: newer releases are functional, and must not alias."""
        function = import_package(_MODULE_3, self.name)._flash_attn_forward

        def part(q: Tensor, k: Tensor, v: Tensor, seen: PackedPattern, into: Partial | None) -> Partial:
            call = package_arguments(seen, q, k)
            options: list[object] = [None] * _FORWARD_OPTIONS
            if call.queries is not None:
                options[_OFFSETS], options[_LENGTHS] = call[1:3], call[3:5]
            result, lse, *_ = function(
                *(aligned(call.flat(t)) for t in (q, k, v)),
                *options,
                softmax_scale=scoring.scale,
                causal=call.causal,
                **_named(function, call, scoring.softcap),
            )
            return call.partial(result, lse, q, into)

        found = forward_seen(forward_by_few_segments(part), q, k, v, without_cells(scoring.pattern, self.name), into)
        return isolate_forward(found, q, k, v, scoring) if q.is_cuda else found

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        unless_repeating(deterministic, self.name, self.nondeterminism(given.q))
        function = import_package(_MODULE_3, self.name)._flash_attn_backward

        def part(given: BackwardInputs, seen: PackedPattern, into: Gradients | None) -> Gradients:
            call = package_arguments(seen, given.q, given.k)
            grad_out, q, k, v = (aligned(call.flat(t)) for t in given[:4])
            gradients = gradient_memory(q, k, v, call.flat_targets(into))
            lengths = (None,) * 6 if call.queries is None else (*call[1:3], None, None, *call[3:5])
            function(
                grad_out,
                q,
                k,
                v,
                call.flat(surrogate_out(given.grad_out, given.delta)),
                call.flat_statistic(given.lse).contiguous(),
                *lengths,
                *gradients,
                scoring.scale,
                call.causal,
                **_named(function, call, scoring.softcap),
            )
            return call.gradients(gradients, given.q.shape[0], into)

        calls = backward_by_few_segments(backward_by_few_heads(self.name, part))
        found = backward_seen(calls, given, without_cells(scoring.pattern, self.name), into)
        return isolate_backward(found, given, scoring) if given.q.is_cuda else found


def _named(function: Callable[..., object], call: PackageArguments, softcap: float | None) -> dict[str, object]:
    """Return window and softcap by their names in this release; without a window or softcap they are left out."""
    left, right = call.window
    capped: dict[str, object] = {} if softcap is None else {"softcap": softcap}
    if left == right == -1:
        return capped
    if "window_size" in inspect.signature(function).parameters:
        return {"window_size": (left, right), **capped}
    return {"window_size_left": left, "window_size_right": right, **capped}
