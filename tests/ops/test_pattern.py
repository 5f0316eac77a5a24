"""What is derived from a pattern is what its definition says, pair by pair."""

import random

import pytest
import torch

from bmburst_ops.flash import CAUSAL, FULL, Band, Cells, Segments
from bmburst_ops.pattern import rectangles, transposed, visible_ranges
from tests.ops.masks import a_band, a_cells, a_segments, some, visible

SIZES = [(7, 7), (5, 12), (12, 5), (1, 9), (9, 1), (1, 1)]


def draws(count=12):
    for size in SIZES:
        for seed in range(count):
            for pattern in some(seed, *size):
                yield pattern, size


def test_intervals_are_the_definition():
    for pattern, (queries, keys) in draws():
        rows = visible_ranges(pattern, queries, keys)
        columns = transposed(rows, keys)
        for (starts, stops), length in ((rows, queries), (columns, keys)):
            assert len(starts) == len(stops) == length
            assert (starts <= stops).all() and (starts[1:] >= starts[:-1]).all() and (stops[1:] >= stops[:-1]).all()
        if not isinstance(pattern, Cells):
            wanted = visible(pattern, queries, keys)
            assert torch.equal(between(rows, keys), wanted)
            assert torch.equal(between(columns, queries).T, wanted)
        else:
            assert torch.equal(between(columns, queries).T, between(rows, keys))


def test_rectangles_hold_all_that_is_seen_and_no_blind_row():
    for pattern, (queries, keys) in draws():
        if isinstance(pattern, Cells):
            continue
        found = torch.zeros(queries, keys, dtype=torch.bool)
        for rows, columns, band in rectangles(pattern, queries, keys):
            part = visible(band, rows.stop - rows.start, columns.stop - columns.start)
            assert part.any(1).all() and part.any(0).all()
            assert not found[rows].any() and not found[:, columns].any()
            found[rows, columns] = part
        assert torch.equal(found, visible(pattern, queries, keys))


def test_a_band_within_a_rectangle_is_the_same_mask():
    rng, dropped = random.Random(0), 0
    for queries, keys in SIZES:
        for _ in range(40):
            band = a_band(rng, 14)
            near = band.within(queries, keys)
            assert torch.equal(visible(near, queries, keys), visible(band, queries, keys))
            for bound in (near.left, near.right):  # none is left that binds nothing
                dropped += bound is None
            for i, bound in enumerate(near):
                if bound is not None:
                    other = Band(*(None if i == j else b for j, b in enumerate(near)))
                    assert not torch.equal(visible(other, queries, keys), visible(near, queries, keys))
    assert dropped


def test_needs_are_named():
    rng = random.Random(0)
    assert FULL.needs == CAUSAL.needs == frozenset()
    assert Band(5, 0).needs == {"window"}
    assert Segments(CAUSAL, (0, 4), (0, 4)).needs == {"segments"}
    assert Segments(Band(1, 0), (0, 4), (0, 4)).needs == {"segments", "window"}
    assert a_cells(rng, 4, 4, 2).needs == {"cells"}
    assert "segments" in a_segments(rng, 4, 4, 2).needs


def test_no_segments_at_all():
    nothing = Segments(CAUSAL, (0,), (0,))
    assert all(len(side) == 0 for side in visible_ranges(nothing, 0, 0))
    assert not list(rectangles(nothing, 0, 0))


@pytest.mark.parametrize("keys", [0, 3])
def test_nobody_sees_keys_that_no_query_asks(keys):
    columns = transposed(visible_ranges(FULL, 0, keys), keys)
    assert columns.start.tolist() == columns.stop.tolist() == [0] * keys


def between(rows, length):
    places = torch.arange(length)
    return (places >= torch.from_numpy(rows.start)[:, None]) & (places < torch.from_numpy(rows.stop)[:, None])
