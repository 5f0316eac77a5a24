"""Corrections around kernels of torch and of packages, for masks that these kernels compute wrongly.

These kernels do not support queries that see no key, or keys that no query sees. Some do not support causal rectangles
aligned at the bottom right. Some spread NaN from the next packed document.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device, package_arguments
from bmburst_ops.flash.kernel import (
    BackwardInputs,
    Gradients,
    Partial,
    Scoring,
    deliver,
    deliver_gradients,
    deliver_partial,
)
from bmburst_ops.flash.triton import BlockSizes, Kernels, cap_of, launch_grid, near_rows, strides_of, widths_of
from bmburst_ops.machine import is_there
from bmburst_ops.merge import accumulation_dtype, merge_partials_
from bmburst_ops.pattern import Band, Rectangle, Segments, rectangles, transposed, visible_ranges

_SHARE = 4096  # tokens of a document that one program recomputes
_WIDE_TILES = 96  # head dims up to this have tiles of more than 128 keys
_UNBOUNDED = 2**30

PackedPattern = Band | Segments
SeenForward = Callable[[Tensor, Tensor, Tensor, PackedPattern, Partial | None], Partial]
"""A kernel's forward of `(q, k, v, pattern, into)`."""
SeenBackward = Callable[[BackwardInputs, PackedPattern, Gradients | None], Gradients]
"""A kernel's backward of `(given, pattern, into)`."""


def forward_seen(
    part: SeenForward, q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, into: Partial | None
) -> Partial:
    """Return the result of `part`, with the right values for queries that see no key.

    For such queries a kernel may leave its memory unwritten, return a log-sum-exp of `inf`, or compute NaN from
    `-inf - -inf`. For a band, `part` gets only queries that see a key and keys that are seen. For segments it gets all
    tokens, and its result is corrected afterwards.
    """
    seen = _seen(pattern, q.shape[1], k.shape[1])
    if seen is None:
        return _nothing(q, v, into)
    if isinstance(pattern, Segments):
        partial = part(q, k, v, pattern, into)
        if (queries := _places(pattern, q, k)[0]) is not None:
            partial.out.index_fill_(1, queries, 0.0)
            partial.lse.index_fill_(2, queries, -torch.inf)
        return partial
    first, first_key = seen.queries.start, seen.keys.start
    if not first and not first_key:
        return part(q, k, v, seen.band, into)
    near = q[:, first:], k[:, first_key:], v[:, first_key:]
    if into is None:
        out, lse = part(*near, seen.band, None)
        return Partial(_after_zeros(out, first), pad(lse, (first, 0), value=-torch.inf))
    part(*near, seen.band, Partial(into.out[:, first:], into.lse[..., first:]))
    into.out[:, :first] = 0
    into.lse[..., :first] = -torch.inf
    return into


def backward_seen(
    part: SeenBackward, given: BackwardInputs, pattern: PackedPattern, into: Gradients | None
) -> Gradients:
    """Return the gradients of `part`, corrected as in `forward_seen`."""
    grad_out, q, k, v, lse, delta = given
    seen = _seen(pattern, q.shape[1], k.shape[1])
    if seen is None:
        return deliver_gradients(Gradients(*(torch.zeros_like(t) for t in (q, k, v))), into)
    if isinstance(pattern, Segments):
        queries, keys = _places(pattern, q, k)
        if queries is not None:
            given = given._replace(lse=lse.index_fill(2, queries, 0.0), delta=delta.index_fill(2, queries, 0.0))
        gradients = part(given, pattern, into)
        for gradient, places in zip(gradients, (queries, keys, keys), strict=True):
            if places is not None:
                gradient.index_fill_(1, places, 0.0)
        return gradients
    first, first_key = seen.queries.start, seen.keys.start
    if not first and not first_key:
        return part(given, seen.band, into)
    near = BackwardInputs(
        grad_out[:, first:], q[:, first:], k[:, first_key:], v[:, first_key:], lse[..., first:], delta[..., first:]
    )
    starts = (first, first_key, first_key)
    if into is None:
        return Gradients(*map(_after_zeros, part(near, seen.band, None), starts))
    part(near, seen.band, Gradients(*(t[:, start:] for t, start in zip(into, starts, strict=True))))
    for target, start in zip(into, starts, strict=True):
        target[:, :start] = 0
    return into


class _MaskedTokens(NamedTuple):
    """Indices of queries that see no key and of keys that no query sees, on a device; None if there are none."""

    queries: DeviceVectors | None
    keys: DeviceVectors | None


def _seen(pattern: PackedPattern, queries: int, keys: int) -> Rectangle | None:
    """Return the queries that see a key and the keys that are seen, for a band or the first such segment; else None."""
    if isinstance(pattern, Band):
        return _seen_of_band(pattern, queries, keys)
    return next(rectangles(pattern, queries, keys), None)


@lru_cache(maxsize=256)
def _seen_of_band(band: Band, queries: int, keys: int) -> Rectangle | None:
    return next(rectangles(band, queries, keys), None)


def _places(pattern: Segments, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of queries that see no key, and of keys that no query sees."""
    found = _sent(pattern, q.shape[1], k.shape[1], q.device)
    queries, keys = (None if sent is None else sent.here()[0] for sent in found)
    return queries, keys


@bounded_cache(maxsize=256)
def _sent(pattern: Segments, queries: int, keys: int, device: torch.device) -> _MaskedTokens:
    rows = visible_ranges(pattern, queries, keys)
    columns = transposed(rows, keys)
    empty = (np.flatnonzero(side.start == side.stop) for side in (rows, columns))
    return _MaskedTokens(*(copy_to_device((places,), device, torch.int64) if places.size else None for places in empty))


def _nothing(q: Tensor, v: Tensor, into: Partial | None) -> Partial:
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    return deliver_partial(Partial(q.new_zeros(*q.shape[:3], v.shape[3]), lse), into)


def _after_zeros(tensor: Tensor, count: int) -> Tensor:
    """Return a result `[batch, tokens, ...]` with zeros for `count` tokens before it."""
    if not count:
        return tensor
    return torch.cat((tensor.new_zeros(tensor.shape[0], count, *tensor.shape[2:]), tensor), 1)


class CausalForward(Protocol):
    """Forward of a tile that is full, or causal and square."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        """Return the part's output and log-sum-exp."""
        ...


class CausalBackward(Protocol):
    """Backward of a tile that is full, or causal and square; queries, dO and their statistics are already bound."""

    def __call__(self, k: Tensor, v: Tensor, causal: bool) -> Gradients:
        """Return the part's gradients."""
        ...


def forward_bottom_right(
    part: CausalForward, q: Tensor, k: Tensor, v: Tensor, causal: bool, into: Partial | None
) -> Partial:
    """Return attention of a tile, for kernels whose causal mask is aligned at the top left.

    Their mask differs from the bottom-right one unless the tile is square. Other causal tiles are computed in two
    parts, which are merged in fp32 or wider. The output is in the dtype of `part`, or after a merge in fp32 or wider.
    `into` is as in `Kernel.forward`.
    """
    hidden = k.shape[1] - q.shape[1]
    if not _must_cut(causal, q, k):
        return deliver_partial(part(q, k, v, causal and hidden == 0), into)
    seen, square = (part(q, k[:, keys], v[:, keys], is_causal) for keys, is_causal in _cut(hidden))
    dtype = accumulation_dtype(q.dtype)
    # Merge in the target if it is wide enough; in a narrower one, rounding before the merge would lose accuracy.
    merged = torch.empty_like(seen.out, dtype=dtype) if into is None or into.out.dtype != dtype else into.out
    merged.copy_(seen.out)
    merge_partials_(merged, seen.lse, square.out, square.lse)
    return deliver_partial(Partial(merged, seen.lse), into)


def backward_bottom_right(
    part: CausalBackward, q: Tensor, k: Tensor, v: Tensor, causal: bool, into: Gradients | None
) -> Gradients:
    """Return the gradients of a tile, in the parts of `forward_bottom_right`; `into` is as in `Kernel.backward`."""
    hidden = k.shape[1] - q.shape[1]
    if not _must_cut(causal, q, k):
        return deliver_gradients(part(k, v, causal and hidden == 0), into)
    seen, square = (part(k[:, keys], v[:, keys], is_causal) for keys, is_causal in _cut(hidden))
    grad_q = torch.add(seen.q.to(accumulation_dtype(q.dtype)), square.q)
    if into is None:
        return Gradients(grad_q, torch.cat((seen.k, square.k), 1), torch.cat((seen.v, square.v), 1))
    for target, first, second in ((into.k, seen.k, square.k), (into.v, seen.v, square.v)):
        target[:, :hidden].copy_(first)
        target[:, hidden:].copy_(second)
    return Gradients(deliver(grad_q, into.q), into.k, into.v)


def _must_cut(causal: bool, q: Tensor, k: Tensor) -> bool:
    """Return whether a tile needs two parts. A square has the same mask either way; a single query sees every key."""
    return causal and q.shape[1] not in (1, k.shape[1])


def _cut(hidden: int) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """Split a bottom-right causal rectangle: full over the first `hidden` keys, a causal square over the others."""
    return (slice(0, hidden), False), (slice(hidden, None), True)


def isolate_forward(found: Partial, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Partial:
    """Return a kernel's result, with a document recomputed if V of the tokens after it is not finite.

    For kernels whose tiles of packed documents reach into the next document. Without Triton, results stay unchanged;
    torch for NVIDIA GPUs includes Triton. Do not call it for tensors on CPUs: there, tests replace the packages.

    Args:
        found: The result. Its output is corrected in place; its log-sum-exp is already right.
        q: Queries, as given to `Kernel.forward`; likewise all other arguments.
        k: Keys.
        v: Values.
        scoring: Of segments, with a scale above 0. A band has only one document, so its result stays unchanged.
    """
    if isinstance(scoring.pattern, Segments) and is_there("triton"):
        tensors = [near_rows(t) for t in (q, k, v)]
        _run(_kernels().forward, [*tensors, found.out], q, k, v, scoring, over_keys=True)
    return found


def isolate_backward(found: Gradients, given: BackwardInputs, scoring: Scoring) -> Gradients:
    """Return a kernel's gradients, with a document recomputed if an input of the tokens after it is not finite.

    Args:
        found: The gradients, corrected in place.
        given: As given to `Kernel.backward`.
        scoring: As in `isolate_forward`.
    """
    if isinstance(scoring.pattern, Segments) and is_there("triton"):
        tensors = [*map(near_rows, given[:4]), *(t.transpose(1, 2) for t in given[4:])]
        _run(_kernels().keys, [*tensors, *found[1:]], *given[1:4], scoring, over_keys=False)
        _run(_kernels().queries, [*tensors, found.q], *given[1:4], scoring, over_keys=True)
    return found


def _run(
    kernel: object, tensors: list[Tensor], q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, over_keys: bool
) -> None:
    """Run a kernel whose programs hold queries and loop over keys, or the other way round."""
    pattern, scale, softcap = scoring
    assert isinstance(pattern, Segments)
    call, documents, head_dim = package_arguments(pattern, q, k), len(pattern.queries) - 1, max(q.shape[3], v.shape[3])
    longest, tokens = (call.longest_queries, k.shape[1]) if over_keys else (call.longest_keys, q.shape[1])
    parts = -(-longest // _SHARE)
    left, right = (_UNBOUNDED if bound is None else bound for bound in pattern.band)
    numbers = (parts, tokens, q.shape[2] // k.shape[2], scale, cap_of(softcap, scale), left, right)
    size = 64 if head_dim <= 128 else 32
    behind = 256 if head_dim <= _WIDE_TILES else 128
    arguments = (*tensors, *map(strides_of, tensors), call.queries, call.keys, *numbers)
    launch_grid(kernel, k, documents * parts, arguments, BlockSizes(size, size, 4, 1), BEHIND=behind, **widths_of(v))


@cache
def _kernels() -> Kernels:
    from bmburst_ops.flash.triton_isolate import forward_kernel, keys_kernel, queries_kernel

    return Kernels(forward_kernel, keys_kernel, queries_kernel)
