"""Which cells there are, what they are called, and their arithmetic."""

import math

from benchmarks.attention.cells import Cell, Selection, accuracy_ranks, forward_flops, list_cells, one_gpu_cell, sizes

NAMES = ("one-gpu", "ours", "ulysses", "ours-balanced", "ring-flash-attn-llama3")


def selection(**changes):
    return Selection(**{"ranks": (8,), "device": "cuda", "methods": NAMES, **changes})


def test_names_are_those_of_earlier_files():
    keys = {cell.key for cell in list_cells(selection())}
    assert keys >= {
        "sequence/65536/mha/causal/ours@8",
        "sequence/1048576/gqa/full/ulysses@8",
        "batch/8x65536/mha/full/one-gpu@8",
        "block/131072/gqa/causal/ours@8",
        "accuracy/4096/gqa/full/ulysses@4",
        "accuracy/4096/mha/causal/one-gpu@1",
        "documents/524288/mha/ours-balanced@8",
        "window/262144/gqa/ulysses@8",
        "accuracy/4096/gqa/documents/ring-flash-attn-llama3@2",
    }
    small = {"device": "cpu", "dtype": "float32", "tokens": (256,), "heads": ((4, 2),), "ranks": (2,)}
    (cell,) = list_cells(selection(**small, globs=("sequence/*causal/ulysses",)))
    assert cell.key == "sequence/256/4-2x128/causal/ulysses@2-cpu-float32"


def test_no_two_cells_share_a_key():
    cells = [*list_cells(selection()), *list_cells(selection(ranks=(4,))), *list_cells(selection(device="cpu"))]
    by_key = {cell.key: cell for cell in cells}
    assert all(by_key[cell.key] == cell for cell in cells)
    assert len(list_cells(selection())) == len({cell.key for cell in list_cells(selection())})


def test_suites_have_the_shapes_they_promise():
    cells = list_cells(selection())
    lengths = {c.tokens for c in cells if c.suite == "sequence"}
    assert lengths == {32768, 65536, 131072, 262144, 524288, 1048576}
    assert {c.batch for c in cells if c.suite == "batch"} == {1, 2, 4, 8}
    assert {(c.heads, c.kv_heads) for c in cells if c.suite != "block"} == {(32, 32), (32, 8)}
    for suite, tokens in (("documents", {131072, 524288}), ("window", {262144})):
        own = [c for c in cells if c.suite == suite]
        assert {c.tokens for c in own} == tokens and {c.mask for c in own} == {suite}
        assert {c.method for c in own} >= {"one-gpu", "ours", "ulysses"}
    assert {c.mask for c in cells if c.suite == "accuracy"} == {"causal", "full", "documents", "window"}
    assert {c.mask for c in cells if c.method in ("ours-balanced", "ring-flash-attn-llama3")} == {"documents"}
    assert {c.mask for c in list_cells(selection(masks=("window",)))} == {"window"}
    assert {c.ranks for c in cells if c.suite == "accuracy"} == {1, 2, 4, 8}
    assert {c.ranks for c in cells if c.method == "one-gpu" and c.suite == "accuracy"} == {1}


def test_globs_choose_and_stars_cross_slashes():
    assert {c.suite for c in list_cells(selection(globs=("batch/*", "block/*")))} == {"batch", "block"}
    assert all(
        c.tokens == 65536 and c.method == "ours" for c in list_cells(selection(globs=("sequence/65536/*/ours",)))
    )
    assert list_cells(selection(globs=("sequence/1/*",))) == ()


def test_accuracy_is_measured_on_powers_of_two_and_all():
    assert [accuracy_ranks(n) for n in (1, 2, 3, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_one_gpu_gets_a_ranks_share_of_the_work():
    for cell in list_cells(selection(globs=("sequence/*",))):
        share, one = forward_flops(cell) / cell.ranks, one_gpu_cell(cell)
        assert 0.97 * share < forward_flops(one) <= share
        assert one.tokens % 128 == 0 and one.ranks == 1 and one == one_gpu_cell(one)


def test_flops_and_sizes_are_those_of_visible_pairs_and_of_a_ranks_tensors():
    shape = {"suite": "batch", "method": "ours", "tokens": 64, "batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}
    pairs = sum(q + 1 for q in range(64))  # half of all, but for the diagonal
    flops = forward_flops(Cell(**shape, ranks=1, device="cpu"))
    assert math.isclose(flops, 2 * 2 * 3 * 4 * 8 * pairs, rel_tol=1 / 32)
    own = sizes(Cell(**shape, ranks=2, device="cuda"))
    assert (own.q, own.k, own.statistics, own.wide) == (3 * 32 * 4 * 8 * 2, 3 * 32 * 2 * 8 * 2, 3 * 32 * 4 * 4, 2)
