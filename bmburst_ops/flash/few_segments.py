"""Calls of kernels whose grids have a dimension for segments, with so few segments at a time that the grid can exist.

A grid of CUDA has at most 65,535 programs in its second and third dimension. flash-attn, torch's copy of it and
FlashAttention-3 have one for each segment of each sample, and end with "invalid configuration argument" above that.
"""

from collections.abc import Iterator

from torch import Tensor

from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial, empty_gradients, empty_partial
from bmburst_ops.flash.mask_corrections import PackedPattern, SeenBackward, SeenForward
from bmburst_ops.pattern import Segments

MOST = 65535
"""Segments of all samples in a call."""


def forward_by_few_segments(part: SeenForward) -> SeenForward:
    """Return a forward that calls `part` for all segments, or for as many at a time as a grid may have.

    The results of queries whose segment has no key are not written.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, into: Partial | None) -> Partial:
        if not _are_many(pattern, q.shape[0]):
            return part(q, k, v, pattern, into)
        if into is None:
            into = empty_partial(q, v)
        for queries, keys, some in _cut(pattern, q.shape[0]):
            target = Partial(into.out[:, queries], into.lse[..., queries])
            part(q[:, queries], k[:, keys], v[:, keys], some, target)
        return into

    return forward


def backward_by_few_segments(part: SeenBackward) -> SeenBackward:
    """Return a backward that calls `part` as in `forward_by_few_segments`.

    The gradients of queries whose segment has no key are not written, nor those of keys whose segment has no query.
    """

    def backward(given: BackwardInputs, pattern: PackedPattern, into: Gradients | None) -> Gradients:
        grad_out, q, k, v, lse, delta = given
        if not _are_many(pattern, q.shape[0]):
            return part(given, pattern, into)
        if into is None:
            into = empty_gradients(q, k, v)
        for queries, keys, some in _cut(pattern, q.shape[0]):
            rows = grad_out[:, queries], q[:, queries], k[:, keys], v[:, keys], lse[..., queries], delta[..., queries]
            part(BackwardInputs(*rows), some, Gradients(into.q[:, queries], into.k[:, keys], into.v[:, keys]))
        return into

    return backward


def _are_many(pattern: PackedPattern, batch: int) -> bool:
    return isinstance(pattern, Segments) and batch * (len(pattern.queries) - 1) > MOST


def _cut(pattern: PackedPattern, batch: int) -> Iterator[tuple[slice, slice, Segments]]:
    """Yield pieces of a pattern with queries and keys: their queries, their keys, and their own pattern."""
    assert isinstance(pattern, Segments)
    step = max(1, MOST // batch)
    for first in range(0, len(pattern.queries) - 1, step):
        queries, keys = (side[first : first + step + 1] for side in (pattern.queries, pattern.keys))
        rows, columns = (slice(side[0], side[-1]) for side in (queries, keys))
        if rows.start < rows.stop and columns.start < columns.stop:
            from_zero = (tuple(edge - side[0] for edge in side) for side in (queries, keys))
            yield rows, columns, Segments(pattern.band, *from_zero)
