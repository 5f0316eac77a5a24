"""Calls of recurrent layers that are refused, with the value, what is allowed and what to do."""

import pytest
import torch

import bmburst
from tests.linear.oracle import problem
from tests.linear.split import FUNCTIONS, KINDS
from tests.refusals import refused

LINEAR, CONV = "gated_delta", "conv"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (LINEAR, {"layout": "zag"}, "unknown layout 'zag' | zigzag"),
        (LINEAR, {"mask": "full"}, "mask 'full' | 'causal' | bmburst.Documents | fix: "),
        (LINEAR, {"mask": bmburst.SlidingWindow(3)}, "recurrent layer | mask | allowed: 'causal'"),
        (LINEAR, {"mask": bmburst.Documents((3, 3), causal=False)}, "recurrent layer | allowed: 'causal'"),
        (LINEAR, {"mask": bmburst.Documents((3, 2)), "length": 6}, "made for 5 tokens"),
        (LINEAR, {"mask": ("causal",) * 3}, "3 masks | batch of 2"),
        (LINEAR, {"length": 7}, "length is 7 | 1 to 6"),
        (LINEAR, {"kind": "gdn"}, "unknown kind 'gdn' | gated_delta"),
        (LINEAR, {"kind": "decay"}, "kind 'decay' has no beta | fix: "),
        (LINEAR, {"beta": None}, "kind 'gated_delta' needs beta | fix: "),
        (LINEAR, {"kind": "kda"}, "g must be [batch, local_tokens, value_heads, key_dim] | [2, 6, 4]"),
        (LINEAR, {"scale": 0}, "scale | positive | 0"),
        (LINEAR, {"kernel": "fast"}, "unknown kernel 'fast' | reference"),
        (LINEAR, {"kernel": ["triton"]}, "unknown kernel '['triton']' | reference"),
        (LINEAR, {"final_state": 1}, "final_state must be a bool | 1"),
        (
            LINEAR,
            {"initial_state": torch.zeros(2, 4, 3, 4)},
            "initial_state must be | [2, 4, 3, 4] | allowed: [2, 4, 4, 3]",
        ),
        (LINEAR, {"q": torch.zeros(2, 6, 3, 4)}, "k must be | [2, 6, 2, 4] | allowed: [2, 6, 3, 4]"),
        (LINEAR, {"v": torch.zeros(2, 6, 4, 3)}, "q, k and v must share one dtype | torch.float32"),
        (LINEAR, {"v": [1.0]}, "v must be a torch tensor | list"),
        (LINEAR, {"g": torch.zeros(2, 6, 4, dtype=torch.int64)}, "g must be a floating-point tensor | torch.int64"),
        ("ssd", {"dt_limit": (1.0, 0.5)}, "dt_limit | ascending | (1.0, 0.5)"),
        ("ssd", {"dt_limit": 0.1}, "dt_limit | two ascending numbers | 0.1"),
        ("ssd", {"dt_limit": (None, 1.0)}, "dt_limit | two ascending numbers | (None, 1.0)"),
        ("ssd", {"x": torch.zeros(2, 6, 4, 3)}, "x, B and C must share one dtype | torch.float32"),
        (
            "ssd",
            {"initial_state": torch.zeros(2, 4, 4, 3)},
            "initial_state must be | [2, 4, 4, 3] | allowed: [2, 4, 3, 4]",
        ),
        ("ssd", {"dt_softplus": 1}, "dt_softplus must be a bool | 1"),
        (LINEAR, {"normalize": "yes"}, "normalize must be a bool | 'yes'"),
        ("ssd", {"A": torch.zeros(3)}, "A must be [heads] | [3] | allowed: [4]"),
        ("scan", {"a": torch.zeros(2, 6, 4, 2)}, "a must be | [2, 6, 4, 2] | allowed: [2, 6, 4, 3]"),
        ("scan", {"b": torch.zeros(2, 6)}, "b must be [batch, local_tokens, channels, ...] | [2, 6]"),
        *(
            (kind, {name: torch.nested.nested_tensor([torch.zeros(2, 3)])}, f"{name} must be a dense tensor | nested")
            for kind, name in ((LINEAR, "q"), (LINEAR, "v"), ("ssd", "x"), ("ssd", "B"), ("scan", "b"), (CONV, "x"))
        ),
        (CONV, {"weight": None}, "weight must be a torch tensor | NoneType | [channels, width]"),
        (CONV, {"bias": torch.zeros(5)}, "weight and bias must share one dtype | torch.float32"),
        (CONV, {"activation": "relu"}, "unknown activation 'relu' | silu"),
        (CONV, {"weight": torch.zeros(3, 4)}, "weight must be [channels, width] | [3, 4] | allowed: [5, any]"),
        (CONV, {"initial_state": torch.zeros(2, 4, 5)}, "initial_state must be [batch, width - 1, channels]"),
    ],
)
def test_calls(kind, options, words):
    case = problem(kind, 2, 6)
    with refused(words):
        FUNCTIONS[kind](**{**case.tokens, **case.shared, **case.options, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_to_compute(kind, dim):
    case = problem(kind, 2, 6)
    none = {name: t.narrow(dim, 0, 0) for name, t in case.tokens.items()}
    with refused(f"got shape {[*[2, 6][:dim], 0]}"[:-1], "at least 1 each | fix: "):
        FUNCTIONS[kind](**{**none, **case.shared, **case.options})


def test_heads_that_cannot_be_shared():
    case = problem(LINEAR, 1, 4).tokens
    case["v"], case["g"], case["beta"] = (case[name][:, :, :3] for name in ("v", "g", "beta"))
    with refused("3 value heads | 2 heads"):
        bmburst.burst_linear_attention(**case)


def test_second_derivatives():
    case = problem(LINEAR, 1, 4).tokens
    out = bmburst.burst_linear_attention(**{name: t.requires_grad_() for name, t in case.items()})
    with refused("create_graph=True | SequenceScan"):
        torch.autograd.grad(out.sum(), case["q"], create_graph=True)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_dtypes_and_autocast(kind):
    """Half precision computes in fp32: as close to fp64 as its own rounding; autocast changes nothing."""
    case = problem(kind, 1, 10)
    exact = FUNCTIONS[kind](**case.tokens, **case.shared, **case.options)
    wide = {"g", "beta", "A", "dt", "dt_bias", "D", "a"}
    low = {n: t.float() if n in wide else t.bfloat16() for n, t in (case.tokens | case.shared).items()}
    found = FUNCTIONS[kind](**low, **case.options)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).norm() / exact.norm()) < 2**-7
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(FUNCTIONS[kind](**low, **case.options), found)
