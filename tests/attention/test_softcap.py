"""Attention with a softcap gives what its definition gives: scaled scores become softcap * tanh(score / softcap)."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst.comm.transports import double_ring_groups
from bmburst.recompute import checkpoint
from bmburst_ops.flash import BackwardInputs
from tests.attention.cross_oracle import visible
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import long
from tests.refusals import refused

HEADS, KV_HEADS, DIM = 4, 2, 8
SOFTCAP = 0.7  # of scores whose standard deviation is 1: most of them are bent, some are flat
DOCUMENTS = (3, 9, 1, 8)
LENGTH = sum(DOCUMENTS)  # odd: there is padding
MASKS = {
    "causal": "causal",
    "full": "full",
    "window": bmburst.SlidingWindow(4),
    "documents": bmburst.Documents(DOCUMENTS),
    "windows of documents": bmburst.Documents(DOCUMENTS) & bmburst.SlidingWindow(3),
}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def seen_by(name):
    index = np.arange(LENGTH)
    if name in ("causal", "full", "window"):
        return visible(MASKS[name], LENGTH, LENGTH)
    of, distance = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS), index[:, None] - index[None]
    return (of[:, None] == of[None]) & (distance >= 0) & (distance < (3 if name.startswith("windows") else LENGTH))


def problem(seen, sink=None, seed=0, with_lse=True):
    """Return q, k, v, dO, dLSE in fp64, and out, lse, dq, dk, dv and dsink of the definition, row by row."""
    rng = torch.Generator().manual_seed(seed)
    queries, keys = seen.shape
    shapes = [(2, queries, HEADS, DIM), *[(2, keys, KV_HEADS, DIM)] * 2, (2, queries, HEADS, DIM)]
    q, k, v, grad = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    grad_lse = torch.randn(2, HEADS, queries, generator=rng, dtype=torch.float64) * with_lse
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *(() if sink is None else (sink,)))]
    outs, lses = [], []
    for head, i in product(range(HEADS), range(queries)):
        near, kv = torch.from_numpy(np.flatnonzero(seen[i])), head // (HEADS // KV_HEADS)
        scores = torch.einsum("bd,bnd->bn", leaves[0][:, i, head], leaves[1][:, near, kv]) / DIM**0.5
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
        if sink is not None:
            scores = torch.cat((scores, leaves[3][head].expand(2, 1)), 1)
        outs.append(torch.einsum("bn,bnd->bd", scores.softmax(1)[:, : len(near)], leaves[2][:, near, kv]))
        lses.append(scores.logsumexp(1))
    out = torch.stack(outs, 1).unflatten(1, (HEADS, queries)).transpose(1, 2)
    lse = torch.stack(lses, 1).unflatten(1, (HEADS, queries))
    return (q, k, v, grad, grad_lse), (
        *(out.detach(), lse.detach()),
        *torch.autograd.grad((out, lse), leaves, (grad, grad_lse)),
    )


def compare(comm, mask, given, wanted, layout, recompute=None, sink=None, **options):
    """Attend over the ranks; output, log-sum-exp and gradients of both are the definition's."""
    cut = {"layout": layout, "group": comm}
    q, k, v, grad = (bmburst.shard(t, **cut) for t in given[:4])
    grad_lse = bmburst.shard(given[4].transpose(1, 2), **cut).transpose(1, 2)
    leaves = [t.requires_grad_() for t in (q, k, v, *(() if sink is None else (sink.clone(),)))]

    def work(q, k, v, sink=None):
        return bmburst.burst_attention(
            q, k, v, mask=mask, length=LENGTH, softcap=SOFTCAP, sink=sink, return_lse=True, **cut, **options
        )

    out, lse = work(*leaves) if recompute is None else checkpoint(recompute, work, *leaves)
    grads = torch.autograd.grad((out, lse), leaves, (grad, torch.where(lse.isfinite(), grad_lse, 0)))
    got = [bmburst.unshard(t, length=LENGTH, **cut) for t in (out, lse.transpose(1, 2), *grads[:3])]
    got[1] = got[1].transpose(1, 2)
    if sink is not None:
        (of_ranks,) = comm.all_gather(grads[3][None].contiguous()).wait()
        got.append(of_ranks.reshape(comm.size, HEADS).sum(0))
    for what, ours, exact in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, wanted, strict=False):
        said = f"{what} of {mask} over {comm.size} ranks, {layout}, {options}"
        torch.testing.assert_close(ours, exact, **CLOSE, msg=lambda m, s=said: f"{s}: {m}")


@pytest.mark.parametrize("size", [*long(1), 2, 3, *long(4)])
@pytest.mark.parametrize("name", MASKS)
def test_equals_its_definition(size, name):
    given, wanted = problem(seen_by(name))

    def body(comm):
        for strategy, layout in product(("heads", "gather", "kv", "burst", "auto"), ("zigzag", "striped")):
            if strategy == "heads" and HEADS % size:
                continue
            if strategy == "gather" and layout == "striped" and name != "full":
                continue
            compare(comm, MASKS[name], given, wanted, layout, strategy=strategy)
        if size == 4:
            for strategy in ("heads+ring", "heads+gather"):
                compare(comm, MASKS[name], given, wanted, "zigzag", strategy=strategy)

    run_ranks(size, body)


@pytest.mark.parametrize("ring_tensors", ["kv", "burst"])
def test_over_a_double_ring(ring_tensors):
    given, wanted = problem(seen_by("causal"))

    def body(comm):
        cut = {"layout": "zigzag", "group": comm}
        q, k, v, grad = (bmburst.shard(t, **cut) for t in given[:4])
        grad_lse = bmburst.shard(given[4], dim=2, **cut)
        options = AttentionOptions(softcap=SOFTCAP, strategy=ring_tensors)
        call = replace(decide(comm, q, k, v, LENGTH, options), double_ring=double_ring_groups(comm, 2, "auto"))
        out, lse = ring_forward(call, q, k, v)
        delta = (grad * out).sum(-1).transpose(1, 2) - grad_lse
        grads = ring_backward(call, BackwardInputs(grad, q, k, v, lse, delta))
        for ours, exact in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
            torch.testing.assert_close(bmburst.unshard(ours, length=LENGTH, **cut), exact, **CLOSE)

    run_ranks(4, body)


@pytest.mark.parametrize("policy", [None, "block", "block-keep-attention", "block-keep-attention:0.5"])
def test_with_a_sink_and_recomputation(policy):
    """The sink is not capped: it is no product of a query and a key."""
    sink = torch.tensor([0.3, -2.0, 3.0, 0.0], dtype=torch.float64)
    given, wanted = problem(seen_by("causal"), sink)

    def body(comm):
        for strategy in ("heads", "kv"):
            compare(comm, "causal", given, wanted, "zigzag", policy, sink, strategy=strategy)

    run_ranks(2, body)


def test_a_mask_for_each_sample_and_keys_of_another_sequence():
    given, wanted = problem(visible("causal", 13, 29))

    def body(comm):
        for mask, strategy in product(("causal", ("causal", "causal")), ("auto", "gather", "kv", "burst")):
            *inputs, grad = (bmburst.shard(t, group=comm) for t in given[:4])
            inputs = [t.requires_grad_() for t in inputs]
            sizes = {"length": 13, "key_length": 29, "group": comm}
            out = bmburst.burst_attention(*inputs, mask=mask, strategy=strategy, softcap=SOFTCAP, **sizes)
            found = (out, *torch.autograd.grad(out, inputs, grad))
            for ours, exact, length in zip(found, (wanted[0], *of_out), (13, 13, 29, 29), strict=True):
                torch.testing.assert_close(bmburst.unshard(ours, length=length, group=comm), exact, **CLOSE)

    of_out = problem(visible("causal", 13, 29), with_lse=False)[1][2:]
    run_ranks(3, body)


@on_ranks(2)
def test_auto_takes_a_kernel_that_can_and_others_are_refused_by_name(comm):
    q = torch.zeros(1, 4, 4, 8)
    call = decide(comm, q, q, q, None, AttentionOptions(softcap=50))
    assert (call.kernel.name, call.softcap) == ("reference", 50.0)
    assert decide(comm, q, q, q, None, AttentionOptions()).kernel.name == "cpu"
    with refused("kernel 'cpu' | logit softcapping | kernel='auto' | reference"):
        bmburst.burst_attention(q, q, q, softcap=50.0, kernel="cpu", group=comm)
