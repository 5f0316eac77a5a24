"""More numbers and more documents than 32 and 16 bits count, by every 16-bit kernel: parts alone give the same."""

import pytest
import torch

from bmburst_ops.flash import CAUSAL, KERNELS, BackwardInputs, Band, Gradients, Scoring, Segments
from bmburst_ops.merge import row_dots

pytestmark = [pytest.mark.gpu, pytest.mark.long]
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 265_000, 64, 8, 128
MEMORY = 100 * 2**30
CUT = (*range(0, TOKENS, 4000), TOKENS)
PATTERNS = {"causal": CAUSAL, "window": Band(100, 0), "documents": Segments(CAUSAL, CUT, CUT)}


def able_kernels(pattern):
    q = torch.empty(1, 1, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return [k for k in KERNELS if k.name != "reference" and k.refusal(q, q, pattern.needs) is None]


@pytest.mark.skipif(torch.cuda.get_device_properties(0).total_memory < MEMORY, reason="needs 100 GiB of GPU memory")
@pytest.mark.parametrize("name", PATTERNS)
def test_more_numbers_than_32_bits_count(name):
    scoring = Scoring(PATTERNS[name], HEAD_DIM**-0.5)
    assert TOKENS * HEADS * HEAD_DIM > 2**31
    draw = torch.Generator(device="cuda").manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, grad = (
        torch.randn(1, TOKENS, n, HEAD_DIM, dtype=torch.bfloat16, device="cuda", generator=draw) for n in sizes
    )
    for kernel in able_kernels(scoring.pattern):
        out, lse = kernel.forward(q, k, v, scoring)
        delta = torch.cat([row_dots(*(t[:, :, h : h + 8] for t in (grad, out))) for h in range(0, HEADS, 8)], 1)
        found = kernel.backward(BackwardInputs(grad, q, k, v, lse, delta), scoring, deterministic=False)
        for kv_head in (0, 3, KV_HEADS - 1):
            heads, keys = slice(kv_head * 8, kv_head * 8 + 8), slice(kv_head, kv_head + 1)
            alone = [t[:, :, part].contiguous() for t, part in ((grad, heads), (q, heads), (k, keys), (v, keys))]
            own = kernel.forward(*alone[1:], scoring)
            given = BackwardInputs(*alone, own.lse, row_dots(alone[0], own.out))
            gradients = kernel.backward(given, scoring, deterministic=False)
            of_these = Gradients(found.q[:, :, heads], found.k[:, :, keys], found.v[:, :, keys])
            hold(kernel.name, (out[:, :, heads], lse[:, heads], *of_these), (*own, *gradients))
        del out, lse, delta, found


def hold(name, results, wanted):
    """Compare every 16,384 tokens: sums of atomic additions differ by rounding, in 16 bits."""
    for place, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        dim = 2 if place == 1 else 1
        for a, b in zip(ours.split(16384, dim), theirs.split(16384, dim), strict=True):
            assert (a.float() - b.float()).norm() <= 2.0**-8 * b.float().norm(), (name, place)


def test_more_documents_than_a_grid_counts():
    """Each half of the documents alone gives the same."""
    count, length = 70_000, 3
    tokens, half = count * length, count // 2 * length
    draw = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, tokens, n, 64, dtype=torch.bfloat16, device="cuda", generator=draw) for n in (2, 1, 1, 2)
    )

    def results(kernel, part):
        edges = tuple(range(0, (part.stop - part.start) + 1, length))
        scoring = Scoring(Segments(CAUSAL, edges, edges), 0.125)
        inputs = [t[:, part] for t in (q, k, v)]
        found = kernel.forward(*inputs, scoring)
        given = BackwardInputs(grad[:, part], *inputs, found.lse, row_dots(grad[:, part], found.out))
        return *found, *kernel.backward(given, scoring, deterministic=False)

    for kernel in able_kernels(Segments(CAUSAL, (0, 1), (0, 1))):
        whole = results(kernel, slice(0, tokens))
        for part in (slice(0, half), slice(half, tokens)):
            at = (*(t[..., part] if t.dim() == 3 else t[:, part] for t in whole),)
            hold(kernel.name, at, results(kernel, part))
