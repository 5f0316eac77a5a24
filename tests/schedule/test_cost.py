"""Prices are those of the records, and each constant decides some of them."""

from dataclasses import dataclass, fields, replace
from statistics import mean

import pytest

from bmburst.plan import accuracy
from bmburst.schedule import cost as module
from bmburst.schedule.cost import AttentionCost, Placement, Problem
from bmburst.schedule.hardware import DEFAULT, HOST, Hardware, hardware_like, load_hardware
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Causal, Mask, SlidingWindow
from bmburst.schedule.strategy_names import Strategy
from bmburst.schedule.units import HeadShapes

CAUSAL = Causal()
H200, CPU = load_hardware("h200"), load_hardware(HOST)
NEVER = (
    *("peak", "matmul", "matmul_half_rows", "layer_host", "memory", "reserved", "nccl_memory"),
    *("workspace", "collective_bandwidth", "host_memory", "host_bandwidth"),
)
"""Numbers of a machine that price other things than attention."""
PRICED = [declared.name for declared in fields(Hardware) if declared.name not in (*NEVER, "name")]
FACTORS = [name for name, value in vars(module).items() if name.isupper() and isinstance(value, float)]
"""Bytes that executors read and write, and a kernel's tile."""
PINNED = 1e-4


@dataclass(frozen=True)
class Case:
    """A strategy for heads of 128 in bf16, each rank on an H200, or on a CPU where threads or gloo move blocks."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    strategy: Strategy
    placement: Placement
    mask: Mask

    @property
    def machine(self) -> Hardware:
        return H200 if self.placement.transport in ("peer", "nccl") else CPU

    def cost(self, hardware: Hardware | None = None) -> AttentionCost:
        shapes = HeadShapes(
            layout=make_layout("zigzag", self.ranks, self.tokens // self.ranks), degree=1, batch=1, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=128, itemsize=2, statistics_itemsize=4,
        )  # fmt: skip
        problem = Problem(shapes, self.tokens, self.mask, self.placement, hardware or self.machine)
        return problem.cost(problem.in_units(self.strategy))


# Milliseconds forward, backward, and of both with what the GPU waits for the host: what the records say within the
# errors of `bmburst plan --check`, to six digits.
CASES = {
    "heads over copy engines, in units": (
        Case(2, 65536, 32, 32, Strategy(2, "ring", "q"), Placement("peer"), CAUSAL),
        (27.8639, 74.435, 102.299),
    ),
    "heads over copy engines, at once": (
        Case(2, 8192, 4, 4, Strategy(2, "ring", "q"), Placement("peer"), CAUSAL),
        (0.137086, 0.24494, 0.895507),
    ),
    "heads over NCCL": (
        Case(4, 65536, 32, 8, Strategy(4, "ring", "q"), Placement("nccl"), CAUSAL),
        (14.9052, 38.4679, 53.3732),
    ),
    "heads over two nodes": (
        Case(16, 131072, 32, 8, Strategy(16, "ring", "q"), Placement("nccl", 2), CAUSAL),
        (15.8544, 40.1348, 55.9892),
    ),
    "gather over copy engines": (
        Case(4, 65536, 12, 12, Strategy(1, "gather", "kv"), Placement("peer"), CAUSAL),
        (5.62428, 14.9388, 20.5631),
    ),
    "gather of a window": (
        Case(4, 65536, 12, 12, Strategy(1, "gather", "kv"), Placement("peer"), SlidingWindow(4096)),
        (0.928075, 2.14826, 5.96908),
    ),
    "ring of keys over NCCL": (
        Case(4, 16384, 8, 8, Strategy(1, "ring", "kv"), Placement("nccl"), CAUSAL),
        (0.631674, 1.93728, 7.44224),
    ),
    "ring of queries over NCCL": (
        Case(4, 65536, 32, 32, Strategy(1, "ring", "q"), Placement("nccl"), CAUSAL),
        (17.5832, 48.5251, 66.1082),
    ),
    "ring over copy engines": (
        Case(4, 65536, 32, 32, Strategy(1, "ring", "q"), Placement("peer"), CAUSAL),
        (15.4456, 43.198, 58.6436),
    ),
    "one ring over two nodes": (
        Case(4, 32768, 8, 8, Strategy(1, "ring", "kv"), Placement("nccl", 2), CAUSAL),
        (2.76203, 9.70801, 13.5985),
    ),
    "a ring of groups over two nodes": (
        Case(16, 131072, 32, 32, Strategy(8, "ring", "kv"), Placement("nccl", 2), CAUSAL),
        (16.1638, 48.8767, 65.0404),
    ),
    "double ring": (
        Case(8, 65536, 7, 7, Strategy(1, "double-ring", "q"), Placement("nccl", 2), CAUSAL),
        (2.13378, 6.35695, 15.3227),
    ),
    "heads between processes on CPUs": (
        Case(4, 8192, 8, 8, Strategy(4, "ring", "q"), Placement("gloo"), CAUSAL),
        (187.556, 458.799, 646.356),
    ),
    "a ring of threads": (
        Case(2, 8192, 8, 8, Strategy(1, "ring", "q"), Placement("threads"), CAUSAL),
        (374.377, 946.345, 1320.72),
    ),
    "a ring of groups that span nodes": (
        Case(16, 131072, 32, 32, Strategy(8, "ring", "kv"), Placement("nccl", 4), CAUSAL),
        (18.5556, 59.79, 78.3455),
    ),
    "heads over processes of two hosts": (
        Case(4, 8192, 8, 8, Strategy(4, "ring", "q"), Placement("gloo", 2), CAUSAL),
        (183.346, 451.426, 634.772),
    ),
    "groups of processes that span hosts": (
        Case(8, 8192, 8, 8, Strategy(4, "ring", "kv"), Placement("gloo", 4), CAUSAL),
        (104.662, 282.022, 386.684),
    ),
    "heads between threads": (
        Case(2, 256, 2, 2, Strategy(2, "ring", "q"), Placement("threads"), CAUSAL),
        (0.359479, 0.558842, 1.82958),
    ),
    "a gather between processes": (
        Case(4, 4096, 8, 8, Strategy(1, "gather", "q"), Placement("gloo"), CAUSAL),
        (62.0399, 149.493, 211.533),
    ),
    "one ring of processes over two hosts": (
        Case(8, 4096, 8, 8, Strategy(1, "ring", "kv"), Placement("gloo", 2), CAUSAL),
        (44.4551, 126.718, 171.174),
    ),
}


def off(prices):
    """Return by how much the pass that is furthest off differs from what is pinned."""
    errors = (
        abs(price.total * 1e3 / pinned - 1)
        for cost, (_, expected) in zip(prices, CASES.values(), strict=True)
        for price, pinned in zip((cost.forward, cost.backward, cost), expected, strict=True)
    )
    return max(errors)


@pytest.mark.parametrize("name", CASES)
def test_prices_are_what_they_were(name):
    case, expected = CASES[name]
    cost = case.cost()
    found = [price.total * 1e3 for price in (cost.forward, cost.backward, cost)]
    assert found == pytest.approx(expected, rel=PINNED)


def changed(monkeypatch, machine, number, factor):
    """Return the prices where a number of a machine is another one."""
    other = replace(machine, **{number: getattr(machine, number) * factor})
    if machine is CPU:
        monkeypatch.setattr(module, "hardware_like", lambda _: other)
    return [case.cost(other if case.machine is machine else None) for case, _ in CASES.values()]


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("number", PRICED)
def test_no_constant_of_a_machine_can_be_off_by_two(number, factor, monkeypatch):
    assert off(changed(monkeypatch, H200, number, factor)) > 10 * PINNED


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize(
    "number", [name for name in PRICED if name not in ("all_to_all_bandwidth", "attention_tail", "multiprocessors")]
)
def test_no_constant_of_a_host_without_gpus_can_be_off_by_two(number, factor, monkeypatch):
    """The three others are of NCCL's exchanges and of kernels in units, which only copy engines have."""
    assert off(changed(monkeypatch, CPU, number, factor)) > 10 * PINNED


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("name", FACTORS)
def test_no_factor_of_the_formulas_can_be_off_by_two(name, factor, monkeypatch):
    monkeypatch.setattr(module, name, getattr(module, name) * factor)
    assert off([case.cost() for case, _ in CASES.values()]) > 10 * PINNED


@pytest.mark.parametrize("number", NEVER)
def test_other_numbers_price_no_attention(number, monkeypatch):
    assert off(changed(monkeypatch, H200, number, 2)) < PINNED


def records_error(machine, monkeypatch):
    """Return the mean size of the errors of attention on 2 and 4 H200s, as they were measured."""
    monkeypatch.setattr(accuracy, "load_hardware", lambda _: machine)
    rows = accuracy._read(accuracy.MEASURED)["attention"]
    assert len(rows) > 30
    return mean(abs(each.error) for each in accuracy._measured_attention(rows))


@pytest.mark.parametrize(
    ("number", "factor"),
    [
        *((number, 0.5) for number in ("attention_forward", "attention_backward", "memory_bandwidth")),
        *((number, 0.5) for number in ("nccl_bandwidth", "all_to_all_bandwidth", "peer_bandwidth")),
        *((number, 2) for number in ("attention_forward", "attention_backward", "nccl_exposed", "cut_loss")),
        *((number, 2) for number in ("attention_tail", "attention_call", "all_to_all_bandwidth")),
    ],
)
def test_records_hold_constants_to_what_was_measured(number, factor, monkeypatch):
    here = records_error(H200, monkeypatch)
    assert here < 0.025
    assert records_error(replace(H200, **{number: getattr(H200, number) * factor}), monkeypatch) > 1.05 * here


@pytest.mark.parametrize(
    ("device", "machine"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", DEFAULT),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("another maker's", DEFAULT),
        (HOST, HOST),
    ],
)
def test_a_device_is_priced_by_its_machine_or_by_the_default(device, machine):
    assert hardware_like(device) == load_hardware(machine)
    assert hardware_like(device) is hardware_like(device)  # read once
