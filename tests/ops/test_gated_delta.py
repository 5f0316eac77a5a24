"""The gated delta rule in Triton against its definition in fp64: summaries, outputs, and all gradients."""

from itertools import pairwise

import pytest
import torch

from bmburst_ops.fragments import CHUNK
from bmburst_ops.linear import Pieces, Recurrence, ReferenceKernel
from bmburst_ops.linear import triton_gated_delta as ours
from bmburst_ops.linear.spans import all_fragments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = (0, 40, CHUNK + 40, 4 * CHUNK + 57)  # fragments of a part of a chunk, a chunk, and three with a part
SCALE = 0.3


def problem(key_dim, value_dim, decay, low):
    """Return inputs of a flat batch, states before all fragments and gradients, in fp64 that `low` represents."""
    rng = torch.Generator().manual_seed(0)
    tokens, heads, key_heads, count = EDGES[-1], 4, 2, len(EDGES) - 1

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(low).double()

    def keys():
        return torch.nn.functional.normalize(draw(tokens, key_heads, key_dim), dim=-1).to(low).double()

    inputs = keys(), keys(), draw(tokens, heads, value_dim), -decay * draw(tokens, heads).abs()
    rates = (2 * draw(tokens, heads).sigmoid()).to(low).double()
    rates[3] = 0.0
    states = draw(count, heads, key_dim, value_dim), draw(count, heads, key_dim, value_dim)
    return (*inputs, rates), states[0], draw(tokens, heads, value_dim), states[1]


def chunks_of(inputs, low):
    """Return the chunks, with inverses computed in fp64."""
    _, k, v, g, beta = inputs
    sums, inverse = torch.zeros_like(g), torch.zeros(*g.shape, CHUNK, dtype=g.dtype)
    for begin, end in pairwise(EDGES):
        for row in range(begin, end, CHUNK):
            part = slice(row, min(row + CHUNK, end))
            sums[part] = g[part].cumsum(0)
            for head in range(v.shape[1]):
                key, total = k[part, head // (v.shape[1] // k.shape[1])], sums[part, head]
                m = (beta[part, head, None] * (total[:, None] - total).exp() * (key @ key.T)).tril(-1)
                one = (torch.eye(len(m), dtype=torch.float64) + m).inverse()
                inverse[part, head, : len(m)] = one
    to = lambda t, dtype: t[None].to(DEVICE, dtype)  # noqa: E731
    sums = to(sums / torch.log(torch.tensor(2.0, dtype=torch.float64)), torch.float32)
    return ours.Chunks(to(k, low), sums, to(beta, low), to(inverse, low))


@pytest.mark.parametrize("decay", [0.0, 0.05, 8.0])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (20, 80)])
def test_gated_delta_in_triton(key_dim, value_dim, decay):
    low = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    inputs, before, grad_out, after = problem(key_dim, value_dim, decay, low)
    count = len(EDGES) - 1
    everything = tuple(range(count))
    recurrence = Recurrence("gated_delta", SCALE)
    scan = ReferenceKernel().prepare(recurrence, inputs, Pieces(EDGES, waiting=everything, exporting=everything))
    names = ("M", "U", "out", "start", "dq", "dk", "dv", "dg", "dbeta")
    wanted = *scan.summary(), scan.forward(before), scan.start_gradients(grad_out)
    wanted = dict(zip(names, (*wanted, *scan.backward(before, grad_out, after)), strict=True))

    chunks = chunks_of(inputs, low)
    q, v, grad = (t[None].to(DEVICE, low) for t in (inputs[0], inputs[2], grad_out))
    states = [t.to(DEVICE, torch.float32) for t in (before, after)]
    fragments = all_fragments(EDGES, torch.device(DEVICE))
    spans = fragments.spans
    found = (
        *ours.summarize(chunks, v, spans),
        ours.outputs(q, chunks, v, states[0], SCALE, spans)[0],
    )
    start = ours.start_gradients(q, chunks, grad, SCALE, spans)
    of_chunks = ours.states_of_chunks(chunks, v, states[0], fragments)
    of_chunks = *of_chunks, *ours.gradients_of_chunks(q, chunks, grad, states[1], SCALE, fragments)
    *grads, dg, dbeta = ours.input_gradients(q, (None, None), chunks, v, grad, of_chunks, SCALE, fragments)
    for begin, end in pairwise(EDGES):
        for row in range(begin, end, CHUNK):
            part = dg[:, row : min(row + CHUNK, end)]
            part.copy_(part.flip(1).cumsum(1).flip(1))
    found = dict(zip(names, (*found, start, *(t[0] for t in (*grads, dg, dbeta))), strict=True))
    for name in names:
        error = float((found[name].cpu().double() - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6))
        assert error < (2e-5 if low == torch.float32 else 2e-2), f"{name}: {error}"
