"""What is not a number stays among tokens that see each other, in every kernel, forward and backward."""

from itertools import product

import numpy as np
import pytest
import torch

from bmburst_ops.biased import BiasedReferenceKernel, BiasedTritonKernel, Pairs
from bmburst_ops.flash import (
    CAUSAL,
    FULL,
    BackwardInputs,
    Band,
    Cells,
    Gradients,
    Partial,
    Scoring,
    Segments,
    able_kernels,
    select_kernel,
)
from bmburst_ops.flash.mask_corrections import isolate_backward, isolate_forward
from tests.ops.biased_oracle import draw, draw_bee
from tests.ops.masks import visible
from tests.ops.test_biased import ours
from tests.ops.tiles import DEVICE
from tests.pairs import in_turn, long

LENGTHS = (5, 1, 9, 30, 3) if DEVICE == "cpu" else (5, 1, 300, 9, 130, 3)
EDGES = tuple(np.cumsum((0, *LENGTHS)).tolist())
WHERE = (EDGES[2] + 2,) if DEVICE == "cpu" else (EDGES[2] + 2, EDGES[4] + 1)
CELLS = Cells(
    *(np.repeat(edges, LENGTHS) for edges in (EDGES[:-1], EDGES[1:])), *[np.array(EDGES)] * 2, np.eye(len(LENGTHS)) > 0
)
PATTERNS = {
    "documents": Segments(CAUSAL, EDGES, EDGES),
    "full documents": Segments(FULL, EDGES, EDGES),
    "windows of documents": Segments(Band(4, 0), EDGES, EDGES),
    "cells": CELLS,
    "causal": CAUSAL,
}
HEAD_DIM = 16 if DEVICE == "cpu" else 64
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def kernels(pattern):
    q = torch.zeros(1, 1, 1, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    return {*able_kernels(q, q, needs=pattern.needs), "triton"}


def passes(kernel, q, k, v, grad, pattern, softcap=None):
    """Return output, statistics and gradients of a kernel."""
    scoring = Scoring(pattern, 0.2, softcap)
    out, lse = kernel.forward(q, k, v, scoring)
    delta = (out.float() * grad.float()).sum(-1).transpose(1, 2).contiguous()
    given = BackwardInputs(grad, q, k, v, lse, delta)
    gradients = kernel.backward(given, scoring, deterministic=False)
    return [out, lse.transpose(1, 2), *gradients]


@pytest.mark.parametrize(
    ("pattern", "kernel", "name", "value"),
    in_turn(
        [(name, kernel) for name, each in PATTERNS.items() for kernel in sorted(kernels(each))],
        [*((name, float("nan")) for name in ("v", "grad", "q", "k")), ("v", float("inf"))],
    ),
)
def test_stays_in_its_document(pattern, kernel, name, value):
    pattern = PATTERNS[pattern]
    generator = torch.Generator().manual_seed(0)
    names, heads, count = ("q", "k", "v", "grad"), (4, 2, 2, 4), EDGES[-1]
    clean = {
        each: torch.randn(2, count, heads[at], HEAD_DIM, generator=generator).to(DEVICE, DTYPE)
        for at, each in enumerate(names)
    }
    chosen = select_kernel(kernel, clean["q"], clean["k"], needs=pattern.needs)
    wanted = passes(chosen, **clean, pattern=pattern)
    assert all(x.isfinite().all() for x in wanted)
    mask = visible(pattern, count, count).to(DEVICE)
    for where in WHERE:
        document = next(at for at, end in enumerate(EDGES[1:]) if where < end)
        begin, end = (0, count) if pattern == CAUSAL else EDGES[document : document + 2]
        spoiled = {each: x.clone() for each, x in clean.items()}
        spoiled[name][1, where, 1, 3] = value
        found = passes(chosen, **spoiled, pattern=pattern)
        for x, y in zip(found, wanted, strict=True):
            # Of other samples and documents. Packages add gradients in any order; documents computed again are rounded.
            exact = {"rtol": 2e-2, "atol": 1e-2} if kernel in ("fa4", "fa3", "fa2", "torch") else {"rtol": 0, "atol": 0}
            torch.testing.assert_close((x[0], x[1, :begin], x[1, end:]), (y[0], y[1, :begin], y[1, end:]), **exact)
        if kernel == "triton" and name == "v" and pattern != CAUSAL:
            assert torch.equal(found[0][1, :, 2:4].isfinite().flatten(1).all(1), ~mask[:, where])
        assert value == float("inf") or not all(x[1, begin:end].isfinite().all() for x in found)


@pytest.mark.parametrize(
    ("pattern", "name", "softcap"),
    [
        ("windows of documents", "v", None),
        ("documents", "v", 0.2),  # which mends all results
        *long(*product(("documents", "full documents"), ("v",), (None,))),
        *long(*product(("documents", "full documents", "windows of documents"), ("q", "k", "grad"), (None,))),
    ],
)
def test_documents_computed_again(pattern, name, softcap):
    """Of results spoiled in all documents, those before one that is not finite are mended, and no others touched."""
    pattern = PATTERNS[pattern]
    names, heads, count = ("q", "k", "v", "grad"), (4, 2, 2, 4), EDGES[-1]
    widths = (24, 24, 16, 16) if DEVICE == "cpu" else (96, 96, 64, 64)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    given = {
        each: torch.randn(2, count, heads[at], widths[at], generator=generator).to(DEVICE, dtype)
        for at, each in enumerate(names)
    }
    kernel = select_kernel("triton", given["q"], given["k"], needs=pattern.needs)
    scoring = Scoring(pattern, 0.2, softcap)
    wanted = passes(kernel, **given, pattern=pattern, softcap=softcap)
    where = EDGES[3] + 1
    given[name][1, where, :, 3] = float("nan")
    q, k, v, grad = given.values()
    out, lse = kernel.forward(q, k, v, scoring)
    delta = (out.float() * grad.float()).sum(-1).transpose(1, 2).contiguous()
    spoiled = [torch.full_like(x, -7.0) for x in (out, q, k, v)]
    isolate_forward(Partial(spoiled[0], lse), q, k, v, scoring)
    isolate_backward(Gradients(*spoiled[1:]), BackwardInputs(grad, q, k, v, lse, delta), scoring)
    mended = {
        "q": (False, False, True, True), "k": (False, True, True, True), "v": (True, True, True, True),
        "grad": (False, False, True, True),
    }[name]  # fmt: skip
    for x, y, is_mended in zip(spoiled, (wanted[0], *wanted[2:]), mended, strict=True):
        assert (x[1, EDGES[3] :] == -7).all() or is_mended  # nothing that is not finite follows the last documents
        near = x[1, EDGES[2] : EDGES[3]]
        if is_mended:
            torch.testing.assert_close(near.float(), y[1, EDGES[2] : EDGES[3]].float(), rtol=2e-2, atol=2e-2)
        else:
            assert (near == -7).all()
        assert (x[1, EDGES[4] :] == -7).all()


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *product([BiasedReferenceKernel()], ("v", "grad")),
        (BiasedTritonKernel(), "v"),
        *long(*product([BiasedReferenceKernel(), BiasedTritonKernel()], ("q", "k")), (BiasedTritonKernel(), "grad")),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_stays_in_its_packed_instance(kernel, name):
    """Of CPM-Bee: several instances in a sequence, told apart by `span`."""
    batch = draw_bee(3, 2, 35 if DEVICE == "cpu" else 500)
    formula, relations, tokens = ours(batch)
    whole = draw(5, *batch.segment.shape, 2, 16, batch.rows)
    q, k, v, table, grad = (t.to(DEVICE, torch.float32) for t in whole[:5])
    pairs = Pairs(formula, relations, tokens, tokens)

    def passes(q, k, v, grad):
        out, lse = kernel.forward(q, k, v, table, pairs, scale=0.2)
        delta = (out.float() * grad).sum(-1).transpose(1, 2).contiguous()
        gradients = kernel.backward(BackwardInputs(grad, q, k, v, lse, delta), table, pairs, scale=0.2)
        return [out, *gradients[:3]], gradients.table

    clean = {"q": q, "k": k, "v": v, "grad": grad}
    wanted, _ = passes(**clean)
    for span in (1,) if DEVICE == "cpu" else (0, 1, 2):
        where = int((batch.span[1] == span).nonzero()[0])
        spoiled = {each: x.clone() for each, x in clean.items()}
        spoiled[name][1, where, 1, 3] = float("nan")
        found, table_gradient = passes(**spoiled)
        others = (batch.span[1] != span).to(DEVICE)
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x[0], y[0])
            assert torch.equal(x[1, others], y[1, others])
        assert not all(x.isfinite().all() for x in found)
        assert not table_gradient[:, 1].isfinite().all()  # which all instances share
