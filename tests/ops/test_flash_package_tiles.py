"""Tiles that ranks compute, drawn at random from masks and layouts, by stand-ins for packages not installed here."""

import random

import numpy as np
import pytest
import torch

from bmburst.schedule.layout import LAYOUTS, kernel_needs, padded_layout, real_positions
from bmburst.schedule.tiles import make_tiles
from bmburst_ops.flash import Band, Gradients, kernels_on, select_kernel
from tests.mask_oracle import KINDS, random_mask, random_tree
from tests.ops.another_machine import AnotherMachine
from tests.ops.masked import Masked, gradient_bound
from tests.ops.package_stand_ins import cudnn, fa2, fa3, fa4, older_fa3, torchs
from tests.ops.test_flash_packages import query
from tests.ops.tiles import EPSILON

STAND_INS = (fa2, fa3, older_fa3, fa4, torchs, cudnn)
LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20)]


def drawn(rng, kinds):
    """Return a mask, a layout of 1 to 5 ranks, and the tiles of two ranks, sometimes of a turn and a KV cache."""
    length, size = rng.choice((7, 23, 61)), rng.randint(1, 5)
    is_turn = rng.random() < 0.2
    if rng.random() < 0.1:
        mask = random_tree(rng, length)
    else:
        mask = random_mask(rng, length, ("causal", "window") if is_turn else kinds)
    layout = padded_layout(rng.choice(list(LAYOUTS)), size, length, mask)
    ranks = [rng.randrange(size) for _ in range(2)]
    queries, keys = (real_positions(layout, rank, length) for rank in ranks)
    if is_turn and len(mask.levels) == 1:
        start = rng.randrange(length)
        queries, keys = (
            np.arange(first + rank, stop, size)
            for first, stop, rank in zip((start, 0), (length, start), ranks, strict=True)
        )
    return mask, layout, make_tiles(mask, length, queries, keys, rng.choice(("queries", "keys")))


def kind(tile):
    """Return what the rules of packages depend on: bounds, and which side is longer, of all that a tile consists of."""
    pattern, whole = tile.pattern, (len(tile.queries), len(tile.keys))
    if isinstance(pattern, Band):
        return _kind(pattern, *whole)
    sides = zip(*(np.diff(side).tolist() for side in (pattern.queries, pattern.keys)), strict=True)
    return frozenset(_kind(pattern.band, *side) for side in sides)


def _kind(band, queries, keys):
    bounds = tuple(None if bound is None else min(bound, 1) + (bound >= keys) for bound in band)
    return *bounds, (queries > keys + 1) - (queries < keys), min(queries, 2), min(keys, 2)


@pytest.mark.parametrize("seed", [0, *LONG])
def test_packages_are_right_for_tiles_of_ranks(monkeypatch, seed):
    """One tile of each kind. Rare ones are those in which a package's rule for a window matters."""
    rng, tiles = random.Random(seed), {}
    for _ in range(1000):
        mask, _, found = drawn(rng, [name for name in KINDS if name != "blocks"])
        if mask.blocks is None:
            tiles |= {kind(tile): tile for tile in found}
    bands = [tile for tile in tiles.values() if isinstance(tile.pattern, Band)]
    others = [tile for tile in tiles.values() if not isinstance(tile.pattern, Band)]
    for tile in bands + others[:20]:
        sizes = len(tile.queries), len(tile.keys), *rng.choice(((4, 2, 16), (2, 2, 8), (3, 1, 24)))
        masked = Masked(tile.pattern, *sizes, torch.bfloat16, rng.choice((1, 2)), device="cpu")
        for stand_in in STAND_INS:
            if stand_in is not cudnn or not tile.pattern.needs:
                with monkeypatch.context() as patch:
                    hold(masked, stand_in(patch).kernel, rng.random() < 0.5)


def hold(tile, kernel, has_targets):
    """Compare a kernel with the definition of a tile."""
    part = tile.forward(kernel)
    tile.hold_forward(part, EPSILON[torch.bfloat16])
    into = Gradients(*(torch.full_like(t, torch.nan) for t in (tile.q, tile.k, tile.v))) if has_targets else None
    gradients = tile.backward(kernel, into=into)
    tile.hold_blind_rows(*part, gradients)
    for ours, wanted in zip(gradients, tile.gradients, strict=True):
        # Where a query sees one key, a gradient is the rounding of terms that cancel.
        assert (ours.double() - wanted).norm() < gradient_bound(kernel) * (wanted.norm() + 0.5 * wanted.numel() ** 0.5)


GPUS = {"A100": (8, 0), "Ada": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 50": (12, 0)}
INSTALLED = ({}, {"triton": None}, {"flash-attn": (2, 8, 3), "triton": None}, {"flash_attn_interface": None})


@pytest.mark.parametrize("name", GPUS)
def test_auto_takes_a_kernel_that_can_compute_each_tile(name):
    """Kernels are chosen for the needs of a mask in a layout, before its tiles are known."""
    rng, count = random.Random(name), 0
    for _ in range(150):
        mask, layout, tiles = drawn(rng, KINDS)
        needs = kernel_needs(layout, mask) | ({"softcap"} if rng.random() < 0.2 else set())
        for installed in INSTALLED:
            q, able = query(rng.choice((64, 128, 256))), kernels_on(AnotherMachine(GPUS[name], installed))
            kernel = select_kernel("auto", q, q, rng.random() < 0.5, needs, kernels=able)
            for tile in tiles:
                assert kernel.refusal(q, q, tile.pattern.needs | needs & {"softcap"}) is None
                count += 1
    assert count
