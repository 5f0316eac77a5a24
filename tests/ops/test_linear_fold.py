"""Folds of fragments against products of whole matrices in fp64."""

from functools import partial

import pytest
import torch

from bmburst_ops.linear import Recurrence
from bmburst_ops.linear.fold import fold
from bmburst_ops.linear.paths import Path, Paths, paths_after, paths_between
from bmburst_ops.linear.triton_fold import fold as triton_fold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = (0, 3, 4, 9)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["gated_delta", "decay", "decay in Triton"])
def test_states_of_fragments(kind, backward):
    """Pieces of several fragments, some with a given state, and summaries in slots, of which one stays empty."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    wide, recurrence = kind == "gated_delta", Recurrence(kind.split()[0])
    m = 0.4 * (draw(EDGES[-1], 2, 12, 12) if wide else draw(EDGES[-1], 2, 1, 1))
    u, firsts = draw(EDGES[-1], 2, 12, 200), draw(len(EDGES) - 1, 2, 12, 200)
    firsts[1] = 0.0
    m_given, u_given, firsts_given = (t.to(DEVICE) for t in (m, u, firsts[::2]))
    if kind.endswith("Triton"):
        folded = partial(triton_fold, m_given, u_given)
    else:
        folded = partial(fold, recurrence, m_given, u_given, backward=backward)
    each = folded(paths_between(EDGES, (0, 2), backward=backward), firsts_given)
    inputs = *[torch.zeros(1, 2, 12, device=DEVICE)] * 2, torch.zeros(1, 2, 200, device=DEVICE)
    slots = recurrence.new_summaries(inputs, 4)
    products, lasts = recurrence.summary_views(inputs, slots)
    folded(paths_after(EDGES, (2, 0, 1), (0, 1, 3), 4, backward=backward), out=lasts, products=products)
    assert not slots[2].any()

    matrices = m.double() if wide else m.double() * torch.eye(12)
    for piece, (place, state) in enumerate(zip((1, 3, 0), firsts.double(), strict=True)):
        order = range(EDGES[piece], EDGES[piece + 1])
        product = torch.eye(12, dtype=torch.float64).expand(2, 12, 12)
        for fragment in reversed(order) if backward else order:
            torch.testing.assert_close(each[fragment].cpu().double(), state, rtol=1e-4, atol=1e-4)
            one = matrices[fragment].mT if backward else matrices[fragment]
            state, product = one @ state + u[fragment].double(), one @ product
        own = state - product @ firsts[piece].double()
        torch.testing.assert_close(lasts[place].cpu().double(), own, rtol=1e-4, atol=1e-4)
        if not (wide and backward):  # a product is of the matrices as they are
            found = products[place].cpu().double() * (1.0 if wide else torch.eye(12))
            torch.testing.assert_close(found, product, rtol=1e-4, atol=1e-4)


def test_paths_with_states_on_the_way():
    """States are stored between rows of a long path, at places and with strides of their own; none in other places."""
    rng = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 3, 1 + 1100, generator=rng, device="cpu").to(DEVICE)
    m, u = rows[..., :1], rows[..., 1:]
    firsts = torch.randn(2, 3, 1100, generator=rng).to(DEVICE)
    paths = Paths(
        (Path((4, 0, 2), (-1, 3, 0), after=5, first=1), Path((), (), after=2, first=0), Path((5,), (1,), after=6)), 8
    )
    found = [fold(Recurrence("decay"), m, u, paths, firsts), triton_fold(m, u, paths, firsts)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    after_4 = m[4] * firsts[1] + u[4]
    torch.testing.assert_close(found[1][3], after_4, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][0], m[0] * after_4 + u[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1][2], firsts[0]) and torch.equal(found[1][6], u[5])
    assert not found[1][[1, 4, 7]].any() and not paths.fills
    path = Path((4, 0, 2), (-1, 3, -1))
    assert path.shortened() == Path((4,), (-1,), after=3) and path._replace(after=0).shortened().rows == path.rows
