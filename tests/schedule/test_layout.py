"""Layouts are permutations in ascending local order; "balanced" gives every rank like work under any mask."""

import random
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.schedule.balance import balance_chunks, deal_chunks
from bmburst.schedule.documents import Documents, PrefixLM
from bmburst.schedule.gather_plan import make_gather_plan
from bmburst.schedule.layout import (
    LAYOUTS,
    Balanced,
    Run,
    kernel_needs,
    key_areas,
    make_layout,
    most_keys,
    narrowed_queries,
    padded_layout,
    rank_areas,
    real_length,
    real_positions,
    real_tokens,
)
from bmburst.schedule.mask import BlockSparse, Causal, Full, SlidingWindow
from bmburst.schedule.ring_schedule import tiles
from bmburst.schedule.tree import Tree
from bmburst.schedule.units import HeadShapes
from bmburst_ops.pattern import Cells, blocks_of
from tests.mask_oracle import random_mask, visible
from tests.refusals import refused


def positions(layout, rank):
    return [run.start + i * run.stride for run in layout.runs(rank) for i in range(run.tokens)]


def long_tailed(seed, total):
    """Lengths from a log-normal of median 1,800 and sigma 1.5: half of all tokens are in documents beyond 17,000."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(int(min(total - sum(lengths), max(1, rng.lognormal(7.5, 1.5)))))
    return lengths


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [8, 24])
def test_layout_is_a_permutation_in_ascending_local_order(name, size, tokens):
    layout = make_layout(name, size, tokens, SlidingWindow(5, causal=False) & PrefixLM(3))
    local = [positions(layout, rank) for rank in range(size)]
    assert all(part == sorted(part) and len(part) == tokens for part in local)
    assert sorted(position for part in local for position in part) == list(range(tokens * size))
    assert all([run.offset for run in layout.runs(r)] == _offsets(layout.runs(r)) for r in range(size))


def _offsets(runs):
    return [sum(run.tokens for run in runs[:i]) for i in range(len(runs))]


def test_where_each_layout_puts_tokens():
    """The orders that other programs know by these names: their data must fit."""
    held = {name: [positions(make_layout(name, 3, 4), r) for r in range(3)] for name in LAYOUTS if name != "balanced"}
    assert held == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        "zigzag": [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
        "striped": [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]],
    }


@given(name=st.sampled_from(sorted(LAYOUTS)), size=st.integers(1, 6), extra=st.integers(0, 30))
def test_padding_is_a_suffix_and_as_short_as_it_can_be(name, size, extra):
    length = size + extra
    layout = padded_layout(name, size, length, Causal())
    assert 0 <= layout.size * layout.tokens - length < size * layout.chunks
    for rank in range(size):
        real = real_tokens(layout, rank, length)
        assert [p < length for p in positions(layout, rank)] == [i < real for i in range(layout.tokens)]
        assert real_positions(layout, rank, length).tolist() == positions(layout, rank)[:real]


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_causal_areas_of_sequences_that_no_array_could_hold(name):
    length, window = (1 << 45) + 1, 1 << 30
    for mask, pairs in (
        (Causal(), length * (length + 1) // 2),
        (SlidingWindow(window), length * window - window * (window - 1) // 2),
    ):
        layout = padded_layout(name, 3, length)
        areas = rank_areas(layout, length, mask), key_areas(layout, length, mask)
        assert [sum(each) for each in areas] == [pairs, pairs] and most_keys(mask, length) in (length, window)


@pytest.mark.parametrize("seed", range(40))
def test_rank_areas_are_what_ranks_see(seed):
    rng = random.Random(seed)
    size, name = rng.randint(1, 8), rng.choice(sorted(LAYOUTS))
    length = rng.randint(size, 70)
    mask = random_mask(rng, length)
    layout, seen = padded_layout(name, size, length, mask), visible(mask, length)
    held = [[p for p in positions(layout, rank) if p < length] for rank in range(size)]
    assert list(rank_areas(layout, length, mask)) == [seen[part].sum() for part in held]
    assert list(key_areas(layout, length, mask)) == [seen[:, part].sum() for part in held]
    if mask.blocks is None:
        assert list(narrowed_queries(layout, length, mask)) == [(~seen[part, 0]).sum() for part in held]


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_groups_of_neighbours_hold_what_their_ranks_hold(name, degree):
    """As the exchange of heads takes for granted."""
    layout = make_layout(name, 6, 16, PrefixLM(30))
    groups = layout.over_groups(degree)
    assert (groups.size, groups.tokens) == (6 // degree, 16 * degree)
    for group in range(groups.size):
        ranks = range(group * degree, (group + 1) * degree)
        assert positions(groups, group) == sorted(p for rank in ranks for p in positions(layout, rank))


def test_neighbouring_chunks_are_one_run():
    layout = Balanced(2, 16, (0, 0, 1, 0, 1, 1, 1, 0))  # chunks of 4 tokens
    assert layout.runs(0) == (Run(0, 0, 1, 8), Run(8, 12, 1, 4), Run(12, 28, 1, 4))
    assert layout.runs(1) == (Run(0, 8, 1, 4), Run(4, 16, 1, 12))
    assert layout.over_groups(2).runs(0) == (Run(0, 0, 1, 32),)
    for rank in range(4):
        runs = make_layout("balanced", 4, 64, Causal()).runs(rank)
        assert all(a.start + a.tokens < b.start for a, b in pairwise(runs))


def test_chunks_of_one_token_are_avoided():
    """They would interleave to staircases, which not every kernel does."""
    for size in (2, 3, 8):
        for rank in range(size):
            assert all(run.tokens % 2 == 0 for run in make_layout("balanced", size, 8, Causal()).runs(rank))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.randoms(use_true_random=False))
def test_deal_keeps_its_bound(size, chunks, rng):
    highest = rng.choice((1, 10, 10**12))
    areas = [rng.choice((0, rng.randint(0, highest), highest)) for _ in range(size * chunks)]
    owners = balance_chunks(areas, size)
    assert Counter(owners) == dict.fromkeys(range(size), chunks)
    sums = [sum(area for area, owner in zip(areas, owners, strict=True) if owner == rank) for rank in range(size)]
    assert max(sums) - min(sums) <= max(areas) - min(areas)
    assert owners == balance_chunks(tuple(areas), size)


def test_deal_gives_the_largest_chunks_to_different_ranks():
    assert balance_chunks([5, 5, 1, 1], 2) in {(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0)}
    assert balance_chunks([1, 2, 3, 4], 1) == (0, 0, 0, 0)
    assert balance_chunks([4, 3, 2, 1], 2) in {(0, 1, 1, 0), (1, 0, 0, 1)}
    areas = [61, 35, 85, 68, 86, 45, 19, 49, 2, 48, 62, 36, 83, 59, 89, 77]
    sums = np.bincount(balance_chunks(areas, 4), areas, 4)
    assert max(sums) - min(sums) == 11  # without swaps it leaves 27


def test_chunks_of_equal_masks_are_dealt_once(monkeypatch):
    """Each layer's call of attention makes the layout, and swaps of many ranks' chunks take milliseconds."""
    dealt, own = [], deal_chunks
    monkeypatch.setattr("bmburst.schedule.layout.deal_chunks", lambda *values: dealt.append(values) or own(*values))
    first, second = (make_layout("balanced", 5, 24, Tree([-1, 0, 0], [50, 31, 36]), 117) for _ in range(2))
    assert first == second and len(dealt) == 1


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_documents_of_a_long_tail_are_balanced(size, seed):
    """To a hundredth of the mean, where zigzag gives one rank up to three times as much as the mean."""
    total = 131072
    mask = Documents(long_tailed(seed, total))

    def most(name):
        areas = rank_areas(make_layout(name, size, total // size, mask), total, mask)
        return max(areas) / np.mean(areas), min(areas) / np.mean(areas)

    balanced = most("balanced")
    assert balanced[0] < 1.01 and balanced[1] > 0.99
    assert most("zigzag")[0] > 1.15 and most("contiguous")[0] > 1.1


def test_any_mask_is_balanced_to_the_spread_of_chunks():
    rng = random.Random(3)
    tokens, length = 64, 8 * 64 - 5  # padding too
    blocks = BlockSparse([[rng.random() < 0.2 for _ in range(32)] for _ in range(32)], 16)
    for mask in (Causal(), Full(), SlidingWindow(100), PrefixLM(200), blocks, blocks & Causal()):
        layout = make_layout("balanced", 8, tokens, mask, length)
        seen = visible(mask, length)
        chunks = [seen[start : start + 8].sum() for start in range(0, 8 * tokens, 8)]
        areas = rank_areas(layout, length, mask)
        assert sum(areas) == seen.sum()
        assert max(areas) - min(areas) <= max(chunks) - min(chunks)


def _every_tile(layout, length, mask):
    """All that any strategy gives a kernel: of a ring, of a gather, and of one of both behind an exchange of heads."""
    for degree in (n for n in range(1, layout.size + 1) if layout.size % n == 0):
        outer = layout.over_groups(degree)
        for query_rank, key_rank in product(range(outer.size), repeat=2):
            yield from tiles(outer, length, mask, query_rank, key_rank)
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 2, "itemsize": 4, "statistics_itemsize": 4}
        shapes = HeadShapes(layout=outer, degree=1, **sizes)
        for rank in range(outer.size):
            plan = make_gather_plan(shapes, length, mask, rank, 0)
            yield from (*plan.own, *plan.forward, *plan.backward)


@pytest.mark.parametrize("seed", range(30))
def test_layouts_that_keep_blocks_give_kernels_tiles_of_blocks(seed):
    rng = random.Random(seed)
    name, size = rng.choice(("contiguous", "zigzag", "balanced")), rng.randint(1, 4)
    tokens = LAYOUTS[name].chunks * 128 * rng.choice((1, 2))
    length = max(1, size * tokens - rng.choice((0, 0, 1, 100, 300)))
    block_size, share = rng.choice((128, 256, 384)), rng.choice((0.2, 0.5, 0.9))
    blocks = -(-length // block_size)
    on = [[rng.random() < share for _ in range(blocks)] for _ in range(blocks)]
    mask = BlockSparse(on, block_size, causal=rng.random() < 0.6)
    layout = make_layout(name, size, tokens, mask, length)
    assert kernel_needs(layout, mask) == {"blocks"}
    for tile in _every_tile(layout, length, mask):
        assert not isinstance(tile.pattern, Cells) or blocks_of(tile.pattern) is not None


@pytest.mark.parametrize(
    ("name", "size", "tokens", "keeps"),
    [
        ("zigzag", 1, 300, True),  # its chunks follow each other
        ("zigzag", 2, 256, True),
        ("zigzag", 2, 192, False),
        ("contiguous", 3, 128, True),
        ("contiguous", 3, 200, False),
        ("contiguous", 1, 201, True),
        ("striped", 1, 256, True),
        ("striped", 2, 256, False),
        ("balanced", 2, 1024, True),
        ("balanced", 2, 512, False),
    ],
)
def test_a_layout_that_cuts_inside_blocks_needs_cells(name, size, tokens, keeps):
    blocks = -(-size * tokens // 128)
    mask = BlockSparse(np.tri(blocks), 128)
    layout = make_layout(name, size, tokens, mask)
    assert kernel_needs(layout, mask) == ({"blocks"} if keeps else {"cells"})
    assert kernel_needs(layout, SlidingWindow(3)) == {"window"}
    found = [tile.pattern for tile in _every_tile(layout, size * tokens, mask)] if name != "striped" else []
    assert not found or keeps == all(blocks_of(p) is not None for p in found if isinstance(p, Cells))


def test_unknown_and_impossible_layouts_are_refused():
    with refused("layout", "'zigzga'", "'zigzag'", "contiguous"):
        make_layout("zigzga", 2, 4)
    with refused("'zigzag'", "multiple of 2", "got 5", "multiple of 4"):
        make_layout("zigzag", 2, 5)
    with refused("'balanced'", "multiple of 8", "got 12", "multiple of 16"):
        make_layout("balanced", 2, 12, Causal())
    with refused("'balanced'", "mask", "pass mask="):
        make_layout("balanced", 2, 16)
    with refused("mask", "7 tokens", "16 real", "16 tokens", "length=7"):
        make_layout("balanced", 2, 8, Documents([3, 4]))
    with refused("mask", "7 tokens", "9 real", "9 tokens", "length=7"):
        padded_layout("balanced", 2, 9, Documents([3, 4]))
    with refused("3 tokens", "4 ranks", "one token a rank"):
        padded_layout("striped", 4, 3)
    for name in sorted(LAYOUTS):
        for size, tokens in ((0, 8), (2, 0)):
            with refused("layout", f"{size} ranks", f"{tokens} tokens", "at least 1", "fix: "):
                make_layout(name, size, tokens, Causal())
    with refused("layout", "'None'", "contiguous"):
        padded_layout(None, 2, 4)


def test_real_length():
    assert real_length(2, 8, None) == 16
    assert real_length(2, 8, np.int64(16)) == 16 and type(real_length(2, 8, np.int64(3))) is int
    for wrong in (0, 17, -1):
        with refused("length", f"is {wrong}", "2 ranks", "8 local tokens", "1 to 16"):
            real_length(2, 8, wrong)
    for wrong in (3.0, "3"):
        with refused("length", "whole number", repr(wrong)):
            real_length(2, 8, wrong)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(1), SlidingWindow(5), SlidingWindow(1 << 70)])
def test_areas_by_formula_are_those_that_are_counted(name, mask):
    for size, tokens in ((1, 8), (3, 16), (4, 8)):
        for length in (1, 2, size * tokens // 2 + 1, size * tokens - 1, size * tokens):
            layout = make_layout(name, size, tokens, mask, length)
            seen = visible(mask, length)
            areas = [int(seen[real_positions(layout, rank, length)].sum()) for rank in range(size)]
            assert list(rank_areas(layout, length, mask)) == areas
            assert most_keys(mask, length) == int(seen.sum(1).max())
