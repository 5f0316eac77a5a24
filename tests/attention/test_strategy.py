"""The cost model chooses what was measured to be fastest, and only what can work."""

from itertools import product

import pytest

from bmburst.attention.heads_plan import HeadShapes
from bmburst.attention.strategy import LINKS, STRATEGIES, Strategy, choose_strategy, cost
from bmburst.layout import LAYOUTS, make_layout


def shapes(size, tokens, heads=32, kv_heads=32, layout="zigzag"):
    return HeadShapes(
        layout=make_layout(layout, size, tokens // size), degree=1, batch=1, heads=heads, kv_heads=kv_heads,
        head_dim=128, itemsize=2, statistics_itemsize=4,
    )  # fmt: skip


def choose(name, sizes, transport="peer", mask="causal"):
    return choose_strategy(name, sizes, mask, transport, 4)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("tokens", [65536, 262144, 1048576])
def test_heads_are_exchanged_where_they_divide(size, kv_heads, transport, tokens):
    """As measured on H200s: no merge, no sum, the fewest bytes."""
    assert choose("auto", shapes(size, tokens, kv_heads=kv_heads), transport).heads == size


def test_any_head_count_has_a_way():
    for size, heads, kv_heads, layout, mask, transport in product(
        (1, 2, 3, 5, 8), (1, 3, 7, 12), (1, 3), LAYOUTS, ("causal", "full"), LINKS
    ):
        if heads % kv_heads == 0:
            found = choose("auto", shapes(size, size * 64, heads, kv_heads, layout), transport, mask)
            assert size % found.heads == 0


def test_heads_that_do_not_divide_are_exchanged_as_far_as_they_do():
    found = choose("heads+ring", shapes(8, 65536, 12, 12))
    assert (found.heads, found.outer) == (4, "ring")
    assert choose("auto", shapes(8, 65536, 12, 12), "nccl").heads in (2, 4)
    assert choose("auto", shapes(8, 65536, 7, 7)).heads == 1


def test_names_mean_what_they_say():
    sizes = shapes(4, 65536, 32, 8)
    found = {name: choose(name, sizes) for name in STRATEGIES}
    assert found["heads"].heads == 4
    assert {found[name].heads for name in ("gather", "ring", "kv", "burst")} == {1}
    assert (found["gather"].outer, found["ring"].outer) == ("gather", "ring")
    assert (found["kv"].travellers, found["burst"].travellers) == ("kv", "q")
    assert found["ring"].travellers == "kv"  # four times fewer bytes with GQA
    assert choose("ring", shapes(4, 65536)).travellers == "q"
    assert (found["heads+ring"].heads, found["heads+ring"].outer) == (2, "ring")
    assert (found["heads+gather"].heads, found["heads+gather"].outer) == (2, "gather")


def test_steps_are_pipelined_where_kernels_are_long_and_copies_free():
    assert choose("heads", shapes(4, 65536)).most_kv_heads > 1
    assert choose("heads", shapes(4, 65536), "nccl").most_kv_heads == 0
    assert choose("heads", shapes(4, 2048)).most_kv_heads == 0
    assert choose("heads", shapes(4, 1 << 20)).most_kv_heads == 1  # an outbox holds 1 GiB


@pytest.mark.parametrize("transport", LINKS)
def test_costs_grow_with_what_is_done(transport):
    def seconds(tokens, kv_heads=32):
        return cost(Strategy(1, "ring", "kv"), shapes(4, tokens, kv_heads=kv_heads), "causal", transport, 4)

    assert seconds(65536) < seconds(131072) < seconds(262144)
    assert seconds(65536, kv_heads=8) < seconds(65536)
    sizes = shapes(4, 65536)
    assert cost(Strategy(4, "ring", "q"), sizes, "causal", transport, 4) < cost(
        Strategy(4, "ring", "q"), sizes, "full", transport, 4
    )


def test_a_single_rank_takes_any_name():
    for name, layout in product(STRATEGIES, LAYOUTS):
        assert choose(name, shapes(1, 4096, 7, 7, layout)).heads == 1
