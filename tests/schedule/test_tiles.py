"""Tiles are the mask, each visible pair once, for any positions; and few."""

import random
from itertools import pairwise

import numpy as np
import pytest

from bmburst.schedule.documents import Documents, PrefixLM
from bmburst.schedule.layout import make_layout, real_positions
from bmburst.schedule.mask import BlockSparse, Causal, Full, SlidingWindow
from bmburst.schedule.tiles import Span, Tile, make_tiles, seen_by, visible_area, visible_rows
from bmburst_ops.pattern import CAUSAL, FULL, Band, Cells, Segments
from tests.mask_oracle import random_mask, visible
from tests.ops.masks import visible as shown


def positions(rng, length):
    """Return ascending positions: all, neighbours, every n-th, chunks that lie apart, or any."""
    first, last = sorted((rng.randrange(length), rng.randrange(length)))
    chunk = rng.randint(1, 9)
    found = rng.choice(
        (
            range(length),
            range(first, last),  # there may be none
            range(first, length, rng.randint(1, 5)),
            [i for i in range(length) if (i // chunk) % 3 == first % 3],
            sorted(rng.sample(range(length), rng.randint(0, length))),
        )
    )
    return np.array(found, dtype=np.int64)


def rectangles(tile):
    """Return the queries and keys of each rectangle of a tile that is not empty."""
    (q, _), (k, _), pattern = tile.queries, tile.keys, tile.pattern
    if not isinstance(pattern, Segments):
        return [(tile.queries, tile.keys)]
    parts = zip(pairwise(pattern.queries), pairwise(pattern.keys), strict=True)
    return [(Span(q + a, q + b), Span(k + c, k + d)) for (a, b), (c, d) in parts if a < b and c < d]


def hold(tile, queries, keys):
    """What kernels and executors rely on."""
    pattern, n, m = tile.pattern, len(tile.queries), len(tile.keys)
    assert 0 <= tile.queries.start < tile.queries.stop <= queries and 0 <= tile.keys.start < tile.keys.stop <= keys
    seen = shown(pattern, n, m).numpy()
    assert tile.area == seen.sum() > 0
    rows, columns = seen.any(1), seen.any(0)
    assert rows[0] and rows[-1]
    if isinstance(pattern, Cells):
        assert (pattern.start <= pattern.stop).all() and not seen.all()
        assert all((np.diff(side) >= 0).all() for side in (pattern.start, pattern.stop))
        for edges, count in ((pattern.query_edges, n), (pattern.key_edges, m)):
            assert edges[0] == 0 and edges[-1] == count and (np.diff(edges) >= 0).all()
        return seen
    assert columns[0] and columns[-1]
    band = pattern.band if isinstance(pattern, Segments) else pattern
    assert all(bound is None or bound >= 0 for bound in band)
    if isinstance(pattern, Segments):
        assert len(pattern.queries) == len(pattern.keys)
        for edges, count in ((pattern.queries, n), (pattern.keys, m)):
            assert edges[0] == 0 and edges[-1] == count and list(edges) == sorted(edges)
    else:
        assert rows.all() and columns.all()
        assert band == band.within(n, m)  # no bound that bounds nothing
    return seen


@pytest.mark.parametrize("seed", range(300))
def test_every_visible_pair_is_in_one_tile(seed):
    rng = random.Random(seed)
    length = rng.randint(1, 70)
    check(random_mask(rng, length), length, positions(rng, length), positions(rng, length))


@pytest.mark.parametrize("seed", range(60))
def test_pieces_that_one_band_does_not_serve_are_not_grouped(seed):
    """Windows over many short documents: bands of all widths beside pieces that nothing bounds."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(10)]
    length, mask = sum(lengths), Documents(lengths, rng.random() < 0.5)
    mask &= SlidingWindow(rng.randint(2, 8), rng.random() < 0.5)
    chunk = rng.randint(2, 7)
    halves = [np.array([i for i in range(length) if (i // chunk) % 2 == half]) for half in (0, 1)]
    some = np.array(sorted(rng.sample(range(length), rng.randint(1, length))))
    check(
        mask, length, rng.choice((*halves, some)), rng.choice((*halves, some, np.arange(rng.randrange(length), length)))
    )


def check(mask, length, queries, keys):
    wanted = visible(mask, length)[np.ix_(queries, keys)]
    for by in ("queries", "keys"):
        tiles = make_tiles(mask, length, queries, keys, by)
        count = np.zeros(wanted.shape, dtype=int)
        alone = np.zeros(len(queries) if by == "queries" else len(keys), dtype=int)
        for tile in tiles:
            count[tile.queries.slice, tile.keys.slice] += hold(tile, len(queries), len(keys))
            for rectangle in rectangles(tile):
                alone[rectangle[by == "keys"].slice] += 1
        assert (count == wanted).all()
        assert (alone <= 1).all()
        if mask.blocks is not None:
            assert len(tiles) == wanted.any()
        elif not mask.starts:
            assert not any(isinstance(tile.pattern, Segments) for tile in tiles)


@pytest.mark.parametrize("seed", range(100))
def test_rows_and_areas_are_the_definition(seed):
    rng = random.Random(seed)
    length = rng.randint(1, 60)
    mask = random_mask(rng, length)
    queries, keys, seen = positions(rng, length), positions(rng, length), visible(mask, length)
    assert visible_area(mask, length, queries) == seen[queries].sum()
    assert visible_area(mask, length, queries[:0]) == 0
    if mask.blocks is None:
        start, stop = visible_rows(mask, length, queries, keys)
        every = np.arange(len(keys))
        assert ((start[:, None] <= every) & (every < stop[:, None]) == seen[np.ix_(queries, keys)]).all()


@pytest.mark.parametrize("seed", range(100))
def test_neighbours_see_together_what_any_of_them_sees(seed):
    rng = random.Random(seed)
    length = rng.randint(1, 60)
    mask = random_mask(rng, length)
    first, last = sorted((rng.randrange(length), rng.randrange(length)))
    spans = seen_by(mask, length, first, last)
    assert all(a.stop < b.start for a, b in pairwise(spans)) and all(0 <= s.start < s.stop <= length for s in spans)
    told = np.zeros(length, dtype=bool)
    for span in spans:
        told[span.slice] = True
    seen = np.ones(length, dtype=bool)
    for part in getattr(mask, "masks", (mask,)):
        seen &= visible(all_on(part), length)[first : last + 1].any(0)
    if mask.blocks is not None:  # to the block
        size, cells = mask.blocks
        seen &= cells[first // size : last // size + 1].any(0)[np.arange(length) // size]
    assert (told == seen).all()


def all_on(mask):
    """Return the mask with all of its blocks on, if it has any."""
    if isinstance(mask, BlockSparse):
        return BlockSparse(np.ones_like(mask.block_map), mask.block_size, mask.causal)
    return mask


def test_no_tile_where_nothing_is_seen():
    some, none = np.arange(4, 8), np.arange(0)
    for by in ("queries", "keys"):
        assert make_tiles(Full(), 8, some, none, by) == make_tiles(Full(), 8, none, some, by) == ()
        assert make_tiles(Causal(), 16, some, some + 4, by) == ()
        assert make_tiles(SlidingWindow(4), 16, some + 7, some, by) == ()
        assert make_tiles(Documents([4, 4, 8]), 16, some, some + 4, by) == ()
        assert make_tiles(BlockSparse([[1, 0], [0, 1]], 4), 8, some, some - 4, by) == ()


def spread(mask, length, name="zigzag", size=4):
    """Return the tiles between all pairs of ranks."""
    layout = make_layout(name, size, length // size, mask, length)
    held = [real_positions(layout, rank, length) for rank in range(size)]
    return {(q, k): make_tiles(mask, length, held[q], held[k]) for q in range(size) for k in range(size)}


def patterns(tiles):
    return [tile.pattern for tile in tiles]


def test_plain_masks_are_a_call_of_the_simplest_kind():
    for (q, k), tiles in spread(Causal(), 64).items():
        assert patterns(tiles) == [CAUSAL if q == k else FULL]
        assert (len(tiles[0].queries), len(tiles[0].keys)) == ((16, 16) if q == k else (16, 8) if q > k else (8, 16))
    assert all(patterns(tiles) == [FULL] for tiles in spread(Full(), 64).values())
    assert all(patterns(tiles) == [CAUSAL] for tiles in spread(Causal(), 64, "striped").values())
    every = np.arange(64)
    assert make_tiles(Causal(), 64, every, every, "keys") == (Tile(Span(0, 64), Span(0, 64), CAUSAL, 65 * 32),)
    # On one rank, whatever hides nothing is left out.
    assert patterns(make_tiles(SlidingWindow(64), 64, every, every)) == [CAUSAL]
    assert patterns(make_tiles(Documents([64], causal=False), 64, every, every)) == [FULL]
    assert patterns(make_tiles(BlockSparse([[1, 1], [1, 1]], 32), 64, every, every)) == [FULL]


@pytest.mark.parametrize("size", [10, 2**62, 2**63, 10**30])
def test_a_block_wider_than_the_sequence_is_one_cell(size):
    mask, every = BlockSparse([[True]], size, causal=True), np.arange(10)
    mask.require(10)
    assert visible_area(mask, 10, every) == 55
    assert seen_by(mask, 10, 2, 4) == [Span(0, 5)]
    (tile,) = make_tiles(mask, 10, every, every)
    assert tile.area == 55 and (shown(tile.pattern, 10, 10).numpy() == visible(Causal(), 10)).all()


def test_a_window_is_one_call():
    every = np.arange(1000)
    for mask, band in (
        (SlidingWindow(10), Band(9, 0)),
        (SlidingWindow(1), Band(0, 0)),
        (SlidingWindow(10, causal=False), Band(9, 9)),
    ):
        for by in ("queries", "keys"):
            assert patterns(make_tiles(mask, 1000, every, every, by)) == [band]
    (tile,) = make_tiles(SlidingWindow(10), 1000, every[500:], every[:500])
    assert (tile.queries, tile.keys, tile.area) == (Span(0, 9), Span(491, 500), 45)
    (tile,) = make_tiles(SlidingWindow(600), 1000, every[500:], every[:500])
    assert (tile.queries, tile.keys, tile.pattern.right) == (Span(0, 500), Span(0, 500), None)


def test_a_prefix_is_a_call_and_what_follows_another():
    every = np.arange(100)
    assert make_tiles(PrefixLM(30), 100, every, every) == (
        Tile(Span(0, 30), Span(0, 30), FULL, 900),
        Tile(Span(30, 100), Span(0, 100), CAUSAL, 70 * 30 + 35 * 71),
    )
    assert patterns(make_tiles(PrefixLM(0), 100, every, every)) == [CAUSAL]
    assert patterns(make_tiles(PrefixLM(100), 100, every, every)) == [FULL]
    lengths = [random.Random(i).randint(1, 9) for i in range(300)]
    prefixes = [n // 2 for n in lengths]
    assert len(make_tiles(PrefixLM(prefixes, lengths), sum(lengths), *[np.arange(sum(lengths))] * 2)) == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_hundreds_of_documents_are_few_calls(layout, causal):
    rng = random.Random(1)
    lengths = [rng.choice((1, 2, 3, 7, 30, 90)) for _ in range(700)]
    lengths.append(-sum(lengths) % 64 + 64)
    own = make_tiles(Documents(lengths, causal), sum(lengths), *[np.arange(sum(lengths))] * 2)
    assert [len(tile.pattern.queries) for tile in own] == [702]
    for mask in (Documents(lengths, causal), Documents(lengths, causal) & SlidingWindow(20, causal=causal)):
        for (q, k), tiles in spread(mask, sum(lengths), layout).items():
            # What a window shows of another rank's chunk begins and ends in the middle of its band.
            assert len(tiles) <= (3 if "window" in mask.needs and q != k else 1)


def test_documents_that_nobody_holds_are_skipped_by_empty_segments():
    """Queries that see nothing, and keys that nobody sees, lie between segments."""
    queries, keys = np.array([0, 1, 2, 6, 7, 8]), np.array([0, 1, 2, 3, 4, 8])
    (tile,) = make_tiles(Documents([3, 3, 2, 1]), 9, queries, keys)
    assert (tile.queries, tile.keys, tile.area) == (Span(0, 6), Span(0, 6), 7)
    assert tile.pattern == Segments(CAUSAL, (0, 3, 5, 5, 6), (0, 3, 3, 5, 6))
