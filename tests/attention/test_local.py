"""Tiles of one device are put together where they are asked for, and a query in none of them sees nothing."""

from types import SimpleNamespace

import pytest
import torch

from bmburst.attention.local import local_backward, local_forward
from bmburst.schedule.tiles import Span, Tile
from bmburst_ops.flash import FULL, BackwardInputs, Gradients, Partial, Segments
from bmburst_ops.flash.cpu import CpuKernel
from bmburst_ops.flash.kernel import ReferenceKernel
from tests.attention.oracle import draw
from tests.ops.tiles import assert_same, head_major, room, some_heads

QUERIES, KEYS = 18, 14
WHOLE = [Tile(Span(0, QUERIES), Span(0, KEYS), FULL, QUERIES * KEYS)]
SEVERAL = [
    Tile(Span(1, 12), Span(0, 9), Segments(FULL, (0, 3, 6, 11), (0, 4, 4, 9)), 37),
    Tile(Span(4, 7), Span(9, KEYS), FULL, 15),  # between segments of the one before
    Tile(Span(14, 16), Span(0, 2), FULL, 4),
]
SEEN = [((1, 4), (0, 4)), ((7, 12), (4, 9)), ((4, 7), (9, KEYS)), ((14, 16), (0, 2))]


@pytest.mark.parametrize("kernel", [CpuKernel(), ReferenceKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("tiles", "seen"), [(WHOLE, [((0, QUERIES), (0, KEYS))]), (SEVERAL, SEEN), ([], [])])
def test_tiles_equal_the_definition_wherever_results_go(kernel, tiles, seen):
    q = draw(1, 2, QUERIES, 4, 2, 8)[0]
    k, v = draw(2, 2, KEYS, 4, 2, 8)[1:3]
    mask = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    for rows, columns in seen:
        mask[slice(*rows), slice(*columns)] = True
    keys, values = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, keys) * 0.3).masked_fill(~mask, -torch.inf)
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), values), scores.logsumexp(-1)
    call = SimpleNamespace(kernel=kernel, scale=0.3, softcap=None)
    targets = room(q, some_heads, torch.float64)
    assert_same(local_forward(call, q, k, v, targets, tiles=tiles), targets)
    for results in (local_forward(call, q, k, v, tiles=tiles), targets):
        torch.testing.assert_close(results, wanted, rtol=1e-9, atol=1e-9)


class HeadsFirst(ReferenceKernel):
    """A kernel that gives fp32 with heads before tokens."""

    def forward(self, *args, **options):
        out, lse = super().forward(*args, **options)
        return Partial(head_major(out), lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", [WHOLE, SEVERAL], ids=len)
def test_results_are_dense_in_the_dtype_of_the_queries(tiles, dtype):
    q, k, v = (some_heads(torch.ones(2, n, 2, 8, dtype=dtype)) for n in (QUERIES, KEYS, KEYS))
    out, lse = local_forward(SimpleNamespace(kernel=HeadsFirst(), scale=0.3, softcap=None), q, k, v, tiles=tiles)
    assert out.is_contiguous() and out.dtype is dtype and lse.dtype is torch.float32


class Shares(ReferenceKernel):
    """A kernel whose gradients are one number for each call, the next one of some."""

    def __init__(self, shares):
        super().__init__()
        self.shares = iter(shares)

    def backward(self, given, scoring, *, deterministic, into=None):
        del scoring, deterministic
        share = next(self.shares)
        targets = into or [torch.empty_like(t) for t in (given.q, given.k, given.v)]
        return Gradients(*(target.fill_(share) for target in targets))


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 2**-7), (1.0, 2**-8, 2**-8)], ids=len)
def test_sums_of_gradients_are_rounded_once(shares):
    """1 + 2^-8 is 1 in bf16."""
    q, k, v = (torch.ones(1, n, 2, 8, dtype=torch.bfloat16) for n in (QUERIES, KEYS, KEYS))
    given = BackwardInputs(q, q, k, v, *[torch.zeros(1, 2, QUERIES)] * 2)
    call = SimpleNamespace(kernel=Shares(shares), scale=0.3, softcap=None, deterministic=False)
    for gradient in local_backward(call, given, tiles=WHOLE * len(shares)):
        assert gradient.dtype is torch.bfloat16 and bool((gradient == sum(shares)).all())
