"""Flash attention on CPUs: torch's kernel, and for long fp32 tiles the C kernel `cpu_tile.c`.

The causal mask of torch's kernel is aligned at the top left. The C kernel computes full and causal attention on one
thread with AVX-512, and is compiled at first use. On a core of an AMD EPYC (Zen 5), torch's kernel takes 2.2 times as
long forward and 2.7 times backward (2 heads of dimension 32 over 1 KV head, 4,096 causal tokens, torch 2.13 with MKL).
Ranks of the host runtime have one thread each. With several threads, little work, or no AVX-512 or compiler, torch's
kernel is used.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.flash.inputs import PACKED, require_no_softcap, unless_able, without_cells
from bmburst_ops.flash.kernel import (
    BackwardInputs,
    BooleanMask,
    Gradients,
    Kernel,
    Partial,
    Scoring,
    deliver_gradients,
    deliver_partial,
)
from bmburst_ops.flash.mask_corrections import backward_bottom_right, forward_bottom_right
from bmburst_ops.fused import compiled
from bmburst_ops.machine import HERE, Machine
from bmburst_ops.merge import accumulation_dtype, dense_rows, surrogate_out
from bmburst_ops.pattern import CAUSAL, FULL, Band, Need, Pattern, Segments, rectangles

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS = 512  # queries per call under a window, which is passed as a dense mask: memory stays linear in the keys
TILE_HEAD_DIMS = (32, 64, 128)


class CpuKernel(Kernel):
    """`Kernel` over `aten._scaled_dot_product_flash_attention_for_cpu`.

    It is called once per segment, and once per 512 queries of a window: on a CPU a call costs microseconds. Full and
    causal tiles are computed by the C kernel where it is faster.

    Args:
        machine: Where it runs.
        least_scores: Number of scores of a call, over all batches and heads, from which compiling the C kernel pays
            off.
    """

    name = "cpu"

    def __init__(self, machine: Machine = HERE, least_scores: int = 1 << 23) -> None:
        super().__init__(machine)
        self._least_scores = least_scores

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k
        if q.device.type != "cpu":
            return f"runs on the CPU only, and the tensors are on {q.device}"
        if q.dtype not in _DTYPES:
            return f"takes float64, float32, bfloat16 and float16 only, got {q.dtype}"
        return unless_able(needs, PACKED)

    def _tile_library(self, q: Tensor, k: Tensor) -> ctypes.CDLL | None:
        """Return the library for `forward_tile` and `backward_tile`; None if torch should compute the tile.

        Args:
            q: `[batch, queries, heads, head_dim]`; each query must see a key.
            k: `[batch, keys, kv_heads, head_dim]`.
        """
        batch, queries, heads, head_dim = q.shape
        is_long = batch * heads * queries * k.shape[1] >= self._least_scores
        if not is_long or q.dtype != torch.float32 or head_dim not in TILE_HEAD_DIMS or torch.get_num_threads() > 1:
            return None
        return compile_for(head_dim) if self._machine.cpu() == "AVX512" else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`."""
        pattern, scale = require_no_softcap(scoring, self.name)
        whole = _as_one_call(pattern, q, k)
        if whole is not None:
            if library := self._tile_library(q, k):
                return deliver_partial(forward_tile(library, q, k, v, causal=whole, scale=scale), into)
            return _forward(q, k, v, whole, scale, into)
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros(q.shape, dtype=dtype) if into is None or into.out.dtype != dtype else into.out.zero_()
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
        for piece in _pieces(without_cells(pattern, self.name), q, k):
            rows, near = piece.queries, piece.keys
            target = Partial(out[:, rows], lse[:, :, rows])
            _forward(q[:, rows], k[:, near], v[:, near], piece.attn_mask, scale, target)
        return deliver_partial(Partial(out, lse), into)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        pattern, scale = require_no_softcap(scoring, self.name)
        del deterministic  # always deterministic: one thread computes each (batch, head)
        grad_out, q, k, v, lse, delta = given
        whole = _as_one_call(pattern, q, k)
        if whole is not None and (library := self._tile_library(q, k)):
            return deliver_gradients(backward_tile(library, given, causal=whole, scale=scale), into)
        result = surrogate_out(grad_out, delta)
        if whole is not None:
            return _backward(grad_out, q, k, v, result, lse, whole, scale, into)
        sums = Gradients(*(t.new_zeros(t.shape, dtype=accumulation_dtype(t.dtype)) for t in (q, k, v)))
        for rows, keys, attn_mask in _pieces(without_cells(pattern, self.name), q, k):
            near = (grad_out[:, rows], q[:, rows], k[:, keys], v[:, keys], result[:, rows], lse[:, :, rows])
            part = _backward(*near, attn_mask, scale, None)
            for total, share, place in zip(sums, part, (rows, keys, keys), strict=True):
                total[:, place] += share
        return deliver_gradients(sums, into)


_CausalOrMask = bool | Tensor
"""The mask of one call: whether it is causal, or a tensor `[queries, keys]` of zeros and -inf."""


class _Piece(NamedTuple):
    queries: slice
    keys: slice
    attn_mask: _CausalOrMask


def _as_one_call(pattern: Pattern, q: Tensor, k: Tensor) -> bool | None:
    """Return the causal flag if one call computes the whole pattern, else None."""
    queries, keys = q.shape[1], k.shape[1]
    if not isinstance(pattern, Band) or not queries or not keys:  # torch divides by zero for an empty side
        return None
    band = pattern.within(queries, keys)
    if band == FULL:
        return False
    return True if band == CAUSAL and queries <= keys else None


def _pieces(pattern: Band | Segments, q: Tensor, k: Tensor) -> Iterator[_Piece]:
    for queries, keys, band in rectangles(pattern, q.shape[1], k.shape[1]):
        if band in (FULL, CAUSAL):
            yield _Piece(queries, keys, band == CAUSAL)
            continue
        visible = BooleanMask(band, queries.stop - queries.start, keys.stop - keys.start)
        for first in range(queries.start, queries.stop, _ROWS):
            last = min(first + _ROWS, queries.stop)
            seen, mask = visible.block(slice(first - queries.start, last - queries.start))
            attn_mask = False if mask is None else q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
            yield _Piece(slice(first, last), slice(keys.start + seen.start, keys.start + seen.stop), attn_mask)


def _forward(q: Tensor, k: Tensor, v: Tensor, attn_mask: _CausalOrMask, scale: float, into: Partial | None) -> Partial:
    def part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        mask = attn_mask if isinstance(attn_mask, Tensor) else None
        result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(t) for t in (q, k, v)), 0.0, causal, attn_mask=mask, scale=scale
        )
        return Partial(result.transpose(1, 2), lse)

    return forward_bottom_right(part, q, k, v, attn_mask is True, into)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    attn_mask: _CausalOrMask,
    scale: float,
    into: Gradients | None,
) -> Gradients:
    grad, queries, result = (_heads_first(t) for t in (grad_out, q, result))
    lse, mask = lse.contiguous(), attn_mask if isinstance(attn_mask, Tensor) else None

    def part(k: Tensor, v: Tensor, causal: bool) -> Gradients:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, queries, _heads_first(k), _heads_first(v), result, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return Gradients(*(t.transpose(1, 2) for t in gradients))

    return backward_bottom_right(part, q, k, v, attn_mask is True, into)


def _heads_first(tensor: Tensor) -> Tensor:
    """Return `[batch, tokens, heads, head_dim]` as torch's kernel needs it: heads first, and head_dim dense."""
    return dense_rows(tensor).transpose(1, 2)


class _Operand(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "token", "head")))


class _Tile(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batches", "queries", "keys", "heads", "kv_heads")),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@cache
def compile_for(head_dim: int) -> ctypes.CDLL | None:
    """Return the library for one of `TILE_HEAD_DIMS`, compiled for any processor; None if compiling fails."""
    return compiled(Path(__file__).with_name("cpu_tile.c"), ("-O2", f"-DHEAD_DIM={head_dim}"))


def forward_tile(library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Partial:
    """Return attention of a tile; causal is aligned at the bottom right, with at least as many keys as queries."""
    batch, queries, heads, _ = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(batch, heads, queries)
    inputs = [dense_rows(t) for t in (q, k, v)]
    tile = ctypes.byref(_tile(q, k, causal, scale))
    _require_memory(library.attention_forward(tile, _operands(*inputs), _operands(out), _of(lse)))
    return Partial(out, lse)


def backward_tile(library: ctypes.CDLL, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
    """Return the gradients of a tile of `forward_tile`; bitwise reproducible."""
    q, k, v = given.q, given.k, given.v
    gradients = Gradients(*(t.new_empty(t.shape) for t in (q, k, v)))
    inputs = [dense_rows(t) for t in (given.grad_out, q, k, v)]
    statistics = [t.float().contiguous() for t in (given.lse, given.delta)]
    tile, pointers = ctypes.byref(_tile(q, k, causal, scale)), map(_of, statistics)
    _require_memory(library.attention_backward(tile, _operands(*inputs), *pointers, _operands(*gradients)))
    return gradients


def _tile(q: Tensor, k: Tensor, causal: bool, scale: float) -> _Tile:
    return _Tile(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], causal, scale)


def _operands(*tensors: Tensor) -> ctypes.Array[_Operand]:
    """Return tensors as C structures; the caller must keep the tensors alive."""
    assert all(t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(3) == 1 for t in tensors)
    return (_Operand * len(tensors))(*(_Operand(t.data_ptr(), *t.stride()[:3]) for t in tensors))


def _of(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _require_memory(status: int) -> None:
    if status:
        raise MemoryError("attention on the CPU: no memory for a copy of a head's queries, keys and values")
