"""Kernels with values of another head dim than keys, against the definition in fp64: in their own way, or padded."""

from random import Random

import pytest
import torch

from bmburst_ops.flash import CAUSAL, FULL, Band, Gradients, Partial, Segments, able_kernels, select_kernel
from bmburst_ops.flash.padded import PaddedKernel
from tests.ops.masked import Masked, gradient_bound
from tests.ops.masks import a_cells
from tests.ops.package_stand_ins import fa2, fa3, fa4
from tests.ops.tiles import DEVICE, EPSILON, assert_same, error, some_heads, some_statistics
from tests.pairs import in_turn

GPU = DEVICE == "cuda"
QUERIES, KEYS = (301, 430) if GPU else (35, 40)
DOCUMENTS = (0, 10, 10, 21, QUERIES), (0, 12, 20, 20, KEYS)  # without queries, without keys
PATTERNS = {
    "causal": CAUSAL,
    "full": FULL,
    "windows of documents": Segments(Band(7, 3), *DOCUMENTS),
    "cells": a_cells(Random(4), QUERIES, KEYS, 4),
}
WIDTHS = [(192, 128), (96, 64), (64, 96), (24, 16), (16, 64)] if GPU else [(24, 16), (8, 24), (16, 5)]
SOFTCAP = 0.7


def needs_of(pattern, softcap):
    return PATTERNS[pattern].needs | (set() if softcap is None else {"softcap"})


def able(pattern, softcap):
    """Return the kernels that are not refused here, and ours in the interpreter."""
    q = torch.empty(1, 1, 1, 192, dtype=torch.bfloat16 if GPU else torch.float64, device=DEVICE)
    return sorted({*able_kernels(q, q, needs=needs_of(pattern, softcap)), "triton"})


CASES = [(name, pattern, None) for pattern in PATTERNS for name in able(pattern, None)]
CASES += [(name, "windows of documents", SOFTCAP) for name in able("windows of documents", SOFTCAP)]


@pytest.mark.parametrize(("name", "pattern", "softcap", "head_dim", "value_dim"), in_turn(CASES, WIDTHS))
def test_equals_the_definition(name, pattern, softcap, head_dim, value_dim):
    dtype = torch.bfloat16 if GPU else torch.float32 if name == "triton" else torch.float64
    seen, needs = PATTERNS[pattern], needs_of(pattern, softcap)
    tile = Masked(seen, QUERIES, KEYS, 2, 1, head_dim, dtype, 2 if GPU else 1, softcap, value_dim=value_dim)
    kernel = select_kernel(name, tile.q, tile.k, False, needs, value_dim)
    assert kernel.name == name
    wide = torch.promote_types(dtype, torch.float32)
    rooms = (
        Partial(some_heads(torch.zeros_like(tile.grad)), some_statistics(tile.lse.to(DEVICE, wide))),
        Gradients(*(some_heads(torch.zeros_like(t)) for t in (tile.q, tile.k, tile.v))),
    )
    bounds = {torch.float64: (1e-12, 1e-12), torch.float32: (3e-6, 3e-6)}
    of_output, of_gradients = bounds.get(dtype, (2 * EPSILON[torch.bfloat16], gradient_bound(kernel)))
    for into, grads_into in (rooms, (None, None)):
        out, lse = tile.forward(kernel, into=into)
        gradients = tile.backward(kernel, into=grads_into)
        if into:
            assert_same((out, lse, *gradients), (*into, *grads_into))
        assert out.shape[-1] == value_dim and error(out, tile.out) < of_output
        torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=1e-5, atol=1e-5)
        tile.hold_backward(gradients, of_gradients)
        tile.hold_blind_rows(out, lse, gradients)


@pytest.mark.parametrize(
    ("stand_in", "kv_heads", "pads"), [(fa2, 2, True), (fa3, 2, True), (fa4, 2, True), (fa4, 6, False)]
)
def test_packages_get_what_they_take(monkeypatch, stand_in, kv_heads, pads):
    """Both widths as they are, or equal ones."""
    kernel = stand_in(monkeypatch).kernel
    kernel = PaddedKernel(kernel) if pads else kernel
    tile = Masked(CAUSAL, 37, 53, 6, kv_heads, 96, torch.bfloat16, value_dim=64, device="cpu")
    assert error(tile.forward(kernel).out, tile.out) < EPSILON[tile.dtype]
    tile.hold_backward(tile.backward(kernel), 1.5 * EPSILON[tile.dtype])
