"""The benchmark of strategies runs, says what `auto` takes, and its record is what the cost model predicts."""

import json
from pathlib import Path

import pytest

from benchmarks.attention.cells import mask_of
from benchmarks.predictions import predicted_choice
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.layout import make_layout
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.units import HeadShapes
from tests.benchmarks.made import measured

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDED = json.loads((RESULTS / "strategies_2xh200_202611.json").read_text())["rows"]
LONG = [row for row in RECORDED if row["tokens"] >= 131072]
MASKED = {
    f"{gpus} GPUs, {name}": row
    for gpus in (2, 4)
    for name, row in json.loads((RESULTS / f"attention_masks_{gpus}xh200_202611.json").read_text())["rows"].items()
    if row["status"] == "ok" and row["cell"]["method"] in ("ours", "one-gpu") and "forward_backward" in row
}


@pytest.mark.long
def test_two_ranks_measure_each_strategy(tmp_path):
    found, table = measured(tmp_path, 0, "strategies", "--gpus", "2", "--cases", "3")
    *_, divided, odd = found["rows"]
    assert {"heads", "gather", "ring"} < set(divided) and "heads" not in odd  # 7 heads on 2 ranks
    assert (divided["query_heads"], odd["query_heads"]) == (40, 7) and odd["auto"] in ("gather", "ring")
    assert len(table.splitlines()) == 5 and "| 7 / 7 | 128 | causal | - |" in table


@pytest.mark.parametrize("row", LONG, ids=lambda row: "{query_heads}-{kv_heads}-{tokens}-{mask}".format(**row))
def test_long_windows_and_documents_take_what_is_predicted(row):
    _, costs = predicted_choice(row, 2)
    assert {"heads", "gather", "ring"} == set(costs)
    assert costs == pytest.approx({strategy: row[strategy] for strategy in costs}, rel=0.06)


def test_what_is_taken_is_at_most_two_percent_slower_than_the_best():
    taken = [(row, predicted_choice(row, 2)[0]) for row in RECORDED]
    assert len(taken) == 18
    assert max(row[name] / min(row[s] for s in ("heads", "gather", "ring") if s in row) for row, name in taken) < 1.02


@pytest.mark.parametrize("name", MASKED)
def test_other_records_of_windows_and_documents_are_predicted(name):
    """One GPU has the work of a rank: of all tokens with its part of the heads."""
    row, cell = MASKED[name], MASKED[name]["cell"]
    tokens, alone = cell["tokens"], cell["method"] == "one-gpu"
    ranks, part = (1, cell["ranks"]) if alone else (cell["ranks"], 1)
    sizes = HeadShapes(
        layout=make_layout("zigzag", ranks, tokens // ranks), degree=1, batch=1, heads=cell["heads"] // part,
        kv_heads=cell["kv_heads"] // part, head_dim=128, itemsize=2, statistics_itemsize=4,
    )  # fmt: skip
    problem = Problem(sizes, tokens, mask_of(cell["mask"], tokens), Placement("peer"), load_hardware("h200"))
    degree, outer = (1, "ring") if alone else (row["strategy"]["heads"], row["strategy"]["outer"])
    cost = problem.cost(problem.in_units(Strategy(degree, outer, "kv")))
    assert cost.total * 1e3 == pytest.approx(row["forward_backward"]["milliseconds"]["median"], rel=0.06)
