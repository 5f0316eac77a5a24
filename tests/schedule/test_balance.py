"""Chunks are dealt evenly, and in nested runs where that costs nothing: a pair of ranks has one call a level."""

from collections import Counter
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.schedule.balance import UNEVEN, _nest, balance_chunks, deal_chunks
from bmburst.schedule.calls import kernel_calls
from bmburst.schedule.documents import Documents
from bmburst.schedule.gather_plan import Visibility, make_gather_plan, most_seen
from bmburst.schedule.layout import padded_layout
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.ring_schedule import distances, make_schedule, tiles
from bmburst.schedule.tiles import Span
from bmburst.schedule.tree import Tree
from bmburst.schedule.units import HeadShapes, Sizes

K = 1024


def _prompt(length, *answers):
    return Tree([-1, *(0,) * len(answers)], [length, *answers])


def _forest(trees, *lengths):
    return Tree([parent for i in range(trees) for parent in (-1, 3 * i, 3 * i)], lengths * trees)


DEEP = [-1, 0, 1, 1, 0, 4, 4]
MASKS = {
    "8 answers": _prompt(8 * K, *[K] * 8),
    "16 answers": _prompt(64 * K, *[4 * K] * 16),
    "2 answers": _prompt(64 * K, 4 * K, 4 * K),
    "short answers": _prompt(64 * K, 700, 655),
    "3 levels": Tree(DEEP, [n * K for n in (16, 4, 2, 2, 4, 2, 2)]),
    "3 long levels": Tree(DEEP, [n * K for n in (8, 16, 8, 8, 16, 8, 8)]),
    "pairs": _forest(4, 8 * K, 1500, 700),
    "many pairs": _forest(16, 2 * K, 300, 500),
    "a document": Documents([64 * K]),
}


def _sums(areas, owners, size):
    return np.bincount(owners, areas, size)


@pytest.mark.parametrize(("name", "size"), [pair for pair in product(MASKS, (2, 3, 4, 8)) if pair != ("pairs", 8)])
def test_two_ranks_have_a_call_a_level(name, size):
    """Chunks by work alone had up to 5 calls of two ranks under two levels."""
    mask = MASKS[name]
    layout = padded_layout("balanced", size, mask.length, mask)
    calls = [[len(tiles(layout, mask.length, mask, q, k)) for k in range(size)] for q in range(size)]
    assert max(map(max, calls)) == len(mask.levels)


@pytest.mark.parametrize(
    "mask", [_prompt(32771, 997, 2203, 5003, 4001), MASKS["pairs"]], ids=["1.05 of the mean", "keys of another tree"]
)
def test_runs_are_not_nested_at_any_price(mask):
    """One of 8 ranks would have more work, or ranks would have chunks of one tree more."""
    layout = padded_layout("balanced", 8, mask.length, mask)
    calls = max(len(tiles(layout, mask.length, mask, q, k)) for q in range(8) for k in range(8))
    assert calls > len(mask.levels)


@settings(deadline=None)
@given(st.integers(1, 6), st.sampled_from((2, 4, 8)), st.randoms(use_true_random=False))
def test_nested_runs_are_dealt_as_evenly(size, chunks, rng):
    count = size * chunks
    edges = sorted({0, count, *(rng.randint(0, count) for _ in range(3))})
    documents = [Span(*pair) for pair in pairwise(edges)]
    areas = [rng.randint(0, 9) + i for span in documents for i in range(len(span))]
    owners, even = deal_chunks(areas, size, documents, documents), balance_chunks(areas, size)
    assert Counter(owners) == dict.fromkeys(range(size), chunks)
    assert max(_sums(areas, owners, size)) <= (1 + UNEVEN) * max(_sums(areas, even, size))
    assert owners == even or all(_nest(owners[span.slice]) for span in documents)
    assert all({*owners[span.slice]} <= {*even[span.slice]} for span in documents)  # others would need its keys


@given(st.lists(st.integers(0, 3), max_size=12))
def test_runs_nest_unless_two_ranks_alternate_twice(owners):
    four = (tuple(owners[i] for i in places) for places in combinations(range(len(owners)), 4))
    assert _nest(owners) == (not any(a == c != b == d for a, b, c, d in four))


@pytest.mark.parametrize("layout_name", ["balanced", "zigzag"])
@pytest.mark.parametrize("name", ["8 answers", "3 levels", "2 answers", "pairs", "a document"])
def test_the_calls_of_the_cost_model_are_those_of_the_executors(name, layout_name):
    mask, size, rank = MASKS[name], 4, 2
    if layout_name == "zigzag" and len(mask.levels) == 1:
        return  # a formula
    layout = padded_layout(layout_name, size, mask.length, mask)
    shapes = HeadShapes(
        layout=layout, degree=1, batch=1, heads=4, kv_heads=2, head_dim=16, itemsize=2, statistics_itemsize=4
    )
    visible = Visibility(layout, mask.length, mask)

    def calls(strategy, stops, backward):
        return kernel_calls(Sizes(strategy, shapes), visible, stops, backward=backward)

    ring = make_schedule(layout, mask.length, mask, rank, "kv")
    stops = len(distances(layout, mask.length, mask, "kv"))
    for backward in (False, True):
        assert calls(Strategy(1, "ring", "kv"), stops, backward) == sum(len(step.tiles) for step in ring.steps)
    for most in (0, 1):
        plan = make_gather_plan(shapes, mask.length, mask, rank, most)
        strategy, units = Strategy(1, "gather", "kv", most_kv_heads=most), len(plan.units)
        stops = 2 if most_seen(visible) else 1
        gathers = stops > 1
        assert calls(strategy, stops, False) == len(plan.own) + gathers * units * len(plan.forward)
        expected = len(plan.own) + len(plan.backward)
        assert calls(strategy, stops, True) == (units * expected if gathers else len(plan.own))
