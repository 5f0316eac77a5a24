"""Every kernel that has a softcap, under every kind of mask, against the definition in fp64."""

import random
from itertools import product

import pytest
import torch

from bmburst_ops.decode import decode_attention
from bmburst_ops.flash import CAUSAL, FULL, KERNELS, Band, Segments, select_kernel
from tests.ops.masked import Masked, gradient_bound
from tests.ops.masks import a_cells
from tests.ops.tiles import DEVICE, EPSILON, error

ON_GPU = DEVICE == "cuda"
CAPPED = frozenset({"softcap"})
# queries, keys, heads, KV heads, head dim: one of each, as FlashAttention-4 compiles each anew, and each softcap.
SIZE = (403, 617, 4, 2, 64) if ON_GPU else (37, 53, 2, 1, 16)
CUT = (0, 10, 11, 30, SIZE[0]), (0, 20, 21, 48, SIZE[1])
MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": Band(SIZE[1] // 5, 0),
    "documents": Segments(CAUSAL, *CUT),
    "windows of documents": Segments(Band(7, 0), *CUT),
    "cells": a_cells(random.Random(1), *SIZE[:2], 5),
}
# Scores of standard deviation 1 that are mostly bent, and Gemma 2's bound of scores of standard deviation 16.
CAPS = {"bent": (0.7, 1.0), "gemma 2": (50.0, 4.0)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def able(needs):
    """Return the kernels that run here, each with its dtypes; on CPUs Triton's is its interpreter."""
    found = []
    for kernel in KERNELS:
        for dtype in DTYPES:
            q = torch.empty(1, 1, 1, SIZE[-1], dtype=dtype, device=DEVICE)
            if kernel.refusal(q, q, needs) is None:
                found.append((kernel, dtype))
    return found


def takes_long(kernel, dtype, mask="", cap=""):
    """Whether it is one more run of the interpreter or of FlashAttention-4's compiler that shows little more."""
    if kernel.name == "fa4":
        return (dtype, cap) != (torch.bfloat16, "bent") and mask != "windows of documents"
    is_interpreted = kernel.name == "triton" and not ON_GPU
    return is_interpreted and (dtype, cap) != (torch.float32, "bent") and mask != "windows of documents"


ABLE = able(CAPPED)
TOGETHER = [
    pytest.param(kernel, dtype, mask, cap, id=f"{kernel.name}-{str(dtype)[6:]}-{mask}-{cap}")
    for mask, cap, (kernel, dtype) in product(MASKS, CAPS, ABLE)  # kernels in turn: they share the definition
    if (kernel, dtype) in able(CAPPED | MASKS[mask].needs) and not takes_long(kernel, dtype, mask, cap)
]


def bounds(kernel, dtype, softcap):
    """Return relative errors of output and gradients, and an absolute one of log-sum-exps.

    Packages take tanh from an instruction that is off by 2^-11 of it: a score by up to softcap * 2^-11, its weight by
    as much of itself, and the slope 1 - tanh^2 by twice 2^-11. Triton's interpreter cuts bf16 off where GPUs round.
    """
    if dtype is torch.float64:
        return 1e-12, 1e-12, 1e-11
    rough = softcap * 2**-11 if kernel.name in ("fa4", "fa3", "fa2") else 0.0
    if dtype is torch.float32:  # a score of 50 is good to 4e-6
        return 2e-6 * max(1, softcap / 5), 4e-6 * max(1, softcap / 5), 2e-6 * max(1, softcap / 5)
    out = EPSILON[dtype] * (1 if ON_GPU or kernel.name != "triton" else 2) + rough
    return out, gradient_bound(kernel) * EPSILON[dtype] / EPSILON[torch.bfloat16] + rough + 2**-10, 1e-4 + rough


@pytest.mark.parametrize(("kernel", "dtype", "mask", "cap"), TOGETHER)
def test_equals_the_definition(kernel, dtype, mask, cap):
    softcap, spread = CAPS[cap]
    tile = Masked(MASKS[mask], *SIZE, dtype, softcap=softcap, spread=spread)
    of_out, of_gradients, of_lse = bounds(kernel, dtype, softcap)
    out, lse = tile.forward(kernel)
    assert error(out, tile.out) < of_out
    torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=0, atol=of_lse)
    gradients = tile.backward(kernel)
    tile.hold_backward(gradients, of_gradients)
    tile.hold_blind_rows(out, lse, gradients)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [each for each in ABLE if not takes_long(*each, cap="bent")],
    ids=lambda each: getattr(each, "name", str(each)[6:]),
)
def test_scores_far_beyond_the_softcap(kernel, dtype):
    """They are the softcap or its negative, also where exp of a score is more than any number, and their slope is 0."""
    tile = Masked(CAUSAL, *SIZE, dtype, softcap=0.7, spread=30.0)
    out, lse = tile.forward(kernel)
    of_out, _, of_lse = bounds(kernel, dtype, 0.7)
    assert error(out, tile.out) < of_out
    torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=0, atol=of_lse)
    assert all(gradient.isfinite().all() for gradient in tile.backward(kernel))


@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 128), ("window", 256)])
@pytest.mark.parametrize(("kernel", "dtype"), [each for each in ABLE if each[1] in (torch.bfloat16, torch.float64)])
def test_heads_of_gemma_2(kernel, dtype, mask, head_dim):
    """Of 9 and 27 billion parameters: two query heads a KV head, each of 256 or 128."""
    if kernel.name == "triton" and not ON_GPU:
        return
    tile = Masked(MASKS[mask], *SIZE[:2], 4, 2, head_dim, dtype, softcap=50.0, spread=4.0)
    of_out, of_gradients, of_lse = bounds(kernel, dtype, 50.0)
    out, lse = tile.forward(kernel)
    assert error(out, tile.out) < of_out
    torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=0, atol=of_lse)
    tile.hold_backward(tile.backward(kernel), of_gradients)


def test_a_softcap_far_above_all_scores_changes_nothing():
    q = torch.zeros(1, 1, 1, SIZE[-1], device=DEVICE)
    kernel = select_kernel("auto", q, q, needs=CAPPED)
    plain = Masked(CAUSAL, *SIZE, torch.float32)
    plain.softcap = 1e3
    assert error(plain.forward(kernel).out, plain.out) < 1e-4
    plain.hold_backward(plain.backward(kernel), 1e-4)


@pytest.mark.parametrize("softcap", [1e6, 1e30])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_scores_keep_their_digits_under_a_large_softcap(name, softcap):
    """The difference of numbers as large as the softcap would have none of a score's, and weigh all keys alike."""
    tile = Masked(CAUSAL, *SIZE, torch.float32, softcap=softcap)
    kernel = select_kernel(name, tile.q, tile.k, needs=CAPPED)
    out, lse = tile.forward(kernel)
    assert error(out, tile.out) < 1e-6
    torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=0, atol=2e-6)
    tile.hold_backward(tile.backward(kernel), 2e-6)


@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_token_after_a_cache(kernel, splits):
    """Of three sequences one sees nothing, and one a window; tokens beyond are NaN."""
    rng = torch.Generator().manual_seed(3)
    device = DEVICE if kernel == "triton" else "cpu"
    q, cache = torch.randn(3, 4, 16, generator=rng), torch.full((2, 3, 40, 2, 16), torch.nan)
    spans = ((0, 33), (5, 5), (7, 40))
    for i, (start, stop) in enumerate(spans):
        cache[:, i, start:stop] = torch.randn(2, stop - start, 2, 16, generator=rng)
    starts, stops = (torch.tensor(side, dtype=torch.int32, device=device) for side in zip(*spans, strict=True))
    options = {"starts": starts, "scale": 0.3, "softcap": 0.7, "kernel": kernel, "num_splits": splits}
    out, lse = (t.double().cpu() for t in decode_attention(q.to(device), *cache.to(device), stops, **options))
    for i, head in product(range(3), range(4)):
        k, v = (t[i, slice(*spans[i]), head // 2].double() for t in cache)
        scores = 0.7 * torch.tanh(k @ q[i, head].double() * 0.3 / 0.7)
        torch.testing.assert_close(lse[i, head], scores.logsumexp(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[i, head], scores.softmax(0) @ v, rtol=1e-5, atol=1e-5)
