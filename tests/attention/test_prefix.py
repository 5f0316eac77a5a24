"""Attention of which only a sequence's end is kept: exact, with less work and fewer bytes, the same part everywhere."""

import pytest
import torch

import bmburst
from bmburst.attention.function import Prefix
from bmburst.attention.heads import executor_of
from bmburst.recompute import checkpoint
from bmburst.schedule.layout import rank_areas
from tests.attention.counting import watch_forward
from tests.attention.oracle import draw, reference
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused

DOCUMENTS = bmburst.Documents([9, 3, 14, 1, 2])  # 29 tokens: one lies across the half
CASES = [  # ranks, layout, fraction, strategy
    (1, "zigzag", 0.3, "auto"),
    (1, "contiguous", 0.7, "auto"),
    (2, "zigzag", 0.5, "heads"),
    (2, "zigzag", 0.5, "gather"),
    (3, "zigzag", 0.5, "kv"),
    (3, "zigzag", 0.5, "gather"),
    (3, "striped", 0.4, "burst"),
    (2, "striped", 0.75, "heads"),
    (4, "zigzag", 0.5, "heads+gather"),
    (4, "striped", 0.05, "kv"),
    (4, "zigzag", 0.5, "double-ring"),
]


@pytest.fixture
def calls(monkeypatch):
    """The forward passes that run: of whole sequences, and of prefixes."""
    found = {"whole": [], "prefix": []}

    def seen(ran, inputs, is_whole):
        found["whole" if is_whole else "prefix"].append((ran, inputs[0].shape))

    watch_forward(monkeypatch, seen)
    return found


@pytest.mark.parametrize("mask", ["causal", bmburst.SlidingWindow(7), DOCUMENTS, bmburst.PrefixLM([5])], ids=str)
@pytest.mark.parametrize(("size", "layout", "fraction", "strategy"), CASES)
def test_gradients_are_those_of_the_definition(calls, size, layout, fraction, strategy, mask):
    length, heads, kv_heads = 29, 4, 2
    whole = draw(3, 2, length, heads, kv_heads, 8)
    expected = reference(*whole[:4], mask, whole[4])

    def body(comm):
        comm = comm.hinted(2, None)
        q, k, v, grad = (bmburst.shard(t, layout=layout, group=comm) for t in whole[:4])
        grad_lse = bmburst.shard(whole[4], dim=2, layout=layout, group=comm)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        options = {"mask": mask, "layout": layout, "length": length, "group": comm, "strategy": strategy}

        def attend(*qkv):
            out, lse = bmburst.burst_attention(*qkv, **options, return_lse=True)
            lse = lse.masked_fill(lse == -torch.inf, 0)
            return (out * grad).sum() + (lse * grad_lse).sum() + out.sin().sum() * 0

        got = torch.autograd.grad(checkpoint(f"block-keep-attention:{fraction}", attend, *inputs), inputs)
        return [bmburst.unshard(t, layout=layout, group=comm, length=length) for t in got]

    found = run_ranks(size, body)
    for gradients in found:
        torch.testing.assert_close(gradients, expected[2:], rtol=1e-9, atol=1e-9)
    assert len(calls["whole"]) == len(calls["prefix"]) == size
    (whole_call, shape), (call, part) = calls["whole"][0], calls["prefix"][0]
    assert part[1] == min(shape[1] - 1, round((1 - fraction) * shape[1])) < shape[1]
    before, after = (sum(rank_areas(c.layout, c.length, c.mask)) for c in (whole_call, call))
    assert after < before * (1.3 if mask == "causal" else 2) * (part[1] / shape[1]) ** (2 if mask == "causal" else 1)


def test_half_of_a_zigzag_sequence_is_a_quarter_of_the_work(calls):
    """With heads exchanged for every rank; a ring's last rank has up to half of the whole's."""
    tokens, size = 512, 4

    def body(comm):
        q, k, v = (torch.randn(1, tokens // size, 4, 8, requires_grad=True) for _ in range(3))
        attend = lambda *qkv: bmburst.burst_attention(*qkv, group=comm, strategy="heads").sin().sum()  # noqa: E731
        checkpoint("block-keep-attention:0.5", attend, q, k, v).backward()

    run_ranks(size, body)
    whole, call = calls["whole"][0][0], calls["prefix"][0][0]
    before, after = (rank_areas(c.layout, c.length, c.mask) for c in (whole, call))
    assert sum(after) / sum(before) == pytest.approx(1 / 4, rel=0.01)
    assert max(after) / max(before) == pytest.approx((2 - 1 / size) / 4, rel=0.01)
    together = [c.outer for c in (whole, call)]  # each rank works on all tokens of its heads
    alone = [rank_areas(c.layout, c.length, c.mask) for c in together]
    assert alone[1][0] / alone[0][0] == pytest.approx(1 / 4, rel=0.01)


def test_all_layers_compute_one_prefix(calls):
    """Its plans and recorded kernels are found by the call: of its own in each layer they would never be used again."""
    x = torch.randn(1, 16, 2, 8)
    bmburst.burst_attention(x, x, x)
    call = calls["whole"][0][0]
    first, second, longer = (Prefix.of(executor_of(call), call, (x, x, x), kept).call for kept in (0.5, 0.5, 0.25))
    assert first is second and first != call
    assert longer.length > first.length and longer != first


WHOLE = "recompute policy block-keep-attention"
REFUSALS = {
    ("zigzag", 0.4, "causal"): "'zigzag' | halves | 0.4 | block-keep-attention:0.5 | striped",
    ("contiguous", 0.5, "causal"): f"'contiguous' | 2 ranks | {WHOLE} | zigzag (0.5) or striped",
    ("balanced", 0.5, "causal"): f"'balanced' | 2 ranks | {WHOLE} | zigzag (0.5) or striped",
    ("zigzag", 0.5, "full"): f"mask full | first 16 tokens | {WHOLE} | a causal mask",
    ("striped", 0.5, bmburst.PrefixLM([20])): f"mask prefixes | first 16 tokens | {WHOLE} | a causal mask",
}


@pytest.mark.parametrize("case", REFUSALS, ids=str)
@on_ranks(2)
def test_what_cannot_be_kept_in_part_is_refused_on_every_rank(comm, case):
    layout, fraction, mask = case
    x = torch.randn(1, 16, 2, 8, requires_grad=True)
    attend = lambda t: bmburst.burst_attention(t, t, t, mask=mask, layout=layout, group=comm)  # noqa: E731
    with refused(REFUSALS[case], "fix: "):
        checkpoint(f"block-keep-attention:{fraction}", attend, x)
    with torch.no_grad():  # nothing is kept, so nothing is refused
        checkpoint(f"block-keep-attention:{fraction}", attend, x)
