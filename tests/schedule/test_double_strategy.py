"""Where links between nodes are slow, the cost model lets blocks cross them no more than they must."""

from dataclasses import replace

import pytest

from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.layout import Contiguous, make_layout
from bmburst.schedule.mask import Causal
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.units import HeadShapes, backward_bytes
from tests.refusals import refused

TOKENS, SIZE = 1 << 17, 16
H200 = load_hardware("h200")


def shapes(heads=7, kv_heads=7, tokens=TOKENS):
    """By default with heads that no number of ranks divides."""
    return HeadShapes(
        layout=make_layout("zigzag", SIZE, tokens // SIZE), degree=1, batch=1, heads=heads, kv_heads=kv_heads,
        head_dim=128, itemsize=2, statistics_itemsize=4,
    )  # fmt: skip


def choose(name, placement, sizes):
    placement = placement if isinstance(placement, Placement) else Placement("nccl", placement)
    return choose_strategy(name, sizes, sizes.layout.size * sizes.layout.tokens, Causal(), placement, H200)


def cost(strategy, sizes, nodes, tokens=TOKENS, hardware=H200):
    problem = Problem(sizes, tokens, Causal(), Placement("nccl", nodes), hardware)
    return problem.cost(problem.in_units(strategy))


def seconds(outer, nodes):
    return cost(Strategy(1, outer, "kv"), shapes(), nodes).total


def test_auto_takes_it_where_there_are_nodes():
    long = shapes(tokens=4 * TOKENS)  # of short sequences the host issues a gather sooner
    assert choose("auto", 2, long).outer == choose("auto", 8, long).outer == "double-ring"
    assert all(choose("auto", nodes, long).outer != "double-ring" for nodes in (None, 1, SIZE))
    assert choose("auto", Placement("nccl", 2, even=False), long).outer != "double-ring"


def test_an_exchange_of_heads_across_nodes_waits_for_the_slow_link():
    def exchange(nodes):
        taken = cost(Strategy(16, "ring", "kv"), shapes(16, 16), nodes)
        return taken.forward.exposed + taken.backward.exposed

    vectors = TOKENS // SIZE * 16 * (128 * 2 * (5 + 6) + 3 * 4)  # q, k, v, out, dO and the gradients; three statistics
    across = vectors * 8 / 16 / H200.inter_bandwidth
    assert exchange(2) == pytest.approx(across + 4 * H200.inter_latency)
    assert exchange(1) == pytest.approx(vectors * 15 / 16 / H200.all_to_all_bandwidth + 4 * H200.nccl_latency)
    assert choose("auto", 2, shapes(8, 8)).ulysses_degree <= 8


def test_a_flat_ring_waits_for_the_slow_link_at_every_hop():
    sizes = HeadShapes(
        layout=Contiguous(SIZE, TOKENS // SIZE),
        degree=1,
        batch=1,
        heads=7,
        kv_heads=7,
        head_dim=128,
        itemsize=2,
        statistics_itemsize=4,
    )
    moved = (sizes.groups - 1) * 2 * sizes.k_bytes + backward_bytes(sizes, "kv")
    lone = replace(H200, inter_lone_bandwidth=H200.inter_bandwidth * 2)  # one rank of each node sends at once
    assert seconds("ring", 1) < seconds("ring", 2) == pytest.approx(seconds("ring", 8))
    assert seconds("ring", 2) - seconds("ring", 1) <= moved / H200.inter_bandwidth
    assert seconds("double-ring", 2) < seconds("double-ring", 8) < seconds("ring", 2)
    ring, double = Strategy(1, "ring", "kv"), Strategy(1, "double-ring", "kv")
    assert cost(ring, shapes(), 2, hardware=lone).total < seconds("ring", 2)
    assert cost(double, shapes(), 2, hardware=lone).total == seconds("double-ring", 2)


def test_blocks_inside_a_node_go_by_what_is_there():
    """Copy engines where they may, NCCL where it was asked for."""
    sizes, ring = shapes(), Strategy(1, "double-ring", "kv")
    taken = [
        Problem(sizes, TOKENS, Causal(), Placement("nccl", 2, within=within), H200).cost(ring).total
        for within in ("peer", None, "nccl")
    ]
    assert taken[0] == taken[1] < taken[2]


@pytest.mark.parametrize("nodes", [1, SIZE])
def test_without_two_nodes_of_two_ranks_it_is_refused(nodes):
    words = "'double-ring'", f"{SIZE} ranks", f"{nodes} node", "2 or more nodes", "BMBURST_NODE", "strategy='auto'"
    with refused(*words):
        choose("double-ring", nodes, shapes())
    assert choose("double-ring", None, shapes()).outer == "double-ring"  # not known yet
