"""`bmburst bench attention`: options, lists, and whole runs on two ranks of the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bmburst
from bmburst.cli import main
from tests.distributed.started import run_bmburst
from tests.refusals import says

ROOT = Path(bmburst.__file__).parents[1]
SMALL = ("--ranks", "2", "--tokens", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--repeats", "2")


DEADLY = """
import os
def set_seq_parallel_pg(*_):
    if os.environ["RANK"] == "1":
        os._exit(7)
    import torch.distributed as dist
    dist.barrier()
"""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what --ranks sets is taken back after the test


def bench(*words):
    return main(["bench", "attention", *words])


def start(*words, cwd):
    done = run_bmburst("bench", "attention", *SMALL, *words, cwd=cwd, env=environment(), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def environment():
    return {**os.environ, "PYTHONPATH": f"{ROOT}:.", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.long
def test_two_ranks_measure_and_go_on(tmp_path):
    wanted = "sequence/*/causal/*,block/*/causal/ours,documents/*/ours,window/*/ours,accuracy/*/causal/*"
    options = (
        "--cells",
        wanted,
        "--methods",
        "one-gpu,ours,ulysses,ring-li-2021,yunchang,burst-attention",
        "--output",
        "r.json",
    )
    (tmp_path / "yunchang.py").write_text(DEADLY)
    (tmp_path / "benchmarks").mkdir()  # a stranger's, which neither the command nor a rank takes for ours
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('not ours')")
    out, _ = start(*options, "--trace", "trace", cwd=tmp_path)
    content = json.loads((tmp_path / "r.json").read_text())
    rows = {key.removesuffix("@2-cpu-float32"): row for key, row in content["rows"].items()}
    assert len(rows) == 16 and content["running"] is None
    assert "| host: microseconds a call, forward / backward |" in out
    for name in ("one-gpu", "ours", "ulysses", "ring-li-2021"):
        row = rows[f"sequence/256/4-2x8/causal/{name}"]
        assert row["host_us"]["forward"] > 0 and row["host_us"]["backward"] > 0
        assert row["status"] == "ok" and row["kernel"] == "cpu", row
        for direction in ("forward", "forward_backward"):
            assert row[direction]["milliseconds"]["count"] == 2
            assert row[direction]["ratio"] > 0 and row[direction]["tflops"] > 0
    for direction, factor in (("forward", 1), ("forward_backward", 3.5)):  # 4 S^2 H D, half of it seen, on 2 ranks
        part = rows["sequence/256/4-2x8/causal/ulysses"][direction]
        done = part["tflops"] * part["milliseconds"]["median"] * 1e9
        assert done == pytest.approx(factor * 4 * 256**2 * 4 * 8 / 2 / 2)
    chosen = rows["sequence/256/4-2x8/causal/ours"]
    assert chosen["transport"] == "gloo" and chosen["strategy"]["heads"] in (1, 2)
    assert chosen["forward_backward"]["bytes"] > chosen["forward"]["bytes"] > 0
    assert rows["block/256/4-2x8/causal/ours"]["status"] == "ok"
    for mask, said in (("documents", {"number": 9, "longest": 60}), ("window", 16)):
        row = rows[f"{mask}/256/4-2x8/ours"]
        assert row["status"] == "ok" and row["forward_backward"]["times_arithmetic"] > 0
        assert row[mask] == said if mask == "window" else said.items() <= row[mask].items()
    missing = rows["sequence/256/4-2x8/causal/burst-attention"]
    assert (missing["status"], missing["reason"]) == ("refused", "the package Burst-Attention is not installed")
    deadly = rows["sequence/256/4-2x8/causal/yunchang"]  # the cells after it were measured by other ranks
    assert (deadly["status"], deadly["reason"]) == ("failed", "it took the ranks down: exit status 7")
    accurate = {key: row for key, row in rows.items() if row["status"] == "ok" and "errors" in row}
    assert {row["cell"]["ranks"] for row in accurate.values()} == {1, 2}
    assert all(1e-9 < error < 1e-6 for row in accurate.values() for error in row["errors"].values())
    assert "## Relative L2 error against fp64" in out and (tmp_path / "r.md").read_text() in out
    assert (tmp_path / "r-sequence-4-2x8-causal-2cpu-forward-ratio.png").exists()
    timelines = [json.loads(path.read_text()) for path in (tmp_path / "trace").iterdir()]
    assert len(timelines) == 14 and all(line["traceEvents"] for line in timelines)

    before = content["rows"]
    _, err = start(*options, "--mask", "causal", "--budget", "0.001", cwd=tmp_path)
    after = json.loads((tmp_path / "r.json").read_text())
    assert after["rows"] == before and len(after["runs"]) == 2
    assert "not measured yet" not in err


@pytest.fixture
def installed(tmp_path):
    """Return an installation without a clone, a folder, and its `bmburst bench`; both have a stranger's benchmarks."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    for package in ("bmburst", "bmburst_ops"):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (site, elsewhere):
        (folder / "benchmarks" / "engine").mkdir(parents=True)
        (folder / "benchmarks" / "engine" / "__init__.py").write_text("raise SystemExit('not ours')")

    def run_in(folder, *words):
        command = [sys.executable, "-P", "-m", "bmburst", "bench", *words]
        own = {**environment(), "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)

    return site, elsewhere, run_in


@pytest.mark.parametrize("words", [("attention", "--list"), ("train",), ("--help",)])
def test_an_installation_says_where_the_benchmarks_are(installed, words):
    _, elsewhere, run_in = installed
    done = run_in(elsewhere, *words)
    assert done.returncode == 2 and not done.stdout
    says(done.stderr, "installation", elsewhere, "fix: clone", lines=2)


def test_an_installation_takes_the_benchmarks_of_the_clone_that_it_is_run_in(installed):
    site, _, run_in = installed
    words = ("attention", "--list", "--ranks", "2", "--tokens", "256", "--cells", "sequence/*/mha/causal/ours")
    done = run_in(ROOT, *words)
    assert (done.returncode, done.stdout) == (0, "sequence/256/mha/causal/ours@2-cpu-float32\n"), done.stderr
    init = site / "bmburst" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{bmburst.__version__}"', '"9.9.9"'))
    done = run_in(ROOT, *words)
    assert done.returncode == 2
    says(done.stderr, "bmburst 9.9.9")


def test_tables_and_pictures_come_from_a_file_alone(tmp_path, capsys):
    from benchmarks.attention.kind import KIND
    from benchmarks.engine.kinds import Results

    Results(KIND).write(tmp_path / "r.json")
    assert bench("--table", "--plot", "--output", str(tmp_path / "r.json")) == 0
    assert "## Runs" in capsys.readouterr().out
    assert bench("--table") == 2
    says(capsys.readouterr().err, "--output")
    assert bench("--plot", "--output", str(tmp_path / "other.json")) == 2
    says(capsys.readouterr().err, "other.json", "does not exist")


def test_a_list_for_gpus_needs_none(capsys):
    assert bench("--list", "--gpus", "8", "--methods", "ours", "--cells", "sequence/1048576/gqa/causal/*") == 0
    assert capsys.readouterr().out == "sequence/1048576/gqa/causal/ours@8\n"


def test_list_says_what_cannot_run(capsys):
    assert bench(*SMALL, "--heads", "3", "--kv-heads", "1", "--list", "--cells", "sequence/*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "sequence/256/3-1x8/causal/ours@2-cpu-float32" in lines
    (ulysses,) = (line for line in lines if "/causal/ulysses@" in line)
    assert ulysses.endswith("cannot run: 3 query heads do not divide by 2 ranks")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ranks", "2", "--tokens", "255"), "--tokens 255 | 2 ranks"),
        (("--ranks", "2", "--tokens", "many"), "--tokens many | allowed: "),
        (("--ranks", "2", "--cells", "nothing/*"), "--cells nothing/*"),
        (("--ranks", "2", "--mask", "docs"), "--mask"),
        (("--ranks", "2", "--methods", "ulises"), "'ulises' | 'ulysses'"),
        (("--ranks", "2", "--kernel", "gpu"), "kernel | 'gpu' | known: "),
        (("--ranks", "2", "--kernel", "fa4"), "kernel | 'fa4' | NVIDIA | cpu"),
        (("--ranks", "2", "--heads", "6", "--kv-heads", "4"), "--heads 6 --kv-heads 4"),
        (("--ranks", "0"), "--ranks 0"),
        (("--ranks", "1,2"), "--ranks 1,2 | one number"),
        (("--ranks", "2", "--gpus", "2"), "--ranks | --gpus"),
        (("--ranks", "2", "--budget", "-1"), "--budget -1"),
        (("--gpus", "2"), "no GPU | fix: --ranks"),
        (("--list",), "no GPU | --list --gpus 2 | --list --ranks 2"),
        (("--ranks", "2", "--output", "no/such/r.json"), "no/such/r.json | no such folder | fix: "),
        (("--ranks", "2", "--output", "r.md"), "--output r.md | .json"),
        (("--rank", "2"), "'--rank' | '--ranks'"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(argv, words, capsys):
    assert bench(*argv) == 2
    says(capsys.readouterr().err, words)


def test_a_rank_is_no_place_to_start_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert bench("--ranks", "2") == 2
    says(capsys.readouterr().err, "RANK")
