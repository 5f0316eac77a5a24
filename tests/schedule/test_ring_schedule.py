"""Every schedule is the mask: each visible (query, key) pair exactly once, no other pair, by brute force."""

import random
from itertools import accumulate

import numpy as np
import pytest

from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import (
    LAYOUTS,
    Contiguous,
    make_layout,
    padded_layout,
    rank_areas,
    real_positions,
)
from bmburst.schedule.mask import BlockSparse, Causal, Full
from bmburst.schedule.ring_schedule import distances, have_visible_pair, make_schedule
from bmburst.schedule.tiles import Span
from bmburst.schedule.units import HeadShapes, backward_bytes, choose_ring_tensors
from bmburst_ops.pattern import CAUSAL, Segments
from tests.mask_oracle import random_mask, visible
from tests.ops.masks import visible as shown


def held(layout, rank, length):
    """Return the positions of a rank's real tokens."""
    every = [run.start + i * run.stride for run in layout.runs(rank) for i in range(run.tokens)]
    return [position for position in every if position < length]


def check_every_pair(layout, length, mask, ring_tensors):
    """Hold the schedules of all ranks to the definition; return the distances with work."""
    size, seen = layout.size, np.zeros((length, length), dtype=int)
    steps, worked = distances(layout, length, mask, ring_tensors), {0}
    tokens = [held(layout, rank, length) for rank in range(size)]
    for rank in range(size):
        schedule = make_schedule(layout, length, mask, rank, ring_tensors)
        assert schedule.size == size
        assert [(step.distance, step.owner) for step in schedule.steps] == [(d, (rank - d) % size) for d in steps]
        check_hops(schedule)
        for step in schedule.steps:
            query_rank, key_rank = (rank, step.owner) if ring_tensors == "kv" else (step.owner, rank)
            worked |= {step.distance} if step.tiles else set()
            for tile in step.tiles:
                pairs = shown(tile.pattern, len(tile.queries), len(tile.keys)).numpy()
                assert tile.area == pairs.sum() > 0
                check_needs(tile.pattern.needs, mask)
                queries, keys = tokens[query_rank][tile.queries.slice], tokens[key_rank][tile.keys.slice]
                seen[np.ix_(queries, keys)] += pairs
    assert (seen == visible(mask, length)).all()
    return worked


def check_hops(schedule):
    """Blocks are at each step's distance when it comes, and at home at the end."""
    places = list(accumulate(schedule.hops, initial=0))
    assert places[:-1] == [step.distance for step in schedule.steps]
    assert places[-1] == schedule.size
    assert all(hop > 0 for hop in schedule.hops)


def check_needs(needs, mask):
    """What is asked of a kernel is what the mask told when one was chosen.

    One that does segments does bands, and one that does cells does blocks.
    """
    implied = {"segments": "window", "cells": "blocks"}
    assert needs <= mask.needs | {easier for need, easier in implied.items() if need in mask.needs}


@pytest.mark.parametrize("seed", range(160))
def test_schedule_is_exactly_the_mask(seed):
    rng = random.Random(seed)
    name, size, ring_tensors = rng.choice(sorted(LAYOUTS)), rng.randint(1, 8), rng.choice(["kv", "q"])
    length = rng.randint(size, size + 60)
    mask = random_mask(rng, length)
    layout = padded_layout(name, size, length, mask)
    worked = check_every_pair(layout, length, mask, ring_tensors)
    if mask.blocks is None and name != "striped":  # where no cells are off, no step is for nothing
        assert set(distances(layout, length, mask, ring_tensors)) == worked


@pytest.mark.parametrize("seed", range(80))
def test_ranks_meet_where_one_sees_a_key_of_another(seed):
    rng = random.Random(seed)
    name, size = rng.choice(sorted(LAYOUTS)), rng.randint(1, 6)
    length = rng.randint(size, size + 50)
    mask = random_mask(rng, length)
    layout, seen = padded_layout(name, size, length, mask), visible(mask, length)
    for query in range(size):
        for key in range(size):
            met = have_visible_pair(layout, length, mask, query, key)
            truth = seen[np.ix_(held(layout, query, length), held(layout, key, length))].any()
            assert met >= truth  # never is work missed
            if mask.blocks is None and name != "striped":
                assert met == truth
            assert have_visible_pair(layout, length, Full(), query, key) == bool(
                held(layout, query, length) and held(layout, key, length)
            )


def test_ranks_meet_late_in_their_stripes():
    """Only the last four tokens see each other, each rank's second; or the last two of four."""
    striped, late = make_layout("striped", 4, 2), Documents([1] * 4 + [4])
    assert check_every_pair(striped, 8, late, "kv") == {0, 1, 2, 3}
    assert all(have_visible_pair(striped, 8, late, 3, rank) for rank in range(4))
    assert distances(make_layout("striped", 4, 1), 4, Documents([2, 2]), "kv") == (0, 1)


def test_blocks_decide_who_meets():
    """To the block, on ranks of several blocks each."""
    on = np.zeros((8, 8), dtype=bool)
    on[0, 6] = on[3, 2] = True
    layout = make_layout("contiguous", 4, 10)
    mask = BlockSparse(on, 5)
    met = {(q, k) for q in range(4) for k in range(4) if have_visible_pair(layout, 40, mask, q, k)}
    assert met == {(0, 3), (1, 1)}
    assert distances(layout, 40, mask, "kv") == (0, 1)
    assert distances(layout, 40, mask & Causal(), "kv") == (0,)
    assert [[tile.area for tile in step.tiles] for step in make_schedule(layout, 40, mask, 0, "kv").steps] == [[], [25]]


@pytest.mark.parametrize("name", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_work_is_balanced_to_a_diagonal(name, size):
    layout = make_layout(name, size, tokens=32)
    schedules = (make_schedule(layout, 32 * size, Causal(), rank, "kv") for rank in range(size))
    areas = [sum(tile.area for step in schedule.steps for tile in step.tiles) for schedule in schedules]
    assert max(areas) - min(areas) <= size * 32
    assert rank_areas(layout, 32 * size, Causal()) == tuple(areas)


def test_a_document_over_the_seam_of_two_chunks_is_in_one_call():
    """Rank 1 of zigzag holds chunks 1 and 2, here of 8 tokens: 8 to 23."""
    mask = Documents([6, 4, 10, 12])
    schedule = make_schedule(make_layout("zigzag", 2, 16), 32, mask, 1, "kv")
    (tile,) = schedule.steps[0].tiles
    assert tile == (Span(0, 16), Span(0, 16), Segments(CAUSAL, (0, 2, 12, 16), (0, 2, 12, 16)), 3 + 55 + 10)
    (tile,) = schedule.steps[1].tiles  # of the document that began on rank 0
    assert (tile.queries, tile.keys, tile.area) == (Span(0, 2), Span(6, 8), 4)


def test_a_schedule_is_made_once_and_is_its_own():
    """Cached by value: neither layouts of one size nor masks of one kind share a schedule."""
    layout = make_layout("zigzag", 2, 4)
    first = make_schedule(layout, 8, Documents([3, 5]), 0, "kv")
    assert make_schedule(make_layout("zigzag", 2, 4), 8, Documents((3, 5)), 0, "kv") is first
    assert make_schedule(make_layout("striped", 2, 4), 8, Documents([3, 5]), 0, "kv") != first
    assert make_schedule(layout, 8, Documents([5, 3]), 0, "kv") != first
    assert make_schedule(layout, 8, BlockSparse([[1, 0], [0, 1]], 4), 0, "kv") != make_schedule(
        layout, 8, BlockSparse([[1, 1], [0, 1]], 4), 0, "kv"
    )
    assert "Segments" in repr(first) or "Band" in repr(first)
    assert real_positions(layout, 1, 7).tolist() == [2, 3, 4, 5]


def test_bytes_follow_the_published_break_even():
    """prior work: queries travel for less than keys where heads / kv_heads is below about 1.49 (fp32 gradients)."""

    def shapes(size, heads, kv_heads):
        layout = Contiguous(size, 1024)
        sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
        return HeadShapes(layout=layout, degree=1, **sizes, itemsize=2, statistics_itemsize=4)

    assert choose_ring_tensors(shapes(64, 32, 32)) == "q"
    assert shapes(4, 32, 32).k_bytes == 1024 * 32 * 128 * 2
    for heads, kv_heads, ring_tensors in ((47, 32, "q"), (48, 32, "kv"), (32, 8, "kv")):
        assert choose_ring_tensors(shapes(1000, heads, kv_heads)) == ring_tensors
        alone = shapes(1, heads, kv_heads)
        assert backward_bytes(alone, "kv") == backward_bytes(alone, "q") == 0
        assert choose_ring_tensors(alone) == "q"  # a tie
