"""Recurrences in Triton against their definitions in fp64: summaries, outputs, and all gradients."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from bmburst_ops.fragments import CHUNK
from bmburst_ops.linear import (
    Pieces,
    Recurrence,
    ReferenceKernel,
    Slots,
    triton_decay,
    triton_gated_delta,
    triton_kda,
    triton_kda_gradients,
)
from bmburst_ops.linear.spans import all_fragments, chosen_spans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = (0, 40, CHUNK + 40, 4 * CHUNK + 57)  # fragments of a part of a chunk, a chunk, and three with a part
SCALE = 0.3
LOW = torch.float32 if DEVICE == "cpu" else torch.bfloat16
LIMIT = 2e-5 if DEVICE == "cpu" else 2e-2


def problem(key_dim, value_dim, decay, of_channels=False):
    """Return inputs of a flat batch, states before all fragments and gradients, in fp64 that `LOW` represents."""
    rng = torch.Generator().manual_seed(0)
    tokens, heads, key_heads, count = EDGES[-1], 4, 2, len(EDGES) - 1

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(LOW).double()

    q, k = (torch.nn.functional.normalize(draw(tokens, key_heads, key_dim), dim=-1).to(LOW).double() for _ in range(2))
    k[5] = 0.0
    rates = (2 * draw(tokens, heads).sigmoid()).to(LOW).double()
    rates[3] = 0.0
    decays = -decay * draw(tokens, heads, *((key_dim,) if of_channels else ())).abs()
    inputs = q, k, draw(tokens, heads, value_dim), decays, rates
    states = draw(count, heads, key_dim, value_dim), draw(count, heads, key_dim, value_dim)
    return inputs, states[0], draw(tokens, heads, value_dim), states[1]


def defined(recurrence, inputs, before, grad_out, after):
    """Return the results by name, computed from token to token."""
    everything = tuple(range(len(EDGES) - 1))
    scan = ReferenceKernel().prepare(recurrence, inputs, Pieces(EDGES, waiting=everything, exporting=everything))
    names = ("M", "U", "out", "start", "dq", "dk", "dv", "dg", "dbeta")
    slots = Slots(everything, len(everything))
    summaries = recurrence.summary_views(inputs, scan.summary(slots))
    found = *summaries, scan.forward(before), scan.start_gradients(grad_out, slots)
    return dict(zip(names, (*found, *scan.backward(before, grad_out, after)), strict=False))


def require_equal(found, wanted, limit=LIMIT):
    for name, each in wanted.items():
        error = error_of(found[name], each)
        assert error < limit, f"{name}: {error}"


def chunk_parts():
    return [slice(row, min(row + CHUNK, end)) for begin, end in pairwise(EDGES) for row in range(begin, end, CHUNK)]


def error_of(found, wanted):
    return float((found.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6))


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "normalize", "decay"),
    [
        (32, 48, False, 0.05),
        (32, 48, False, 8.0),
        (20, 80, True, 0.0),
        (20, 80, True, 8.0),
        pytest.param(32, 48, False, 0.0, marks=pytest.mark.long),
        pytest.param(20, 80, True, 0.05, marks=pytest.mark.long),
    ],
)
def test_gated_delta_in_triton(key_dim, value_dim, normalize, decay):
    ours = triton_gated_delta
    (q, k, *inputs), before, grad_out, after = problem(key_dim, value_dim, decay)
    if normalize:
        norms = torch.linspace(-3, 4, k.shape[0], dtype=torch.float64).exp()[:, None, None]
        q, k = (t.to(LOW).double() for t in (q / norms, k * norms))
    inputs = q, k, *inputs
    wanted = defined(Recurrence("gated_delta", SCALE, normalize=normalize), inputs, before, grad_out, after)

    q, k, v, beta, grad = (t[None].to(DEVICE, LOW) for t in (*inputs[:3], inputs[4], grad_out))
    sums = torch.zeros_like(inputs[3])
    for part in chunk_parts():
        sums[part] = inputs[3][part].cumsum(0)
    states = [t.to(DEVICE, torch.float32) for t in (before, after)]
    fragments = all_fragments(EDGES, torch.device(DEVICE))
    decays = inputs[3][None].to(DEVICE, torch.float32)
    chunks, norms = ours.make_chunks(q, k, decays, beta, normalize, fragments)
    for part in chunk_parts():
        keys = inputs[1][part].repeat_interleave(2, 1).transpose(0, 1)
        keys = keys / (keys.square().sum(-1, keepdim=True) + 1e-6).sqrt() if normalize else keys
        m = (inputs[4][part].T[..., None] * (keys @ keys.mT)).tril(-1)
        m = m * (sums[part].T[:, :, None] - sums[part].T[:, None]).tril(-1).exp()
        inverse = (torch.eye(m.shape[-1], dtype=torch.float64) + m).inverse()
        found = chunks.inverse[0, part].transpose(0, 1)
        assert error_of(found[:, :, : m.shape[-1]], inverse) < LIMIT and not found[:, :, m.shape[-1] :].any()

    transitions, ends = ours.summarize(chunks, v, *[fragments.spans] * 2)
    found = {"M": transitions, "U": ends, "out": ours.outputs(chunks, v, states[0], SCALE, fragments.spans)[0]}
    raw = ours.Chunks(q, k, norms, chunks.numbers, chunks.inverse)  # what the backward pass has
    found["start"] = ours.start_gradients(raw, grad, SCALE, fragments.spans)
    of_chunks = ours.states_of_chunks(raw, v, states[0], fragments)
    of_chunks = *of_chunks, *ours.gradients_of_chunks(raw, grad, states[1], SCALE, fragments)
    grads = ours.input_gradients(raw, v, beta, grad, of_chunks, SCALE, fragments)
    found |= {name: t[0] for name, t in zip(("dq", "dk", "dv", "dg", "dbeta"), grads, strict=True)}
    require_equal(found, wanted)


@pytest.mark.parametrize("decay", [0.0, 0.05, 8.0])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (20, 80)])
def test_scalar_decay_in_triton(key_dim, value_dim, decay):
    """Heads share keys. Of the fragments that are summarized, one is left out, and another has no tokens."""
    ours = triton_decay
    (*inputs, _), before, grad_out, after = problem(key_dim, value_dim, decay)
    wanted = defined(Recurrence("decay", SCALE), tuple(inputs), before, grad_out, after)

    q, k, v, grad = (t[None].to(DEVICE, LOW) for t in (*inputs[:3], grad_out))
    states = [t.to(DEVICE, torch.float32) for t in (before, after)]
    fragments = all_fragments(EDGES, torch.device(DEVICE))
    given = ours.DecayInputs(q, k, inputs[3][None].to(DEVICE, torch.float32))
    transitions, ends = ours.summarize(given, v, fragments.spans)
    found = {"M": transitions, "U": ends, "out": ours.outputs(given, v, states[0], SCALE, fragments.spans)[0]}
    found["start"] = ours.start_gradients(given, grad, SCALE, fragments.spans)
    grad_states, dv = ours.gradients_of_chunks(given, grad, states[1], SCALE, fragments)
    of_chunks = ours.states_of_chunks(given, v, states[0], fragments), grad_states
    dq, dk, dg = ours.input_gradients(given, v, grad, *of_chunks, SCALE, fragments)
    require_equal(found | {"dq": dq[0], "dk": dk[0], "dv": dv[0], "dg": dg[0]}, wanted)

    chosen = chosen_spans(EDGES, (2, 0), torch.device(DEVICE), (0,))
    transitions, ends = ours.summarize(given, v, chosen)
    assert torch.equal(ends[0], found["U"][2]) and torch.equal(transitions[0], found["M"][2])
    assert not ends[1].any() and (transitions[1] == 1).all()


@pytest.mark.parametrize("of_states", [False, True])
def test_scalar_decay_without_states(of_states):
    """None stands for zeros."""
    ours, ((*inputs, _), before, grad_out, after) = triton_decay, problem(16, 16, 0.5)
    q, k, v, grad = (t[None].to(DEVICE, LOW) for t in (*inputs[:3], grad_out))
    fragments = all_fragments(EDGES, torch.device(DEVICE))
    given = ours.DecayInputs(q, k, inputs[3][None].to(DEVICE, torch.float32))
    zeros = torch.zeros_like(before if of_states else after, device=DEVICE, dtype=torch.float32)
    if of_states:
        results = [ours.states_of_chunks(given, v, each, fragments) for each in (None, zeros)]
        results += [ours.outputs(given, v, each, SCALE, fragments.spans) for each in (None, zeros)]
    else:
        results = [t for each in (None, zeros) for t in ours.gradients_of_chunks(given, grad, each, SCALE, fragments)]
        results[1:3] = results[2:0:-1]
    for one, other in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(one, other)


def kda(inputs, before, grad_out, after, normalize):
    """Return the results by name."""
    q, k, v, beta, grad = (t[None].to(DEVICE, LOW) for t in (*inputs[:3], inputs[4], grad_out))
    fragments, decays = all_fragments(EDGES, torch.device(DEVICE)), inputs[3][None].to(DEVICE, torch.float32)
    before, after = (t.to(DEVICE, torch.float32) for t in (before, after))
    ours, given = triton_kda, (q, k, decays, beta, normalize, SCALE, fragments)
    chunks = ours.make_chunks(*given)
    transitions, ends = ours.summarize(chunks, v, *[fragments.spans] * 2)
    found = {"M": transitions, "U": ends, "out": ours.outputs(chunks, v, before, SCALE, fragments.spans)[0]}
    chunks = ours.make_chunks(*given, (chunks.weights, chunks.inverse))  # what the backward pass has
    found["start"] = ours.start_gradients(chunks, grad, SCALE, fragments.spans)
    of_chunks = ours.states_of_chunks(chunks, v, before, fragments)
    of_chunks = *of_chunks, *ours.gradients_of_chunks(chunks, grad, after, SCALE, fragments)
    grads = triton_kda_gradients.input_gradients(chunks, q, k, v, beta, grad, of_chunks, SCALE, fragments)
    return found | {name: t[0] for name, t in zip(("dq", "dk", "dv", "dg", "dbeta"), grads, strict=True)}


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "normalize", "decay"),
    [
        (32, 48, False, 0.0),
        (20, 80, True, 0.05),
        (72, 16, True, 4.0),
        pytest.param(32, 48, False, 4.0, marks=pytest.mark.long),
        pytest.param(20, 80, True, 0.0, marks=pytest.mark.long),
        pytest.param(72, 16, True, 0.05, marks=pytest.mark.long),
    ],
)
def test_kda_in_triton(key_dim, value_dim, normalize, decay):
    """Heads share keys. Keys of 72 are two blocks of channels, the last one not full."""
    inputs, *rest = problem(key_dim, value_dim, decay, of_channels=True)
    if normalize:
        norms = torch.linspace(-3, 4, len(inputs[0]), dtype=torch.float64).exp()[:, None, None]
        inputs = (
            *((t * each).to(LOW).double() for t, each in zip(inputs, (1 / norms, norms), strict=False)),
            *inputs[2:],
        )
    wanted = defined(Recurrence("kda", SCALE, normalize=normalize), inputs, *rest)
    require_equal(kda(inputs, *rest, normalize), wanted)


def test_kda_forgets():
    """Decays that no product of chunks represents: a state ends at once, of some channels token after token."""
    inputs, *rest = problem(32, 16, 0.05, of_channels=True)
    inputs[3][::13] = -50.0
    inputs[3][5::7, :, ::3] = -1e4
    wanted = defined(Recurrence("kda", SCALE), inputs, *rest)
    require_equal(kda(inputs, *rest, False), wanted)
    inputs[3][::13] = -torch.inf
    inputs[3][:, 1, 3] = -18.0
    inputs[3][CHUNK + 40 :, 2, :4] = -torch.inf
    wanted = defined(Recurrence("kda", SCALE), inputs, *rest)
    require_equal(kda(inputs, *rest, False), wanted, max(LIMIT, 2**-12.5))  # what a decay of 2^-12.5 leaves


def test_kda_keeps_what_is_not_a_number():
    """Limits of decays do not hide it, also beside a decay that is limited."""
    inputs, *rest = problem(32, 16, 0.05, of_channels=True)
    inputs[3][42, 1, :2] = torch.tensor([torch.nan, -torch.inf])
    found = kda(inputs, *rest, False)
    assert found["out"][42:104, 1].isnan().all() and found["U"][1, 1].isnan().all()
    assert not found["out"][:40].isnan().any() and not found["out"][:, 0].isnan().any()


@pytest.mark.long
@pytest.mark.parametrize("key_dim", [128, 256])
def test_kernels_fit_into_shared_memory(key_dim):
    """They are compiled for Ampere, Ada and Hopper."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.recurrence_sizes", str(key_dim)]
    found = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stderr
