"""The single measurements in `benchmarks/` start, and what they share with the engine."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import main_job
from benchmarks.engine.machine import write_record

SCRIPTS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_used(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_there_are_scripts():
    assert {"biased", "double_ring", "elementwise", "main_job", "plan_measure", "records", "step_parts"} <= {*SCRIPTS}


def test_a_record_says_what_was_run_and_where(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["elementwise", "--tokens", "8"])
    write_record(tmp_path / "r.json", "benchmarks.elementwise", rows=[1, 2])
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["rows"] == [1, 2]
    assert content["machine"]["command"] == "python -m benchmarks.elementwise --tokens 8"
    assert {"date", "device", "python", "torch", "bmburst", "commit"} <= content["machine"].keys()
    write_record(None, "benchmarks.elementwise")


def test_the_main_jobs_record_has_the_machine_and_a_row_a_run():
    metrics = [{"tokens_per_second": 100.0 + n, "loss": 5.0, "memory_gib": 0.5} for n in range(13)]
    run = main_job.FinishedRun(2, "bmburst train --nproc 2", "done", 61.4, metrics, {"bits_per_byte": 2.5})
    machine = {"date": "2026-11-22", "device": "H200", "bmburst": "0.1", "commit": "abc", "python": "3.12"}
    machine |= {"packages": {"bmtrain": "1.0.1"}, "command": "python -m benchmarks.main_job"}
    text = main_job.record([run], machine)
    assert "2026-11-22, H200: bmburst 0.1 (abc), python 3.12, bmtrain 1.0.1." in text
    assert re.search(r"^\| 2 \| 2\.5000 \| 5\.0000 \| 111 \| 0\.50 \| 61 \|$", text, re.M)
    assert "$ bmburst train --nproc 2\ndone\n" in text
