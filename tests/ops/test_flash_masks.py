"""Every kernel under windows, segments and cells against the definition in fp64; and who refuses what."""

import math
import random

import pytest
import torch

from bmburst_ops.errors import KernelError
from bmburst_ops.flash import CAUSAL, FULL, KERNELS, BackwardInputs, Band, Gradients, Scoring, Segments, select_kernel
from tests.ops.masked import Masked, gradient_bound
from tests.ops.masks import a_cells, blocks, some
from tests.ops.tiles import DEVICE, EPSILON, assert_same, error, room, some_heads
from tests.pairs import in_turn
from tests.refusals import refused

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# queries, keys, heads, KV heads: odd, more queries than keys, one query
SIZES = [(37, 53, 4, 2), (53, 37, 3, 1), (1, 23, 2, 2), (23, 1, 2, 1), (41, 41, 2, 2)]


def takes(kernel, dtype, needs=frozenset()):
    q = torch.empty(1, 1, 1, 64, dtype=dtype, device=DEVICE)
    return kernel.refusal(q, q, needs) is None


DOUBLE = [kernel for kernel in KERNELS if takes(kernel, torch.float64)]
HALF = [k for k in KERNELS if takes(k, torch.bfloat16) and (DEVICE == "cuda" or k.name in ("cpu", "reference"))]
named = {"ids": lambda kernel: kernel.name}


@pytest.mark.parametrize("kernel", DOUBLE, **named)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_masks_are_exact(kernel, size, seed):
    for pattern in some(seed, *size[:2]):
        if not takes(kernel, torch.float64, pattern.needs):
            continue
        tile = Masked(pattern, *size, 16, torch.float64)
        out, lse = tile.forward(kernel)
        torch.testing.assert_close(out.cpu(), tile.out, **EXACT)
        torch.testing.assert_close(lse.cpu(), tile.lse, **EXACT)
        gradients = tile.backward(kernel)
        torch.testing.assert_close(gradients, tile.gradients, **EXACT, check_device=False)
        tile.hold_blind_rows(out, lse, gradients)


@pytest.mark.parametrize("kernel", DOUBLE, **named)
@pytest.mark.parametrize("pattern", [FULL, CAUSAL, Band(3, 2)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(9, 4), (4, 0), (0, 4)])
def test_more_queries_than_keys_and_nothing_at_all(kernel, pattern, queries, keys):
    tile = Masked(pattern, queries, keys, 2, 1, 16, torch.float64) if keys and queries else None
    if tile is None:
        q, k = (torch.ones(2, n, 2, 16, dtype=torch.float64, device=DEVICE) for n in (queries, keys))
        out, lse = kernel.forward(q, k, k, Scoring(pattern, 1.0))
        assert out.shape == q.shape and not out.any() and lse.shape == (2, 2, queries) and (lse == -torch.inf).all()
        gradients = kernel.backward(BackwardInputs(q, q, k, k, lse, lse * 0), Scoring(pattern, 1.0), deterministic=True)
        assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape] and not any(g.any() for g in gradients)
        return
    torch.testing.assert_close(tile.forward(kernel).out.cpu(), tile.out, **EXACT)
    gradients = tile.backward(kernel)
    torch.testing.assert_close(gradients, tile.gradients, **EXACT, check_device=False)
    tile.hold_blind_rows(*tile.forward(kernel), gradients)


RNG = random.Random(5)
LONG = 620  # above a slab of 512 rows, and several tiles of every GPU kernel
PACKED = tuple(sorted({0, LONG, *(RNG.randrange(LONG) for _ in range(300))}))
CUT = [0, *sorted(RNG.randrange(1, LONG) for _ in range(9)), LONG]
MASKS = {
    "window": Band(100, 0),
    "both sides": Band(70, 200),
    "band to the left": Band(130, None),
    "band to the right": Band(None, 30),
    "documents": Segments(CAUSAL, tuple(CUT), tuple(CUT)),
    "full documents": Segments(FULL, tuple(CUT), tuple(CUT)),
    "tiny documents": Segments(CAUSAL, PACKED, PACKED),
    "windows of documents": Segments(Band(40, 0), (0, 1, 1, 260, 500, LONG), (0, 1, 1, 300, 520, LONG)),
    "some see nothing": Segments(CAUSAL, (0, 200, 200, 520, LONG), (0, 0, 150, 400, LONG)),
    "two sides of documents": Segments(Band(20, 150), (0, 300, 420, LONG), (0, 100, 600, LONG)),
    "cells": a_cells(RNG, LONG, LONG, 7),
    "blocks": blocks(RNG, LONG, LONG, 64, 0.3),
}


@pytest.mark.parametrize("kernel", HALF, **named)
@pytest.mark.parametrize(
    ("mask", "heads", "kv_heads", "head_dim", "batch"), in_turn(MASKS, [(4, 4, 128, 1), (4, 2, 64, 2)])
)
def test_masks_are_as_exact_as_16_bits(kernel, mask, heads, kv_heads, head_dim, batch):
    pattern = MASKS[mask]
    if not takes(kernel, torch.bfloat16, pattern.needs):
        assert kernel.name in ("cpu", "cudnn", "torch", "fa2", "fa3", "fa4")  # named below
        return
    tile = Masked(pattern, LONG, LONG, heads, kv_heads, head_dim, torch.bfloat16, batch)
    out, lse = tile.forward(kernel)
    tile.hold_forward((out, lse), EPSILON[torch.bfloat16], 1e-4)
    gradients = tile.backward(kernel)
    tile.hold_backward(gradients, gradient_bound(kernel))
    tile.hold_blind_rows(out, lse, gradients)


@pytest.mark.parametrize("kernel", HALF, **named)
@pytest.mark.parametrize("pattern", [CAUSAL, Band(30, 0), Band(None, 20), Band(0, 200)], ids=str)
def test_the_first_of_more_queries_than_keys_see_nothing(kernel, pattern):
    """And a bound to the right of more than the keys is still one: the first of 420 queries see no key of 120."""
    if not takes(kernel, torch.bfloat16, pattern.needs):
        return
    tile = Masked(pattern, 420, 120, 4, 2, 64, torch.bfloat16)
    assert not tile.mask.any(1).all()
    out, lse = tile.forward(kernel)
    tile.hold_forward((out, lse), EPSILON[torch.bfloat16], 1e-4)
    gradients = tile.backward(kernel)
    tile.hold_backward(gradients, gradient_bound(kernel))
    tile.hold_blind_rows(out, lse, gradients)


@pytest.mark.parametrize("kernel", HALF, **named)
@pytest.mark.parametrize(("mask", "batch"), in_turn(["window", "documents", "some see nothing", "blocks"], [1, 2]))
def test_results_go_where_asked(kernel, mask, batch):
    pattern = MASKS[mask]
    if not takes(kernel, torch.bfloat16, pattern.needs):
        return
    tile = Masked(pattern, LONG, LONG, 2, 1, 64, torch.bfloat16, batch)
    wanted, gradients = tile.forward(kernel), tile.backward(kernel)

    def later_rows(tensor):  # a batch whose samples do not follow each other
        wide = torch.full((tensor.shape[0], tensor.shape[1] + 5, *tensor.shape[2:]), math.nan).to(tensor)
        return wide[:, 5:].copy_(tensor)

    for view in (some_heads, later_rows):
        tile.q, tile.k, tile.v, tile.grad = (view(t) for t in (tile.q, tile.k, tile.v, tile.grad))
        targets = room(tile.q, view)
        into = Gradients(*(view(torch.full_like(t, math.nan)) for t in (tile.q, tile.k, tile.v)))
        assert_same(tile.forward(kernel, into=targets), targets)
        assert_same(tile.backward(kernel, into=into), into)
        torch.testing.assert_close(targets.lse, wanted.lse)
        for ours, like in zip((targets.out, *into), (wanted.out, *gradients), strict=True):
            assert error(ours, like.double().cpu()) < EPSILON[torch.bfloat16]


@pytest.mark.parametrize("kernel", HALF, **named)
def test_deterministic_gradients_are_bit_equal(kernel):
    """On CPUs every call is one thread's for each head, whatever the mask."""
    for mask in ("window", "documents", "windows of documents", "blocks") if DEVICE == "cuda" else ("tiny documents",):
        q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
        try:
            select_kernel(kernel.name, q, q, True, MASKS[mask].needs)
        except KernelError:
            continue
        tile = Masked(MASKS[mask], LONG, LONG, 4, 2, 64, torch.bfloat16)
        first = tile.backward(kernel, deterministic=True)
        for _ in range(3 if DEVICE == "cuda" else 1):
            again = tile.backward(kernel, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_kernel_says_which_masks_it_cannot_do():
    q = torch.zeros(1, 4, 2, 16)
    for need in ({"cells"}, {"cells", "window"}):
        with refused("'cpu' | block-sparse masks | kernel='auto' | reference", error=KernelError):
            select_kernel("cpu", q, q, needs=frozenset(need))
    assert select_kernel("auto", q, q, needs=frozenset({"window", "segments"})).name == "cpu"
    assert select_kernel("auto", q, q, needs=frozenset({"cells"})).name == "reference"
    cells = a_cells(random.Random(0), 4, 4, 2)
    with refused("'cpu' | block-sparse masks | another kernel", error=KernelError):
        select_kernel("cpu", q, q).forward(q, q, q, Scoring(cells, 1.0))
