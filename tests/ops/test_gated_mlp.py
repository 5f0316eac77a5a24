"""The MLP in chunks of tokens is the MLP: value, gradients, precision and memory."""

import pytest
import torch
from torch.nn.functional import linear, silu

from bmburst.blocks.config import AUTOMATIC_CHUNK, mlp_chunk
from bmburst_ops.gated_mlp import gated_mlp
from bmburst_ops.linears import LowRank
from tests.live_bytes import LiveBytes
from tests.refusals import refused


def draw(rows, features, width, dtype=torch.float64):
    rng = torch.Generator().manual_seed(rows)
    shapes = (*rows, features) if isinstance(rows, tuple) else (rows, features)
    x, gate, up = (torch.randn(s, generator=rng, dtype=torch.float64) for s in (shapes, *[(width, features)] * 2))
    down = torch.randn(features, width, generator=rng, dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (x, gate / 4, up / 4, down / 4)]


def plain(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


@pytest.mark.parametrize("chunk", [1, 4, 13, 22, 100])
@pytest.mark.parametrize("is_needed", [True, False])
def test_equals_the_definition(chunk, is_needed):
    torch.manual_seed(0)
    tensors = draw(11, 6, 10)
    x = torch.randn(2, 11, 6, dtype=torch.float64, requires_grad=True)
    tensors[0] = x
    grad = torch.randn(2, 11, 6, dtype=torch.float64)
    wanted = plain(*tensors)
    expected = torch.autograd.grad(wanted, tensors, grad)
    got = gated_mlp(*tensors, chunk=chunk, is_needed=is_needed)
    assert not is_needed or torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got, tensors, grad), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("frozen", range(4))
def test_what_needs_no_gradient_gets_none(frozen):
    tensors = draw(9, 6, 10)
    tensors[frozen] = tensors[frozen].detach()
    grads = [t for t in tensors if t.requires_grad]
    expected = torch.autograd.grad(plain(*tensors).sin().sum(), grads)
    got = torch.autograd.grad(gated_mlp(*tensors, chunk=4).sin().sum(), grads)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chunk", [4, 22, 100])
@pytest.mark.parametrize("left_out", [None, 0, 2])
def test_adapters_are_added_to_frozen_matrices(chunk, left_out):
    x, *matrices = (each.detach() for each in draw(22, 6, 10))
    x = x.view(2, 11, 6).requires_grad_()
    rng, terms = torch.Generator().manual_seed(5), []
    for number, each in enumerate(matrices):
        sides = (3, each.shape[1]), (each.shape[0], 3)
        a, b = (torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in sides)
        terms.append(None if number == left_out else LowRank(a, b, 0.7, slice(None)))
    leaves = [x, *(each for term in terms if term for each in (term.a, term.b))]
    dense = [each + 0.7 * term.b @ term.a if term else each for each, term in zip(matrices, terms, strict=True)]
    wanted, got = plain(x, *dense), gated_mlp(x, *matrices, chunk=chunk, adapters=terms)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    expected, found = (torch.autograd.grad(each.sin().sum(), leaves) for each in (wanted, got))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_gradients_of_weights_are_rounded_once():
    """Summed in 16 bits over 64 chunks they would be several times as far off as whole."""
    tensors = draw(1024, 16, 24, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    grad = torch.randn(1024, 16).bfloat16()
    wanted = torch.autograd.grad(plain(*exact), exact, grad.double())

    def errors(chunk):
        found = torch.autograd.grad(gated_mlp(*tensors, chunk=chunk), tensors, grad)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]

    for cut, whole in zip(errors(16), errors(1024), strict=True):
        assert cut <= 1.05 * whole


def test_only_a_chunk_is_as_wide():
    rows, features, width, chunk = 512, 8, 128, 32
    tensors = draw(rows, features, width)
    with LiveBytes() as alive:
        out = gated_mlp(*tensors, chunk=chunk)
        assert alive.now == out.nbytes
        forward = alive.peak
        out.sum().backward()
    item, wide = 8, chunk * width * 8
    assert forward <= out.nbytes + 8 * wide < rows * width * item
    weights = 3 * features * width * item
    assert alive.peak <= 4 * rows * features * item + 2 * weights + 14 * wide < rows * width * item * 2


def test_chunks_are_even_and_free_where_blocks_are_recomputed():
    for rows in (1, 7, 16384, 16385, 131072, 1 << 20):
        for recomputes in (True, False):
            chunk = mlp_chunk(rows, None, recomputes=recomputes)
            assert chunk == rows or (recomputes and chunk <= AUTOMATIC_CHUNK < rows)
            assert -(-rows // chunk) * chunk - rows < -(-rows // chunk)  # the last lacks less than one a chunk
        assert mlp_chunk(rows, 0, recomputes=True) == rows
        assert mlp_chunk(rows, 5, recomputes=False) <= 5


@pytest.mark.parametrize(
    "change",
    [{"chunk": 0}, {"x": torch.zeros(3, 5)}, {"up": torch.zeros(4, 6)}, {"down": torch.zeros(10, 6)},
     {"gate": torch.zeros(10, 6)}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change):
    x, gate, up, down = draw(3, 6, 10)
    given = {"x": x, "gate": gate, "up": up, "down": down, "chunk": 2} | change
    with refused("gated_mlp", error=ValueError):
        gated_mlp(given["x"], given["gate"], given["up"], given["down"], chunk=given["chunk"])
