"""A kind of benchmark that the engine has never seen is listed, measured by ranks, continued, shown and drawn."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.engine import job as job_module
from benchmarks.engine import kinds
from benchmarks.engine.job import RankRun
from benchmarks.engine.kinds import OK, BaseCell, BaseSelection, Kind, Results, selection_of
from benchmarks.engine.report import grid, groups, plot_methods
from bmburst.cli import main
from bmburst.outputs import blank_picture, save_picture
from tests.distributed.processes import run_processes
from tests.refusals import says

KINDS = {**kinds.KINDS, "sums": "tests.benchmarks.test_third_kind"}


@dataclass(frozen=True, kw_only=True)
class SumCell(BaseCell):
    tokens: int

    @property
    def name(self):
        return f"{self.suite}/{self.tokens}/{self.method}"


class SumRun(RankRun[SumCell]):
    def refusal(self, cell):
        return "it is too long" if cell.tokens > 99 else None

    def measure(self, cell):
        if cell.method == "broken":
            raise RuntimeError("no sum")
        total = torch.tensor([float(cell.tokens)])
        dist.all_reduce(total)
        return {"sum": float(total) * self.job.options["factor"]}


def column(cell):
    return cell.tokens


def select(args, device, ranks):
    selection = BaseSelection(**selection_of(args, device, ranks, ["plain", "broken"]))
    cells = (
        SumCell(suite="sum", method=m, ranks=ranks[0], device=device, dtype="float32", tokens=n)
        for n in selection.tokens or (8, 64, 128)
        for m in selection.methods
    )
    return tuple(cell for cell in cells if selection.fits(cell))


def tables(results, notes):
    found = groups(results.cell_rows("sum"), lambda cell: cell.ranks, lambda cell: f"Sums on {cell.ranks}")
    lines = []
    for title, rows in found:
        lines += [f"## {title}", "", *grid("sum", rows, column, lambda row: f"{row['sum']:g}", notes)]
    return lines


def draw(results, stem):
    rows = results.cell_rows("sum")
    figure, path = blank_picture(4, 4), stem.with_name(f"{stem.name}-sums.png")
    plot_methods(figure.subplots(), rows, column, lambda row: row["sum"])
    save_picture(figure, path)
    return [path]


KIND = Kind(
    name="sums",
    format="sums 1",
    cell=SumCell,
    own_options=("factor",),
    defaults={"repeats": 1, "cell_seconds": 1.0, "cell_timeout": 60.0},
    configure=lambda group: group.add_argument("--factor", type=int, default=1),
    select=select,
    refusal=lambda _: None,
    starts=lambda args, cells, ranks: [{"cells": cells, "ranks": ranks[0], "options": {"factor": args.factor}}],
    estimate=lambda *_: 0.0,
    rank_run="tests.benchmarks.test_third_kind:SumRun",
    describe=lambda _, row: f"sum {row['sum']:g}",
    tables=tables,
    draw=draw,
)


@pytest.fixture
def third_kind(monkeypatch):
    """Let the engine know the kind, on a CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(kinds, "KINDS", KINDS)


def _rank(folder):
    kinds.KINDS = KINDS
    SumRun(job_module.Job.read(folder), torch.device("cpu"), folder).run()


def test_the_engine_runs_it(tmp_path, third_kind, monkeypatch, capsys):
    def start(spec, command):
        run_processes(spec.nproc, _rank, Path(command[-1]))
        return 0

    monkeypatch.setattr(job_module, "launch", start)
    output = tmp_path / "r.json"
    words = ["bench", "sums", "--ranks", "2", "--factor", "10"]
    assert main([*words, "--list"]) == 0
    assert "sum/8/plain@2-cpu-float32\n" in capsys.readouterr().out
    assert main([*words, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "| plain | 160 | 1280 | - [1] |" in text and "| broken | - [2] | - [2] | - [1] |" in text
    assert "1. refused: it is too long" in text and "2. failed: RuntimeError: no sum" in text
    rows = Results.read(KIND, output).rows
    assert [row["status"] for row in rows.values()] == [OK, "failed", OK, "failed", "refused", "refused"]
    assert (tmp_path / "r-sums.png").is_file() and Path(tmp_path / "r.md").read_text() in text
    assert main(["bench", "attention", "--ranks", "2", "--factor", "3"]) == 2
    says(capsys.readouterr().err, "--factor", "bench sums")


@pytest.mark.parametrize("tokens", ["7", "0"])
def test_the_engine_checks_its_lengths(tokens, third_kind, capsys):
    assert main(["bench", "sums", "--ranks", "2", "--tokens", tokens]) == 2
    assert f"--tokens {tokens}" in capsys.readouterr().err
