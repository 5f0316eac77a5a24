"""Attention whose keys are another sequence gives what its definition gives, by every strategy and layout."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

import bmburst
from bmburst.attention import call as decided
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.groups import communicator
from bmburst.comm.transports import double_ring_groups
from bmburst.schedule.cross import CrossMask
from bmburst.schedule.tiles import make_tiles
from tests.attention.cross_oracle import compare, layout_of, local, problem
from tests.attention.exchange_ways import change_strategy, move_heads
from tests.attention.oracle import reference
from tests.distributed.processes import on_processes, run_processes
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import in_turn, long, pairwise
from tests.refusals import refused

LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = ("full", "causal", bmburst.SlidingWindow(4), bmburst.SlidingWindow(3, causal=False))
LENGTHS = ((13, 29), (29, 13), (17, 17), (2, 11), (11, 2))  # fewer tokens than ranks among them


def documents(queries, keys, causal):
    """Return documents of queries, the second of them without keys and the third with most."""
    if queries < 3:
        return bmburst.Documents((queries,), causal, (keys,))
    first = (keys + 3) // 4
    return bmburst.Documents((1, queries // 2, queries - 1 - queries // 2), causal, (first, 0, keys - first))


def masks(lengths):
    return (*MASKS, documents(*lengths, causal=False), documents(*lengths, causal=True))


CASES = [
    (layouts, lengths, mask)
    for layouts, lengths in product(product(LAYOUTS, LAYOUTS), LENGTHS)
    for mask in masks(lengths)
]


def attend(comm, strategy, cases):
    size = comm.size
    heads = ((2, 2), (4, 2), (3, 1))
    if strategy == "heads":
        heads = (size, size), (2 * size, size), (2 * size, 1)
    if strategy.startswith("heads+"):
        heads = (4, 4), (4, 2), (8, 1)
    for i, (layouts, lengths, mask) in enumerate(cases):
        is_striped = "striped" in layouts
        if strategy.endswith("gather") and layouts[1] == "striped" and mask != "full":
            continue
        if strategy.startswith("heads+") and is_striped:
            continue
        compare(comm, mask, layouts, lengths, *heads[i % 3], strategy=strategy)


@pytest.mark.parametrize(("strategy", "size"), in_turn(["heads", "gather", "kv", "burst", "auto"], [1, 3, 2, 5, 4]))
def test_equals_its_definition(size, strategy):
    """Each size and strategy with its own part of the cases."""
    run_ranks(size, attend, strategy, CASES[size + len(strategy) :: 13])


@pytest.mark.parametrize("strategy", ["heads+ring", "heads+gather"])
def test_equals_its_definition_beside_an_exchange_of_heads(strategy):
    run_ranks(4, attend, strategy, CASES[::7])


@pytest.mark.parametrize(("size", "most"), in_turn([2, 5], [1, 2]))
def test_equals_its_definition_in_units_of_heads(monkeypatch, size, most):
    move_heads(monkeypatch, "several units")
    run_ranks(size, attend, "heads", CASES[::23])
    change_strategy(monkeypatch, lambda strategy, _: replace(strategy, most_kv_heads=most))
    run_ranks(size, attend, "gather", CASES[::11])


@pytest.mark.parametrize("strategy", [*long("kv"), "burst"])
def test_equals_its_definition_in_a_double_ring(monkeypatch, strategy):
    real = decided.StrategyRequest.place

    def place(request, call, shapes):
        groups = double_ring_groups(request.comm, 2, "auto")
        return replace(real(request, call, shapes), double_ring=groups)

    monkeypatch.setattr(decided.StrategyRequest, "place", place)
    run_ranks(4, attend, strategy, CASES[::7])


@pytest.mark.parametrize("mask", [bmburst.Documents((9, 21), True, (33, 8)), "full", "causal"])
def test_balanced_sequences_are_cut_as_shard_cuts_them(mask):
    lengths = 30, 41
    whole, expected = problem(*lengths, 4, 2, mask)
    of_keys = bmburst.Documents((33, 8)) if isinstance(mask, bmburst.Documents) else mask

    def body(comm):
        q = bmburst.shard(whole[0], layout="balanced", mask=mask, group=comm)
        k, v = (bmburst.shard(t, layout="balanced", mask=of_keys, group=comm) for t in whole[1:3])
        cut = {"layout": "balanced", "mask": mask, "length": 30, "group": comm}
        out = bmburst.burst_attention(q, k, v, key_length=41, **cut)
        torch.testing.assert_close(bmburst.unshard(out, **cut), expected[0], rtol=1e-10, atol=1e-10)

    run_ranks(3, body)


# documents without queries or keys at the start, between others and at the end
EMPTY = bmburst.Documents((0, 5, 0, 0, 7, 1), True, (4, 0, 0, 9, 11, 5))


STRATEGIES = [pair for pair in product(("heads", "gather", "kv", "burst"), LAYOUTS) if pair != ("gather", "striped")]


@pytest.mark.parametrize(
    ("size", "causal", "strategy", "key_layout", "layout"), pairwise([1, 2, 3], [True, False], STRATEGIES, LAYOUTS)
)
def test_documents_of_either_sequence_may_be_empty(size, causal, strategy, key_layout, layout):
    mask, layouts = replace(EMPTY, causal=causal), (layout, key_layout)
    run_ranks(size, partial(compare, strategy=strategy), mask, layouts, (13, 29), 2 * size, size)


def test_by_default_as_many_tokens_are_real_as_documents_have():
    """Of each sample, where each has a mask of its own: the rest is padding."""
    masks = bmburst.Documents((9,), False, (20,)), bmburst.Documents((6, 7), True, (0, 28))
    lengths = [(mask.length, sum(mask.key_lengths)) for mask in masks]
    problems = [problem(*each, 2, 1, mask) for mask, each in zip(masks, lengths, strict=True)]

    def body(comm):
        ql, kl = layout_of("zigzag", comm.size, 13, None), layout_of("contiguous", comm.size, 29, None)
        of_each = [
            (local(whole[0], ql, comm.rank, n), *(local(t, kl, comm.rank, m) for t in whole[1:3]))
            for (whole, _), (n, m) in zip(problems, lengths, strict=True)
        ]
        q, k, v = (torch.cat([each[i][sample : sample + 1] for sample, each in enumerate(of_each)]) for i in range(3))
        options = {"key_layout": "contiguous", "group": comm}
        out = bmburst.burst_attention(q, k, v, mask=masks, **options)
        for sample, (_, expected) in enumerate(problems):
            alone = bmburst.burst_attention(*of_each[sample], mask=masks[sample], **options)
            for got in (out[sample], alone[sample]):
                whole = bmburst.unshard(got, dim=0, length=lengths[sample][0], group=comm)
                torch.testing.assert_close(whole, expected[0][sample], rtol=1e-10, atol=1e-10)

    run_ranks(3, body)


@on_ranks(2)
def test_a_mask_for_each_sample(comm):
    masks = bmburst.Documents((9, 4), False, (0, 29)), "causal"
    found = []
    for i, mask in enumerate(masks):
        whole, expected = problem(13, 29, 2, 1, mask)
        q = bmburst.shard(whole[0], group=comm)
        k, v = (bmburst.shard(t, group=comm) for t in whole[1:3])
        options = {"length": 13, "key_length": 29, "group": comm}
        out = bmburst.burst_attention(q, k, v, mask=masks, **options)
        found.append((bmburst.unshard(out, group=comm, length=13)[i], expected[0][i]))
    for got, wanted in found:
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_equal_sequences_are_self_attention():
    """And keys that have a layout of their own may lie otherwise than the queries."""
    whole, _ = problem(24, 24, 2, 1, "causal")
    out, _, *_ = reference(*whole[:4], "causal")

    def body(comm):
        q, k, v = (bmburst.shard(t, group=comm) for t in whole[:3])
        call = decide(comm, q, k, v, 24, AttentionOptions(key_layout="zigzag"), 24)
        assert call.layout.keys is call.layout and str(call.mask) == "causal"
        k, v = (bmburst.shard(t, layout="contiguous", group=comm) for t in whole[1:3])
        got = bmburst.burst_attention(q, k, v, key_layout="contiguous", length=24, group=comm)
        torch.testing.assert_close(bmburst.unshard(got, group=comm), out, rtol=1e-10, atol=1e-10)

    run_ranks(3, body)


@on_processes(2)
def test_over_processes():
    for strategy in ("auto", "heads", "gather", "burst"):
        attend(communicator(None), strategy, CASES[::29])


@pytest.mark.long
@pytest.mark.parametrize(("seed", "strategy"), list(enumerate(("heads", "gather", "kv", "burst", "auto"))))
def test_over_five_processes(seed, strategy):
    """A random sample of the cases, another for each strategy, each with all pairs of lengths and with documents."""
    cases = [CASES[i] for i in np.random.default_rng(seed).permutation(len(CASES))[:40]]
    assert {lengths for _, lengths, _ in cases} == {*LENGTHS}
    assert any(isinstance(mask, bmburst.Documents) for *_, mask in cases)
    run_processes(5, _over_five_processes, strategy, cases)


def _over_five_processes(strategy, cases):
    attend(communicator(None), strategy, cases)


PAIRED = bmburst.Documents((3, 5), True, (6, 6))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key_layout": "contiguous"}, "6 | 4 | key_length | fix: "),
        ({"key_layout": "stripe", "key_length": 12}, "key_layout | 'stripe' | 'striped' | zigzag"),
        ({}, "k is [1, 6, 2, 8] | q is [1, 4, 2, 8] | key_length="),
        ({"key_length": 13}, "key_length | 13 | 2 ranks | 6 local tokens | 1 to 12"),
        ({"key_length": 1.0}, "key_length | whole number | 1.0"),
        ({"key_length": 12, "mask": bmburst.PrefixLM(3)}, "mask | another sequence | key_length=12 | SlidingWindow"),
        ({"key_length": 12, "mask": bmburst.Documents((3, 5))}, "2 documents | keys | key_lengths | fix: "),
        ({"key_length": 11, "mask": PAIRED}, "12 keys | key_length | 11 | fix: "),
        ({"key_length": 12, "mask": PAIRED, "length": 7}, "8 tokens | 7 | fix: "),
        ({"key_length": 12, "key_layout": "striped", "kernel": "cpu"}, "cpu | kernel='auto'"),
        (
            {"key_length": 12, "key_layout": "striped", "strategy": "gather", "layout": "contiguous"},
            "'gather' | striped | zigzag | strategy='auto'",
        ),
    ],
)
@on_ranks(2)
def test_what_has_no_meaning_is_refused_on_every_rank(comm, options, words):
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 6, 2, 8)
    with refused(words):
        bmburst.burst_attention(q, k, k, group=comm, **options)


@on_ranks(2)
def test_ranks_that_disagree_on_keys_are_refused(comm):
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 6, 2, 8)
    with refused("key"):
        bmburst.burst_attention(q, k, k, mask="full", key_length=11 + comm.rank, group=comm)


@on_ranks(2)
def test_ranks_that_disagree_on_whether_keys_are_another_sequence_are_refused(comm):
    """Their plans are alike, but checkpoints would keep different parts."""
    q = torch.zeros(1, 4, 2, 8)
    with refused("key_layout zigzag"):
        bmburst.burst_attention(q, q, q, key_length=8 if comm.rank else None, group=comm)


def test_documents_of_other_numbers_are_refused():
    with refused("3 documents | 2 documents | key | fix: "):
        bmburst.Documents((3, 5), key_lengths=(1, 2, 3))
    with refused("keys of a document | -1"):
        bmburst.Documents((3, 5), key_lengths=(1, -1))
    for lengths, key_lengths, side in (((0, 0), (1, 2), "queries"), ((1, 2), (0, 0), "keys"), ((), (), "queries")):
        with refused(f"{len(lengths)} documents | no {side} | at least one"):
            bmburst.Documents(lengths, key_lengths=key_lengths)


@pytest.mark.parametrize("mask", [PAIRED, PAIRED & bmburst.SlidingWindow(2)])
def test_paired_documents_of_one_sequence_are_refused(mask):
    q = torch.zeros(1, 8, 2, 8)
    with refused("key_lengths | one sequence | fix: | Documents(lengths)"):
        bmburst.burst_attention(q, q, q, mask=mask)


@on_ranks(2)
def test_a_staircase_is_one_kernel_call(comm):
    """Of striped queries and contiguous keys; without it every query would be a call of its own."""
    q, k = torch.zeros(1, 40, 2, 8), torch.zeros(1, 60, 2, 8)
    options = AttentionOptions(layout="striped", key_layout="contiguous")
    call = decide(comm, q, k, k, None, options, 120)
    assert [len(call.tiles(comm.rank, other)) for other in range(2)] == [1, 1]


def test_tiles_that_keep_keys_whole_are_cut_where_documents_of_keys_begin():
    mask = CrossMask(bmburst.Documents((3, 4), True, (0, 4)), 7, 4)
    assert len(make_tiles(mask, 7, np.arange(7), np.arange(4), "keys")) == 1
