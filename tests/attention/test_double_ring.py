"""Attention over nodes gives what one device gives, and little goes over the links between them."""

import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.attention.ring import ring_backward, ring_carry_home, ring_forward, ring_visits
from bmburst.comm.transports import RingGroups, double_ring_groups
from bmburst.errors import UserError
from bmburst.schedule.ring_schedule import make_ring_order
from bmburst_ops.flash import BackwardInputs
from tests.attention.exchange_ways import change_strategy
from tests.attention.oracle import draw, reference
from tests.attention.test_burst_attention import compare, hold_accuracy
from tests.attention.test_ring_traffic import Echo
from tests.comm.counting import Counting
from tests.distributed.threads import on_ranks, run_ranks
from tests.live_bytes import LiveBytes
from tests.mask_oracle import random_tree
from tests.pairs import pairwise
from tests.refusals import refused

MESHES = [(1, 2), (2, 1), (2, 2), (2, 4), (3, 2)]
LAYOUTS = ["contiguous", "zigzag", "striped"]


def everything(owner, rank):
    return True


def double_attention(comm, nodes, ring_tensors, whole, mask, layout, with_lse=True):
    """Cut, attend and put together, by the executor itself; return also both groups."""
    length = whole[0].shape[1]
    q, k, v, grad = (bmburst.shard(t, layout=layout, group=comm) for t in whole[:4])
    grad_lse = bmburst.shard(whole[4], dim=2, layout=layout, group=comm)
    name = {"kv": "kv", "q": "burst"}[ring_tensors]
    options = AttentionOptions(mask=mask, layout=layout, strategy=name, kernel="reference")
    groups = double_ring_groups(comm, nodes, "auto")
    groups = RingGroups(Counting(groups.intra), Counting(groups.inter))
    call = replace(decide(comm, q, k, v, length, options), double_ring=groups)
    out, lse = ring_forward(call, q, k, v)
    forward = groups.inter.sent, groups.intra.sent
    delta = (grad * out).sum(-1).transpose(1, 2) - grad_lse
    grads = ring_backward(call, BackwardInputs(grad, q, k, v, lse, delta))
    parts = [bmburst.unshard(t, layout=layout, group=comm, length=length) for t in (out, *grads)]
    return (
        [parts[0], bmburst.unshard(lse, dim=2, layout=layout, group=comm, length=length), *parts[1:]],
        groups,
        forward,
    )


@pytest.mark.parametrize(
    ("nodes", "places", "layout", "mask", "ring_tensors", "a_rank", "more", "heads", "kv_heads"),
    pairwise(MESHES, LAYOUTS, ["causal", "full", "tree"], ["kv", "q"], [(1, 1, 2, 2), (2, 13, 4, 2), (16, 0, 3, 1)]),
)
def test_equals_one_device_in_fp64(nodes, places, layout, mask, ring_tensors, a_rank, more, heads, kv_heads):
    """Of `a_rank` tokens for each rank, and some more."""

    def body(comm, whole, expected):
        got, _, _ = double_attention(comm, nodes, ring_tensors, whole, mask, layout)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)

    size = nodes * places
    length = a_rank * size + more
    if mask == "tree":
        mask = random_tree(random.Random(length), length)
    whole = draw(0, 2, length, heads, kv_heads, 8)
    run_ranks(size, body, whole, reference(*whole[:4], mask, whole[4]))


@pytest.mark.parametrize("mask", [bmburst.SlidingWindow(9), bmburst.Documents([20, 1, 7, 25, 8])])
@pytest.mark.parametrize("ring_tensors", ["kv", "q"])
def test_steps_without_work_are_not_taken(mask, ring_tensors):
    """Results are those of the definition; fewer blocks move than under a causal mask."""
    whole = draw(1, 1, 61, 4, 2, 8)
    expected = reference(*whole[:4], mask, whole[4])

    def body(comm):
        got, groups, _ = double_attention(comm, 2, ring_tensors, whole, mask, "contiguous")
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
        causal = double_attention(comm, 2, ring_tensors, whole, "causal", "contiguous")[1]
        return groups.intra.calls, causal.intra.calls

    (hops,) = set(run_ranks(6, body))
    assert hops[0] < hops[1]


@pytest.mark.parametrize(("nodes", "places"), MESHES)
@pytest.mark.parametrize(("ring_tensors", "kv_heads"), [("kv", 1), ("q", 4), ("kv", 4)])
def test_moves_the_bytes_that_the_formula_says(nodes, places, ring_tensors, kv_heads):
    """Between nodes a rank sends nodes - 1 blocks forward, and as many with as many gradients backward."""
    tokens, size = 6, nodes * places

    def body(comm):
        whole = draw(0, 2, tokens * size, 4, kv_heads, 8)
        _, groups, forward = double_attention(comm, nodes, ring_tensors, whole, "causal", "zigzag")
        keys, queries, statistics = (2 * tokens * 8 * n for n in (8 * kv_heads, 8 * 4, 4))  # bytes of fp64
        blocks, gradients = (2 * keys, 2 * keys) if ring_tensors == "kv" else (2 * queries + 2 * statistics, queries)
        assert forward == ((nodes - 1) * 2 * keys, nodes * (places - 1) * 2 * keys)
        assert groups.inter.sent - forward[0] == (nodes - 1) * (blocks + gradients)
        returns = nodes * (places - 1) + (places > 2 or nodes == 1 < places)
        assert groups.intra.sent - forward[1] == nodes * (places - 1) * blocks + returns * gradients

    run_ranks(size, body)


class Logging:
    """A level that writes down when a hop starts and when it is waited for."""

    def __init__(self, name, size, log):
        self.name, self.size, self.log, self.count = name, size, log, 0

    def ring(self, *tensors, shift=1):
        self.count += 1
        name = f"{self.name}{self.count}"
        self.log.append(f"start {name} by {shift}")
        return SimpleNamespace(wait=lambda: self.log.append(f"wait {name}") or tensors)


def test_a_block_is_on_its_way_between_nodes_for_a_whole_window():
    log = []
    groups = RingGroups(Logging("hop", 2, log), Logging("far", 3, log))
    ring_order = make_ring_order(3, 2, everything, returning=False)
    for _ in ring_visits(groups, ring_order, torch.zeros(1)):
        log.append("work")
    first = ["start far1 by 1", "start hop1 by 1", "work", "wait hop1", "work", "wait far1"]
    second = ["start far2 by 1", "start hop2 by 1", "work", "wait hop2", "work", "wait far2"]
    assert log == [*first, *second, "start hop3 by 1", "work", "wait hop3", "work"]


def test_gradients_between_nodes_are_on_their_way_for_a_whole_window():
    log = []
    groups = RingGroups(Logging("hop", 4, log), Logging("far", 3, log))
    ring_order = make_ring_order(3, 4, everything, returning=True)
    ring_carry_home(groups, ring_order, (torch.zeros(1),), lambda _: log.append("work") or (torch.zeros(1),))
    far = [(entry.split(" by ")[0], log[:i].count("work")) for i, entry in enumerate(log) if "far" in entry]
    assert far == [  # at which step: windows are of 2, 4, 4 and 2 of them
        *(("start far1", 0), ("wait far1", 2), ("start far2", 2)),  # blocks
        *(("start far3", 6), ("wait far2", 6)),  # what the first foreign window gathered leaves
        *(("wait far3", 10), ("start far4", 10), ("wait far4", 12)),  # the second adds to it; it comes home
    ]
    assert log[-2:] == ["wait hop" + log[-2].removeprefix("wait hop"), "wait hop" + log[-1].removeprefix("wait hop")]


@pytest.mark.parametrize(("nodes", "size"), [(2, 4), (4, 8), (2, 6)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1)])
@on_ranks()
def test_the_strategy_of_that_name(comm, nodes, size, heads, kv_heads):
    comm.nodes = nodes
    compare(comm, "zigzag", "causal", 37, heads, kv_heads, {"strategy": "double-ring"})
    q, k = (torch.zeros(1, 4, n, 8) for n in (heads, kv_heads))
    call = decide(comm, q, k, k, None, AttentionOptions(strategy="double-ring"))
    assert (call.double_ring.intra.size, call.double_ring.inter.size) == (size // nodes, nodes)
    assert call.strategy.ring_tensors == ("q" if kv_heads == heads else "kv")


def test_inside_an_exchange_of_heads(monkeypatch):
    """Neighbours exchange heads, and their groups form a double ring: every rank's ring is one of two."""
    change_strategy(monkeypatch, lambda strategy, _: replace(strategy, ulysses_degree=2, outer="double-ring"))

    def body(comm):
        comm.nodes = 2
        compare(comm, "zigzag", "causal", 53, 4, 2, {"strategy": "auto"})
        q = torch.zeros(1, 4, 4, 8)
        groups = decide(comm, q, q, q, None, AttentionOptions()).double_ring
        assert (groups.intra.size, groups.inter.size) == (2, 2)

    run_ranks(8, body)


@pytest.mark.parametrize(
    ("size", "nodes", "words"),
    [
        (4, 1, "4 ranks | 1 node | 2 or more nodes | 2 or more ranks | BMBURST_NODE"),
        (4, 4, "4 ranks | 4 nodes | 2 or more nodes | BMBURST_NODE"),
        (4, 3, "4 ranks | 3 nodes"),
        (4, None, "4 ranks | 1 node | 2 or more nodes | BMBURST_NODE"),  # found: they are threads of one host
        (3, None, "3 ranks | 2 or more nodes | BMBURST_NODE"),
    ],
)
@on_ranks()
def test_what_cannot_be_is_refused_on_every_rank(comm, size, nodes, words):
    comm.nodes = nodes
    q = torch.zeros(1, 4, 2, 8)
    with refused("strategy", "'double-ring'", words, "strategy='auto'"):
        bmburst.burst_attention(q, q, q, group=comm, strategy="double-ring")
    comm.nodes = None if comm.rank else 2
    with pytest.raises(UserError, match="disagree"):
        bmburst.burst_attention(q, q, q, group=comm, strategy="kv")


def test_no_less_accurate_than_one_device():
    hold_accuracy(torch.bfloat16, [8], nodes=2, strategy="double-ring")


def test_memory_does_not_grow_with_nodes_or_ranks():
    """Five blocks, the own one among them, and five of gradients."""

    def peak(nodes, places):
        groups = RingGroups(Echo(0, places), Echo(0, nodes))
        alive = LiveBytes()
        with alive:
            ring_order = make_ring_order(nodes, places, everything, returning=False)
            deque(ring_visits(groups, ring_order, torch.zeros(1000)), maxlen=0)
            forward, ring_order = alive.peak, make_ring_order(nodes, places, everything, returning=True)
            ring_carry_home(groups, ring_order, (torch.zeros(1000),), lambda _: (torch.zeros(1000),))
        return forward, alive.peak

    for nodes, places in ((2, 2), (4, 4), (8, 8)):
        forward, backward = peak(nodes, places)
        assert forward <= 5 * 4000
        assert backward <= 10 * 4000
    assert peak(4, 4) == peak(8, 8)
