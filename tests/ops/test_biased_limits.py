"""Biased attention at its limits: bad input is refused, what is not finite shows, and empty blocks give nothing."""

import math

import pytest
import torch

from bmburst_ops.biased import (
    PADDING,
    BiasedReferenceKernel,
    BiasedTritonKernel,
    Pairs,
    RelativeBias,
    Tokens,
    bee_bias,
    require_relations,
    select_biased_kernel,
)
from bmburst_ops.biased.triton import as_numbers, no_sums
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import BackwardInputs
from tests.ops.test_biased import DEVICE
from tests.refusals import refused

FORMULA = bee_bias(num_buckets=8, num_segment_buckets=4, max_distance=9)
KERNELS = pytest.mark.parametrize("kernel", [BiasedReferenceKernel(), BiasedTritonKernel()], ids=lambda k: k.name)


def plain_tokens(batch, tokens, **changes):
    """One segment that all see."""
    zeros = torch.zeros(batch, tokens, dtype=torch.int32, device=DEVICE)
    vectors = dict.fromkeys(("segment", "row", "sample", "span"), zeros)
    position = torch.arange(tokens, dtype=torch.int32, device=DEVICE).expand(batch, -1)
    return Tokens(**({"position": position, "context": zeros + 1} | vectors | changes))


def problem(batch=2, tokens=5, heads=2, **changes):
    q, k, v = torch.randn(3, batch, tokens, heads, 16, device=DEVICE)
    inputs = {"q": q, "k": k, "v": v, "table": torch.randn(FORMULA.rows, heads, device=DEVICE)}
    inputs["relations"] = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    return inputs | {side: plain_tokens(batch, tokens) for side in ("queries", "keys")} | changes


def pairs_of(inputs):
    return Pairs(FORMULA, *(inputs[name] for name in ("relations", "queries", "keys")))


def forward(kernel, inputs):
    q, k, v, table = (inputs[name] for name in ("q", "k", "v", "table"))
    return kernel.forward(q, k, v, table, pairs_of(inputs), scale=0.3)


def backward(kernel, inputs, grad, lse):
    given = BackwardInputs(grad, inputs["q"], inputs["k"], inputs["v"], lse, torch.zeros_like(lse))
    return kernel.backward(given, inputs["table"], pairs_of(inputs), scale=0.3)


@KERNELS
def test_refuses_what_does_not_fit(kernel):
    q, table, relations = (problem()[name] for name in ("q", "table", "relations"))
    for change, words in (
        ({"k": q[:, :, :1], "v": q[:, :, :1]}, "as many heads | [2, 5, 2, 16] | [2, 5, 1, 16]"),
        ({"v": q[:, :4]}, "q, k and v | [batch, tokens, heads, head_dim] | [2, 4, 2, 16]"),
        ({"v": q.double()}, "one floating-point dtype | torch.float32 | torch.float64"),
        ({"keys": plain_tokens(2, 4)}, "[2, 4] keys | [2, 5] | [batch, tokens]"),
        ({"table": table[:-1]}, "float [12, 2] | [rows, heads] | float32 [11, 2]"),
        ({"relations": relations.long()}, "relations | int32 [2 or 1, entries] | int64"),
        ({"relations": None}, "relations | dense tensor | NoneType | allowed: int32"),
        ({"keys": plain_tokens(1, 5)}, "keys of 1 samples | queries of 2 | fix: "),
        ({"relations": relations.to("meta")}, "relations, queries and keys | one device | meta"),
        ({"q": q.to("meta")}, "one device | meta"),
        ({"q": None}, "q | dense tensor | NoneType | allowed: "),
        ({"v": q.to_sparse()}, "v | dense tensor | torch.sparse_coo | allowed: "),
    ):
        with refused(words, error=KernelError):
            forward(kernel, problem(**change))


def test_refuses_tokens_and_formulas():
    wrong = torch.zeros(1, 3, device=DEVICE)
    with refused("span | int32 [1, 4] | [batch, tokens] | float32", error=KernelError):
        plain_tokens(1, 4, span=wrong)
    with refused("span | tensor | list | allowed: int32", error=KernelError):
        plain_tokens(1, 4, span=[0, 1])
    with refused("sample | meta | position", error=KernelError):
        plain_tokens(1, 3, sample=wrong.int().to("meta"))
    for values, words in (
        ({"num_buckets": 3}, "num_buckets 3 | 4 relations | too few"),
        ({"num_relations": 0}, "num_buckets 8 | 0 relations | too few"),
        ({"max_distance": 2}, "max_distance 2 | 8 buckets | allowed: 3 and more"),
        ({"max_distance": 9.0}, "max_distance | whole number | 9.0 | allowed: "),
        ({"bidirectional": 1}, "bidirectional | bool | 1 | allowed: True or False"),
    ):
        with refused(words, error=KernelError):
            RelativeBias(**({"num_buckets": 8, "num_relations": 4, "max_distance": 9} | values))


def test_refuses_relations_that_are_not_there():
    tokens = plain_tokens(1, 3)
    for relations, changes, words in (
        ([0, 5], {}, "relation 5 | table | allowed: 0 to 4"),
        ([0, -1], {}, "relation -1 | table | allowed: 0 to 4"),
        ([0, 1], {"row": tokens.row + 2}, "rows of relations | from 2 to 2 | 2 entries"),
        ([0, 1], {"segment": tokens.segment - 1}, "segment -1 | 0"),
    ):
        held, changed = torch.tensor([relations], dtype=torch.int32, device=DEVICE), plain_tokens(1, 3, **changes)
        with refused(words, error=KernelError):
            require_relations(Pairs(FORMULA, held, changed, changed))
    far = plain_tokens(1, 3, row=tokens.row + 9, segment=tokens.segment - 1, span=tokens.span + PADDING)
    require_relations(Pairs(FORMULA, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), far, far))


def test_refuses_kernels():
    q = torch.randn(1, 2, 2, 16, device=DEVICE)
    assert select_biased_kernel("auto", q).name == ("triton" if DEVICE == "cuda" else "reference")
    assert select_biased_kernel("auto", q.double()).name == "reference"
    with refused("unknown kernel 'fa4' | auto, triton, reference", error=KernelError):
        select_biased_kernel("fa4", q)
    with refused("'triton' | float32, bfloat16 and float16 | torch.float64", error=KernelError):
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
    beginning = torch.zeros(1, 9, dtype=torch.int32, device=DEVICE)[:, :1]  # what lies behind would be a relation
    row = torch.ones(2, 5, dtype=torch.int32, device=DEVICE)
    inputs = problem(queries=plain_tokens(2, 5, row=row), relations=beginning)
    assert forward(BiasedTritonKernel(), inputs).out.isnan().all()
    held = torch.full((1, 1), 5, dtype=torch.int32, device=DEVICE)
    inputs = problem(relations=held)
    assert forward(BiasedTritonKernel(), inputs).out.isnan().all()


def unit(sums, bits):
    """Return how much one is in the sums: what a number of all ones is, inverted."""
    numbers = torch.empty(ROWS, 2, device=DEVICE)
    sums[: 2 * ROWS] = 1
    as_numbers(sums, bits, numbers)
    return 1 / numbers[0, 0].double().item()


ROWS = 7


@pytest.mark.parametrize("head_dim", [8, 40])
def test_sums_of_integers_are_numbers_again(head_dim):
    rng = torch.Generator().manual_seed(0)
    grad, v = torch.randn(2, 2, 100, 2, head_dim, generator=rng).to(DEVICE)
    delta = torch.randn(2, 2, 100, generator=rng).to(DEVICE)
    most = (grad.norm(dim=-1).amax() * v.norm(dim=-1).amax() + delta.abs().amax()).double().item()
    sums, bits = no_sums(grad, v[:, 30:], delta, ROWS)
    assert not sums[: 2 * ROWS].any()
    values = torch.randint(-(2**60), 2**60, (2, ROWS), generator=rng).to(DEVICE)
    one = unit(sums, bits)
    assert math.log2(one).is_integer()
    assert 2.0**59 <= 256 * most * one < 2.0**62  # of 200 queries; the longest value may be among those left out
    sums[: 2 * ROWS] = values.flatten()
    for dtype in (torch.float32, torch.float16):
        numbers = torch.empty(ROWS, 2, dtype=dtype, device=DEVICE)
        as_numbers(sums, bits, numbers)
        assert torch.equal(numbers, (values.t().double() / one).float().to(dtype))


@pytest.mark.parametrize("changed", ["grad", "v", "delta"])
def test_units_of_what_is_zero_or_not_finite(changed):
    """Also of the last token and the last feature alone."""
    given = {name: torch.zeros(1, 300, 2, 20, device=DEVICE) for name in ("grad", "v")}
    given["delta"] = torch.zeros(1, 2, 300, device=DEVICE)
    assert unit(*no_sums(*given.values(), ROWS)) == 2.0**100
    for value in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        given[changed].view(-1)[-1] = value
        assert math.isnan(unit(*no_sums(*given.values(), ROWS)))
