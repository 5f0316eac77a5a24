"""Attention with a softcap gives what its definition gives: scaled scores become softcap * tanh(score / softcap)."""

from dataclasses import replace

import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst.comm.transports import double_ring_groups
from bmburst_ops.flash import BackwardInputs
from tests.attention.scored import (
    CLOSE,
    LENGTH,
    MASKS,
    by_every_strategy,
    problem,
    recomputed,
    with_keys_of_another_sequence,
)
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import long
from tests.refusals import refused

SOFTCAP = 0.7  # of scores whose standard deviation is 1: most of them are bent, some are flat


@pytest.mark.parametrize("size", [*long(1), 2, 3, *long(4)])
@pytest.mark.parametrize("name", MASKS)
def test_equals_its_definition(size, name):
    by_every_strategy(size, name, softcap=SOFTCAP)


@pytest.mark.parametrize("ring_tensors", ["kv", "burst"])
def test_over_a_double_ring(ring_tensors):
    given, wanted = problem("causal", softcap=SOFTCAP)

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
    recomputed(policy, sink=torch.tensor([0.3, -2.0, 3.0, 0.0], dtype=torch.float64), softcap=SOFTCAP)


def test_a_mask_for_each_sample_and_keys_of_another_sequence():
    with_keys_of_another_sequence(softcap=SOFTCAP)


@on_ranks(2)
def test_auto_takes_a_kernel_that_can_and_others_are_refused_by_name(comm):
    q = torch.zeros(1, 4, 4, 8)
    call = decide(comm, q, q, q, None, AttentionOptions(softcap=50))
    assert (call.kernel.name, call.softcap) == ("reference", 50.0)
    assert decide(comm, q, q, q, None, AttentionOptions()).kernel.name == "cpu"
    with refused("kernel 'cpu' | logit softcapping | kernel='auto' | reference"):
        bmburst.burst_attention(q, q, q, softcap=50.0, kernel="cpu", group=comm)
