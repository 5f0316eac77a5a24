"""Queries that see nothing and keys that nobody sees, kept from kernels that were not made for them.

A kernel may leave its memory as it was there, call the log-sum-exp `inf`, or make NaN of `-inf - -inf`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.memory import DeviceVectors, copy_to_device, deliver_gradients, deliver_partial
from bmburst_ops.pattern import Band, Rectangle, Segments, rectangles, transposed, visible_ranges

PackedPattern = Band | Segments
ForwardPart = Callable[[Tensor, Tensor, Tensor, PackedPattern, Partial | None], Partial]
"""A kernel's forward of `(q, k, v, pattern, into)`."""
BackwardPart = Callable[[BackwardInputs, PackedPattern, Gradients | None], Gradients]
"""A kernel's backward of `(given, pattern, into)`."""


def forward(
    part: ForwardPart, q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, into: Partial | None
) -> Partial:
    """Return the part's result: of a band it gets the queries that see something, of segments all, set right after."""
    seen = _seen(pattern, q.shape[1], k.shape[1])
    if seen is None:
        return _nothing(q, into)
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


def backward(part: BackwardPart, given: BackwardInputs, pattern: PackedPattern, into: Gradients | None) -> Gradients:
    """Return the part's gradients, as `forward`."""
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
    """Places on a device; None where there is none."""

    queries: DeviceVectors | None
    keys: DeviceVectors | None


def _seen(pattern: PackedPattern, queries: int, keys: int) -> Rectangle | None:
    """Return where a band sees something; of segments, the first such; None if nobody sees anything."""
    return next(rectangles(pattern, queries, keys), None)


def _places(pattern: Segments, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return which queries see nothing, and which keys nobody sees."""
    found = _sent(pattern, q.shape[1], k.shape[1], q.device)
    queries, keys = (None if sent is None else sent.here()[0] for sent in found)
    return queries, keys


@bounded_cache(maxsize=256)
def _sent(pattern: Segments, queries: int, keys: int, device: torch.device) -> _MaskedTokens:
    rows = visible_ranges(pattern, queries, keys)
    columns = transposed(rows, keys)
    empty = (np.flatnonzero(side.start == side.stop) for side in (rows, columns))
    return _MaskedTokens(*(copy_to_device((places,), device, torch.int64) if places.size else None for places in empty))


def _nothing(q: Tensor, into: Partial | None) -> Partial:
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    return deliver_partial(Partial(torch.zeros_like(q), lse), into)


def _after_zeros(tensor: Tensor, count: int) -> Tensor:
    """Return a result `[batch, tokens, ...]` with zeros for `count` tokens before it."""
    if not count:
        return tensor
    return torch.cat((tensor.new_zeros(tensor.shape[0], count, *tensor.shape[2:]), tensor), 1)
