"""Attention patterns of one kernel call, as plain values that all kernels share: which keys each query sees."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Need = Literal["window", "segments", "blocks", "cells", "softcap"]
"""What a kernel must support beyond full and causal rectangles of plain scores. "softcap" is not a need of patterns.

A block-sparse pattern needs "blocks" if `blocks_of` can express it, else "cells".
"""

BLOCK = 128
"""Side length, in tokens, of the blocks that block-sparse kernels compute or skip as a whole."""


class Band(NamedTuple):
    """A band: query i of n sees the keys from `i + m - n - left` to `i + m - n + right`, of m keys; None is no bound.

    It is aligned at the bottom right: with `right` 0 the last query sees the last key. Bounds are not negative.
    """

    left: int | None = None
    right: int | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """See `Need`."""
        return frozenset() if self in (FULL, CAUSAL) else frozenset({"window"})

    def within(self, queries: int, keys: int) -> "Band":
        """Return the same band without bounds that have no effect for this many queries and keys."""
        left = None if self.left is not None and self.left >= keys - 1 else self.left
        right = None if self.right is not None and self.right >= queries - 1 else self.right
        return Band(left, right)


FULL = Band()
CAUSAL = Band(None, 0)


@dataclass(frozen=True, slots=True)
class Segments:
    """Packed segments: rectangles along the diagonal, each with the same band (varlen in flash attention).

    Rectangle i has queries `queries[i]` to `queries[i + 1]` and keys `keys[i]` to `keys[i + 1]`. Its band is aligned at
    its own bottom right. Either side may be empty: then its queries see no key, or its keys are seen by no query. Both
    tuples start at 0 and end at the call's number of queries and keys.
    """

    band: Band
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def needs(self) -> frozenset[Need]:
        """See `Need`."""
        return self.band.needs | {"segments"}


@dataclass(frozen=True, eq=False)
class Cells:
    """The general case: query i sees the keys from `start[i]` to `stop[i]`, exclusive, whose cell is on.

    Queries `query_edges[a]` to `query_edges[a + 1]` and keys `key_edges[b]` to `key_edges[b + 1]` form cell (a, b).
    `start` and `stop` never decrease, and `start <= stop`.
    """

    start: IntArray
    stop: IntArray
    query_edges: IntArray
    key_edges: IntArray
    cells: NDArray[np.bool_]
    """`[len(query_edges) - 1, len(key_edges) - 1]`"""

    @property
    def needs(self) -> frozenset[Need]:
        """See `Need`."""
        return frozenset({"cells"} if blocks_of(self) is None else {"blocks"})


Pattern = Band | Segments | Cells


class VisibleRanges(NamedTuple):
    """Query i sees keys `start[i]` to `stop[i]`, exclusive; neither decreases, and `start <= stop`."""

    start: IntArray
    stop: IntArray


def visible_ranges(pattern: Pattern, queries: int, keys: int) -> VisibleRanges:
    """Return the interval of keys that each query sees, without regard to cells."""
    if isinstance(pattern, Cells):
        return VisibleRanges(pattern.start, pattern.stop)
    whole = pattern if isinstance(pattern, Segments) else Segments(pattern, (0, queries), (0, keys))
    band, query_edges, key_edges = whole.band, np.array(whole.queries), np.array(whole.keys)
    lengths = np.diff(query_edges)
    first_key, end_key, end_query = (
        np.repeat(edges, lengths) for edges in (key_edges[:-1], key_edges[1:], query_edges[1:])
    )
    aligned = np.arange(queries) + end_key - end_query
    start = first_key if band.left is None else np.clip(aligned - band.left, first_key, end_key)
    stop = end_key if band.right is None else np.clip(aligned + band.right + 1, first_key, end_key)
    return VisibleRanges(start, np.maximum(start, stop))


def cell_of(edges: IntArray, start: int, stop: int) -> IntArray:
    """Return the cell of each token from `start` to `stop`."""
    return np.searchsorted(edges, np.arange(start, stop), side="right") - 1


class Rectangle(NamedTuple):
    """Queries and keys of a band, in which every query sees a key and every key is seen by a query."""

    queries: slice
    keys: slice
    band: Band


def rectangles(pattern: Band | Segments, queries: int, keys: int) -> Iterator[Rectangle]:
    """Yield the disjoint rectangles of a pattern, without queries and keys that are wholly masked."""
    whole = pattern if isinstance(pattern, Segments) else Segments(pattern, (0, queries), (0, keys))
    left, right = whole.band
    for (q0, q1), (k0, k1) in zip(pairwise(whole.queries), pairwise(whole.keys), strict=True):
        # The last query sees the last key, so queries and keys that are wholly masked are at the start.
        first_query = q0 if right is None else max(q0, q1 - (k1 - k0) - right)
        first_key = k0 if left is None else max(k0, k1 - (q1 - q0) - left)
        if k1 > k0 and q1 > q0:
            band = whole.band.within(q1 - first_query, k1 - first_key)
            yield Rectangle(slice(first_query, q1), slice(first_key, k1), band)


def transposed(rows: VisibleRanges, keys: int) -> VisibleRanges:
    """Return the interval of queries that see each key, without regard to cells. Neither end decreases."""
    every = np.arange(keys)
    first = np.searchsorted(rows.stop, every, side="right")  # the first query whose interval ends after the key
    return VisibleRanges(first, np.maximum(first, np.searchsorted(rows.start, every, side="right")))


class Blocks(NamedTuple):
    """A pattern in blocks of `BLOCK` queries and `BLOCK` keys; the last block of either side may be shorter.

    Attributes:
        band: The mask inside the blocks of `part`. It hides nothing in the blocks of `whole`.
        part: `[blocks of queries, blocks of keys]`, true where some pairs of the block are visible and others are not.
        whole: The same shape, true where all pairs of the block are visible.
    """

    band: Band
    part: NDArray[np.bool_]
    whole: NDArray[np.bool_]


def blocks_of(pattern: Cells) -> Blocks | None:
    """Return the pattern in blocks, or None if blocks cannot express its cells or intervals.

    Edges of cells must be multiples of `BLOCK`. Intervals may cut a block if their ends form one band, as in the
    diagonal blocks of a causal mask.
    """
    queries, keys = len(pattern.start), int(pattern.key_edges[-1])
    for edges, count in ((pattern.query_edges, queries), (pattern.key_edges, keys)):
        if (edges[edges < count] % BLOCK).any():
            return None
    rows, columns = np.arange(0, queries, BLOCK), np.arange(0, keys, BLOCK)
    last = np.minimum(rows + BLOCK, queries) - 1
    # Repeated edges are those of empty cells: the last of them starts the cell of the token there.
    row_cells = np.searchsorted(pattern.query_edges, rows, side="right") - 1
    column_cells = np.searchsorted(pattern.key_edges, columns, side="right") - 1
    ends = np.minimum(columns + BLOCK, keys)
    start, stop = pattern.start[:, None], pattern.stop[:, None]
    seen = pattern.cells[np.ix_(row_cells, column_cells)] & (stop[last] > columns) & (start[rows] < ends)
    whole = seen & (start[last] <= columns) & (stop[rows] >= ends)
    part = seen & ~whole
    if not part.any():
        return Blocks(FULL, part, whole)
    if (part & (start[last] > columns)).any():
        return None
    inside = np.flatnonzero((pattern.stop > 0) & (pattern.stop < keys))
    every = np.arange(queries) + keys - queries + 1
    right = int((pattern.stop - every)[inside[0]]) if len(inside) else -1
    is_band = right >= 0 and np.array_equal(pattern.stop, np.clip(every + right, 0, keys))
    return Blocks(Band(None, right), part, whole) if is_band else None
