"""Folds of fragments and their summaries in Triton against products of whole matrices in fp64."""

import pytest
import torch

from bmburst_ops.fragments import CHUNK
from bmburst_ops.linear import Recurrence
from bmburst_ops.linear.fold import joined_transitions, states_after, states_between
from bmburst_ops.linear.spans import Spans
from bmburst_ops.linear.triton_summaries import start_gradients, summarize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = (0, 3, 4, 9)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("kind", "wide"), [("gated_delta", True), ("decay", False)])
def test_states_between_fragments(kind, wide, backward):
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    m = 0.4 * (draw(EDGES[-1], 2, 12, 12) if wide else draw(EDGES[-1], 2, 1, 1))
    u, firsts = draw(EDGES[-1], 2, 12, 20), draw(len(EDGES) - 1, 2, 12, 20)
    recurrence = Recurrence(kind)
    given = [t.to(DEVICE) for t in (m, u)]
    firsts[1] = 0.0
    each = states_between(recurrence, *given, EDGES, firsts[::2].to(DEVICE), (0, 2), backward=backward)
    lasts = states_after(recurrence, *given, EDGES, (0, 1, 2), backward=backward)
    joined = joined_transitions(recurrence, given[0], EDGES, (0, 1, 2))
    for piece in range(3):
        assert torch.equal(states_after(recurrence, *given, EDGES, (piece,), backward=backward)[0], lasts[piece])
        assert torch.equal(joined_transitions(recurrence, given[0], EDGES, (piece,))[0], joined[piece])
    matrices = m.double() if wide else m.double() * torch.eye(12)
    for piece, state in enumerate(firsts.double()):
        order = range(EDGES[piece], EDGES[piece + 1])
        product = torch.eye(12, dtype=torch.float64).expand(2, 12, 12)
        for fragment in reversed(order) if backward else order:
            torch.testing.assert_close(each[fragment].cpu().double(), state, rtol=1e-4, atol=1e-4)
            one = matrices[fragment].mT if backward else matrices[fragment]
            state, product = one @ state + u[fragment].double(), one @ product
        own = state - product @ firsts[piece].double()
        torch.testing.assert_close(lasts[piece].cpu().double(), own, rtol=1e-4, atol=1e-4)
        found = joined[piece].cpu().double() * (1.0 if wide else torch.eye(12))
        torch.testing.assert_close(found.mT if backward else found, product, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (20, 80)])
def test_summaries_in_triton(key_dim, value_dim):
    """Fragments in any order and with others left out, and a chunk that ends early."""
    rng = torch.Generator().manual_seed(0)
    tokens, heads, scale = 3 * CHUNK + 50, 4, 0.3
    spans = [(CHUNK, tokens, 1), (0, 40, 0)]
    draw = lambda *shape: torch.randn(1, tokens, heads, *shape, generator=rng, dtype=torch.float64)  # noqa: E731
    q, k, w = (0.2 * draw(key_dim) for _ in range(3))
    v, grad, local = (draw(value_dim) for _ in range(3))
    sums = -0.02 * draw(key_dim).abs().cumsum(1)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    low = [t.to(DEVICE, dtype) for t in (q, k, w, v, grad, local)]
    exact = [t.cpu().double()[0] for t in low]
    places = Spans(*torch.tensor(spans, device=DEVICE).T.contiguous())
    on_device = sums.float().to(DEVICE)
    m, u = summarize(*low[1:4], on_device, places, places)
    back = start_gradients(*low[:3], *low[4:], on_device, scale, places)
    for fragment, (begin, end, _) in enumerate(spans):
        for head in range(heads):
            wanted = _dense(*(t[begin:end, head] for t in exact), sums[0, begin:end, head], scale)
            for name, ours, exactly in zip(("M", "U", "start"), (m, u, back), wanted, strict=True):
                error = float((ours[fragment, head].cpu().double() - exactly).norm() / exactly.norm())
                assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"{name}: {error}"


def _dense(q, k, w, v, grad, local, sums, scale):
    """Return M, U and the gradient of the state before one head of a fragment, chunk after chunk."""
    key_dim = k.shape[1]
    m, u = torch.eye(key_dim, dtype=torch.float64), torch.zeros(key_dim, v.shape[1], dtype=torch.float64)
    chunks = []
    for begin in range(0, len(k), CHUNK):
        part = slice(begin, begin + CHUNK)
        step = sums[part][-1].exp2().diag() - k[part].T @ w[part]
        m, u = step @ m, step @ u + k[part].T @ v[part]
        chunks.append((part, step))
    state = torch.zeros_like(u)
    for part, step in reversed(chunks):
        state = step.T @ state + scale * q[part].T @ grad[part] - w[part].T @ local[part]
    return m, u, state
