"""The bytes that the suite says `burst_attention` receives are those of the library's own plans."""

from types import SimpleNamespace

import pytest

from benchmarks.attention.cells import Cell, mask_of, sizes
from benchmarks.attention.methods import traffic
from bmburst.schedule import make_schedule
from bmburst.schedule.gather_plan import make_gather_plan
from bmburst.schedule.layout import make_layout
from bmburst.schedule.strategy import Strategy
from bmburst.schedule.units import HeadShapes

TOKENS = 256
CASES = [
    (mask, layout, ranks)
    for mask, layout in (
        ("causal", "zigzag"),
        ("full", "contiguous"),
        ("documents", "zigzag"),
        ("documents", "balanced"),
        ("window", "contiguous"),
    )
    for ranks in (2, 4)
]


def cell_and_call(mask, layout, ranks, outer, ring_tensors="kv"):
    at = Cell(
        **{"suite": "sequence", "method": "ours", "ranks": ranks, "device": "cpu", "tokens": TOKENS, "mask": mask},
        **{"heads": 4, "kv_heads": 2, "head_dim": 8},
    )
    value = mask_of(mask, TOKENS)
    call = SimpleNamespace(strategy=Strategy(1, outer, ring_tensors), length=TOKENS, mask=value)
    call.layout = make_layout(layout, ranks, TOKENS // ranks, value)
    call.outer = call
    return at, call


@pytest.mark.parametrize(("mask", "layout", "ranks"), CASES)
def test_a_gather_receives_what_its_exchanges_move(mask, layout, ranks):
    at, call = cell_and_call(mask, layout, ranks, "gather")
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "itemsize": 2, "statistics_itemsize": 4}
    shapes = HeadShapes(layout=call.layout, degree=1, **sizes)
    inward, home = [], []
    for rank in range(ranks):
        plan = make_gather_plan(shapes, TOKENS, call.mask, rank, 1)
        inward.append(sum(received(exchange) for exchange, _ in plan.inbound))
        home.append(sum(received(exchange) for exchange, _ in plan.outbound))
    said = traffic(at, call)
    assert said.forward == max(inward)
    assert said.forward_backward == max(2 * k + g for k, g in zip(inward, home, strict=True))


def received(exchange):
    return sum(m.source.nbytes for p, moves in enumerate(exchange.receives) if p != exchange.rank for m in moves)


@pytest.mark.parametrize("ring_tensors", ["kv", "q"])
@pytest.mark.parametrize(("mask", "layout", "ranks"), CASES)
def test_a_ring_receives_a_block_a_hop(mask, layout, ranks, ring_tensors):
    at, call = cell_and_call(mask, layout, ranks, "ring", ring_tensors)
    moves = {
        side: len(make_schedule(call.layout, TOKENS, call.mask, 0, side).steps) - 1 for side in {"kv", ring_tensors}
    }
    own, hops = sizes(at), moves[ring_tensors]
    said = traffic(at, call)
    assert said.forward == 2 * own.k * moves["kv"]
    read = 2 * own.k if ring_tensors == "kv" else 2 * (own.q + own.statistics)
    gradients = own.wide * (2 * own.k if ring_tensors == "kv" else own.q)
    assert said.forward_backward - said.forward == read * hops + gradients * (hops + 1 if hops else 0)
