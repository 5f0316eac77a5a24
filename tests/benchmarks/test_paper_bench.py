"""`bmburst bench paper`: its cells, tables, and a run on two ranks of the CPU; perplexity by method."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.engine import OK, BaseSelection, Results
from benchmarks.engine.job import Job
from benchmarks.engine.report import markdown
from benchmarks.paper import measure, perplexity
from benchmarks.paper.kind import KIND, METHODS, PaperCell, list_cells
from bmburst.cli import main
from tests import tiny
from tests.benchmarks.formulas import METHODS as FORMULAS
from tests.benchmarks.formulas import Shape
from tests.refusals import says

RUN = {"date": "d", "command": "c", "ranks": 2, "device": "H200", "python": "3", "torch": "2", "bmburst": "0"}


def selection(**changes):
    return BaseSelection(**{"ranks": (2,), "device": "cuda", "methods": METHODS, **changes})


def test_cells_are_of_the_suites_methods_and_one_gpu_is_one_rank():
    keys = [cell.key for cell in list_cells(selection())]
    assert len(keys) == len(set(keys)) and "backward/65536/gqa/burst@2" in keys and "batch/8x65536/mha/ours@2" in keys
    assert {"sequence/1048576/mha/one-gpu@1", "sequence/1048576/mha/ours@2"} <= set(keys)
    assert [cell.key for cell in list_cells(selection(tokens=(64,), globs=("tile/*",)))] == [
        "tile/64/mha/flash@2",
        "tile/64/mha/whole-tile@2",
    ]


def test_tables_show_times_bytes_and_memory():
    made = Results(KIND, runs=[RUN | {"commit": None, "packages": {}}])
    at = PaperCell(suite="backward", method="burst", ranks=2, device="cuda", tokens=65536, heads=32, kv_heads=8)
    names = ("forward", "backward", "transfers")
    times = {name: {"median": 1.5 + n} for n, name in enumerate(names)}
    row = {"milliseconds": times, "bytes": 5_000_000, "peak_gib": dict.fromkeys(names, 2.0), "peak_memory_gib": 2.0}
    made.put(at, {"status": OK, "seconds": 1.0, **row})
    text = markdown(made)
    assert "## What moves in backward: 32 q / 8 kv heads, head dim 128, causal, bfloat16, 2 GPUs" in text
    assert (
        "| burst | 1.50 / 2.50 / 3.50 |" in text and "| burst | 5.0 |" in text and "| burst | 2.0 / 2.0 / 2.0 |" in text
    )
    assert KIND.describe(at, made.rows[at.key]).startswith("forward 1.50 ms, backward 2.50 ms")
    assert KIND.estimate(made, at) == 1.0


def test_a_kernels_compilation_is_in_no_time(monkeypatch):
    """Of a call that is long the first time because something is compiled, and of one that is long each time."""
    job = Job(kind="paper", ranks=2, cells=(), output="", repeats=5, cell_seconds=1.0)
    for costs in ((20_000.0, 3.0), (20_000.0, 18_000.0)):
        found = iter(costs)
        monkeypatch.setattr(measure, "once", lambda *_, left=found: next(left))
        monkeypatch.setattr(measure, "in_turns", lambda *_, **__: ((2.0, 3.0, 4.0),))
        times = measure.PaperRun._time(SimpleNamespace(job=job), lambda: None, None)
        assert (times.median, times.count) == ((3.0, 3) if costs[1] == 3.0 else (18_000.0, 1))


@pytest.mark.parametrize("ranks", ["1", "2,4"])
def test_a_ring_needs_one_number_of_ranks_above_one(ranks, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", "paper", "--ranks", ranks]) == 2
    says(capsys.readouterr().err, f"{ranks} ranks", "2 or more", "fix: --gpus 2")


@pytest.mark.long
def test_two_ranks_measure_every_suite(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--ranks", "2", "--tokens", "64", "--repeats", "1", "--cell-seconds", "0.01", "--dtype", "bfloat16"]
    assert main(["bench", "paper", *words, "--output", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == 19 and {row["status"] for row in rows.values()} == {OK}
    for heads, kv_heads in (("mha", 32), ("gqa", 8)):
        of = Shape(ranks=2, tokens=64, heads=32, kv_heads=kv_heads)
        for method in ("kv", "burst"):
            row = rows[f"backward/64/{heads}/{method}@2-cpu"]
            assert row["bytes"] == FORMULAS[method].backward(of) and row["milliseconds"]["transfers"]["median"] > 0
    assert set(rows["sequence/64/mha/one-gpu@1-cpu"]["milliseconds"]) == {"forward", "forward_backward"}
    assert "no-overlap" in (tmp_path / "r.md").read_text()


@pytest.mark.long
def test_every_method_gives_one_perplexity(tmp_path):
    words = ["--steps", "1", "--tokens", "32", "--sequences", "1", "--output", str(tmp_path / "p.json")]
    assert perplexity.main(words) == 0
    found = json.loads((tmp_path / "p.json").read_text())
    assert list(found["rows"]) == list(perplexity.WAYS) and found["trained"].startswith("bmburst train --preset")
    losses = [row["loss"] for row in found["rows"].values()]
    assert max(losses) - min(losses) < 1e-5
    assert len({row["tokens"] for row in found["rows"].values()}) == 1


def held_out(folder):
    """Return the options of one sequence of a short text."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox, {i * i} times.\n" for i in range(400)))
    return ["--data", str(text), "--sequences", "1"]


@pytest.mark.long
def test_a_method_that_cannot_evaluate_a_model_says_why(tmp_path):
    """A peer without a window would give another model's perplexity."""
    folder = tiny.save(tmp_path / "mistral", "mistral", vocab_size=300, sliding_window=9)
    words = ["--model", str(folder), "--tokens", "32", *held_out(tmp_path), "--output", str(tmp_path / "p.json")]
    assert perplexity.main(words) == 0
    rows = json.loads((tmp_path / "p.json").read_text())["rows"]
    refused = {name for name, row in rows.items() if "sliding window" in row.get("refused", "")}
    assert refused == {name for name, way in perplexity.WAYS.items() if way.peer} | {perplexity.NO_LAO}
    losses = [row["loss"] for row in rows.values() if "loss" in row]
    assert len(losses) == len(rows) - len(refused) >= 4 and max(losses) - min(losses) < 1e-5


@pytest.mark.long
def test_methods_that_need_equal_parts_refuse_others(tmp_path):
    """4 heads and 2 KV heads on 3 ranks, then 31 tokens on 2."""
    folder = tiny.save(tmp_path / "llama", "llama", vocab_size=300)
    for ranks, tokens, reason in ((3, 33, "heads"), (2, 31, "31 tokens do not divide by 2 ranks")):
        words = ["--model", str(folder), "--ranks", str(ranks), "--tokens", str(tokens), *held_out(tmp_path)]
        assert perplexity.main([*words, "--output", str(tmp_path / "p.json")]) == 0
        rows = json.loads((tmp_path / "p.json").read_text())["rows"]
        assert list(rows) == list(perplexity.WAYS) and reason in rows["ulysses"]["refused"]
        assert rows["burst"]["loss"] == pytest.approx(rows["alone"]["loss"], abs=1e-5)


def test_ranks_of_a_perplexity_are_checked_before_work_starts(capsys):
    assert perplexity.main(["--ranks", "0"]) == 2
    says(capsys.readouterr().err.strip(), "--ranks | at least 1 | got 0 | fix: ")
