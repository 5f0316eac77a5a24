"""Values with another head dim than keys, as in multi-head latent attention: what moves keeps its own width."""

from dataclasses import replace

import pytest
import torch

import bmburst
from bmburst.attention.call import decide, head_shapes
from bmburst.attention.options import AttentionOptions
from bmburst.comm.groups import single_rank_group
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.layout import Zigzag
from bmburst.schedule.mask import Causal
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.units import HeadShapes, Sizes, backward_bytes
from bmburst_ops.flash.padded import PaddedKernel
from tests.attention.oracle import draw, reference
from tests.attention.test_burst_attention import compare, split_attention
from tests.attention.test_gather import in_units
from tests.comm.counting import counted
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import long, pairwise
from tests.refusals import refused

LENGTH = 29
MASKS = {"causal": "causal", "full": "full", "documents": bmburst.Documents((3, 13, 1, 12))}
NARROW, WIDE = 5, 12  # beside a head_dim of 8


@pytest.mark.parametrize(
    ("size", "layout", "mask", "strategy", "kernel", "value_dim"),
    pairwise(
        [1, 2, 3],
        ["contiguous", "zigzag"],
        MASKS,
        ["kv", "burst", "gather", "heads"],
        ["reference", "cpu"],
        [NARROW, WIDE],
    ),
)
def test_equals_one_device_in_fp64(size, layout, mask, strategy, kernel, value_dim, monkeypatch):
    in_units(monkeypatch, 1 if size == 2 else 0)
    options = {"strategy": strategy, "kernel": kernel}
    for heads, kv_heads in ((6, 6), (6, 1), (12, 6)):
        run_ranks(size, compare, layout, MASKS[mask], LENGTH, heads, kv_heads, options, value_dim)


@pytest.mark.parametrize(
    ("strategy", "layout"), [("heads+gather", "zigzag"), *long(("heads+ring", "zigzag"), ("kv", "striped"))]
)
def test_equals_one_device_on_four_ranks(strategy, layout):
    for value_dim in (NARROW, WIDE):
        run_ranks(4, compare, layout, "causal", LENGTH, 4, 4, {"strategy": strategy}, value_dim)


@pytest.mark.parametrize("strategy", ["kv", "burst", "gather", "heads"])
@pytest.mark.parametrize("value_dim", [NARROW, WIDE])
def test_moves_the_bytes_of_both_widths(strategy, value_dim):
    """Which the cost model counts, too: not those of values padded to the width of keys."""

    def body(comm):
        group, counting = counted(comm)
        widths = 8, 8, value_dim, value_dim
        q, k, v, grad = (torch.randn(2, 6, 4, width).bfloat16().requires_grad_() for width in widths)
        options = {"strategy": strategy, "mask": "full", "layout": "contiguous"}
        out = bmburst.burst_attention(q, k, v, group=group, **options)
        forward = counting.sent
        out.backward(grad)
        call = decide(comm, q, k, v, None, AttentionOptions(**options))
        shapes = replace(head_shapes(call.layout, q, k, v), degree=call.strategy.ulysses_degree)
        return forward, counting.sent - forward, Sizes(call.strategy, shapes)

    vectors, statistics = 2 * 6 * 4 * 2, 2 * 6 * 4 * 4  # bytes a number of a head: in 16 bits, in 32
    kv = vectors * (8 + value_dim)
    wanted = {
        "kv": (kv, kv + 2 * 2 * kv),  # gradients are in 32 bits and make one hop more
        "burst": (kv, kv + 2 * statistics + 2 * 2 * vectors * 8),
        "gather": (kv, 2 * kv),
        "heads": ((2 * kv + statistics) // 2, (vectors * (4 * 8 + 3 * value_dim) + 2 * statistics) // 2),
    }
    for forward, backward, sizes in run_ranks(2, body):
        assert (forward, backward) == wanted[strategy]
        predicted = {
            "kv": (sizes.shapes.kv_bytes, backward_bytes(sizes.shapes, "kv")),
            "burst": (sizes.shapes.kv_bytes, backward_bytes(sizes.shapes, "q")),
            "gather": (sizes.gather_bytes, 2 * sizes.gather_bytes),
            "heads": tuple(sum(sizes.head_bytes(backward=direction)) // 2 for direction in (False, True)),
        }
        assert (forward, backward) == predicted[strategy]


def test_costs_lie_between_those_of_each_width():
    """In time of kernels, of sums and of transfers, forward and backward."""

    def cost(strategy, head_dim, value_dim):
        shapes = HeadShapes(
            layout=Zigzag(4, 1 << 14),
            degree=1,
            batch=1,
            heads=16,
            kv_heads=16,
            head_dim=head_dim,
            itemsize=2,
            statistics_itemsize=4,
            value_dim=value_dim,
        )
        problem = Problem(shapes, 1 << 16, Causal(), Placement("nccl"), load_hardware("h100"))
        return problem.cost(problem.in_units(strategy))

    for strategy in (Strategy(4, "ring", "kv"), Strategy(1, "gather", "kv"), Strategy(1, "ring", "kv"),
                     Strategy(1, "ring", "q"), Strategy(2, "gather", "kv")):  # fmt: skip
        narrow, both, wide = (cost(strategy, *widths) for widths in ((128, 128), (192, 128), (192, 192)))
        assert cost(strategy, 192, 0) == wide
        for name in ("forward", "backward"):
            parts = zip(*(getattr(each, name)[::2] for each in (narrow, both, wide)), strict=True)
            assert all(a < b < c for a, b, c in parts), (strategy, name)


def test_the_kernels_pads_where_it_takes_one_width():
    comm = single_rank_group()
    q, k, v = (torch.zeros(1, 4, 2, width, dtype=torch.float64) for width in (8, 8, 5))
    padded, own = (decide(comm, q, k, v, None, AttentionOptions(kernel=name)).kernel for name in ("cpu", "reference"))
    assert isinstance(padded, PaddedKernel) and padded.name == "cpu" and own.name == "reference"
    assert not isinstance(own, PaddedKernel)
    assert not isinstance(decide(comm, q, k, k, None, AttentionOptions(kernel="cpu")).kernel, PaddedKernel)


@pytest.mark.parametrize("shape", [(1, 4, 1, 8), (1, 3, 2, 8), (2, 4, 2, 8)], ids=str)
def test_other_shapes_of_values_are_refused(shape):
    q = torch.zeros(1, 4, 2, 8)
    with refused("k and v", "batch, tokens and heads", "[1, 4, 2, 8]", str(list(shape)), "fix: "):
        bmburst.burst_attention(q, q, torch.zeros(shape))


@on_ranks(2)
def test_ranks_with_different_widths_are_refused(comm):
    q = torch.zeros(1, 4, 2, 8)
    with refused("disagree", "v float32[1, 4, 2, 5]", "v float32[1, 4, 2, 6]"):
        bmburst.burst_attention(q, q, torch.zeros(1, 4, 2, 5 + comm.rank), group=comm)


def test_with_a_sink_and_a_log_sum_exp_in_the_loss():
    """Which takes a kernel that is given delta, and a second one where ranks exchange heads."""
    whole = draw(0, 2, LENGTH, 4, 2, 8, value_dim=NARROW)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    expected = reference(*whole[:4], "causal", whole[4], sink=sink)

    def body(comm):
        for strategy in ("ring", "gather", "heads"):
            got = split_attention(comm, whole, "zigzag", "causal", strategy=strategy, sink=sink)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)

    run_ranks(2, body)
