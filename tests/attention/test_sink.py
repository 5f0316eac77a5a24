"""Attention with sinks gives what its definition gives: one more logit in every row's softmax, which has no value."""

from itertools import product

import numpy as np
import pytest
import torch

import bmburst
from bmburst.recompute import checkpoint
from tests.attention.cross_oracle import visible
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import long
from tests.refusals import refused

HEADS, KV_HEADS, DIM = 4, 2, 8
DOCUMENTS = (3, 9, 1, 8)
MASKS = {
    "causal": "causal",
    "full": "full",
    "window": bmburst.SlidingWindow(4),
    "documents": bmburst.Documents(DOCUMENTS),
}
LENGTH = sum(DOCUMENTS)  # odd: there is padding


def seen_by(name, queries, keys):
    if name != "documents":
        return visible(MASKS[name], queries, keys)
    of = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    return (of[:, None] == of[None]) & (np.arange(queries)[:, None] >= np.arange(keys)[None])


def problem(seen, seed=0):
    """Return q, k, v, sink, dO, dLSE in fp64, and out, lse, dq, dk, dv, dsink of the definition."""
    rng = torch.Generator().manual_seed(seed)
    queries, keys = seen.shape
    shapes = [(2, queries, HEADS, DIM), *[(2, keys, KV_HEADS, DIM)] * 2, (HEADS,), (2, queries, HEADS, DIM)]
    q, k, v, sink, grad = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    grad_lse = torch.randn(2, HEADS, queries, generator=rng, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    wide_k, wide_v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in leaves[1:3])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide_k) * DIM**-0.5
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    scores = torch.cat((scores, leaves[3][None, :, None, None].expand(2, HEADS, queries, 1)), -1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], wide_v)
    lse = scores.logsumexp(-1)
    grads = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    return (q, k, v, sink, grad, grad_lse), (out.detach(), lse.detach(), *grads)


def attend(comm, name, layout, **options):
    given, wanted = problem(seen_by(name, LENGTH, LENGTH))
    cut = {"layout": layout, "group": comm}
    q, k, v, grad = (bmburst.shard(given[i], **cut) for i in (0, 1, 2, 4))
    grad_lse = bmburst.shard(given[5].transpose(1, 2), **cut).transpose(1, 2)
    leaves = [t.requires_grad_() for t in (q, k, v, given[3].clone())]
    policy = options.pop("recompute", None)

    def work(q, k, v, sink):
        return bmburst.burst_attention(
            q, k, v, mask=MASKS[name], length=LENGTH, sink=sink, return_lse=True, **cut, **options
        )

    out, lse = work(*leaves) if policy is None else checkpoint(policy, work, *leaves)
    grad_lse = torch.where(lse.isfinite(), grad_lse, 0)  # padding
    grads = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    (of_sink,) = comm.all_gather(grads[3][None].contiguous()).wait()
    got = [bmburst.unshard(t, length=LENGTH, **cut) for t in (out, lse.transpose(1, 2), *grads[:3])]
    got[1] = got[1].transpose(1, 2)
    for what, ours, exact in zip(
        ("out", "lse", "dq", "dk", "dv", "dsink"), (*got, of_sink.reshape(comm.size, HEADS).sum(0)), wanted, strict=True
    ):
        said = f"{what} of {name} over {comm.size} ranks, {layout}, {options}"
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10, msg=lambda m, s=said: f"{s}: {m}")


STRATEGIES = ("heads", "gather", "kv", "burst", "auto")


@pytest.mark.parametrize("size", [*long(1), 2, 3, *long(4)])
@pytest.mark.parametrize("name", MASKS)
@on_ranks()
def test_equals_its_definition(comm, size, name):
    for strategy, layout in product(STRATEGIES, ("zigzag", "striped")):
        if strategy == "heads" and HEADS % size:
            continue
        if strategy == "gather" and layout == "striped" and name != "full":
            continue
        attend(comm, name, layout, strategy=strategy)


@pytest.mark.parametrize("policy", ["block", "block-keep-attention", "block-keep-attention:0.5"])
@on_ranks(2)
def test_is_kept_or_recomputed_as_the_rest(comm, policy):
    for strategy in ("heads", "kv"):
        attend(comm, "causal", "zigzag", strategy=strategy, recompute=policy)


def test_a_mask_for_each_sample_and_keys_of_another_sequence():
    given, wanted = problem(visible("causal", 13, 29))

    def body(comm):
        q, k, v = (bmburst.shard(t, group=comm) for t in given[:3])
        sizes = {"length": 13, "key_length": 29, "group": comm}
        for mask in ("causal", ("causal", "causal")):
            out = bmburst.burst_attention(q, k, v, mask=mask, sink=given[3], **sizes)
            whole = bmburst.unshard(out, length=13, group=comm)
            torch.testing.assert_close(whole, wanted[0], rtol=1e-10, atol=1e-10)

    run_ranks(3, body)


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all():
    (q, k, v, *_), _ = problem(seen_by("causal", LENGTH, LENGTH))

    def body(comm):
        options = {"group": comm, "layout": "contiguous"}
        plain = bmburst.burst_attention(q, k, v, **options)
        none = bmburst.burst_attention(q, k, v, sink=torch.full((HEADS,), -torch.inf, dtype=q.dtype), **options)
        assert torch.equal(none, plain)
        taken = bmburst.burst_attention(q, k, v, sink=torch.full((HEADS,), 1e4, dtype=q.dtype), **options)
        assert not taken.any()

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ([0.0] * 4, "sink | list | torch.as_tensor"),
        (torch.zeros(2), "sink | 4 query heads | [2] | fix: "),
        (torch.zeros(4, 1), "sink | 4 query heads | [4, 1] | fix: "),
        (torch.zeros(4, dtype=torch.int64), "sink | floating-point | int64 | fix: "),
        (torch.zeros(4, device="meta"), "sink is on meta | cpu | fix: "),
        (torch.zeros(4).to_sparse(), "sink must be a dense tensor | fix: "),
        (torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged), "sink must be a dense tensor | fix: "),
    ],
)
@on_ranks(2)
def test_what_is_no_sink_is_refused_on_every_rank(comm, sink, words):
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8)
    with refused(words):
        bmburst.burst_attention(q, k, k, sink=sink if comm.rank else torch.zeros(4), group=comm)


@on_ranks(2)
def test_ranks_that_disagree_on_a_sink_are_refused(comm):
    q = torch.zeros(1, 4, 4, 8)
    with refused("sink"):
        bmburst.burst_attention(q, q, q, sink=torch.zeros(4) if comm.rank else None, group=comm)
    for other, words in (
        (torch.zeros(4, dtype=torch.float64), "equal shapes and dtypes | sink float32[4] | sink float64[4]"),
        (torch.zeros(4, requires_grad=True), "grad mode | without gradient | with gradient"),
    ):
        with refused("disagree", words):
            bmburst.burst_attention(q, q, q, sink=other if comm.rank else torch.zeros(4), group=comm)
    with torch.no_grad():
        bmburst.burst_attention(q, q, q, sink=torch.zeros(4, requires_grad=comm.rank == 1), group=comm)
