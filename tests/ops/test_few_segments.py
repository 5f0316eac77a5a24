"""Kernels whose grids have a dimension for segments get so few at a time that the grid can exist; here, of few."""

import pytest
import torch

from bmburst_ops.flash import CAUSAL, Band, Gradients, Segments
from tests.ops.masked import Masked, gradient_bound
from tests.ops.package_stand_ins import fa2, fa3, fa4, limit_kernels, torchs
from tests.ops.tiles import EPSILON, assert_same, room, some_heads
from tests.pairs import pairwise

QUERIES, KEYS = 29, 31
EDGES = (0, 4, 4, 5, 9, 20, 20, 25, QUERIES), (0, 6, 9, 9, 15, 16, 22, 22, KEYS)
APART = (0, 0, 0, QUERIES, QUERIES), (0, 7, 9, 20, KEYS)  # pieces without queries


@pytest.mark.parametrize(
    ("stand_in", "most", "batch", "pattern"),
    pairwise(
        [fa2, fa3, torchs],
        [1, 2, 3, 7],
        [1, 2],
        [(Segments(band, *edges),) for band in (CAUSAL, Band(3, 1)) for edges in (EDGES, APART)],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)[:60]),
)
def test_few_segments_at_a_time(monkeypatch, stand_in, most, batch, pattern):
    made = stand_in(monkeypatch)
    tile = Masked(pattern, QUERIES, KEYS, 4, 2, 16, torch.bfloat16, batch, device="cpu")
    limit_kernels(monkeypatch, segments=most * batch)
    for into in (None, room(tile.q, some_heads)):
        part = tile.forward(made.kernel, into)
        assert_same(part, into)
        tile.hold_forward(part, EPSILON[torch.bfloat16])
    for into in (None, Gradients(*(some_heads(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))):
        gradients = tile.backward(made.kernel, into=into)
        assert_same(gradients, into)
        tile.hold_blind_rows(*part, gradients)
        tile.hold_backward(gradients, gradient_bound(made.kernel))


def test_few_heads_of_few_segments(monkeypatch):
    made = fa2(monkeypatch)
    tile = Masked(Segments(CAUSAL, *EDGES), QUERIES, KEYS, 4, 2, 16, torch.bfloat16, 1, device="cpu")
    limit_kernels(monkeypatch, offsets=2 * (20 + 4 * 128) * 64 + 1, segments=4)
    tile.hold_backward(tile.backward(made.kernel), gradient_bound(made.kernel))
    assert made.calls == 4


def test_fa4_gets_all_segments(monkeypatch):
    made = fa4(monkeypatch)
    limit_kernels(monkeypatch, segments=1)
    Masked(Segments(CAUSAL, *EDGES), QUERIES, KEYS, 4, 2, 16, torch.bfloat16, 1, device="cpu").forward(made.kernel)
    assert made.calls == 1
