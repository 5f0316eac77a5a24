"""Calls of kernels whose offsets have 32 bits, for so few heads at a time that the offsets fit.

These kernels read or write wrong addresses where a tensor has 2^31 numbers or more (262,144 tokens of 64 heads of 128):

- flash-attn up to 2.8.3, and torch's copy of it, in backward: offsets of dQ in fp32 have 32 bits, in packed documents
  those of tokens, else those of samples. Up to 2.7.4 those of tokens have 32 bits in both cases. Pull request 2260 of
  flash-attention changes it.
- FlashAttention-3 in backward: strides of samples have 32 bits.
- cuDNN 9 in backward: dQ and dK were wrong on an H200. What computes its offsets is not public, so each tensor that it
  gets, in forward too, ends within 2^31 numbers of its start.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.flash.inputs import unable
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial, empty_gradients, empty_partial
from bmburst_ops.flash.mask_corrections import PackedPattern, SeenBackward, SeenForward
from bmburst_ops.merge import accumulation_dtype
from bmburst_ops.pattern import Segments

OFFSETS = 2**31
"""Numbers that these kernels can address."""
_TILE = 128  # tokens: kernels pad each document to a multiple of this, or of less
_WIDTH = 64  # kernels pad head dims to a multiple of this, or of less


class _Heads(NamedTuple):
    """KV heads, and the query heads that read them: those of one call each."""

    keys: slice
    queries: tuple[slice, ...]
    """More than one: all of them read a single KV head."""


def forward_by_few_heads(kernel: str, part: SeenForward) -> SeenForward:
    """Return a forward that calls `part` for all heads, or for as many at a time as 32-bit offsets allow.

    It raises `KernelError` if not even one head fits.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, into: Partial | None) -> Partial:
        most = _most_heads(kernel, q, k, v, pattern)
        if q.shape[2] <= most:
            return part(q, k, v, pattern, into)
        if into is None:
            into = empty_partial(q, v)
        for keys, calls in _cut(q.shape[2], k.shape[2], most):
            for queries in calls:
                target = Partial(into.out[:, :, queries], into.lse[:, queries])
                part(q[:, :, queries], k[:, :, keys], v[:, :, keys], pattern, target)
        return into

    return forward


def backward_by_few_heads(kernel: str, part: SeenBackward) -> SeenBackward:
    """Return a backward that calls `part` as in `forward_by_few_heads`."""

    def backward(given: BackwardInputs, pattern: PackedPattern, into: Gradients | None) -> Gradients:
        grad_out, q, k, v, lse, delta = given
        most = _most_heads(kernel, q, k, v, pattern)
        if q.shape[2] <= most:
            return part(given, pattern, into)
        if into is None:
            into = empty_gradients(q, k, v)
        for keys, calls in _cut(q.shape[2], k.shape[2], most):
            keys_of, values_of = k[:, :, keys], v[:, :, keys]
            target_k, target_v = into.k[:, :, keys], into.v[:, :, keys]
            shares = []
            for queries in calls:
                rows = q[:, :, queries], keys_of, values_of, lse[:, queries], delta[:, queries]
                some, target_q = BackwardInputs(grad_out[:, :, queries], *rows), into.q[:, :, queries]
                if len(calls) == 1:
                    part(some, pattern, Gradients(target_q, target_k, target_v))
                else:
                    grad_q, *share = part(some, pattern, None)
                    target_q.copy_(grad_q)
                    shares.append(share)
            if shares:
                _write_sums(shares, (target_k, target_v))
        return into

    return backward


def near(tensor: Tensor) -> Tensor:
    """Return the tensor if 32-bit offsets reach its last number, else a dense copy."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if last < OFFSETS else tensor.clone(memory_format=torch.contiguous_format)


def _most_heads(kernel: str, q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern) -> int:
    """Return how many query heads one call may have, at least 1; KernelError if not even one fits."""
    documents = len(pattern.queries) - 1 if isinstance(pattern, Segments) else 1
    tokens = q.shape[0] * (max(q.shape[1], k.shape[1]) + _TILE * documents)
    width = -(-max(q.shape[3], v.shape[3]) // _WIDTH) * _WIDTH
    most = (OFFSETS - 1) // (tokens * width)
    if not most:
        raise unable(kernel, f"takes fewer than 2^31 numbers of a head, padding included, got {tokens} x {width}")
    return most


def _cut(heads: int, kv_heads: int, most: int) -> Iterator[_Heads]:
    """Yield all heads in pieces; each call has at most `most` query heads."""
    group = heads // kv_heads
    for first, last in _edges(0, kv_heads, max(1, most // group)):
        yield _Heads(slice(first, last), tuple(slice(*edges) for edges in _edges(first * group, last * group, most)))


def _edges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return pairwise([*range(start, stop, step), stop])


def _write_sums(shares: Sequence[Sequence[Tensor]], targets: Sequence[Tensor]) -> None:
    """Write the sums of several calls' gradients of a KV head, added in fp32 or wider."""
    for target, gradients in zip(targets, zip(*shares, strict=True), strict=True):
        target.copy_(torch.stack(gradients).sum(0, dtype=accumulation_dtype(target.dtype)))
