"""Trees: levels and tiles show what the definition says, in few calls; "balanced" fits them; bad ones are refused."""

import pickle
import random

import numpy as np
import pytest
import torch

from bmburst import Causal, Documents, PrefixLM, SlidingWindow, Tree
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.gather_plan import Visibility, pulled
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.layout import LAYOUTS, key_areas, padded_layout, rank_areas, real_positions
from bmburst.schedule.mask import BlockSparse, Full
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.tiles import make_tiles, seen_by
from bmburst.schedule.tree import first_positions
from bmburst.schedule.units import HeadShapes
from bmburst.sequence import SequenceShard
from tests.mask_oracle import random_tree, visible
from tests.pairs import long
from tests.refusals import refused
from tests.schedule.test_tiles import hold

GROUP = Tree([-1, 0, 0, 2, 2, -1], [4, 2, 1, 3, 1, 2])


def drawn(seed, longest=70):
    rng = random.Random(seed)
    length = rng.randint(1, longest)
    return random_tree(rng, length), length


def test_what_a_tree_shows():
    """Written out, so that the oracle cannot be wrong in the same way."""
    rows = ["".join(".x"[int(seen)] for seen in row) for row in visible(Tree([-1, 0, 0, 2], [2, 1, 1, 2]), 6)]
    assert rows == ["x.....", "xx....", "xxx...", "xx.x..", "xx.xx.", "xx.xxx"]


@pytest.mark.parametrize("seed", [*range(30), *long(*range(30, 100))])
def test_levels_are_masks_that_share_no_pair(seed):
    tree, length = drawn(seed)
    tree.require(length)
    every, shown = np.arange(length), np.zeros((length, length), int)
    for level in tree.levels:
        start, stop = level.rows(every, length)
        assert (np.diff(start) >= 0).all() and (np.diff(stop) >= 0).all() and (start <= stop).all()
        shown += (start[:, None] <= every) & (every < stop[:, None])
    assert (shown == visible(tree, length)).all()
    start, stop = tree.rows(every, length)
    hull = visible(tree, length)
    assert (start == hull.argmax(1)).all() and (stop == every + 1).all()
    assert len(tree.levels) == 1 + max(tree.depths)


@pytest.mark.parametrize("seed", [*range(40), *long(*range(40, 120))])
def test_every_visible_pair_is_in_one_tile_and_a_level_is_a_call(seed):
    tree, length = drawn(seed)
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    for name in LAYOUTS:
        if length < size:
            continue
        layout = padded_layout(name, size, length, tree)
        seen, by = np.zeros((length, length), int), rng.choice(("queries", "keys"))
        for q in range(size):
            for k in range(size):
                queries, keys = (real_positions(layout, rank, length) for rank in (q, k))
                tiles = make_tiles(tree, length, queries, keys, by)
                # Under "balanced", chunks of two ranks may alternate in a node: stairs, as in a long document.
                stairs = make_tiles(Documents(tree.lengths), length, queries, keys, by) if name == "balanced" else ()
                assert len(tiles) <= len(tree.levels) + max(0, len(stairs) - 1), (name, by)
                for tile in tiles:
                    shown = hold(tile, len(queries), len(keys))
                    seen[np.ix_(queries[tile.queries.slice], keys[tile.keys.slice])] += shown
        assert (seen == visible(tree, length)).all(), (name, by)
        areas = [int(visible(tree, length)[real_positions(layout, rank, length)].sum()) for rank in range(size)]
        assert list(rank_areas(layout, length, tree)) == areas
        columns = [int(visible(tree, length)[:, real_positions(layout, rank, length)].sum()) for rank in range(size)]
        assert list(key_areas(layout, length, tree)) == columns


@pytest.mark.parametrize("seed", [*range(20), *long(*range(20, 60))])
def test_neighbours_see_exactly_ancestors_and_what_follows(seed):
    tree, length = drawn(seed)
    rng = random.Random(seed)
    first = rng.randrange(length)
    last = rng.randrange(first, length)
    seen = np.zeros(length, int)
    for span in seen_by(tree, length, first, last):
        seen[span.slice] += 1
    assert (seen == visible(tree, length)[first : last + 1].any(0)).all()


def test_a_rank_pulls_the_prompt_but_no_other_answer():
    tree = Tree([-1, 0, 0, 0], [8, 8, 8, 8])
    layout = padded_layout("contiguous", 4, 32)
    seen = [sum(len(piece.tokens) for piece in pulled(Visibility(layout, 32, tree), rank)) for rank in range(4)]
    assert seen == [0, 8, 8, 8]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_without_branches_equals_plain_masks(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))]
    forest, documents, one = Tree([-1] * len(lengths), lengths), Documents(lengths), Tree([-1], [sum(lengths)])
    layout = padded_layout("zigzag", 2, max(2, sum(lengths)))
    queries, keys = (real_positions(layout, rank, sum(lengths)) for rank in (0, 1))
    for tree, plain in ((forest, documents), (one, Documents([sum(lengths)]))):
        tiles = [make_tiles(mask, sum(lengths), queries, keys) for mask in (tree, plain)]
        assert [(t.queries, t.keys, t.area, str(t.pattern)) for t in tiles[0]] == [
            (t.queries, t.keys, t.area, str(t.pattern)) for t in tiles[1]
        ]
    assert (visible(one, sum(lengths)) == visible(Causal(), sum(lengths))).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_positions_continue_those_of_the_parent(size):
    assert first_positions(GROUP).tolist() == [0, 4, 4, 5, 5, 0] and GROUP.leaves == (1, 3, 4, 5)
    expected = np.array([0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 5, 0, 1])
    for rank in range(size):
        shard = SequenceShard.cut(13, layout="zigzag", size=size, rank=rank)
        here = real_positions(shard.layout, rank, 13)
        part = shard.batch(torch.arange(13)[None], torch.arange(13)[None], GROUP)
        assert (part.positions[0, : len(here)].numpy() == expected[here]).all()
        shard = shard.under(GROUP)
        here = real_positions(shard.layout, rank, 13)
        _, labels, positions = shard.read(lambda places: (np.array(places), np.array(places)), GROUP)
        assert (positions[: len(here)] == expected[here]).all() and (labels[: len(here)] == here).all()


def test_labels_of_a_tree_are_given():
    shard = SequenceShard.cut(13, layout="zigzag", size=1, rank=0)
    with refused("a tree", "several next tokens", "fix: pass labels"):
        shard.batch(torch.arange(13)[None], None, GROUP)
    shard.batch(torch.arange(13)[None], None, Tree([-1, -1], [6, 7]))


@pytest.mark.parametrize(
    ("prompt", "answers", "size"), [(8192, [1024] * 8, 8), (65536, [4096] * 16, 8), (8192, [8192] * 8, 4)]
)
def test_balanced_balances_a_tree(prompt, answers, size):
    tree = Tree([-1, *(0,) * len(answers)], [prompt, *answers])
    areas = rank_areas(padded_layout("balanced", size, tree.length, tree), tree.length, tree)
    zigzag = rank_areas(padded_layout("zigzag", size, tree.length), tree.length, tree)
    assert max(areas) / (sum(areas) / size) < 1.01 < max(zigzag) / (sum(zigzag) / size)


def test_trees_are_values():
    same = Tree(torch.tensor(GROUP.parents), np.array(GROUP.lengths))
    assert same == GROUP and hash(same) == hash(GROUP) and pickle.loads(pickle.dumps(GROUP)) == GROUP
    assert str(same) == str(GROUP) and "2 trees of 6 nodes, 3 levels, 13 tokens" in str(GROUP)
    other = Tree([-1, 0, 0, 0, 0, -1], GROUP.lengths)
    assert other != GROUP and str(other) != str(GROUP)
    assert GROUP & Causal() == GROUP == Full() & GROUP & GROUP


@pytest.mark.parametrize(
    "other", [SlidingWindow(4), Documents([6, 7]), PrefixLM(3), BlockSparse([[1] * 4] * 4, 4), Tree([-1, 0], [6, 7])]
)
def test_joins_that_are_not_exact_are_refused(other):
    for masks in ((GROUP, other), (other, GROUP)):
        with refused("tree", "cannot be joined", str(other).split("(")[0], "fix:"):
            masks[0] & masks[1]


@pytest.mark.parametrize(
    ("parents", "lengths", "words"),
    [
        ([], [], ["lengths", "empty"]),
        ([-1, 0], [3], ["2 parents", "1 length", "fix:"]),
        ([-1, 0], [3, 0], ["document 1", "0 tokens"]),
        ([0], [3], ["node 0", "parent 0", "-1", "no node is before it", "before its children"]),
        ([-1, 2, 0], [1, 1, 1], ["node 1", "parent 2", "0 to 0"]),
        ([-1, -2], [1, 1], ["node 1", "parent -2"]),
        ([-1, 0, 0, 1], [1, 1, 1, 1], ["node 3", "parent 1", "depth-first"]),
        ([-1, -1, 0], [1, 1, 1], ["node 2", "parent 0", "depth-first"]),
        ([-1, 0.5], [1, 1], ["parents", "whole numbers"]),
    ],
)
def test_bad_trees_are_refused(parents, lengths, words):
    with refused(*words):
        Tree(parents, lengths)


def test_another_number_of_tokens_is_refused():
    with refused("13 tokens", "14", "length=13"):
        GROUP.require(14)


def test_the_cost_counts_the_calls_and_merges_of_levels():
    """One prompt with one answer shows what a causal mask shows: the same FLOPs, and a merge."""
    hardware = load_hardware("h200")
    layout = padded_layout("zigzag", 2, 65536)
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "itemsize": 2, "statistics_itemsize": 4}
    shapes = HeadShapes(layout=layout, degree=1, batch=1, **sizes)
    costs = {}
    for name, mask in (("causal", Documents([65536])), ("tree", Tree([-1, 0], [32768, 32768]))):
        problem = Problem(shapes, 65536, mask, Placement("peer"), hardware)
        costs[name] = problem.cost(problem.in_units(Strategy(1, "ring", "kv")))
    plain, tree = costs["causal"], costs["tree"]
    assert 0 < tree.forward.joining - plain.forward.joining < 0.03 * plain.forward.kernel
    assert tree.forward.kernel == pytest.approx(plain.forward.kernel, rel=0.01)
