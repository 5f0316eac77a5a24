"""FlashAttention-4: the package flash-attn-4, with kernels in CuTe DSL that are compiled at first use."""

import sys
import warnings
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmburst_ops import TILE_ROWS
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash.inputs import (
    CAPPED,
    LATENT_WIDTHS,
    DeviceVectors,
    PackageArguments,
    aligned,
    copy_to_device,
    gradient_memory,
    package_arguments,
    unable,
    unless_able,
    unless_half_on_gpu,
    unless_head_dim,
    unless_repeating,
    writable,
    writable_statistic,
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
from bmburst_ops.machine import HERE, Machine
from bmburst_ops.pattern import BLOCK, FULL, Band, Cells, IntArray, Need, blocks_of

_DISTRIBUTION = "flash-attn-4"
_OLDEST, _OLDEST_BETA = (4, 0, 0), 36  # betas before lack arguments, or give other results with some compilers
_MODULE = "flash_attn.cute.interface"
_SPARSE = "flash_attn.cute.block_sparsity"
# Largest head dim by the first digit of the compute capability. On Blackwell the package has wider ones, but only with
# other head dims for V or with a backward that takes no dLSE.
_WIDEST = {9: 256, 10: 128, 11: 128, 12: 128}
_UNCAPPED = (12,)  # where the package's backward refuses a softcap

BLOCK_HEAD_DIMS = frozenset({64, 96, 128})
"""Head dims supported under block-sparse masks: `tests/ops/test_fa4_blocks.py` checks their output and gradients on a
GPU. Wrong gradients were reported at 64 (flash-attention issue 2623); with 4.0.0b36 the tests find none."""
_WHOLE_BLOCKS = (
    f"takes block-sparse masks only with a block_size that is a multiple of {BLOCK}, joined with nothing but Causal, "
    f"and split over ranks at multiples of {BLOCK} tokens"
)
_UNCAPPED_BLOCKS = "cannot do logit softcapping under block-sparse masks"
_NOT_REPEATING = "has no deterministic backward under block-sparse masks"


class FlashAttention4Kernel(Kernel):
    """`Kernel` over `_flash_attn_fwd` and `_flash_attn_bwd` of flash-attn-4 (from 4.0.0b36 on): fp16 and bf16.

    Each new combination of head dim, mask, GQA ratio, dtype and softcap takes seconds to compile. The package caches
    the result on disk if `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`, which bmburst's launcher sets.
    """

    name = "fa4"
    recordable = True
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if (reason := unless_half_on_gpu(q)) is not None:
            return reason
        if "cells" in needs:
            return _WHOLE_BLOCKS
        if (reason := unless_able(needs, CAPPED | {"blocks"})) is not None:
            return reason
        generation = self._machine.capability(q.device)[0]
        if generation not in _WIDEST:
            return f"needs Hopper or Blackwell, got {self._machine.gpu(q.device)}"
        if (reason := unless_head_dim(q, _WIDEST[generation], " here")) is not None:
            return reason
        if "blocks" in needs and (reason := self._unless_blocks(q, needs)) is not None:
            return reason
        if "softcap" in needs and generation in _UNCAPPED:
            return f"cannot do logit softcapping on {self._machine.gpu(q.device)}"
        return unusable(self._machine)

    def _unless_blocks(self, q: Tensor, needs: frozenset[Need]) -> str | None:
        """Refuse inputs that the kernels for block-sparse masks do not support, or at which they were not tested."""
        if self._machine.capability(q.device)[0] != 9:  # on Blackwell, tiles of forward have 256 queries
            return f"does block-sparse masks on Hopper alone, got {self._machine.gpu(q.device)}"
        if "softcap" in needs:
            return _UNCAPPED_BLOCKS
        if q.shape[-1] not in BLOCK_HEAD_DIMS:
            able = ", ".join(map(str, sorted(BLOCK_HEAD_DIMS)))
            return f"takes head dims {able} alone under block-sparse masks, got {q.shape[-1]}"
        return None

    def nondeterminism(self, q: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.nondeterminism`."""
        if "blocks" in needs:
            return _NOT_REPEATING
        if self._machine.capability(q.device)[0] == 12:
            return f"has no deterministic backward for {self._machine.gpu(q.device)}"
        return None

    def takes_widths(self, q: Tensor, k: Tensor, value_dim: int, needs: frozenset[Need] = frozenset()) -> bool:
        """See `Kernel.takes_widths`. On Hopper the package chooses its tiles by the head dim of keys, the wider one.

        Its backward takes two widths only if each query head has a KV head of its own.
        """
        is_hopper = self._machine.capability(q.device)[0] == 9
        is_shared = q.shape[2] != k.shape[2]
        return is_hopper and not is_shared and "blocks" not in needs and (q.shape[-1], value_dim) in LATENT_WIDTHS

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`. Under a block-sparse mask the package is right for queries that see no key."""
        function, pattern = _package()._flash_attn_fwd, scoring.pattern

        def attend(
            q: Tensor, k: Tensor, v: Tensor, call: PackageArguments, into: Partial | None, **sparse: object
        ) -> Partial:
            flat = [aligned(call.flat(t)) for t in (q, k, v)]
            out, statistic = (None, None) if into is None else into
            with torch.cuda.device_of(q):
                result, lse, *_ = function(
                    *flat,
                    softmax_scale=scoring.scale,
                    # Query heads of a KV head share a tile if they fill it evenly; else it would be loaded without TMA.
                    pack_gqa=None if TILE_ROWS % (q.shape[2] // k.shape[2]) == 0 else False,
                    return_lse=True,
                    out=writable(call.flat_target(out), q),
                    lse=writable_statistic(call.flat_statistic_target(statistic)),
                    **fa4_options(call, scoring.softcap),
                    **sparse,
                )
            return call.partial(result, lse, q, into)

        def part(q: Tensor, k: Tensor, v: Tensor, seen: PackedPattern, into: Partial | None) -> Partial:
            return attend(q, k, v, package_arguments(seen, q, k), into)

        if isinstance(pattern, Cells):
            lists = _lists(pattern, "queries", q.device, scoring.softcap)
            return attend(q, k, v, package_arguments(lists.band, q, k), into, block_sparse_tensors=lists.tensors())
        found = forward_seen(part, q, k, v, pattern, into)
        return isolate_forward(found, q, k, v, scoring) if q.is_cuda else found

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`.

        The package computes rowsum(dO * O) - dLSE in fp32 before its main kernel. With O = 0 and dLSE = -delta this is
        exactly delta, also where dO is zero. A surrogate output (`merge.surrogate_out`) would need a pass over a tensor
        of dO's size, and would pass delta in 16 bits. O is one row of zeros, expanded over all tokens and heads, so
        reading it causes almost no memory traffic.
        """
        function, pattern = _package()._flash_attn_bwd, scoring.pattern

        def differentiate(
            given: BackwardInputs, call: PackageArguments, into: Gradients | None, **sparse: object
        ) -> Gradients:
            grad_out, q, k, v = (aligned(call.flat(t)) for t in given[:4])
            gradients = gradient_memory(q, k, v, call.flat_targets(into))
            with torch.cuda.device_of(q):
                function(
                    q,
                    k,
                    v,
                    q.new_zeros(grad_out.shape[-1]).expand(grad_out.shape),
                    grad_out,
                    call.flat_statistic(given.lse).float(),
                    softmax_scale=scoring.scale,
                    deterministic=deterministic,
                    dq=gradients.q,
                    dk=gradients.k,
                    dv=gradients.v,
                    dlse=-call.flat_statistic(given.delta).float(),
                    **fa4_options(call, scoring.softcap),
                    **sparse,
                )
            return call.gradients(gradients, given.q.shape[0], into)

        def part(given: BackwardInputs, seen: PackedPattern, into: Gradients | None) -> Gradients:
            return differentiate(given, package_arguments(seen, given.q, given.k), into)

        if isinstance(pattern, Cells):
            unless_repeating(deterministic, self.name, _NOT_REPEATING)
            lists = _lists(pattern, "keys", given.q.device, scoring.softcap)
            call = package_arguments(lists.band, given.q, given.k)
            return differentiate(given, call, into, block_sparse_tensors=lists.tensors())
        found = backward_seen(part, given, pattern, into)
        return isolate_backward(found, given, scoring) if given.q.is_cuda else found


def unusable(machine: Machine = HERE) -> str | None:
    """Return why the installed package cannot be used, as a phrase; None: it can."""
    version, beta = machine.version(_DISTRIBUTION), machine.beta(_DISTRIBUTION)
    if version is None:
        return f"needs the package {_DISTRIBUTION}"
    if version > _OLDEST or (version == _OLDEST and (beta is None or beta >= _OLDEST_BETA)):
        return None
    found = ".".join(map(str, version)) + ("" if beta is None else f"b{beta}")
    return f"needs {_DISTRIBUTION} 4.0.0b{_OLDEST_BETA} or newer, got {found}"


def _package() -> ModuleType:
    """Return the package's module with the forward and backward functions.

    A warning of its compiler is ignored: it is about an argument that the package itself passes.
    """
    if _MODULE not in sys.modules:
        warnings.filterwarnings("ignore", message="Argument aux_data .* JitArgument", category=UserWarning)
    return import_package(_MODULE, FlashAttention4Kernel.name)


def fa4_options(call: PackageArguments, softcap: float | None = None) -> dict[str, Any]:
    """Return the options of both functions for a pattern; a missing bound of a window is None.

    A softcap is compiled into the kernels. They use the GPU's approximate tanh, whose relative error is up to 2^-11. So
    the relative error of a weight is up to |score| * 2^-11; rounding it to bf16 costs up to 2^-9.
    """
    options: dict[str, Any] = {"causal": call.causal, **call.lengths}
    if softcap is not None:
        options["softcap"] = softcap
    if not call.causal and call.band != FULL:
        options |= {"window_size_left": call.band.left, "window_size_right": call.band.right}
    return options


_Side = Literal["queries", "keys"]


class _BlockLists(NamedTuple):
    """A block-sparse pattern on a device, for the kernel whose programs hold blocks of one side.

    Attributes:
        band: The mask inside blocks, passed to the kernel as its causal flag or window.
        rows: Number of blocks of this side.
        sent: Counts and indices, int32 and flat: first of partly visible blocks, then of wholly visible ones.
    """

    band: Band
    rows: int
    sent: DeviceVectors

    def tensors(self) -> object:
        """Return the package's tuple of tensors: counts `[1, 1, rows]`, indices `[1, 1, rows, most]`, for all heads."""
        counts, places, whole_counts, whole_places = (t.view(1, 1, self.rows, -1) for t in self.sent.here())
        # No mask function for partly visible blocks: the causal flag and the window apply to all blocks.
        return import_package(_SPARSE, FlashAttention4Kernel.name).BlockSparseTensorsTorch(
            mask_block_cnt=counts.squeeze(-1),
            mask_block_idx=places,
            full_block_cnt=whole_counts.squeeze(-1),
            full_block_idx=whole_places,
            block_size=(BLOCK, BLOCK),
        )


def _lists(pattern: Cells, side: _Side, device: torch.device, softcap: float | None) -> _BlockLists:
    """Return the block lists of a block-sparse kernel for a pattern; KernelError where `refusal` refuses the inputs."""
    if softcap is not None:
        raise unable(FlashAttention4Kernel.name, _UNCAPPED_BLOCKS)
    lists = _block_lists(pattern, side, device)
    if lists is None:
        raise unable(FlashAttention4Kernel.name, _WHOLE_BLOCKS)
    return lists


@bounded_cache(maxsize=64)
def _block_lists(pattern: Cells, side: _Side, device: torch.device) -> _BlockLists | None:
    """Return the block lists of forward (programs hold queries) or backward (programs hold keys)."""
    blocks = blocks_of(pattern)
    if blocks is None:
        return None
    part, whole = (each if side == "queries" else each.T for each in (blocks.part, blocks.whole))
    return _BlockLists(blocks.band, len(part), copy_to_device((*listed(part), *listed(whole)), device))


def listed(seen: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Return the number of true entries of each row, `[rows]`, and their columns, `[rows, most]`, padded with zeros.

    Columns ascend: a kernel checks for the end of the sequence only in the last block of a list, so the sequence's last
    block must come last.
    """
    counts = np.count_nonzero(seen, axis=1)
    rows, columns = np.nonzero(seen)
    places = np.zeros((len(seen), max(1, counts.max(initial=0))), np.int64)
    places[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
    return counts, places
