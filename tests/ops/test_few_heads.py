"""Kernels with 32-bit offsets, or a grid over segments, get so few heads and segments at a time as they can do.

Here their limits are small numbers.
"""

import pytest
import torch

from bmburst_ops.errors import KernelError
from bmburst_ops.flash import CAUSAL, Band, Gradients, Segments
from tests.ops.masked import Masked, gradient_bound
from tests.ops.package_stand_ins import cudnn, fa2, fa3, fa4, limit_kernels, older_fa3, torchs
from tests.ops.tiles import EPSILON, assert_same, error, room, some_heads
from tests.pairs import pairwise
from tests.refusals import refused

TOKENS, BATCH, WIDTH, PADDING = 41, 2, 64, 128
DOCUMENTS = (0, 9, 9, 30, TOKENS)


def reach(most, documents=1):
    """Return the numbers that an offset must reach for calls of this many heads."""
    return most * BATCH * (TOKENS + documents * PADDING) * WIDTH + 1


def far_rows(tensor):
    """The same numbers in rows that lie far from each other."""
    return torch.zeros(*tensor.shape[:3], 100 * tensor.shape[3]).to(tensor)[..., : tensor.shape[3]].copy_(tensor)


@pytest.mark.parametrize(
    ("stand_in", "heads", "kv_heads", "most", "calls", "pattern"),
    pairwise(
        [fa2, fa3, older_fa3, torchs, cudnn],
        [(6, 6, 4, 2), (6, 2, 4, 2), (6, 2, 2, 4), (5, 1, 2, 3), (6, 2, 6, 1)],
        [(CAUSAL,), (Band(7, 0),), (Segments(CAUSAL, DOCUMENTS, DOCUMENTS),)],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_few_heads_at_a_time(monkeypatch, stand_in, heads, kv_heads, most, calls, pattern):
    if stand_in is cudnn and pattern is not CAUSAL:
        return
    made = stand_in(monkeypatch)
    tile = Masked(pattern, TOKENS, TOKENS, heads, kv_heads, 16, torch.bfloat16, BATCH, device="cpu")
    documents = len(DOCUMENTS) - 1 if isinstance(pattern, Segments) else 1
    limit_kernels(monkeypatch, offsets=reach(most, documents))
    hold(tile, made.kernel)
    assert made.calls == 2 * (calls if stand_in is cudnn else 1) + 2 * calls


def hold(tile, kernel):
    """Compare a kernel with the definition of a tile, where it says where results go and where it does not."""
    for into in (None, room(tile.q, some_heads)):
        part = tile.forward(kernel, into)
        assert_same(part, into)
        tile.hold_forward(part, EPSILON[torch.bfloat16])
    for into in (None, Gradients(*(some_heads(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))):
        gradients = tile.backward(kernel, into=into)
        assert_same(gradients, into)
        tile.hold_blind_rows(*part, gradients)
        tile.hold_backward(gradients, gradient_bound(kernel))


@pytest.mark.parametrize("stand_in", [fa2, fa3, torchs, cudnn], ids=lambda stand_in: stand_in.__name__)
def test_a_head_that_does_not_fit_is_refused(monkeypatch, stand_in):
    made = stand_in(monkeypatch)
    tile = Masked(CAUSAL, TOKENS, TOKENS, 2, 1, 16, torch.bfloat16, BATCH, device="cpu")
    limit_kernels(monkeypatch, offsets=reach(1) - 1)
    with refused(f"'{made.kernel.name}' | 2^31 numbers | 338 x 64 | another kernel", error=KernelError):
        tile.backward(made.kernel)
    assert made.calls == 0


def test_cudnn_gets_nothing_that_is_far_away(monkeypatch):
    made = cudnn(monkeypatch)
    limit_kernels(monkeypatch, offsets=reach(4))
    tile = Masked(CAUSAL, TOKENS, TOKENS, 4, 2, 16, torch.bfloat16, BATCH, device="cpu")
    tile.q, tile.k, tile.v, tile.grad = (far_rows(t) for t in (tile.q, tile.k, tile.v, tile.grad))
    assert error(tile.forward(made.kernel).out, tile.out) < EPSILON[torch.bfloat16]
    tile.hold_backward(tile.backward(made.kernel), gradient_bound(made.kernel))
    assert made.calls == 2


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
    hold(tile, made.kernel)


def test_few_heads_of_few_segments(monkeypatch):
    made = fa2(monkeypatch)
    tile = Masked(Segments(CAUSAL, *EDGES), QUERIES, KEYS, 4, 2, 16, torch.bfloat16, 1, device="cpu")
    limit_kernels(monkeypatch, offsets=2 * (20 + 4 * 128) * 64 + 1, segments=4)
    tile.hold_backward(tile.backward(made.kernel), gradient_bound(made.kernel))
    assert made.calls == 4


@pytest.mark.parametrize("pattern", [CAUSAL, Segments(CAUSAL, DOCUMENTS, DOCUMENTS)], ids=["heads", "segments"])
def test_fa4_gets_everything(monkeypatch, pattern):
    """Its offsets have 64 bits, and its grid none of segments."""
    made = fa4(monkeypatch)
    limit_kernels(monkeypatch, offsets=reach(1), segments=1)
    tile = Masked(pattern, TOKENS, TOKENS, 4, 2, 16, torch.bfloat16, BATCH, device="cpu")
    tile.forward(made.kernel)
    tile.backward(made.kernel)
    assert made.calls == 2
