"""The file of results, what of it is done, tables and pictures, and ranks that are lost."""

import json
from functools import partial
from pathlib import Path

import pytest
from matplotlib.image import imread

from benchmarks.attention.cells import Cell
from benchmarks.attention.kind import KIND, draw
from benchmarks.attention.methods import all_methods
from benchmarks.engine import job as job_module
from benchmarks.engine.job import Job
from benchmarks.engine.kinds import FAILED, OK, REFUSED, Results
from benchmarks.engine.machine import RankGroup
from benchmarks.engine.report import markdown, row_line
from benchmarks.engine.timing import LEAST, Times, in_turns, quotient
from bmburst.amounts import short
from bmburst.comm.streams import CALLS
from bmburst.errors import UserError
from tests.benchmarks.made import HEADER
from tests.benchmarks.made import results as made_results

results = partial(made_results, KIND, command="bmburst bench attention")


def cell(method="ours", tokens=65536, **changes):
    values = {"suite": "sequence", "ranks": 8, "device": "cuda", "heads": 32, "kv_heads": 32}
    return Cell(method=method, tokens=tokens, **{**values, **changes})


def measured(milliseconds=10.0, ratio=0.9, seconds=1.0):
    times = {"median": milliseconds, "least": milliseconds, "most": milliseconds, "count": 3}
    part = {"milliseconds": times, "tflops": 640 * ratio, "ratio": ratio, "exposed_ms": 1.5, "bytes": 2e9}
    directions = {"forward": part, "forward_backward": {**part, "bytes": None}}
    return {"status": OK, "peak_memory_gib": 3.25, "seconds": seconds, **directions}


def test_a_file_holds_what_was_written(tmp_path):
    made = results((cell(), measured()), (cell("ulysses"), {"status": REFUSED, "reason": "heads"}))
    made.running = "somewhere"
    made.write(tmp_path / "r.json")
    assert Results.read(KIND, tmp_path / "r.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert Results.read(KIND, tmp_path / "none.json") == Results(KIND)


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}', '{"rows": {}}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(UserError, match="fix: name a new file"):
        Results.read(KIND, path)
    assert path.read_text() == content


def test_what_is_done_is_what_was_measured_or_tried_in_this_run():
    made = results((cell("ours"), measured()), (cell("ulysses"), {"status": FAILED, "reason": "x"}))
    assert all(made.is_done(cell(m), again=again) for m in ("ours", "ulysses") for again in (True, False))
    made.runs.append(HEADER)
    assert made.is_done(cell("ours"), again=False) and not made.is_done(cell("ours"), again=True)
    assert not made.is_done(cell("ulysses"), again=False)  # what failed or was refused is tried by every run
    assert not made.is_done(cell("ours", ranks=4), again=False)


def test_estimates_grow_with_the_work():
    made = results((cell(tokens=65536), measured(seconds=4.0)), (cell(tokens=32768), measured(seconds=2.0)))
    assert KIND.estimate(made, cell("ulysses", tokens=65536)) == 4.0
    assert KIND.estimate(made, cell("ulysses", tokens=131072)) == pytest.approx(16.0)
    assert KIND.estimate(made, cell("ulysses", tokens=8192)) == pytest.approx(1.0)  # half a cell is preparation
    assert KIND.estimate(made, cell("ulysses", ranks=4)) == 0
    assert KIND.estimate(Results(KIND), cell()) == 0


def test_tables_show_every_cell_and_why_it_is_missing():
    refused = {"status": REFUSED, "reason": "4 heads"}
    errors = {"o": 1e-3, "dq": 2e-3, "dk": 3e-3, "dv": 4e-3}
    made = results(
        (cell("ours"), measured(7.1, 0.953)),
        (cell("ours", 1 << 20), measured(900, 0.991)),
        (cell("ulysses"), refused),
        (cell("ulysses", kv_heads=8), refused),
        (cell("ours", suite="batch", batch=4), measured()),
        (cell("ours", suite="accuracy", ranks=2, tokens=4096), {"status": OK, "errors": errors, "seconds": 1}),
    )
    text = markdown(made)
    assert "| forward: ratio to one GPU / ms / TFLOP/s a GPU | 64K | 1M |" in text
    assert "| ours | 0.953 / 7.10 / 610 | 0.991 / 900.00 / 634 |" in text
    assert "| ours | 3.2 / ? / 1.50 | 3.2 / ? / 1.50 |" in text
    assert "| ulysses | - [1] |  |" in text and "| ulysses | - [1] |\n" in text
    assert text.count("refused: 4 heads") == 1
    assert "head dim 128, causal, bfloat16, 64K tokens, 8 GPUs" in text
    assert "| ours | 1.00e-03 / 2.00e-03 / 3.00e-03 / 4.00e-03 |" in text
    assert "triton 3.6" in text and "`bmburst bench attention`" in text
    assert "ratio 0.953" in row_line(made, cell())
    on_cpu = measured() | {name: measured()[name] | {"tflops": 0.0163} for name in ("forward", "forward_backward")}
    assert "0.016 TFLOP/s" in KIND.describe(cell(), on_cpu)
    chosen = {"heads": 4, "outer": "ring", "travellers": "q"}
    row = measured() | {"strategy": chosen, "transport": "peer"}
    assert KIND.describe(cell(), row).endswith("heads x4 + ring (q backward) by peer)")
    assert KIND.describe(cell(ranks=4), row).endswith("(1.0 s, heads x4 by peer)")


def test_numbers_are_short_only_where_they_are_round():
    assert [short(n) for n in (8, 1024, 65536, 1 << 20, 1000, 1536)] == ["8", "1K", "64K", "1M", "1000", "1536"]


def test_pictures_are_drawn_for_what_was_measured(tmp_path):
    rows = [
        (cell(m, n, kv_heads=kv), measured(ratio=0.5 + n / 2**22))
        for m in (*all_methods("cpu"), "one-gpu")
        for n in (32768, 65536, 131072)
        for kv in (32, 8)
    ]
    paths = draw(results(*rows, (cell("ours", suite="batch"), {"status": REFUSED, "reason": "x"})), tmp_path / "r")
    assert [p.name for p in paths] == [
        f"r-sequence-{heads}-causal-8-{direction}-{what}.png"
        for heads in ("mha", "gqa")
        for direction in ("forward", "forward_backward")
        for what in ("ratio", "tflops")
    ]
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in paths}
    # One panel, as wide as a phone can show with letters that can be read: 4.8 inches.
    assert {imread(p).shape[1] for p in paths} == {768}


def group():
    import torch

    return RankGroup(process_group=None, rank=0, size=1, device=torch.device("cpu"))


def test_calls_are_measured_in_turns():
    calls = []
    times = in_turns(*(lambda n=n: calls.append(n) for n in range(3)), group=group(), repeats=5, seconds=60)
    assert calls == [0, 1, 2] * (CALLS + 5)  # warm-ups first
    assert [len(own) for own in times] == [5, 5, 5]
    first = Times.of(times[0])
    assert first.count == 5 and first.least <= first.median <= first.most


def test_a_ratio_is_that_of_the_rates():
    costs = iter([*[1, 1] * CALLS, 5.0, 10.0, 6.0, 8.0, 5.0, 20.0])  # warm-ups, then rounds of one GPU and the method
    ones, ours = in_turns(*[lambda: None] * 2, group=group(), repeats=3, seconds=60, time_of=lambda *_: next(costs))
    assert (ones, ours) == ((5, 6, 5), (10, 8, 20))
    assert quotient(ones, ours) == 0.5  # of 0.5, 0.75 and 0.25


def test_slow_calls_are_measured_less_often():
    calls = []
    ours, _ = in_turns(lambda: calls.append(1), lambda: None, group=group(), repeats=50, seconds=1e-9)
    assert len(ours) == LEAST and len(calls) == LEAST + 1  # and one warm-up


# Ranks that are lost


@pytest.fixture
def job(tmp_path):
    return Job(
        kind="attention",
        ranks=8,
        cells=(cell("one-gpu"), cell("ours"), cell("ulysses")),
        output=str(tmp_path / "r.json"),
    )


def lose(job, script):
    """Stand in for the ranks: each start takes the next list of what happens to cells, the last may be a loss."""

    def started(_spec, command):
        status, events = script.pop(0)
        made = Results.read(KIND, Path(job.output))
        for at, event in events:
            if event == "lost":
                made.running = at.key
            else:
                made.put(at, measured())
        made.write(Path(job.output))
        if status == 1:
            (Path(command[-1]) / job_module.REASON_FILE).write_text("out of luck")
        return status

    return started


def test_a_cell_that_takes_the_ranks_down_does_not_take_the_others(job, tmp_path):
    one, ours, ulysses = job.cells
    script = [(1, [(one, "ok"), (ours, "lost")]), (0, [(ulysses, "ok")])]
    assert job_module.run_job(job, header=HEADER, cell_timeout=1, starter=lose(job, script)) == 0
    made = Results.read(KIND, tmp_path / "r.json")
    assert [made.rows[c.key]["status"] for c in job.cells] == [OK, FAILED, OK]
    assert (
        "it took the ranks down: out of luck" in made.rows[ours.key]["reason"] and made.running is None and not script
    )


def test_a_loss_in_the_last_cell_starts_nothing_more(job, tmp_path):
    one, ours, ulysses = job.cells
    script = [(1, [(one, "ok"), (ours, "ok"), (ulysses, "lost")])]
    assert job_module.run_job(job, header=HEADER, cell_timeout=1, starter=lose(job, script)) == 0
    assert Results.read(KIND, tmp_path / "r.json").rows[ulysses.key]["status"] == FAILED


@pytest.mark.parametrize("status", [1, 2, 130])
def test_ranks_that_fail_before_any_cell_are_not_started_for_ever(job, status):
    script = [(status, [])] * 2
    assert job_module.run_job(job, header=HEADER, cell_timeout=1, starter=lose(job, script)) == status


def test_a_job_survives_its_file(job, tmp_path):
    job.write(tmp_path)
    assert Job.read(tmp_path) == job
    assert json.loads((tmp_path / "job.json").read_text())["repeats"] == 9
