"""Kernels with 32-bit offsets get so few heads at a time that their tensors are within reach, here of small numbers."""

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
    for into in (None, room(tile.q, some_heads)):
        made.calls = 0
        part = tile.forward(made.kernel, into)
        assert made.calls == (calls if stand_in is cudnn else 1)
        assert_same(part, into)
        tile.hold_forward(part, EPSILON[torch.bfloat16])
    for into in (None, Gradients(*(some_heads(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))):
        made.calls = 0
        gradients = tile.backward(made.kernel, into=into)
        assert made.calls == calls
        assert_same(gradients, into)
        tile.hold_backward(gradients, gradient_bound(made.kernel))


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


def test_fa4_gets_all_heads(monkeypatch):
    """Its offsets have 64 bits."""
    made = fa4(monkeypatch)
    limit_kernels(monkeypatch, offsets=reach(1))
    tile = Masked(CAUSAL, TOKENS, TOKENS, 4, 2, 16, torch.bfloat16, BATCH, device="cpu")
    tile.forward(made.kernel)
    tile.backward(made.kernel)
    assert made.calls == 2
