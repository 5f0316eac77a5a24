"""What packages that are not installed here are told of windows and segments, by stand-ins with their signatures."""

import random

import pytest
import torch

from bmburst_ops.flash import CAUSAL, FULL, Band, Gradients, Segments
from bmburst_ops.flash.fa2_fa3 import FlashAttention3Kernel
from tests.ops.masked import Masked, gradient_bound
from tests.ops.masks import some
from tests.ops.package_stand_ins import fa2, fa3, fa4, older_fa3, torchs
from tests.ops.tiles import EPSILON, assert_same, error, every_second, one_number_off, room, some_heads, wider_room
from tests.pairs import pairwise

QUERIES, KEYS = 37, 53
CUT = (0, 10, 10, 11, 25, QUERIES), (0, 20, 31, 32, 32, KEYS)
CASES = [
    (Band(5, 0), QUERIES, KEYS),
    (Band(60, 0), KEYS, QUERIES),  # a bound that binds nothing, and queries that see nothing
    (Band(0, 200), 220, 120),  # to the right further than there are keys, and yet a bound
    (Band(None, 3), QUERIES, KEYS),
    (Band(1, None), 88, 44),
    (Segments(Band(4, None), (0, 37, 40), (0, 9, 20)), 40, 20),
    (CAUSAL, KEYS, QUERIES),
    (CAUSAL, QUERIES, KEYS),
    (FULL, QUERIES, KEYS),
    (Segments(CAUSAL, *CUT), QUERIES, KEYS),
    (Segments(FULL, *CUT), QUERIES, KEYS),
    (Segments(Band(4, 2), *CUT[::-1]), KEYS, QUERIES),
    (Segments(Band(None, 13), (0, 17, 40), (0, 12, 20)), 40, 20),
    (Segments(CAUSAL, (0, 1, 1, 2), (0, 3, 4, 9)), 2, 9),  # one query at most, and a segment without
    (Segments(CAUSAL, (0, 5, 5), (0, 0, 9)), 5, 9),  # nobody sees anything
    *((pattern, 29, 31) for seed in range(2) for pattern in some(seed, 29, 31, ("window", "segments"))),
]


def as_it_is(tensor):
    return tensor


def later_rows(tensor):
    """Samples that do not follow each other."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 3, *tensor.shape[2:]), torch.nan).to(tensor)
    return wide[:, 3:].copy_(tensor)


@pytest.mark.parametrize(
    ("stand_in", "case", "batch"),
    pairwise([fa2, fa3, older_fa3, fa4, torchs], [(case,) for case in CASES], [1, 2]),
    ids=lambda value: getattr(value, "__name__", str(value)[:60]),
)
def test_packages_are_told_the_mask(monkeypatch, stand_in, case, batch):
    made = stand_in(monkeypatch)
    rng, is_plain = random.Random(str(case)), case[0] in (CAUSAL, FULL) and case[1] <= case[2]
    view = some_heads if is_plain else rng.choice((as_it_is, some_heads, one_number_off, later_rows))
    softcap = None if stand_in is torchs else rng.choice((None, 0.7))
    dtype, head_dim = rng.choice(((torch.bfloat16, 16), (torch.float16, 64)))
    tile = Masked(*case, 4, 2, head_dim, dtype, batch, softcap, device="cpu")
    tile.statistics = tuple(every_second(each) for each in tile.statistics)
    tile.q, tile.k, tile.v, tile.grad = (view(t) for t in (tile.q, tile.k, tile.v, tile.grad))
    narrow = room(tile.q, view)
    for into in (None, narrow, wider_room(tile.q)):
        part = tile.forward(made.kernel, into=into)
        assert_same(part, into)
        # With offsets, samples of a batch lie in one row, as they do not where they are asked for.
        is_one_row = batch == 1 or not isinstance(tile.pattern, Segments)
        can_write = stand_in is fa4 and into is narrow and is_one_row and tile.mask.any()
        assert (made.asked[1] is not None) == can_write
        assert not tile.mask.any() or error(part.out, tile.out) < EPSILON[dtype]
        torch.testing.assert_close(part.lse.double(), tile.lse, rtol=1e-5, atol=1e-5)
    for deterministic in (False, not isinstance(made.kernel, FlashAttention3Kernel)):
        into = (
            Gradients(*(view(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))
            if deterministic
            else None
        )
        gradients = tile.backward(made.kernel, deterministic, into=into)
        assert_same(gradients, into)
        if into and is_plain and stand_in is not torchs:  # nothing in between
            assert all(a is b for a, b in zip(made.gradients, into, strict=True))
        tile.hold_blind_rows(*part, gradients)
        for ours, wanted in zip(gradients, tile.gradients, strict=True):
            assert not wanted.any() or error(ours, wanted) < gradient_bound(made.kernel)
        assert made.deterministic in (None, deterministic)
    assert made.calls == (5 if tile.mask.any() else 0)
    assert made.softcaps <= {softcap}
