"""Biased attention on a GPU: all tables of block sizes, on tokens that meet every kind of block; and streams wait."""

import pytest
import torch

from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.comm.groups import communicator
from bmburst_ops.biased import BiasedReferenceKernel, BiasedTritonKernel, Pairs, Tokens, bee_bias
from bmburst_ops.biased import triton as kernels
from bmburst_ops.flash import BackwardInputs
from tests.ops.test_biased import error
from tests.refusals import refused

pytestmark = pytest.mark.gpu
FORMULA = bee_bias(num_buckets=32, num_segment_buckets=12, max_distance=128)
LENGTH = 1153  # nine blocks of 128 and a token
ERRORS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tokens():
    """Two packed instances, padding, segments of a sample and a second sample, half of them given."""
    place = torch.arange(LENGTH, device="cuda").expand(2, -1)
    span = torch.where(place < 700, 0, 1).masked_fill(place > 1100, -1)
    sample = torch.where((place > 450) & (place < 700), 1, 0)
    segment = torch.where(place < 300, 0, 1).masked_fill(place > 800, 2)
    segment[1] = 0  # where distance alone decides
    context = (place < 150) | (sample == 1) | (place > 900) & (place < 1000)
    return Tokens(*(t.int() for t in (place, segment, 3 * segment, sample, span, context)))


RELATIONS = [[0, 3, 4, 5, 0, 6, 7, 8, 0]]
# Head dims up to 64, 128 and 256 have block sizes of their own, by dtype and by what shared memory there is.
CASES = [(dim, dtype, "_HOPPER") for dim in (64, 128, 256) for dtype in (torch.bfloat16, torch.float16)]
CASES += [(48, torch.bfloat16, "_HOPPER"), (200, torch.float16, "_HOPPER")]
CASES += [(dim, torch.bfloat16, "_SMALL") for dim in (64, 128, 256)]
CASES += [(dim, torch.float32, "_FP32") for dim in (64, 128, 256)]


@pytest.mark.parametrize(("head_dim", "dtype", "table"), CASES, ids=str)
def test_every_plan_equals_the_plain_kernel_in_fp64(head_dim, dtype, table, monkeypatch):
    """With the halves of the keys apart too, of which one begins inside of a block."""
    if table == "_HOPPER" and torch.cuda.get_device_capability()[0] not in (9, 10):
        table = "_SMALL"
    monkeypatch.setattr(kernels, "_HOPPER", getattr(kernels, table))
    rng = torch.Generator("cuda").manual_seed(head_dim)
    shape, heads = (2, LENGTH, 2, head_dim), 2
    q, k, v, grad = (torch.randn(shape, generator=rng, device="cuda").to(dtype) for _ in range(4))
    biases = torch.randn(FORMULA.rows, heads, generator=rng, device="cuda").to(dtype)
    given = tokens()
    for keys in (slice(None), slice(500, None)):
        pairs = Pairs(FORMULA, torch.tensor(RELATIONS, dtype=torch.int32, device="cuda"), given, given.part(keys))
        matrices = q, k[:, keys], v[:, keys]
        wide = [t.double() for t in (*matrices, biases, grad)]
        plain, fast, scale = BiasedReferenceKernel(), BiasedTritonKernel(), head_dim**-0.5
        wanted = plain.forward(*wide[:4], pairs, scale=scale)
        part = fast.forward(*matrices, biases, pairs, scale=scale)
        seen = wanted.lse > -torch.inf
        assert torch.equal(part.lse > -torch.inf, seen)
        assert error(part.lse[seen], wanted.lse[seen].cpu()) < 1e-5
        assert error(part.out, wanted.out.cpu()) < ERRORS[dtype]
        delta = (wide[4] * wanted.out).sum(-1).transpose(1, 2)
        exact = plain.backward(BackwardInputs(wide[4], *wide[:3], wanted.lse, delta), wide[3], pairs, scale=scale)
        inputs = BackwardInputs(grad, *matrices, part.lse, delta.float()), biases, pairs
        found = fast.backward(*inputs, scale=scale)
        for name, value, true in zip("qkvt", found, exact, strict=True):
            assert error(value, true.cpu()) < ERRORS[dtype], name
        again = fast.backward(*inputs, scale=scale, rounded=True)
        for value, narrow in zip(found, again, strict=True):
            assert torch.equal(value.to(dtype), narrow)


def test_another_stream_waits_for_what_the_first_found():
    """Layers of one batch on streams of their own, the first of which is far behind the host."""
    comm = communicator(None)
    q, k, v = (torch.randn(2, LENGTH, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    table = torch.randn(FORMULA.rows, 2, device="cuda")
    relations = torch.tensor(RELATIONS, dtype=torch.int32, device="cuda")

    def sequence():
        return BiasedSequence(formula=FORMULA, relations=relations, tokens=tokens(), group=comm, kernel="triton")

    wanted = biased_attention(q, k, v, table, sequence())[0]
    first, second, shared = torch.cuda.Stream(), torch.cuda.Stream(), sequence()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        outs = [biased_attention(q, k, v, table, shared)[0]]
    with torch.cuda.stream(second):
        outs.append(biased_attention(q, k, v, table, shared)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


def test_tokens_of_another_device_are_refused_and_moved_ones_are_not():
    comm = communicator(None)
    q, k, v = (torch.randn(2, LENGTH, 2, 16, device="cuda") for _ in range(3))
    table, here = torch.randn(FORMULA.rows, 2, device="cuda"), tokens()
    relations = torch.tensor(RELATIONS, dtype=torch.int32)
    away = Tokens.unpacked(here.packed().cpu())
    with refused("one device | cpu, cuda:0"):
        biased_attention(q, k, v, table, BiasedSequence(formula=FORMULA, relations=relations, tokens=away, group=comm))
    moved = BiasedSequence(
        formula=FORMULA, relations=relations.cuda(), tokens=Tokens.unpacked(away.packed().cuda()), group=comm
    )
    assert biased_attention(q, k, v, table, moved)[0].isfinite().all()
