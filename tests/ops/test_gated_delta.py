"""The gated delta rule in Triton against its definition in fp64: summaries, outputs, and all gradients."""

import os
import subprocess
import sys
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

    q, k = (torch.nn.functional.normalize(draw(tokens, key_heads, key_dim), dim=-1).to(low).double() for _ in range(2))
    k[5] = 0.0
    rates = (2 * draw(tokens, heads).sigmoid()).to(low).double()
    rates[3] = 0.0
    inputs = q, k, draw(tokens, heads, value_dim), -decay * draw(tokens, heads).abs(), rates
    states = draw(count, heads, key_dim, value_dim), draw(count, heads, key_dim, value_dim)
    return inputs, states[0], draw(tokens, heads, value_dim), states[1]


def chunk_parts():
    return [slice(row, min(row + CHUNK, end)) for begin, end in pairwise(EDGES) for row in range(begin, end, CHUNK)]


def error_of(found, wanted):
    return float((found.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6))


@pytest.mark.parametrize("decay", [0.0, 0.05, 8.0])
@pytest.mark.parametrize(("key_dim", "value_dim", "normalize"), [(32, 48, False), (20, 80, True)])
def test_gated_delta_in_triton(key_dim, value_dim, normalize, decay):
    low = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    limit = 2e-5 if low == torch.float32 else 2e-2
    inputs, before, grad_out, after = problem(key_dim, value_dim, decay, low)
    count = len(EDGES) - 1
    everything = tuple(range(count))
    recurrence = Recurrence("gated_delta", SCALE, normalize=normalize)
    scan = ReferenceKernel().prepare(recurrence, inputs, Pieces(EDGES, waiting=everything, exporting=everything))
    names = ("M", "U", "out", "start", "dq", "dk", "dv", "dg", "dbeta")
    wanted = *scan.summary(), scan.forward(before), scan.start_gradients(grad_out)
    wanted = dict(zip(names, (*wanted, *scan.backward(before, grad_out, after)), strict=True))

    q, k, v, beta, grad = (t[None].to(DEVICE, low) for t in (*inputs[:3], inputs[4], grad_out))
    sums = torch.zeros_like(inputs[3])
    for part in chunk_parts():
        sums[part] = inputs[3][part].cumsum(0)
    states = [t.to(DEVICE, torch.float32) for t in (before, after)]
    fragments = all_fragments(EDGES, torch.device(DEVICE))
    decays = inputs[3][None].to(DEVICE, torch.float32)
    chunks = ours.make_chunks(q, k, decays, beta, normalize, fragments)
    for part in chunk_parts():
        keys = inputs[1][part].repeat_interleave(2, 1).transpose(0, 1)
        keys = keys / (keys.square().sum(-1, keepdim=True) + 1e-6).sqrt() if normalize else keys
        m = (inputs[4][part].T[..., None] * (keys @ keys.mT)).tril(-1)
        m = m * (sums[part].T[:, :, None] - sums[part].T[:, None]).tril(-1).exp()
        inverse = (torch.eye(m.shape[-1], dtype=torch.float64) + m).inverse()
        found = chunks.inverse[0, part].transpose(0, 1)
        assert error_of(found[:, :, : m.shape[-1]], inverse) < limit and not found[:, :, m.shape[-1] :].any()

    found = (
        *ours.summarize(chunks, v, *[fragments.spans] * 2),
        ours.outputs(chunks, v, states[0], SCALE, fragments.spans)[0],
    )
    start = ours.start_gradients(chunks, grad, SCALE, fragments.spans)
    of_chunks = ours.states_of_chunks(chunks, v, states[0], fragments)
    of_chunks = *of_chunks, *ours.gradients_of_chunks(chunks, grad, states[1], SCALE, fragments)
    grads = ours.input_gradients(chunks, v, grad, of_chunks, SCALE, fragments)
    found = dict(zip(names, (*found, start, *(t[0] for t in grads)), strict=True))
    for name in names:
        error = error_of(found[name], wanted[name])
        assert error < limit, f"{name}: {error}"


@pytest.mark.long
@pytest.mark.parametrize("key_dim", [128, 256])
def test_kernels_fit_into_shared_memory(key_dim):
    """They are compiled for Ampere, Ada and Hopper."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.gated_delta_sizes", str(key_dim)]
    found = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stderr
