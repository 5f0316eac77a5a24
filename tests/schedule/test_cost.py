"""Prices are those of the records, and each constant decides some of them."""

from dataclasses import dataclass, fields, replace
from statistics import mean

import pytest

from benchmarks import accuracy
from bmburst.schedule import cost as module
from bmburst.schedule.cost import AttentionCost, Placement, Problem
from bmburst.schedule.hardware import DEFAULT, HOST, Hardware, hardware_like, load_hardware
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Causal, Mask, SlidingWindow
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.tree import Tree
from bmburst.schedule.units import HeadShapes

CAUSAL, TREE = Causal(), Tree((-1, *[0] * 8), (8192, *[4096] * 8))
H200, CPU = load_hardware("h200"), load_hardware(HOST)
NEVER = (
    *(
        "peak",
        "matmul",
        "matmul_sustained",
        "matmul_half_rows",
        "layer_host",
        "layer_graph_host",
        "zero_host",
        "memory",
        "reserved",
        "nccl_memory",
    ),
    *("workspace", "collective_bandwidth", "host_memory", "host_bandwidth", "host_adam"),
)
"""Numbers of a machine that price other things than attention."""
PRICED = [declared.name for declared in fields(Hardware) if declared.name not in (*NEVER, "name")]
FACTORS = [name for name, value in vars(module).items() if name.isupper() and isinstance(value, float)]
"""Bytes that executors read and write, and a kernel's tile."""
OF_GPUS = ("all_to_all_bandwidth", "attention_tail", "multiprocessors", "graph_host", "message_host")
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
# errors of `python -m benchmarks.accuracy`, to six digits.
CASES = {
    "heads over copy engines, in units": (
        Case(2, 65536, 32, 32, Strategy(2, "ring", "q"), Placement("peer"), CAUSAL),
        (28.0898, 75.0112, 103.101),
    ),
    "heads over copy engines, short": (
        Case(2, 8192, 4, 4, Strategy(2, "ring", "q"), Placement("peer", collectives=False), CAUSAL),
        (0.138207, 0.257082, 1.75482),
    ),
    "heads by one collective": (
        Case(2, 8192, 4, 4, Strategy(2, "ring", "q"), Placement("peer"), CAUSAL),
        (0.176922, 0.30985, 1.61769),
    ),
    "heads over NCCL": (
        Case(4, 65536, 32, 8, Strategy(4, "ring", "q"), Placement("nccl"), CAUSAL),
        (14.9232, 38.8653, 53.7885),
    ),
    "heads over two nodes": (
        Case(16, 131072, 32, 8, Strategy(16, "ring", "q"), Placement("nccl", 2), CAUSAL),
        (15.8566, 40.4306, 56.2872),
    ),
    "gather over copy engines": (
        Case(4, 65536, 12, 12, Strategy(1, "gather", "kv"), Placement("peer"), CAUSAL),
        (5.57294, 14.9096, 20.4825),
    ),
    "gather of a window": (
        Case(4, 65536, 12, 12, Strategy(1, "gather", "kv"), Placement("peer"), SlidingWindow(4096)),
        (0.922237, 2.77233, 4.60289),
    ),
    "heads that share a KV head, in a window": (
        Case(2, 131072, 8, 1, Strategy(2, "ring", "q"), Placement("peer"), SlidingWindow(4096)),
        (2.14702, 6.04148, 8.18851),
    ),
    "heads in a tree": (
        Case(2, 40960, 32, 32, Strategy(2, "ring", "q"), Placement("peer"), TREE),
        (5.47747, 14.2283, 19.7057),
    ),
    "ring of a window": (
        Case(4, 65536, 32, 8, Strategy(1, "ring", "q"), Placement("peer"), SlidingWindow(4096)),
        (2.28705, 8.41815, 11.3899),
    ),
    "ring of keys over NCCL": (
        Case(4, 16384, 8, 8, Strategy(1, "ring", "kv"), Placement("nccl"), CAUSAL),
        (0.629293, 1.936, 7.44132),
    ),
    "ring of queries over NCCL": (
        Case(4, 65536, 32, 32, Strategy(1, "ring", "q"), Placement("nccl"), CAUSAL),
        (17.4466, 48.4474, 65.8939),
    ),
    "ring over copy engines": (
        Case(4, 65536, 32, 32, Strategy(1, "ring", "q"), Placement("peer"), CAUSAL),
        (15.309, 43.1203, 58.4293),
    ),
    "one ring over two nodes": (
        Case(4, 32768, 8, 8, Strategy(1, "ring", "kv"), Placement("nccl", 2), CAUSAL),
        (2.75324, 9.69431, 13.5826),
    ),
    "a ring of groups over two nodes": (
        Case(16, 131072, 32, 32, Strategy(8, "ring", "kv"), Placement("nccl", 2), CAUSAL),
        (16.0324, 48.6702, 64.7027),
    ),
    "double ring": (
        Case(8, 65536, 7, 7, Strategy(1, "double-ring", "q"), Placement("nccl", 2), CAUSAL),
        (2.11855, 6.34796, 15.3166),
    ),
    "heads between processes on CPUs": (
        Case(4, 8192, 8, 8, Strategy(4, "ring", "q"), Placement("gloo"), CAUSAL),
        (187.663, 460.792, 648.454),
    ),
    "a ring of threads": (
        Case(2, 8192, 8, 8, Strategy(1, "ring", "q"), Placement("threads"), CAUSAL),
        (370.833, 940.908, 1311.74),
    ),
    "a ring of groups that span nodes": (
        Case(16, 131072, 32, 32, Strategy(8, "ring", "kv"), Placement("nccl", 4), CAUSAL),
        (18.4242, 59.5835, 78.0078),
    ),
    "heads over processes of two hosts": (
        Case(4, 8192, 8, 8, Strategy(4, "ring", "q"), Placement("gloo", 2), CAUSAL),
        (183.452, 453.419, 636.871),
    ),
    "groups of processes that span hosts": (
        Case(8, 8192, 8, 8, Strategy(4, "ring", "kv"), Placement("gloo", 4), CAUSAL),
        (103.829, 280.82, 384.649),
    ),
    "heads between threads": (
        Case(2, 256, 2, 2, Strategy(2, "ring", "q"), Placement("threads"), CAUSAL),
        (0.362807, 0.594886, 2.47942),
    ),
    "a gather between processes": (
        Case(4, 4096, 8, 8, Strategy(1, "gather", "q"), Placement("gloo"), CAUSAL),
        (61.5564, 149.14, 210.696),
    ),
    "one ring of processes over two hosts": (
        Case(8, 4096, 8, 8, Strategy(1, "ring", "kv"), Placement("gloo", 2), CAUSAL),
        (44.1864, 126.475, 170.661),
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
@pytest.mark.parametrize("number", [name for name in PRICED if name not in OF_GPUS])
def test_no_constant_of_a_host_without_gpus_can_be_off_by_two(number, factor, monkeypatch):
    """The others are of NCCL's exchanges, of graphs, and of kernels in units, which only copy engines have."""
    assert off(changed(monkeypatch, CPU, number, factor)) > 10 * PINNED


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("name", FACTORS)
def test_no_factor_of_the_formulas_can_be_off_by_two(name, factor, monkeypatch):
    monkeypatch.setattr(module, name, getattr(module, name) * factor)
    assert off([case.cost() for case, _ in CASES.values()]) > 10 * PINNED


@pytest.mark.parametrize("number", NEVER)
def test_other_numbers_price_no_attention(number, monkeypatch):
    assert off(changed(monkeypatch, H200, number, 2)) < PINNED


def records_error(machine):
    """Return the mean size of the errors of attention on 2 and 4 H200s, as they were measured."""
    rows = accuracy._read(accuracy.MEASURED)["attention"]
    assert len(rows) > 30
    return mean(abs(each.error) for each in accuracy._measured_attention(rows, machine))


@pytest.mark.parametrize(
    ("number", "factor"),
    [
        *((number, 0.5) for number in ("attention_forward", "attention_backward", "memory_bandwidth")),
        *((number, 0.5) for number in ("nccl_bandwidth", "all_to_all_bandwidth", "peer_bandwidth")),
        *((number, 2) for number in ("attention_forward", "attention_backward", "nccl_exposed", "cut_loss")),
        *((number, 2) for number in ("attention_tail", "attention_call", "all_to_all_bandwidth")),
    ],
)
def test_records_hold_constants_to_what_was_measured(number, factor):
    here = records_error(H200)
    assert here < 0.025
    assert records_error(replace(H200, **{number: getattr(H200, number) * factor})) > 1.05 * here


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
