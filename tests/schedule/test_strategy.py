"""What "auto" and each name take: what was measured to be fastest, and only what can work."""

from dataclasses import replace
from itertools import product

import pytest

from bmburst.schedule.cost import EDGE_KEYS, KERNEL_BACKWARD_Q, UNITS_ALIKE, AttentionCost, Placement, Problem
from bmburst.schedule.cross import CrossMask, PairedLayout
from bmburst.schedule.documents import Documents
from bmburst.schedule.hardware import HOST, load_hardware
from bmburst.schedule.heads_plan import Strides, make_heads_plan
from bmburst.schedule.layout import LAYOUTS, make_layout, narrowed_queries, padded_layout, rank_areas
from bmburst.schedule.mask import BlockSparse, Causal, Full, SlidingWindow
from bmburst.schedule.parallelism import STRATEGIES, Strategy
from bmburst.schedule.strategy import choose_strategy, gather_refusal
from bmburst.schedule.units import HeadShapes
from tests.refusals import refused

CAUSAL = Causal()
TRANSPORTS = ("peer", "nccl", "gloo", "threads")
H200, CPU = load_hardware("h200"), load_hardware(HOST)


def shapes(size, tokens, heads=32, kv_heads=32, layout="zigzag", mask=CAUSAL):
    return HeadShapes(
        layout=make_layout(layout, size, tokens // size, mask), degree=1, batch=1, heads=heads, kv_heads=kv_heads,
        head_dim=128, itemsize=2, statistics_itemsize=4,
    )  # fmt: skip


def machine(transport):
    return H200 if transport in ("peer", "nccl") else CPU


def choose(name, sizes, transport="peer", mask=CAUSAL, length=None):
    whole = sizes.layout.size * sizes.layout.tokens if length is None else length
    return choose_strategy(name, sizes, whole, mask, Placement(transport, None), machine(transport))


def cost(strategy, sizes, mask, transport="peer", length=None) -> AttentionCost:
    whole = sizes.layout.size * sizes.layout.tokens if length is None else length
    problem = Problem(sizes, whole, mask, Placement(transport, None), machine(transport))
    return problem.cost(problem.in_units(strategy))


def seconds(*args, **kwargs):
    """Of the GPU."""
    found = cost(*args, **kwargs)
    return found.forward.total + found.backward.total


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("tokens", [65536, 262144, 1048576])
def test_heads_are_exchanged_where_they_divide(size, kv_heads, transport, tokens):
    """As measured on H200s: no merge, no sum, the fewest bytes."""
    assert choose("auto", shapes(size, tokens, kv_heads=kv_heads), transport).ulysses_degree == size


def test_any_head_count_has_a_way():
    for size, heads, kv_heads, layout, mask, transport in product(
        (1, 2, 3, 5, 8), (1, 3, 7, 12), (1, 3), LAYOUTS, (Causal(), Full()), TRANSPORTS
    ):
        if heads % kv_heads == 0:
            found = choose("auto", shapes(size, size * 64, heads, kv_heads, layout), transport, mask)
            assert size % found.ulysses_degree == 0


def test_heads_that_do_not_divide_are_exchanged_as_far_as_they_do():
    found = choose("heads+ring", shapes(8, 65536, 12, 12))
    assert (found.ulysses_degree, found.outer) == (4, "ring")
    assert choose("auto", shapes(8, 65536, 12, 12), "nccl").ulysses_degree in (2, 4)
    assert choose("auto", shapes(8, 65536, 7, 7)).ulysses_degree == 1


def test_names_mean_what_they_say():
    sizes = shapes(4, 65536, 32, 8)
    found = {name: choose(name, sizes) for name in STRATEGIES}
    assert found["heads"].ulysses_degree == 4
    assert {found[name].ulysses_degree for name in ("gather", "ring", "kv", "burst")} == {1}
    assert (found["gather"].outer, found["ring"].outer) == ("gather", "ring")
    assert (found["kv"].ring_tensors, found["burst"].ring_tensors) == ("kv", "q")
    assert found["ring"].ring_tensors == "kv"  # four times fewer bytes with GQA
    assert choose("ring", shapes(4, 65536)).ring_tensors == "q"
    assert (found["heads+ring"].ulysses_degree, found["heads+ring"].outer) == (2, "ring")
    assert (found["heads+gather"].ulysses_degree, found["heads+gather"].outer) == (2, "gather")


def test_heads_move_in_units_where_kernels_are_long_and_copies_free():
    long, short = choose("heads", shapes(4, 65536)), choose("heads", shapes(4, 2048))
    assert len(long.forward_units) > 1 and len(long.backward_units) > 1 and not long.at_once
    assert sum(long.forward_units) == sum(long.backward_units) == 8
    assert short.at_once and not short.forward_units and not short.backward_units
    assert choose("heads", shapes(4, 65536), "nccl").forward_units == ()
    assert set(choose("heads", shapes(4, 1 << 20)).forward_units) == {1}  # an outbox holds 1 GiB
    assert choose("gather", shapes(4, 1 << 20)).most_kv_heads < choose("gather", shapes(4, 65536)).most_kv_heads < 32


def choose_over(tokens, **changes):
    sizes = shapes(4, tokens, 32, 8)
    machine = replace(H200, **changes)
    return choose_strategy("heads", sizes, tokens, CAUSAL, Placement("peer", 1), machine)


def test_the_way_to_move_heads_is_the_cheapest_by_its_predicted_time():
    """No length is a limit: what decides is what the host, the kernels and the links take."""
    ways = [choose_over(tokens).at_once for tokens in (1 << n for n in range(10, 19))]
    assert ways[0] and not ways[-1] and ways == sorted(ways, reverse=True)
    assert not choose_over(4096, collective_host=1e-2).at_once
    assert choose_over(1 << 16, message_host=1.0).at_once
    assert not choose_over(4096, message_host=0.0, pass_host=0.0, graph_host=0.0).at_once
    assert choose_over(1 << 16, peer_bandwidth=1e10).at_once
    for tokens in (1024, 4096, 16384, 65536):
        problem = Problem(shapes(4, tokens, 32, 8), tokens, CAUSAL, Placement("peer", 1), H200)
        taken = problem.in_units(Strategy(4, "ring", "q"))
        others = [replace(taken, at_once=not taken.at_once, forward_units=(), backward_units=())]
        others += [] if taken.at_once else [replace(taken, forward_units=()), replace(taken, forward_units=(2, 4, 2))]
        assert all(problem.cost(taken).total <= (1 + UNITS_ALIKE) * problem.cost(other).total for other in others)


def test_of_units_that_are_alike_the_fewest_are_taken():
    """28 and 4 heads, 160K tokens: units of 1, 5 and 1 heads would hide 0.4 % of forward."""
    sizes = shapes(4, 163840, 28, 4)
    assert choose("heads", sizes).forward_units == ()
    cheap = Problem(sizes, 163840, CAUSAL, Placement("peer", 1), replace(H200, attention_tail=0.0, attention_call=0.0))
    assert len(cheap.in_units(Strategy(4, "ring", "q")).forward_units) == 3


def test_a_named_transport_moves_all_blocks():
    sizes = shapes(4, 1024)
    for placement, at_once in ((Placement("peer", 1, collectives=False), False), (Placement("nccl", None), True)):
        assert choose_strategy("heads", sizes, 1024, CAUSAL, placement, H200).at_once is at_once
    found = choose_strategy("heads+ring", sizes, 1024, CAUSAL, Placement("peer", 1), H200)
    assert not found.at_once  # groups of ranks exchange heads


def test_latents_are_exchanged_where_that_takes_less_time():
    """Instead of keys and values of 64 heads of 192 and 128 numbers: 576 numbers a token."""

    def taken(name="auto", size=4, place=("nccl", 1), tokens=16384, heads=64, machine=H200, **changes):
        sizes = replace(
            shapes(size, tokens, heads, heads), head_dim=192, value_dim=128, **{"latent_dim": 576} | changes
        )
        asked = tokens, CAUSAL, Placement(*place), machine
        problem, found = Problem(sizes, *asked), choose_strategy(name, sizes, *asked)
        other = choose_strategy(name, replace(sizes, latent_dim=0), *asked)
        assert found == other or (found.latents and problem.cost(found).total < problem.cost(other).total)
        return found.latents

    assert taken() and taken("heads") and taken(tokens=4096, place=("nccl", 2), size=8)
    assert not taken("ring") and not taken(latent_dim=0) and not taken(size=1)
    assert not taken(latent_dim=64 * 320) and not taken(heads=62)  # more bytes; 4 ranks cannot share these heads
    assert not taken(tokens=1 << 18)  # more than an outbox holds: heads move in units
    assert not taken(machine=replace(H200, matmul=H200.matmul / 100))  # they are expanded once more
    assert not taken(machine=replace(H200, collective_host=1.0))
    slow = replace(H200, all_to_all_bandwidth=H200.all_to_all_bandwidth / 4, peer_bandwidth=1e9)
    assert taken(place=("peer", 1), machine=slow)
    assert not taken(place=("peer", 1, True, None, False), machine=slow)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_costs_grow_with_what_is_done(transport):
    ring = Strategy(1, "ring", "kv")
    causal = [
        seconds(ring, shapes(4, tokens, kv_heads=kv_heads), Causal(), transport)
        for tokens, kv_heads in ((65536, 8), (65536, 32), (131072, 32), (262144, 32))
    ]
    assert causal == sorted(causal) and len(set(causal)) == 4
    sizes = shapes(4, 65536)
    for strategy in (Strategy(4, "ring", "q"), ring, Strategy(1, "gather", "kv")):
        masks = (SlidingWindow(1024), SlidingWindow(8192), Causal(), Full())
        assert sorted(masks, key=lambda mask: seconds(strategy, sizes, mask, transport)) == list(masks)
    assert seconds(ring, sizes, Causal(), transport, length=40000) < seconds(ring, sizes, Causal(), transport)


def test_the_rank_with_most_to_see_decides():
    """Nobody is ready before it is; exchanged heads give every rank the same."""
    mask = Documents([1 << 17, *[1 << 10] * 128])
    sizes = {name: shapes(8, 1 << 18, layout=name, mask=mask) for name in ("contiguous", "zigzag", "balanced")}
    for strategy in (Strategy(1, "ring", "kv"), Strategy(1, "gather", "kv")):
        took = {name: seconds(strategy, s, mask) for name, s in sizes.items()}
        most = {name: max(rank_areas(s.layout, 1 << 18, mask)) for name, s in sizes.items()}
        assert sorted(took, key=took.get) == sorted(most, key=most.get) == ["balanced", "zigzag", "contiguous"]
    assert len({seconds(Strategy(8, "ring", "q"), s, mask) for s in sizes.values()}) == 1


def test_a_ring_of_queries_waits_for_the_rank_whose_keys_are_seen_most():
    """Zigzag halves the queries' work of bottom-right causal cross-attention, not the keys': stripes of keys do."""
    queries, keys = 1 << 16, 1 << 17
    mask, took = CrossMask(Causal(), queries, keys), {}
    for name in ("zigzag", "striped"):
        layout = PairedLayout.of(padded_layout("zigzag", 2, queries), padded_layout(name, 2, keys))
        assert len(set(rank_areas(layout, queries, mask))) == 1
        sizes = replace(shapes(2, queries), layout=layout)
        took[name] = [cost(Strategy(1, "ring", tensors), sizes, mask).backward for tensors in ("q", "kv")]
        assert choose("ring", sizes, "nccl", mask).ring_tensors == ("kv" if name == "zigzag" else "q")
    (q, kv), (striped_q, striped_kv) = took["zigzag"], took["striped"]
    assert kv.kernel == pytest.approx(striped_kv.kernel, rel=1e-3)
    assert q.kernel / striped_q.kernel == pytest.approx(14 / 12, rel=1e-3)  # 7 of 12 of the pairs, not half


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 16), (4, 4), (8, 2)])
def test_an_exchange_of_heads_costs_the_bytes_of_its_plan(size, kv_heads):
    """Between threads nothing is hidden, and there is one unit: bytes can be read off the seconds."""
    sizes = replace(shapes(size, 64 * size, 16, kv_heads), batch=3)
    taken = Problem(sizes, 64 * size, CAUSAL, Placement("threads"), CPU).cost(Strategy(size, "ring", "kv"))
    for backward, done in ((False, taken.forward), (True, taken.backward)):
        q, k, statistic = (Strides(64 * h * item, h * item, item) for h, item in ((16, 256), (kv_heads, 256), (16, 4)))
        sources = (q, k, k, q, statistic, statistic) if backward else (q, k, k)
        plan = make_heads_plan(replace(sizes, degree=size), 0, sources, backward=backward)
        moved = sum(exchange.bytes_sent for exchange in (*plan.inbound, *(home.exchange for home in plan.outbound)))
        assert (done.exposed - 2 * CPU.peer_latency) * CPU.peer_bandwidth == pytest.approx(moved, rel=1e-9)


@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_nothing_moves_where_no_rank_sees_a_key_of_another(transport, layout):
    """Here every 1,024 tokens are a document."""
    mask = Documents([1024] * 256)
    sizes = shapes(8, 1 << 18, layout=layout, mask=mask)
    assert choose("auto", sizes, transport, mask).ulysses_degree == 1
    ranks = zip(*(of(sizes.layout, 1 << 18, mask) for of in (rank_areas, narrowed_queries)), strict=True)
    flops = 4.0 * max(area + EDGE_KEYS * queries for area, queries in ranks) * 32 * 128
    half = 1 + H200.attention_half_rows / sizes.layout.tokens
    for strategy in (Strategy(1, "ring", "kv"), Strategy(1, "ring", "q"), Strategy(1, "gather", "kv")):
        taken = cost(strategy, sizes, mask, transport)
        assert taken.forward == pytest.approx((flops / H200.attention_forward * half + H200.attention_call, 0, 0))
        sums = KERNEL_BACKWARD_Q * sizes.q_bytes / 2 / H200.memory_bandwidth
        kernel = 2.5 * flops / H200.attention_backward * half + H200.attention_call + sums
        assert taken.backward == pytest.approx((kernel, 0, 0))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_narrow_window_over_many_ranks_prefers_less_movement(layout):
    """Where a transfer's time is lost, heads of all tokens cost more than the few keys before one's own."""
    window, sizes = SlidingWindow(4096), shapes(32, 1 << 20, layout=layout)
    assert choose("auto", sizes, "nccl").ulysses_degree == 32
    found = choose("auto", sizes, "nccl", window)
    assert found.ulysses_degree <= 2 and found.outer == "gather"
    ring, gather = Strategy(1, "ring", "kv"), Strategy(1, "gather", "kv")
    assert seconds(gather, sizes, window) < seconds(ring, sizes, window) < seconds(ring, sizes, Causal())
    wide = SlidingWindow(1 << 19)
    moved = [seconds(s, sizes, mask, "nccl") for mask in (window, wide) for s in (gather, ring)]
    assert moved == sorted(moved)


def test_gather_needs_neighbours():
    striped = make_layout("striped", 4, 8)
    assert gather_refusal(striped, Full()) is None
    for mask in (Causal(), SlidingWindow(3), BlockSparse([[1]], 32)):
        assert gather_refusal(make_layout("zigzag", 4, 8), mask) is None
        assert "'striped' has no run of neighbouring tokens" in gather_refusal(striped, mask)
        with refused("'gather'", "'striped'", "'zigzag'", "strategy='auto'"):
            choose("gather", shapes(4, 4096, layout="striped"), mask=mask)


def test_a_single_rank_takes_any_name():
    for name, layout in product(STRATEGIES, LAYOUTS):
        assert choose(name, shapes(1, 4096, 7, 7, layout)).ulysses_degree == 1


def test_a_mesh_says_how_many_ranks_exchange_heads():
    def choose_with(heads, name="auto", sizes=None):
        return choose_strategy(name, sizes or shapes(8, 65536), 65536, Causal(), Placement("nccl", None), H200, heads)

    for heads in (1, 2, 4, 8):
        assert choose_with(heads).ulysses_degree == heads
    assert choose_with(2, "heads+ring").ulysses_degree == 2
    with refused("mesh", "Ulysses degree 2", "'heads'", "strategy='auto'"):
        choose_with(2, "heads")
    with refused("mesh", "Ulysses degree 8", "12 query heads", "fix: use a mesh with other heads, or heads=None"):
        choose_with(8, sizes=shapes(8, 65536, 12, 12))
    with refused("mesh", "Ulysses degree 2", "'striped'", "fix: use a mesh with other heads, or heads=None"):
        choose_with(2, sizes=shapes(8, 65536, layout="striped"))
    assert choose_with(2, sizes=shapes(1, 65536)).ulysses_degree == 1  # nothing is spread
