"""Biased attention against the published formulas in fp64: plain torch, and Triton's kernels where tests run them."""

import pytest
import torch

from bmburst_ops.biased import (
    BiasedReferenceKernel,
    BiasedTritonKernel,
    Pairs,
    RelativeBias,
    ant_bias,
    ant_relations,
    ant_tokens,
    bee_bias,
    bee_tokens,
)
from bmburst_ops.flash import BackwardInputs
from tests.ops.biased_oracle import Bee, distance_bucket, draw, draw_ant, draw_bee, long_segments, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERRORS = {torch.float64: 1e-10, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def ours(batch, device=DEVICE):
    """Return the formula, relations and vectors of an oracle's batch."""
    size, tokens = batch.segment.shape
    position = torch.arange(tokens).expand(size, -1)
    if isinstance(batch, Bee):
        formula = bee_bias(
            num_buckets=batch.num_buckets,
            num_segment_buckets=batch.num_segment_buckets,
            max_distance=batch.max_distance,
        )
        vectors, relations = bee_tokens(position, *batch.vectors(), batch.length), batch.segment_rel
    else:
        formula = ant_bias(
            num_buckets=batch.num_buckets,
            num_segments=batch.num_segments,
            max_distance=batch.max_distance,
            bidirectional=batch.bidirectional,
        )
        relations = ant_relations(batch.num_segments, torch.device("cpu"))
        is_real = position >= tokens - batch.length[:, None]
        vectors = ant_tokens(position, batch.segment, batch.span, batch.context, is_real, batch.num_segments)
    return formula, relations.to(device), type(vectors).unpacked(vectors.packed().to(device))


def error(value, wanted):
    assert value.shape == wanted.shape
    return ((value.double().cpu() - wanted).norm() / wanted.norm()).item()


def check(kernel, batch, heads, head_dim, dtype, once=False):
    """Compare a kernel with the oracle: the whole, and unless `once` the same again, and by halves of the keys."""
    formula, relations, tokens = ours(batch)
    size, length = batch.segment.shape
    whole = draw(7, size, length, heads, head_dim, batch.rows, dtype)
    expected = reference(*whole[:5], batch)
    q, k, v, table, grad = (t.to(DEVICE, dtype) for t in whole[:5])
    pairs, options = Pairs(formula, relations, tokens, tokens), {"scale": head_dim**-0.5}
    part = kernel.forward(q, k, v, table, pairs, **options)
    delta = (expected[0] * whole[4]).sum(-1).transpose(1, 2).to(DEVICE, part.lse.dtype)
    seen = expected[1] > -torch.inf
    assert torch.equal(part.lse.cpu() > -torch.inf, seen)
    assert not part.out.cpu().transpose(1, 2)[~seen].any()
    assert error(part.lse.cpu()[seen], expected[1][seen]) < max(1e-10, min(1e-6, ERRORS[dtype]))
    assert error(part.out, expected[0]) < ERRORS[dtype]
    given = BackwardInputs(grad, q, k, v, part.lse, delta)
    gradients = kernel.backward(given, table, pairs, **options)
    for name, value, wanted in zip(("q", "k", "v", "table"), gradients, expected[2:], strict=True):
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert error(value, wanted) < 2 * ERRORS[dtype], name
    if once:
        return
    again = kernel.backward(given, table, pairs, **options, rounded=True)
    for value, narrow in zip(gradients, again, strict=True):
        assert narrow.dtype == dtype
        if DEVICE == "cuda" or dtype != torch.bfloat16:
            assert torch.equal(value.to(dtype), narrow)
        else:  # Triton's interpreter cuts off
            assert error(narrow, value.double()) <= torch.finfo(dtype).eps

    half = slice(0, length // 2), slice(length // 2, None)
    parts = [Pairs(formula, relations, tokens, tokens.part(cut)) for cut in half]
    blocks = [
        kernel.backward(given._replace(k=k[:, cut], v=v[:, cut]), table, part, **options)
        for cut, part in zip(half, parts, strict=True)
    ]
    assert error(blocks[0].q + blocks[1].q, expected[2]) < 2 * ERRORS[dtype]
    assert error(blocks[0].table + blocks[1].table, expected[5]) < 2 * ERRORS[dtype]
    assert error(torch.cat([block.k for block in blocks], 1), expected[3]) < 2 * ERRORS[dtype]


BATCHES = [
    pytest.param(draw_bee(0, 2, 35), id="bee"),
    pytest.param(draw_ant(0, 2, 33), id="ant"),
    pytest.param(draw_ant(1, 1, 35, bidirectional=False), id="one-way"),
]


@pytest.mark.parametrize("numbers", [(32, 128), (256, 2048), (512, 2048), (12, 20), (8, 16), (20, 7)], ids=str)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_distances_are_the_published_ones(numbers, bidirectional):
    """Also beyond the largest: all share its bucket."""
    num_buckets, max_distance = numbers
    if max_distance <= num_buckets // 2:
        max_distance *= 3
    formula = RelativeBias(
        num_buckets=num_buckets, num_relations=1, max_distance=max_distance, bidirectional=bidirectional
    )
    ahead = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    found = formula.distances(torch.device("cpu"))[ahead.clamp(-max_distance, max_distance) + max_distance]
    assert torch.equal(found.long(), distance_bucket(ahead, num_buckets, max_distance, bidirectional))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_equals_the_published_formulas(batch, dtype):
    for kernel in (BiasedReferenceKernel(), BiasedReferenceKernel(tile=16)):
        check(kernel, batch, 3, 8, dtype)


# A new head dim or dtype takes a GPU's compiler seconds.
TRITON = [
    *(pytest.param(*each, marks=pytest.mark.long) for each in (("bee", torch.float32, 5), ("ant", torch.bfloat16, 16))),
    ("one-way", torch.float16, 40),
]
LARGE = [("bee", torch.bfloat16, 64), ("large bee", torch.bfloat16, 128), ("large ant", torch.float16, 256)]
LARGE += [("large bee", torch.float16, 64), ("large bee", torch.bfloat16, 256)]
LARGE += [("large bee", torch.float32, 64), ("large ant", torch.float32, 250)]


@pytest.mark.parametrize(("name", "dtype", "head_dim"), TRITON + LARGE if DEVICE == "cuda" else TRITON, ids=str)
def test_triton_equals_the_published_formulas(name, dtype, head_dim):
    batches = {case.id: case.values[0] for case in BATCHES}
    if name.startswith("large"):
        batches |= {"large bee": draw_bee(8, 2, 301, instances=2), "large ant": draw_ant(9, 2, 413)}
    check(BiasedTritonKernel(), batches[name], 2, head_dim, dtype)


def test_triton_takes_blocks_of_tokens_that_are_alike():
    check(BiasedTritonKernel(), long_segments(), 1, 16, torch.float32, once=True)
