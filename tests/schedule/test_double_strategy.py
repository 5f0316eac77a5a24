"""Where links between nodes are slow, the cost model lets blocks cross them no more than they must."""

from dataclasses import replace

import pytest

from bmburst.errors import UserError
from bmburst.schedule.heads_plan import HeadShapes
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Causal
from bmburst.schedule.ring_schedule import AttentionShape, backward_bytes, forward_bytes
from bmburst.schedule.strategy import BETWEEN_NODES, LINKS, Strategy, choose_strategy, cost

TOKENS, SIZE = 1 << 17, 16


def shapes(heads=7, kv_heads=7):
    """By default with heads that no number of ranks divides."""
    return HeadShapes(
        layout=make_layout("zigzag", SIZE, TOKENS // SIZE), degree=1, batch=1, heads=heads, kv_heads=kv_heads,
        head_dim=128, itemsize=2, statistics_itemsize=4,
    )  # fmt: skip


def choose(name, nodes, sizes):
    return choose_strategy(name, sizes, TOKENS, Causal(), "nccl", nodes)


def seconds(outer, nodes):
    return cost(Strategy(1, outer, "kv"), shapes(), TOKENS, Causal(), "nccl", nodes)


def test_auto_takes_it_where_there_are_nodes():
    assert choose("auto", 2, shapes()).outer == choose("auto", 8, shapes()).outer == "double-ring"
    assert all(choose("auto", nodes, shapes()).outer != "double-ring" for nodes in (None, 1, SIZE))


def test_an_exchange_of_heads_across_nodes_waits_for_the_slow_link():
    def exchange(heads, nodes):
        return cost(Strategy(heads, "ring", "kv"), shapes(16, 16), TOKENS, Causal(), "nccl", nodes)

    per_rank = TOKENS // SIZE * 128 * (5 + 6) * 16 * 2  # bytes of q, k, v, out and the gradients, as `cost` counts them
    across = per_rank * 8 / 16 * (1 / BETWEEN_NODES["nccl"].bandwidth - 1 / LINKS["nccl"].bandwidth)
    assert exchange(16, 1) < exchange(16, 2) <= exchange(16, 1) + across
    assert choose("auto", 2, shapes(8, 8)).heads <= 8


def test_a_flat_ring_waits_for_the_slow_link_at_every_hop():
    shape = AttentionShape(batch=1, tokens=TOKENS // SIZE, heads=7, kv_heads=7, head_dim=128)
    moved = forward_bytes(shape, SIZE) + backward_bytes(shape, SIZE, "kv")
    slow, fast = BETWEEN_NODES["nccl"], LINKS["nccl"]
    assert seconds("ring", 1) < seconds("ring", 2) == pytest.approx(seconds("ring", 8))
    slower = moved / slow.bandwidth - moved * fast.exposed / fast.bandwidth
    assert seconds("ring", 2) - seconds("ring", 1) <= slower
    assert seconds("double-ring", 2) < seconds("double-ring", 8) < seconds("ring", 2)


def test_both_levels_of_a_double_ring_are_busy_at_once():
    """Many short sequences, so that there is less to compute than to move."""
    tokens, batch = 1 << 14, 16
    sizes = replace(shapes(), layout=make_layout("zigzag", SIZE, tokens // SIZE), batch=batch)
    shape = AttentionShape(batch=batch, tokens=tokens // SIZE, heads=7, kv_heads=7, head_dim=128)
    hop = (forward_bytes(shape, SIZE) + backward_bytes(shape, SIZE, "kv")) / (SIZE - 1)
    across, inside = 7 * hop / BETWEEN_NODES["nccl"].bandwidth, 8 * hop / LINKS["peer"].bandwidth
    found = cost(Strategy(1, "double-ring", "kv"), sizes, tokens, Causal(), "nccl", 8)
    latencies_and_merges = 0.0035
    assert across < found < across + latencies_and_merges < across + inside


@pytest.mark.parametrize("nodes", [1, SIZE])
def test_without_two_nodes_of_two_ranks_it_is_refused(nodes):
    with pytest.raises(UserError, match=f"{SIZE} ranks on {nodes} nodes? are no 2 nodes or more of 2 ranks or more"):
        choose("double-ring", nodes, shapes())
    assert choose("double-ring", None, shapes()).outer == "double-ring"  # not known yet
