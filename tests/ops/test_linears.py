"""Products of one input with several matrices against as many of torch's, in fp64 and in 16 bits."""

from functools import partial

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from bmburst_ops.gated_mlp import gated_mlp
from bmburst_ops.linears import LaterProducts, LowRank, linears
from tests.live_bytes import LiveBytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (6, 2, 2)
ROWS = (slice(None), slice(1, 2), slice(0, 2))


def problem(dtype, features=5, shape=(3, 7), scale=1.0):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, features, generator=generator, dtype=torch.float64)
    weights = [torch.randn(width, features, generator=generator, dtype=torch.float64) * scale for width in WIDTHS]
    return [t.to(DEVICE, dtype).requires_grad_() for t in (x, *weights)]


def gradients(results, leaves, seed=4):
    return torch.autograd.grad(results, leaves, _random(results, seed))


def _random(results, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) for r in results]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rows", [None, ROWS])
def test_equals_products_one_by_one(count, rows):
    x, *weights = leaves = problem(torch.float64)[: count + 1]
    parts = rows[:count] if rows else [slice(None)] * count
    results = linears(x, weights, rows and parts)
    expected = [linear(x, weight[own]) for weight, own in zip(weights, parts, strict=True)]
    torch.testing.assert_close(results, tuple(expected))
    torch.testing.assert_close(gradients(results, leaves), gradients(expected, leaves))
    assert torch.autograd.gradcheck(lambda x, *w: linears(x, w, rows and parts), leaves)


def test_results_that_are_not_needed_leave_gradients_alone():
    x, *weights = leaves = problem(torch.float64)
    results, undefined = linears(x, weights), linears(x, weights, is_needed=False)
    assert [u.shape for u in undefined] == [r.shape for r in results]
    torch.testing.assert_close(gradients(undefined, leaves), gradients(results, leaves), rtol=0, atol=0)


def _offered(weights):
    """Offer memory for the gradient of each weight, once; return it, filled with NaN."""
    memories = [torch.full_like(weight, torch.nan, requires_grad=False) for weight in weights]

    def take(left):
        return left.pop() if left else None

    for weight, memory in zip(weights, memories, strict=True):
        weight.gradient_memory = partial(take, [memory.detach()])
    return memories


@pytest.mark.parametrize("rows", [None, ROWS])
def test_gradients_are_written_to_offered_memory(rows):
    """But those of some rows of a weight."""
    x, *weights = leaves = problem(torch.float32)
    wanted = gradients(linears(x, weights, rows), leaves)
    memories = _offered(weights)
    results = linears(x, weights, rows)
    torch.autograd.backward(results, _random(results, 4))
    for leaf, gradient in zip(leaves, wanted, strict=True):
        assert torch.equal(leaf.grad, gradient)
    whole = [rows is None or own == slice(None) for own in ROWS]
    written = [weight.grad.data_ptr() == memory.data_ptr() for weight, memory in zip(weights, memories, strict=True)]
    assert written == whole and [not memory.isnan().any() for memory in memories] == whole


def test_a_weight_that_is_used_twice_is_offered_memory_once():
    x, weight, *_ = problem(torch.float64)
    wanted = gradients((linear(x, weight), linear(x.sin(), weight)), [weight])
    _offered([weight])
    results = (*linears(x, [weight]), *linears(x.sin(), [weight]))
    torch.autograd.backward(results, _random(results, 4))
    torch.testing.assert_close(weight.grad, wanted[0])


def test_sums_over_chunks_are_rounded_to_offered_memory():
    generator = torch.Generator().manual_seed(5)
    x, *weights = (
        torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
        for shape in ((7, 6), (10, 6), (10, 6), (6, 10))
    )
    wanted = gradients([gated_mlp(x, *weights, chunk=3)], weights)
    memories = _offered(weights)
    out = gated_mlp(x, *weights, chunk=3)
    out.backward(*_random([out], 4))
    for weight, memory, gradient in zip(weights, memories, wanted, strict=True):
        assert torch.equal(weight.grad, gradient) and weight.grad.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("rows", [None, ROWS])
def test_gradients_of_weights_that_are_left_for_later_have_the_same_bits(rows):
    """Two passes leave them one after another; a pass between them, and frozen weights, leave none."""
    x, *weights = leaves = problem(torch.float32)
    weights[1].requires_grad_(False)
    moving = [x, weights[0], weights[2]]
    wanted = [gradients(linears(x, weights, rows), moving, seed) for seed in (4, 5)]
    later = LaterProducts()
    results = [linears(x, weights, rows, later=later) for _ in range(3)]
    for seed, result in zip((4, 5), results, strict=False):
        with later.collecting():
            of_x, *none = torch.autograd.grad(result, moving, _random(result, seed), allow_unused=True)
        assert torch.equal(of_x, wanted[seed - 4][0]) and none == [None, None]
    at_once = gradients(results[2], moving)
    for one in wanted:
        products = later.take()
        assert [id(each.weight) for each in products] == [id(weights[0]), id(weights[2])]
        assert all(map(torch.equal, (each.gradient() for each in products), one[1:]))
    assert all(map(torch.equal, at_once, wanted[0])) and len(leaves) == 4


@pytest.mark.parametrize("frozen", range(4))
def test_frozen_ones_get_no_gradient(frozen):
    leaves = problem(torch.float64)
    wanted = gradients(linears(leaves[0], leaves[1:]), leaves)
    leaves[frozen].requires_grad_(False)
    moving = [number for number in range(4) if number != frozen]
    found = gradients(linears(leaves[0], leaves[1:]), [leaves[number] for number in moving])
    for number, ours in zip(moving, found, strict=True):
        torch.testing.assert_close(ours, wanted[number], rtol=0, atol=0)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_frozen_ones_are_given_is_not_kept(is_frozen):
    x, *weights = problem(torch.float64)
    for weight in weights:
        weight.requires_grad_(not is_frozen)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linears(x, weights)
    assert (x.shape in kept) != is_frozen
    assert set(kept) >= {weight.shape for weight in weights}


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_gradients_of_the_input_are_added_inside_of_products():
    x, *weights = leaves = problem(torch.bfloat16)
    with _Names() as names:
        gradients(linears(x, weights), leaves)
    assert names.seen.count("aten::addmm_") == 2
    assert not {"aten::add", "aten::add_"} & set(names.seen)


def test_sums_in_16_bits_are_no_worse_than_autograds():
    """A product that is added to the sum is not rounded before."""
    x, *weights = leaves = problem(torch.bfloat16, features=64, shape=(501,))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    (wanted,) = gradients(linears(exact[0], exact[1:]), exact[:1])
    (ours,) = gradients(linears(x, weights), leaves[:1])
    (theirs,) = gradients([linear(x, weight) for weight in weights], leaves[:1])
    errors = [(found.double() - wanted).square().mean().sqrt() for found in (ours, theirs)]
    assert errors[0] <= errors[1]
    # Three sums are rounded, half a unit of the largest each.
    assert (ours.double() - wanted).abs().max() <= 3 * 2**-9 * 2 * wanted.abs().max()


@pytest.mark.parametrize("frozen", [None, 4, 5])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 5)])
def test_low_rank_terms_are_added(rows, frozen):
    """Of three layers two have terms, of unlike ranks and scales; one of their matrices may need no gradient."""
    x, other, weight = problem(torch.float64)[:3]
    third = weight.detach().flip(0).requires_grad_()
    shapes = (2, x.shape[-1]), (len(other), 2), (3, x.shape[-1]), (len(third), 3)
    matrices = [torch.randn(shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for shape in shapes]
    given = [x, weight, other, third, *matrices]
    if frozen is not None:
        given[frozen].requires_grad_(False)

    def ours(x, weight, other, third, a, b, c, d):
        terms = [None, LowRank(a, b, 0.5, rows), LowRank(c, d, 2.0, slice(None))]
        return linears(x, [weight, other, third], [slice(None), rows, slice(None)], terms)

    a, b, c, d = matrices
    results = ours(*given)
    expected = (
        linear(x, weight),
        linear(x, other[rows]) + 0.5 * linear(linear(x, a), b[rows]),
        linear(x, third) + 2.0 * linear(linear(x, c), d),
    )
    torch.testing.assert_close(results, expected)
    leaves = [each for each in given if each.requires_grad]
    torch.testing.assert_close(gradients(results, leaves), gradients(expected, leaves))
    assert torch.autograd.gradcheck(ours, given)


def test_low_rank_terms_take_no_tensors_of_their_own():
    rows, width, features = 512, 96, 64
    x, gate, up = (torch.randn(n, features, requires_grad=n == rows) for n in (rows, width, width))
    terms = [LowRank(*(torch.randn(s, requires_grad=True) for s in ((1, features), (width, 1))), 1.0, slice(None))] * 2
    result, given = rows * width * 4, rows * features * 4
    with LiveBytes() as forward:
        results = linears(x, [gate, up], None, terms)
    assert forward.peak == pytest.approx(2 * result, rel=0.03)  # the two results, and products of one column
    grads = [torch.ones_like(each) for each in results]
    with LiveBytes() as backward:
        torch.autograd.backward(results, grads)
    assert backward.peak < 1.15 * given  # the gradient of x, and products of one column
