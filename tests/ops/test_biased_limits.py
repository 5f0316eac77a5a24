"""Biased attention at its limits: bad input is refused, what is not finite shows, and empty blocks give nothing."""

import re

import pytest
import torch

from bmburst_ops.biased import (
    PADDING,
    Bias,
    BiasedReferenceKernel,
    BiasedTritonKernel,
    RelativeBias,
    Tokens,
    bee_bias,
    require_relations,
    select_biased_kernel,
)
from bmburst_ops.biased.fixed_point import as_numbers, units
from bmburst_ops.errors import KernelError
from tests.ops.test_biased import DEVICE

FORMULA = bee_bias(num_buckets=8, num_segment_buckets=4, max_distance=9)
KERNELS = pytest.mark.parametrize("kernel", [BiasedReferenceKernel(), BiasedTritonKernel()], ids=lambda k: k.name)

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered",
    "ignore:overflow encountered",
    "ignore:divide by zero encountered in log",
)


def plain_tokens(batch, tokens, **changes):
    """One segment that all see."""
    zeros = torch.zeros(batch, tokens, dtype=torch.int32, device=DEVICE)
    vectors = dict.fromkeys(("segment", "row", "sample", "span"), zeros)
    position = torch.arange(tokens, dtype=torch.int32, device=DEVICE).expand(batch, -1)
    return Tokens(**({"position": position, "context": zeros + 1} | vectors | changes))


def problem(batch=2, tokens=5, heads=2, **changes):
    q, k, v = torch.randn(3, batch, tokens, heads, 16, device=DEVICE)
    relations = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    bias = Bias(FORMULA, torch.randn(FORMULA.rows, heads, device=DEVICE), relations)
    inputs = {"q": q, "k": k, "v": v, "bias": bias} | {
        side: plain_tokens(batch, tokens) for side in ("queries", "keys")
    }
    return inputs | changes


def forward(kernel, inputs):
    return kernel.forward(*inputs.values(), scale=0.3)


def backward(kernel, inputs, grad, lse):
    bias = [inputs[name] for name in ("bias", "queries", "keys")]
    matrices = [inputs[name] for name in "qkv"]
    return kernel.backward(grad, *matrices, lse, torch.zeros_like(lse), *bias, scale=0.3)


@KERNELS
def test_refuses_what_does_not_fit(kernel):
    q, bias = torch.randn(2, 5, 2, 16, device=DEVICE), problem()["bias"]
    for change, message in (
        ({"k": q[:, :, :1], "v": q[:, :, :1]}, "with as many heads each, got [2, 5, 2, 16], [2, 5, 1, 16]"),
        ({"v": q[:, :4]}, "q, k and v must be [batch, tokens, heads, head_dim]"),
        ({"v": q.double()}, "must share one floating-point dtype, got torch.float32"),
        ({"keys": plain_tokens(2, 4)}, "vectors of [2, 4] keys for [2, 5], [batch, tokens]"),
        (
            {"bias": Bias(FORMULA, bias.table[:-1], bias.relations)},
            "must be float [12, 2], [rows, heads], got float32 [11",
        ),
        ({"bias": Bias(FORMULA, bias.table, bias.relations.long())}, "relations must be int32 [2 or 1, entries], got"),
        ({"q": q.to("meta")}, "everything must be on one device, got"),
        ({"q": None}, "q must be a dense tensor, got NoneType\nallowed: "),
        ({"v": q.to_sparse()}, "v must be a dense tensor, got one of layout torch.sparse_coo\nallowed: "),
    ):
        with pytest.raises(KernelError, match=re.escape(message)):
            forward(kernel, problem(**change))


def test_refuses_tokens_and_formulas():
    wrong = torch.zeros(1, 3, device=DEVICE)
    with pytest.raises(KernelError, match=r"span must be int32 \[1, 4\], \[batch, tokens\] as position, got float32"):
        plain_tokens(1, 4, span=wrong)
    with pytest.raises(KernelError, match="span must be a tensor, got list\nallowed: int32 "):
        plain_tokens(1, 4, span=[0, 1])
    with pytest.raises(KernelError, match="sample is on meta, but position on"):
        plain_tokens(1, 3, sample=wrong.int().to("meta"))
    for values, message in (
        ({"num_buckets": 3}, "num_buckets 3 and 4 relations are too few"),
        ({"num_relations": 0}, "num_buckets 8 and 0 relations are too few"),
        ({"max_distance": 2}, "max_distance 2 must be above 2, of 8 buckets those that .*\nallowed: 3 and more"),
        ({"max_distance": 9.0}, "max_distance must be a whole number, got 9.0\nallowed: "),
        ({"bidirectional": 1}, "bidirectional must be a bool, got 1\nallowed: True or False"),
    ):
        with pytest.raises(KernelError, match=message):
            RelativeBias(**({"num_buckets": 8, "num_relations": 4, "max_distance": 9} | values))


def test_refuses_relations_that_are_not_there():
    tokens = plain_tokens(1, 3)
    for relations, changes, message in (
        ([0, 5], {}, "relation 5 is none of the table's\nallowed: 0 to 4"),
        ([0, -1], {}, "relation -1 is none of the table's"),
        ([0, 1], {"row": tokens.row + 2}, "rows of relations begin from 2 to 2, but there are 2 entries"),
        ([0, 1], {"segment": tokens.segment - 1}, "segment -1 is below 0"),
    ):
        held, changed = torch.tensor([relations], dtype=torch.int32, device=DEVICE), plain_tokens(1, 3, **changes)
        with pytest.raises(KernelError, match=message):
            require_relations(FORMULA, held, changed, changed)
    far = plain_tokens(1, 3, row=tokens.row + 9, segment=tokens.segment - 1, span=tokens.span + PADDING)
    require_relations(FORMULA, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), far, far)


def test_refuses_kernels():
    q = torch.randn(1, 2, 2, 16, device=DEVICE)
    assert select_biased_kernel("auto", q).name == ("triton" if DEVICE == "cuda" else "reference")
    assert select_biased_kernel("auto", q.double()).name == "reference"
    with pytest.raises(KernelError, match="unknown kernel 'fa4' of biased attention\nknown: auto, triton, reference"):
        select_biased_kernel("fa4", q)
    with pytest.raises(KernelError, match="takes float32, bfloat16 and float16 only, got"):
        select_biased_kernel("triton", q.double())


@KERNELS
def test_rows_and_blocks_without_a_key(kernel):
    inputs = problem(keys=plain_tokens(2, 5, span=torch.full((2, 5), 3, dtype=torch.int32, device=DEVICE)))
    part = forward(kernel, inputs)
    assert not part.out.any() and (part.lse == -torch.inf).all()
    for lse in (part.lse, torch.zeros_like(part.lse)):  # nobody saw a key, or they saw others
        assert not any(g.any() for g in backward(kernel, inputs, part.out + 1, lse))
    inputs = problem(k=inputs["k"][:, :0], v=inputs["v"][:, :0], keys=plain_tokens(2, 0))
    part = forward(kernel, inputs)
    assert not part.out.any() and (part.lse == -torch.inf).all()
    gradients = backward(kernel, inputs, part.out + 1, part.lse)
    assert [g.shape[1] for g in gradients] == [5, 0, 0, 2] and not any(g.any() for g in gradients)


@KERNELS
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_the_table(kernel, value):
    """A loss scale that is too large must be seen in every parameter's gradient."""
    inputs = problem()
    part = forward(kernel, inputs)
    grad = torch.ones_like(part.out)
    grad[0, 1, 0, 3] = value
    assert not backward(kernel, inputs, grad, part.lse).table.isfinite().all()


def test_a_relation_that_the_table_does_not_have_shows_in_triton():
    bias = problem()["bias"]
    beginning = torch.zeros(1, 9, dtype=torch.int32, device=DEVICE)[:, :1]  # what lies behind would be a relation
    row = torch.ones(2, 5, dtype=torch.int32, device=DEVICE)
    inputs = problem(queries=plain_tokens(2, 5, row=row), bias=Bias(FORMULA, bias.table, beginning))
    assert forward(BiasedTritonKernel(), inputs).out.isnan().all()
    held = torch.full((1, 1), 5, dtype=torch.int32, device=DEVICE)
    inputs = problem(bias=Bias(FORMULA, bias.table, held))
    assert forward(BiasedTritonKernel(), inputs).out.isnan().all()


def test_sums_of_integers_are_exact_in_any_order():
    grad, v = torch.randn(2, 1, 100, 2, 8, device=DEVICE)
    delta = torch.randn(1, 2, 100, device=DEVICE)
    unit = units(grad, v, delta)
    assert torch.equal(torch.exp2(unit.log2().round()), unit)
    most = grad.norm(dim=-1).amax() * v.norm(dim=-1).amax() + delta.abs().amax()
    assert 2.0**60 <= 100 * most.double().item() * unit.double().item() < 2.0**62
    values = most * torch.rand(1000, device=DEVICE)
    whole = (values * unit).long()
    assert torch.equal(whole.sum(), whole.flip(0).sum())
    torch.testing.assert_close(as_numbers(whole, unit), values, rtol=1e-7, atol=0)
    for bound in (0.0, torch.inf, torch.nan):
        assert units(grad * 0, v, delta * 0 + bound).isfinite().item() == (bound == 0 or bound == torch.inf)
