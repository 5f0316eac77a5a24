"""Divides a mask into rectangular tiles, one kernel call each, for two ascending lists of positions. Imports no torch.

Among keys in global order a query sees one interval, and both of its ends do not decrease from one query to the next
(`bmburst.schedule.mask`). Queries are divided where their intervals no longer form a single band of a rectangle.
Rectangles along the diagonal with the same band become the segments of one call. The levels of a tree are divided one
by one.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmburst.schedule.mask import BlockMap, Mask
from bmburst_ops.pattern import FULL, Band, Cells, IntArray, Pattern, Segments, VisibleRanges, transposed


class Span(NamedTuple):
    """Local tokens `start` to `stop`, exclusive."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The span as an index."""
        return slice(self.start, self.stop)


class Tile(NamedTuple):
    """A rectangle of the score matrix in local coordinates, and the pattern of its visible pairs."""

    queries: Span
    keys: Span
    pattern: Pattern
    area: int
    """Number of visible (query, key) pairs."""


def visible_rows(mask: Mask, length: int, queries: IntArray, keys: IntArray) -> VisibleRanges:
    """Return the interval of indices of `keys` that each query sees, regardless of block maps.

    Args:
        mask: The mask.
        length: Real tokens of the sequence.
        queries: Global positions of the queries, ascending, below `length`.
        keys: Global positions of the real keys, ascending.
    """
    start, stop = mask.rows(queries, length)
    return VisibleRanges(_index_of(keys, start), _index_of(keys, stop))


def make_tiles(
    mask: Mask, length: int, queries: IntArray, keys: IntArray, by: Literal["queries", "keys"] = "queries"
) -> tuple[Tile, ...]:
    """Return the tiles of queries and keys; every visible pair is in exactly one tile.

    Args:
        mask: The mask.
        length: Real tokens of the sequence.
        queries: Global positions of the queries, ascending, below `length`.
        keys: Global positions of the real keys, ascending.
        by: "queries": each query is in at most one rectangle of each level of the mask, so its result is complete if
            there is one level. "keys": likewise each key and its gradient. A block-sparse mask gives one rectangle in
            both cases.
    """
    if not len(queries) or not len(keys):
        return ()
    if len(mask.levels) > 1:
        return tuple(tile for level in mask.levels for tile in make_tiles(level, length, queries, keys, by))
    rows = visible_rows(mask, length, queries, keys)
    if mask.blocks is not None:
        return _cells(mask.blocks, rows, queries, keys)
    if by == "keys":
        cuts = np.searchsorted(keys, np.asarray(mask.key_starts, dtype=np.int64))
        rectangles = [_turned(rectangle) for rectangle in _rectangles(transposed(rows, len(keys)), cuts)]
    else:
        rectangles = list(_rectangles(rows, np.searchsorted(queries, np.asarray(mask.starts, dtype=np.int64))))
    if mask.starts:
        return tuple(_tile(group) for group in _grouped(rectangles))
    return tuple(Tile(rectangle.queries, rectangle.keys, rectangle.band, rectangle.area) for rectangle in rectangles)


def visible_area(mask: Mask, length: int, queries: IntArray) -> int:
    """Return the number of visible pairs of these queries with all keys of the sequence."""
    if len(mask.levels) > 1:
        return sum(visible_area(level, length, queries) for level in mask.levels)
    rows = mask.rows(queries, length)
    if mask.blocks is None or not len(queries):
        return int((rows.stop - rows.start).sum())
    edges, blocks = _runs(queries // mask.blocks.size)
    columns = np.minimum(np.arange(len(mask.blocks.cells) + 1) * mask.blocks.size, mask.key_length(length))
    return int(_counts(rows, edges, columns, mask.blocks.cells[blocks]).sum())


def seen_counts(mask: Mask, length: int) -> IntArray:
    """Return how many queries of the sequence see each of its keys, in global order."""
    if len(mask.levels) > 1:
        total: IntArray = np.sum([seen_counts(level, length) for level in mask.levels], axis=0)
        return total
    rows, keys = mask.rows(np.arange(length), length), mask.key_length(length)
    if mask.blocks is None:
        return _counted(rows, slice(None), keys)
    size, cells = mask.blocks
    seen, columns = np.zeros(keys, np.int64), np.arange(keys) // size
    for first, row in zip(range(0, length, size), cells, strict=False):
        seen += _counted(rows, slice(first, first + size), keys) * row[columns]
    return seen


def seen_by(mask: Mask, length: int, first: int, last: int) -> list[Span]:
    """Return the global positions of the keys that any of the consecutive queries `first` to `last` sees.

    Spans do not overlap; see `Mask.seen_intervals` for what they contain. Under a block-sparse mask they are exact to
    blocks.
    """
    seen = [Span(*interval) for interval in mask.seen_intervals(first, last, length)]
    if mask.blocks is None:
        return seen
    (whole,) = seen
    size, cells = mask.blocks
    used = cells[first // size : last // size + 1].max(axis=0).astype(np.int64)
    edges, values = _runs(used)
    spans = (Span(max(whole.start, a * size), min(whole.stop, b * size)) for a, b in pairwise(edges.tolist()))
    return [span for span, on in zip(spans, values, strict=True) if on and span.start < span.stop]


def _counted(rows: VisibleRanges, queries: slice, keys: int) -> IntArray:
    """Return how many of these queries' intervals each key is in."""
    ends = (np.bincount(bound[queries], minlength=keys + 1) for bound in (rows.start, rows.stop))
    return np.cumsum(operator.sub(*ends))[:keys]


def _index_of(ascending: IntArray, values: IntArray) -> IntArray:
    count = len(ascending)
    if count and int(ascending[-1] - ascending[0]) + 1 == count:  # consecutive positions: no search is needed
        return np.clip(values - int(ascending[0]), 0, count)
    return np.searchsorted(ascending, values)


class _Rectangle(NamedTuple):
    """A rectangle and its band; a bound that hides nothing is None."""

    queries: Span
    keys: Span
    band: Band

    @property
    def area(self) -> int:
        return _band_area(self.band, len(self.queries), len(self.keys))


def _band_area(band: Band, queries: int, keys: int) -> int:
    """Return the number of visible pairs of a rectangle in which every query sees a key."""
    hidden = 0
    # The right bound hides the last `short` keys from the first query, and one fewer from each later query. The left
    # bound hides first keys from the last query and the queries before it, likewise.
    for count, bound in ((queries, band.right), (keys, band.left)):
        if bound is not None:
            short = max(0, count - 1 - bound)
            hidden += short * (short + 1) // 2
    return queries * keys - hidden


def _rectangles(rows: VisibleRanges, cuts: IntArray) -> Iterator[_Rectangle]:
    """Yield the rows that see anything as rectangles with a band, in order.

    Args:
        rows: The interval that each row sees.
        cuts: First rows of documents.
    """
    start, stop = rows
    starts, stops = np.diff(start), np.diff(stop)
    sees = stop > start
    hard = (starts > 1) | (stops > 1) | (sees[1:] != sees[:-1])
    hard[cuts[(cuts > 0) & (cuts < len(start))] - 1] = True
    # In a rectangle the end grows up to the last key, and the start is constant up to the first row that loses a key.
    soft = (stops[1:] == 1) & (stops[:-1] == 0) | (starts[1:] == 0) & (starts[:-1] == 1)
    hard[1:] |= soft & ~hard[:-1] & ~hard[1:]
    edges = [0, *(np.flatnonzero(hard) + 1).tolist(), len(start)]
    for first, end in pairwise(edges):
        if sees[first]:
            yield _rectangle(first, end, int(start[first]), int(stop[end - 1]), int(start[end - 1]), int(stop[first]))


def _rectangle(first: int, end: int, key: int, key_end: int, last_start: int, first_stop: int) -> _Rectangle:
    """Return the rectangle of rows `first` to `end` from the intervals of its first and last row."""
    queries, keys = end - first, key_end - key
    left = None if last_start == key else key_end - 1 - last_start
    right = None if first_stop == key_end else first_stop - 1 - key - (keys - queries)
    return _Rectangle(Span(first, end), Span(key, key_end), Band(left, right))


def _turned(rectangle: _Rectangle) -> _Rectangle:
    """Swap queries and keys of a rectangle; both have the same bottom right corner."""
    keys, queries, (left, right) = rectangle
    return _Rectangle(queries, keys, Band(right, left))


@dataclass(slots=True)
class _DiagonalGroup:
    """Rectangles along the diagonal with a common band, which share no query and no key.

    A rectangle without a bound also fits a bound that hides none of its pairs; `keys` and `queries` are the smallest
    such bounds for all rectangles so far.
    """

    rectangles: list[_Rectangle]
    band: Band
    keys: int
    queries: int

    def takes(self, rectangle: _Rectangle) -> bool:
        """Add the rectangle if it fits."""
        last = self.rectangles[-1]
        if rectangle.queries.start < last.queries.stop or rectangle.keys.start < last.keys.stop:
            return False
        keys = max(self.keys, 0 if rectangle.band.left is not None else len(rectangle.keys) - 1)
        queries = max(self.queries, 0 if rectangle.band.right is not None else len(rectangle.queries) - 1)
        band = Band(*(mine if other is None else other for mine, other in zip(self.band, rectangle.band, strict=True)))
        changed = any(mine not in (None, new) for mine, new in zip(self.band, band, strict=True))
        hides = any(bound is not None and bound < need for bound, need in zip(band, (keys, queries), strict=True))
        if changed or hides:
            return False
        self.rectangles.append(rectangle)
        self.band, self.keys, self.queries = band, keys, queries
        return True


def _grouped(rectangles: Iterable[_Rectangle]) -> list[_DiagonalGroup]:
    groups: list[_DiagonalGroup] = []
    for rectangle in rectangles:
        if not any(group.takes(rectangle) for group in groups):
            left, right = rectangle.band
            keys = len(rectangle.keys) - 1 if left is None else 0
            queries = len(rectangle.queries) - 1 if right is None else 0
            groups.append(_DiagonalGroup([rectangle], rectangle.band, keys, queries))
    return groups


def _tile(group: _DiagonalGroup) -> Tile:
    """Return the tile of a group: a single rectangle, or segments, with empty segments between the rectangles."""
    first, last = group.rectangles[0], group.rectangles[-1]
    if first is last:
        return Tile(first.queries, first.keys, first.band, first.area)
    queries = Span(first.queries.start, last.queries.stop)
    keys = Span(first.keys.start, last.keys.stop)
    corners = [(0, 0)]
    for rectangle in group.rectangles:
        start = rectangle.queries.start - queries.start, rectangle.keys.start - keys.start
        for corner in ((start[0], corners[-1][1]), start):  # queries that see nothing, then keys that no query sees
            if corner != corners[-1]:
                corners.append(corner)
        corners.append((rectangle.queries.stop - queries.start, rectangle.keys.stop - keys.start))
    query_edges, key_edges = zip(*corners, strict=True)
    return Tile(queries, keys, Segments(group.band, query_edges, key_edges), sum(p.area for p in group.rectangles))


def _cells(blocks: BlockMap, rows: VisibleRanges, queries: IntArray, keys: IntArray) -> tuple[Tile, ...]:
    """Return the rectangle of all visible pairs, divided into cells at the edges of blocks."""
    query_edges, query_blocks = _runs(queries // blocks.size)
    key_edges, key_blocks = _runs(keys // blocks.size)
    cells = blocks.cells[np.ix_(query_blocks, key_blocks)]
    counts = _counts(rows, query_edges, key_edges, cells)
    seeing = np.flatnonzero(counts)
    if not len(seeing):
        return ()
    used = np.flatnonzero(cells.any(0))
    q = Span(int(seeing[0]), int(seeing[-1]) + 1)
    # Keys end where the last query's interval ends: under a causal mask at the diagonal, whatever blocks are on.
    k = Span(int(key_edges[used[0]]), int(min(key_edges[used[-1] + 1], rows.stop[q.stop - 1])))
    start, stop = (np.clip(side[q.slice], *k) - k.start for side in rows)
    edges = np.clip(query_edges, *q) - q.start, np.clip(key_edges, *k) - k.start
    pattern = Cells(start, stop, *edges, cells)
    area = int(counts.sum())
    return (Tile(q, k, FULL if area == len(q) * len(k) else pattern, area),)


def _runs(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return the edges of runs of equal values, and the value of each run."""
    first = np.flatnonzero(np.diff(values, prepend=-1))
    return np.append(first, len(values)), values[first]


def _counts(rows: VisibleRanges, query_edges: IntArray, key_edges: IntArray, cells: NDArray[np.bool_]) -> IntArray:
    """Return the number of keys that each query sees."""
    widths = cells * np.diff(key_edges)
    before: IntArray = np.cumsum(widths, axis=1) - widths
    block = np.repeat(np.arange(len(cells)), np.diff(query_edges))

    def visible_before(key: IntArray) -> IntArray:
        column = np.clip(np.searchsorted(key_edges, key, side="right") - 1, 0, cells.shape[1] - 1)
        found: IntArray = before[block, column] + cells[block, column] * (key - key_edges[column])
        return found

    return visible_before(rows.stop) - visible_before(rows.start)
