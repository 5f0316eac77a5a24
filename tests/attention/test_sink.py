"""Attention with sinks gives what its definition gives: one more logit in every row's softmax, which has no value."""

import pytest
import torch

import bmburst
from tests.attention.scored import HEADS, MASKS, by_every_strategy, problem, recomputed, with_keys_of_another_sequence
from tests.distributed.threads import on_ranks
from tests.pairs import long
from tests.refusals import refused

SINK = torch.randn(HEADS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("size", [*long(1), 2, 3, *long(4)])
@pytest.mark.parametrize("name", [name for name in MASKS if not name.startswith("windows")])
def test_equals_its_definition(size, name):
    by_every_strategy(size, name, sink=SINK)


@pytest.mark.parametrize("policy", ["block", "block-keep-attention", "block-keep-attention:0.5"])
def test_is_kept_or_recomputed_as_the_rest(policy):
    recomputed(policy, sink=SINK)


def test_a_mask_for_each_sample_and_keys_of_another_sequence():
    with_keys_of_another_sequence(sink=SINK)


@on_ranks(1)
def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all(comm):
    (q, k, v, *_), _ = problem("causal")
    options = {"group": comm, "layout": "contiguous"}
    plain = bmburst.burst_attention(q, k, v, **options)
    none = bmburst.burst_attention(q, k, v, sink=torch.full((HEADS,), -torch.inf, dtype=q.dtype), **options)
    assert torch.equal(none, plain)
    taken = bmburst.burst_attention(q, k, v, sink=torch.full((HEADS,), 1e4, dtype=q.dtype), **options)
    assert not taken.any()


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
        for _ in range(20):  # beyond the first calls, which are compared on GPUs too
            bmburst.burst_attention(q, q, q, sink=torch.zeros(4, requires_grad=comm.rank == 1), group=comm)
        with refused("disagree", "sink of burst_attention values"):  # as where gradients of sinks are not summed
            bmburst.burst_attention(q, q, q, sink=torch.ones(4) * comm.rank, group=comm)
