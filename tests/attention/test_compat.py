"""Programs written for Burst-Attention run with the import changed: same names, same argument order."""

import inspect

import pytest
import torch

from bmburst import OpBurstAttn, OpBurstAttnStrip, burst_attn_func, burst_attn_func_striped, shard
from bmburst.attention import api
from tests.attention.oracle import draw, reference
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (burst_attn_func, "zigzag"),
        (burst_attn_func_striped, "striped"),
        (OpBurstAttn.apply, "zigzag"),
        (OpBurstAttnStrip.apply, "striped"),
    ],
)
@pytest.mark.parametrize("flash", ["cuda", "triton", None])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("optimize", [True, False])
def test_by_position(function, layout, flash, causal, optimize):
    whole = draw(0, 2, 16, 4, 2, 8)
    out, _, *grads = reference(*whole[:4], "causal" if causal else "full", scale=0.3)

    def body(comm):
        order = layout if causal else "contiguous"
        q, k, v, grad = (shard(t, layout=order, group=comm).clone().requires_grad_() for t in whole[:4])
        heads_first = (t.transpose(1, 2) for t in (q, k, v)) if flash is None else (q, k, v)
        ours = function(*heads_first, 0.3, flash, causal, optimize, False, comm, [None, None])
        ours = ours.transpose(1, 2) if flash is None else ours
        torch.testing.assert_close(ours, shard(out, layout=order, group=comm))
        got = torch.autograd.grad(ours, (q, k, v), grad.detach())
        for mine, wanted in zip(got, grads, strict=True):
            torch.testing.assert_close(mine, shard(wanted, layout=order, group=comm))

    run_ranks(2, body)


def test_the_order_of_arguments_is_that_projects():
    for function in (burst_attn_func, burst_attn_func_striped, OpBurstAttn.apply, OpBurstAttnStrip.apply):
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        assert [p.name for p in parameters][:3] == ["q", "k", "v"]
        assert [(p.name, p.default) for p in parameters][3:] == [
            ("softmax_scale", None),
            ("flash", "cuda"),
            ("causal", False),
            ("optimize_bwd_comm", False),
            ("deterministic", False),
            ("process_group", None),
            ("double_group", (None, None)),
        ]


def test_options_arrive(monkeypatch):
    """What has no effect on the numbers here: what moves in backward, determinism, the kernel."""
    seen = []
    real = api.burst_attention
    monkeypatch.setattr(api, "burst_attention", lambda *a, **options: seen.append(options) or real(*a, **options))
    q = torch.randn(1, 4, 4, 8)
    burst_attn_func(q, q, q, None, "cuda", True, True, True)
    burst_attn_func_striped(q, q, q, 0.5, None, True)
    burst_attn_func(q, q, q, double_group=[object(), object()])
    names = ("mask", "layout", "scale", "kernel", "strategy", "deterministic", "group")
    assert [tuple(options[name] for name in names) for options in seen] == [
        ("causal", "zigzag", None, "auto", "burst", True, None),
        ("causal", "striped", 0.5, "reference", "auto", False, None),
        ("full", "contiguous", None, "auto", "auto", False, None),
    ]


@on_ranks(2)
def test_by_keyword_and_unknown_flash(comm):
    q = torch.randn(1, 4, 2, 8)
    by_name = burst_attn_func(
        q, q, q, softmax_scale=None, flash="cuda", causal=True, optimize_bwd_comm=True, process_group=comm
    )
    assert torch.equal(by_name, OpBurstAttn.apply(q, q, q, None, "cuda", True, True, False, comm))
    with refused("flash", "'cudaa'", "'cuda'", "cuda, triton"):
        burst_attn_func(q, q, q, flash="cudaa", process_group=comm)


@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flash": "cudaa"}, "flash | 'cudaa' | 'cuda' | cuda, triton"),
        ({"causal": torch.ones(3)}, "causal | bool | tensor | True or False"),
        ({"optimize_bwd_comm": None}, "optimize_bwd_comm | bool | None | True or False"),
        ({"q": [1.0], "flash": None}, "q | torch tensor | list"),
        ({"v": torch.ones(3), "flash": None}, "v | [batch, local_tokens, heads, head_dim] | [3] | fix: "),
    ],
)
@on_ranks(2)
def test_refuses_on_every_rank(comm, change, words, wrong_ranks):
    q = torch.ones(1, 4, 4, 8)
    given = {"q": q, "k": q, "v": q} | (change if comm.rank in wrong_ranks else {})
    with refused(words):
        burst_attn_func(**given, process_group=comm)
