"""Full and causal attention of long fp32 tiles on one thread with AVX-512, compiled at its first use: `cpu_tile.c`.

On a core of an AMD EPYC (Zen 5), torch's kernel takes 2.2 times as long forward and 2.7 times backward: 2 heads of
dimension 32 over 1 KV head, 4,096 causal tokens, torch 2.13 with MKL. Ranks of the host runtime have a thread each.
Where there are several, no AVX-512, no compiler, or little work, torch's kernel does it.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bmburst_ops.compiled import compiled
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial
from bmburst_ops.merge import dense_rows

HEAD_DIMS = (32, 64, 128)
LEAST = 1 << 23
"""Scores of a call, of all batches and heads, from which on compiling pays."""


class _Operand(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "token", "head")))


class _Tile(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batches", "queries", "keys", "heads", "kv_heads")),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def library(q: Tensor, k: Tensor) -> ctypes.CDLL | None:
    """Return what computes such a tile, or None: torch does. For `forward` and `backward`.

    Args:
        q: `[batch, queries, heads, head_dim]`, with keys for each query to see.
        k: `[batch, keys, kv_heads, head_dim]`.
    """
    batch, queries, heads, head_dim = q.shape
    is_long = batch * heads * queries * k.shape[1] >= LEAST
    if not is_long or q.dtype != torch.float32 or head_dim not in HEAD_DIMS or torch.get_num_threads() > 1:
        return None
    return compile_for(head_dim) if torch.backends.cpu.get_cpu_capability() == "AVX512" else None


@cache
def compile_for(head_dim: int) -> ctypes.CDLL | None:
    """Return what computes tiles of one of `HEAD_DIMS`, on any processor; None where it cannot be compiled."""
    return compiled(Path(__file__).with_suffix(".c"), ("-O2", f"-DHEAD_DIM={head_dim}"))


def forward(library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Partial:
    """Return attention of a tile; causal is aligned at the bottom right, with no more queries than keys."""
    batch, queries, heads, _ = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(batch, heads, queries)
    inputs = [dense_rows(t) for t in (q, k, v)]
    tile = ctypes.byref(_tile(q, k, causal, scale))
    _require_memory(library.attention_forward(tile, _operands(*inputs), _operands(out), _of(lse)))
    return Partial(out, lse)


def backward(library: ctypes.CDLL, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
    """Return the gradients of a tile as `forward` computes it; the same bits each time."""
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
    """Return tensors as C reads them; the caller keeps them."""
    assert all(t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(3) == 1 for t in tensors)
    return (_Operand * len(tensors))(*(_Operand(t.data_ptr(), *t.stride()[:3]) for t in tensors))


def _of(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _require_memory(status: int) -> None:
    if status:
        raise MemoryError("attention on the CPU: no memory for a copy of a head's queries, keys and values")
