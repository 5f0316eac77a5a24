"""The fold of fragments against products of whole matrices, in plain torch and in Triton."""

import pytest
import torch

from bmburst_ops.linear import fold, triton_fold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = (0, 3, 4, 9)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("key_dim", "columns", "given"), [(16, 32, 32), (12, 40, 20), (7, 5, 5)])
@pytest.mark.parametrize("which", [fold, triton_fold], ids=["torch", "triton"])
def test_states_between_fragments(which, key_dim, columns, given, backward):
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    wide = 0.4 * draw(EDGES[-1], 2, key_dim, key_dim + given)  # M and U lie side by side, as a kernel leaves them
    u, m = wide[..., :given], wide[..., given:]
    firsts = draw(len(EDGES) - 1, 2, key_dim, columns)
    each, lasts = which.fold_fragments(*(t.to(DEVICE) for t in (m, u, firsts)), EDGES, backward=backward)
    for piece, state in enumerate(firsts.double()):
        order = range(EDGES[piece], EDGES[piece + 1])
        for fragment in reversed(order) if backward else order:
            torch.testing.assert_close(each[fragment].cpu().double(), state, rtol=1e-4, atol=1e-4)
            one = m[fragment].double()
            state = torch.einsum("hji,hjc->hic" if backward else "hij,hjc->hic", one, state)
            state[..., :given] += u[fragment].double()
        torch.testing.assert_close(lasts[piece].cpu().double(), state, rtol=1e-4, atol=1e-4)
