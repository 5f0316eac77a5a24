"""FlashAttention-4: the package flash-attn-4, kernels in CuTe DSL that are compiled when first used."""

from typing import Any

import torch
from torch import Tensor

from bmburst_ops.constants import TILE_ROWS
from bmburst_ops.flash import fully_masked
from bmburst_ops.flash.isolate import isolate_backward, isolate_forward
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.limits import (
    CAPPED,
    import_package,
    unless_able,
    unless_half_on_gpu,
    unless_head_dim,
    version_of,
    without_cells,
)
from bmburst_ops.flash.memory import aligned, gradient_memory, writable, writable_statistic
from bmburst_ops.flash.varlen import PackageArguments, package_arguments
from bmburst_ops.pattern import FULL, Need, Pattern

_MODULE = "flash_attn.cute.interface"
# Largest head dim by the first digit of the compute capability. On Blackwell the package has wider ones, but only with
# other head dims for V or with a backward that takes no dLSE.
_WIDEST = {9: 256, 10: 128, 11: 128, 12: 128}
_UNCAPPED = (12,)  # the package refuses other functions of scores in its backward there


class FlashAttention4Kernel:
    """`Kernel` over `_flash_attn_fwd` and `_flash_attn_bwd` of flash-attn-4 (4.0.0b36): fp16 and bf16.

    A head dim, mask, GQA ratio, dtype and softcap takes seconds to compile when first seen. The package keeps the
    result on disk where `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`, which bmburst's launcher sets.
    """

    name = "fa4"
    recordable = True
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q) or unless_able(needs, CAPPED)) is not None:
            return reason
        generation = torch.cuda.get_device_capability(q.device)[0]
        if generation not in _WIDEST:
            return f"needs Hopper or Blackwell, got {torch.cuda.get_device_name(q.device)}"
        if (reason := unless_head_dim(q, _WIDEST[generation], " here")) is not None:
            return reason
        if "softcap" in needs and generation in _UNCAPPED:
            return f"cannot do logit softcapping on {torch.cuda.get_device_name(q.device)}"
        return "needs the package flash-attn-4" if version_of("flash-attn-4") is None else None

    def nondeterminism(self, q: Tensor) -> str | None:
        """See `NotAlwaysDeterministic`."""
        if torch.cuda.get_device_capability(q.device)[0] == 12:
            return f"has no deterministic backward for {torch.cuda.get_device_name(q.device)}"
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pattern: Pattern,
        scale: float,
        softcap: float | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """See `Kernel.forward`."""
        function = import_package(_MODULE, self.name)._flash_attn_fwd

        def part(q: Tensor, k: Tensor, v: Tensor, seen: fully_masked.PackedPattern, into: Partial | None) -> Partial:
            call = package_arguments(seen, q, k)
            flat = [aligned(call.flat(t)) for t in (q, k, v)]
            out, statistic = (None, None) if into is None else into
            with torch.cuda.device_of(q):
                result, lse, *_ = function(
                    *flat,
                    softmax_scale=scale,
                    # Query heads of a KV head share a tile, unless they do not fill it: it would be loaded without TMA.
                    pack_gqa=None if TILE_ROWS % (q.shape[2] // k.shape[2]) == 0 else False,
                    return_lse=True,
                    out=writable(call.flat_target(out), q),
                    lse=writable_statistic(call.flat_statistic_target(statistic)),
                    **fa4_options(call, softcap),
                )
            return call.partial(result, lse, q, into)

        found = fully_masked.forward(part, q, k, v, without_cells(pattern, self.name), into)
        return isolate_forward(found, q, k, v, pattern=pattern, scale=scale, softcap=softcap) if q.is_cuda else found

    def backward(
        self,
        given: BackwardInputs,
        *,
        pattern: Pattern,
        scale: float,
        deterministic: bool,
        softcap: float | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        """See `Kernel.backward`.

        The package computes rowsum(dO * O) - dLSE in fp32 before the kernel proper. With O = 0 and dLSE = -delta that
        is delta, bit for bit, also where dO is zero; the surrogate output would read and write a tensor of dO's size
        to say it in 16 bits. O is one row of zeros for every token and head, so that reading it moves no memory.
        """
        function = import_package(_MODULE, self.name)._flash_attn_bwd

        def part(given: BackwardInputs, seen: fully_masked.PackedPattern, into: Gradients | None) -> Gradients:
            call = package_arguments(seen, given.q, given.k)
            grad_out, q, k, v = (aligned(call.flat(t)) for t in given[:4])
            gradients = gradient_memory(q, k, v, call.flat_targets(into))
            with torch.cuda.device_of(q):
                function(
                    q,
                    k,
                    v,
                    q.new_zeros(q.shape[-1]).expand(q.shape),
                    grad_out,
                    call.flat_statistic(given.lse).float(),
                    softmax_scale=scale,
                    deterministic=deterministic,
                    dq=gradients.q,
                    dk=gradients.k,
                    dv=gradients.v,
                    dlse=-call.flat_statistic(given.delta).float(),
                    **fa4_options(call, softcap),
                )
            return call.gradients(gradients, given.q.shape[0], into)

        found = fully_masked.backward(part, given, without_cells(pattern, self.name), into)
        if not given.q.is_cuda:
            return found
        return isolate_backward(found, given, pattern=pattern, scale=scale, softcap=softcap)


def fa4_options(call: PackageArguments, softcap: float | None = None) -> dict[str, Any]:
    """Return what both functions of the package are told of a pattern; a bound that is not there is None to them.

    A softcap is compiled into the kernels. They use the GPU's approximate tanh, whose error is up to 2^-11 of its
    result: a weight is off by up to |score| * 2^-11, where rounding it to bf16 costs up to 2^-9.
    """
    options: dict[str, Any] = {"causal": call.causal, **call.lengths}
    if softcap is not None:
        options["softcap"] = softcap
    if not call.causal and call.band != FULL:
        options |= {"window_size_left": call.band.left, "window_size_right": call.band.right}
    return options
