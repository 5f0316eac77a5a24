"""Our Triton attention under windows, segments and cells: small ones in the interpreter, on GPUs larger ones too."""

import random

import numpy as np
import pytest
import torch

from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Band, Cells, Gradients, Scoring, Segments
from bmburst_ops.flash.inputs import copy_to_device
from bmburst_ops.flash.triton import TritonKernel, mask_arguments, tile_lists
from bmburst_ops.pattern import cell_of, transposed, visible_ranges
from tests.ops.masked import Masked
from tests.ops.masks import a_cells, blocks, some, visible
from tests.ops.tiles import DEVICE, assert_same, error, room, some_heads

KERNEL = TritonKernel()
ERRORS = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2}
RNG = random.Random(1)
QUERIES, KEYS = (45, 68) if DEVICE == "cpu" else (777, 1111)  # several blocks of every size
CUT = [(0, 20, 20, 21, 35, 45), (0, 18, 24, 25, 25, 68)]  # no queries, a single one, no keys
EDGES = [tuple(edge * count // edges[-1] for edge in edges) for edges, count in zip(CUT, (QUERIES, KEYS), strict=True)]
SINGLES = (*range(30), QUERIES), (*range(0, 60, 2), KEYS)
PATTERNS = {
    "window": Band(QUERIES // 4, 0),
    "both sides": Band(QUERIES // 3, QUERIES // 5),
    "left": Band(KEYS // 3, None),
    "right": Band(None, KEYS // 4),
    "documents": Segments(CAUSAL, *EDGES),
    "full documents": Segments(FULL, *EDGES),
    "windows of documents": Segments(Band(7, 3), *EDGES),
    "single tokens": Segments(CAUSAL, *SINGLES),
    "cells": a_cells(RNG, QUERIES, KEYS, 6),
    "blocks": blocks(RNG, QUERIES, KEYS, 16, 0.4),
    "blocks of a tile": blocks(RNG, QUERIES, KEYS, 128 if DEVICE == "cuda" else 32, 0.6),
    "nothing": blocks(RNG, QUERIES, KEYS, 16, 0.0),
}


def hold(pattern, queries, keys, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32):
    tile = Masked(pattern, queries, keys, heads, kv_heads, head_dim, dtype, 1)
    out, lse = tile.forward(KERNEL)
    torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=1e-5, atol=1e-5)
    gradients = tile.backward(KERNEL)
    for name, ours, wanted in zip("oqkv", (out, *gradients), (tile.out, *tile.gradients), strict=True):
        # Where every query sees one key at most, queries have no gradient: in fp64 what is left is its rounding.
        is_nothing = wanted.abs().max() < 1e-12
        assert (ours.abs().max() if is_nothing else error(ours, wanted)) < ERRORS[dtype], name
    tile.hold_blind_rows(out, lse, gradients)
    return tile


@pytest.mark.parametrize("name", PATTERNS)
def test_masks_equal_the_definition(name):
    hold(PATTERNS[name], QUERIES, KEYS)


@pytest.mark.parametrize("name", ["both sides", "windows of documents", "cells"])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_other_shapes_and_dtypes(name, dtype):
    """More queries than keys, three query heads a KV head, a head dim that is padded."""
    pattern = PATTERNS[name]
    if isinstance(pattern, Segments):
        pattern = Segments(pattern.band, pattern.keys, pattern.queries)
    if isinstance(pattern, Cells):
        pattern = a_cells(RNG, KEYS, QUERIES, 4, 0.7)
    hold(pattern, KEYS, QUERIES, 3, 1, 40, dtype)


@pytest.mark.parametrize("seed", range(2 if DEVICE == "cpu" else 20))
def test_random_masks(seed):
    for pattern in some(seed, 18, 35):
        hold(pattern, 18, 35)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
@pytest.mark.parametrize("pattern", [CAUSAL, Band(2, 0)], ids=str)
def test_empty_sides(queries, keys, pattern):
    q, k = (torch.ones(1, n, 1, 16, device=DEVICE) for n in (queries, keys))
    out, lse = KERNEL.forward(q, k, k, Scoring(pattern, 1.0))
    assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()
    gradients = KERNEL.backward(BackwardInputs(q, q, k, k, lse, lse), Scoring(pattern, 1.0), deterministic=True)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape] and not any(g.any() for g in gradients)


def test_results_go_where_asked():
    tile = hold(PATTERNS["windows of documents"], QUERIES, KEYS)
    targets = room(tile.q, some_heads)
    into = Gradients(*(some_heads(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))
    assert_same(tile.forward(KERNEL, into=targets), targets)
    assert_same(tile.backward(KERNEL, into=into), into)
    torch.testing.assert_close(targets.lse.double().cpu(), tile.lse, rtol=1e-5, atol=1e-5)
    for ours, wanted in zip((targets.out, *into), (tile.out, *tile.gradients), strict=True):
        assert error(ours, wanted) < ERRORS[torch.float32]


def test_full_and_causal_read_no_vectors():
    q, k = (torch.empty(1, n, 1, 16, device=DEVICE) for n in (40, 70))
    for pattern, kind in ((FULL, "full"), (CAUSAL, "causal"), (Band(69, 39), "full"), (Band(None, 39), "full")):
        mask = mask_arguments(pattern, q, k, "queries", 32, 16)
        assert mask == (kind, None, None, None, None, None, 0, None, None)
    assert mask_arguments(Band(68, 0), q, k, "queries", 32, 16).kind == "rows"
    assert mask_arguments(CAUSAL, k, q, "queries", 32, 16).kind == "rows"  # some queries see nothing


def test_vectors_are_sent_once():
    q = torch.empty(1, QUERIES, 1, 16, device=DEVICE)
    k = torch.empty(1, KEYS, 1, 16, device=DEVICE)
    for name in ("documents", "cells"):
        pattern = PATTERNS[name]
        first, again = (mask_arguments(pattern, q, k, "keys", 32, 16) for _ in range(2))
        assert all(a is b for a, b in zip(first, again, strict=True) if isinstance(a, torch.Tensor))
    equal = Segments(CAUSAL, *EDGES)
    assert (
        mask_arguments(equal, q, k, "queries", 32, 16).starts
        is mask_arguments(PATTERNS["documents"], q, k, "queries", 32, 16).starts
    )


@pytest.mark.parametrize("seed", range(8))
def test_tiles_are_listed_once_and_open_ones_are(seed):
    rng = random.Random(seed)
    queries, keys, rows, columns = 41, 67, 8, 5
    for pattern in (
        a_cells(rng, queries, keys, 4),
        blocks(rng, queries, keys, 7, 0.5),
        blocks(rng, queries, keys, 40, 0.9),
    ):
        cells = cell_of(pattern.query_edges, 0, queries), cell_of(pattern.key_edges, 0, keys)
        seen, whole = visible_ranges(pattern, queries, keys), visible(pattern, queries, keys)
        hold_tiles(tile_lists(seen, *cells, pattern.cells, rows, columns), whole, rows, columns)
        turned = tile_lists(transposed(seen, keys), *cells[::-1], pattern.cells.T, rows, columns)
        hold_tiles(turned, whole.T, rows, columns)


def hold_tiles(lists, whole, rows, columns):
    tiles, ends = lists
    assert len(ends) == 2 * -(-len(whole) // rows) + 1 and ends[-1] == len(tiles)
    opened = 0
    for block in range(len(ends) // 2):
        part = whole[block * rows : (block + 1) * rows]
        opens, others = tiles[ends[2 * block] : ends[2 * block + 1]], tiles[ends[2 * block + 1] : ends[2 * block + 2]]
        listed = np.concatenate((opens, others)).tolist()
        assert len(set(listed)) == len(listed)
        for first in range(0, whole.shape[1], columns):
            tile = part[:, first : first + columns]
            assert first in listed or not tile.any()
            assert (first in opens) <= bool(tile.all() and tile.shape[1] == columns)
        opened += len(opens)
    assert opened or not whole.all()


def test_vectors_begin_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        (vector,) = copy_to_device([np.arange(5)], torch.device(DEVICE)).here()
    assert vector.tolist() == [0, 1, 2, 3, 4]
