"""The single measurements in `benchmarks/` start, and what they share with the engine."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import families, main_job
from benchmarks.engine.machine import write_record
from bmburst.errors import UserError
from bmburst.integrations.transformers import register
from tests.docs.scripts import run_script

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
    known = {
        "biased",
        "cross",
        "double_ring",
        "elementwise",
        "families",
        "logprobs",
        "main_job",
        "plan_measure",
        "records",
    }
    assert known | {"records", "step_parts", "strategies"} <= {*SCRIPTS}


def test_a_record_says_what_was_run_and_where(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["elementwise", "--tokens", "8"])
    write_record(tmp_path / "r.json", "benchmarks.elementwise", rows=[1, 2])
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["rows"] == [1, 2]
    assert content["machine"]["command"] == "python -m benchmarks.elementwise --tokens 8"
    assert {"date", "device", "python", "torch", "bmburst", "commit"} <= content["machine"].keys()
    write_record(None, "benchmarks.elementwise")


def test_a_pass_of_log_probabilities_is_measured_on_two_ranks(tmp_path):
    words = ["-m", "benchmarks.logprobs", "--small", "--tokens", "65", "--repeats", "1", "--output", "found.json"]
    run_script(tmp_path, 2, words)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tokens"] == 65
    assert [row["pass"].split(",")[0] for row in found["rows"]] == ["log-probabilities"] * 2 + ["mean loss"]
    assert all(row["seconds"] > 0 for row in found["rows"])
    text = (tmp_path / "found.md").read_text()
    assert "65 tokens over 2 ranks" in text
    assert text.count("| - |") == 3  # no memory without a GPU


def test_cross_attention_is_measured_beside_one_rank(tmp_path):
    run_script(tmp_path, 2, ["-m", "benchmarks.cross", "--small", "--output", "found.json"])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        if row["transport"] == "nccl":  # there is none on a CPU
            assert "nccl" in row["refused"]
        else:
            assert row["forward"]["ratio"] > 0 and row["forward and backward"]["ratio"] > 0
    assert (tmp_path / "found.md").read_text().count("| causal |") == 5


def test_families_are_tried_on_two_ranks(tmp_path):
    """Qwen2-MoE's window of 0 is none, gpt-oss has sinks; a softcap and a table of attention classes are refused;
    other sizes are too large to try.
    """
    types = ["mistral", "qwen2_moe", "gpt_oss", "gemma2", "gptj", "xlm-roberta-xl"]
    run_script(tmp_path, 2, ["-m", "benchmarks.families", "--rank", ".", "--types", *types])
    rows = [json.loads(line) for line in (tmp_path / "families.jsonl").read_text().splitlines()]
    assert [row["type"] for row in rows] == types
    assert [row["result"] for row in rows] == ["exact"] * 3 + ["refused"] * 3
    assert "softcap" in rows[3]["reason"] and "GPTJ_ATTENTION_CLASSES" in rows[4]["reason"]
    text = families.table(rows, 2)
    assert "3 exact" in text and "\nmistral, qwen2_moe, gpt_oss.\n" in text
    assert re.search(r"^\| gemma2 \| refused \| .*softcap", text, re.M) and "failed" not in text


def test_an_error_that_is_no_refusal_counts_as_failed():

    def raises(error):
        def part(_):
            raise error

        return families._tried("gpt2", SimpleNamespace(part=part))

    register()
    assert raises(UserError("no\nfix: another")) == ("refused", "no")
    assert raises(KeyError("bmburst")) == ("failed", "KeyError: 'bmburst'")
    rows = [{"type": "gpt2", "result": "failed", "reason": "KeyError", "transformers": "5"}]
    assert "1 failed" in families.table(rows, 2) and "failed" in families.BUGS


def test_the_main_jobs_record_has_the_machine_and_a_row_a_run():
    metrics = [{"tokens_per_second": 100.0 + n, "loss": 5.0, "memory_gib": 0.5} for n in range(13)]
    run = main_job.FinishedRun(2, "bmburst train --nproc 2", "done", 61.4, metrics, {"bits_per_byte": 2.5})
    machine = {"date": "2026-11-22", "device": "H200", "bmburst": "0.1", "commit": "abc", "python": "3.12"}
    machine |= {"packages": {"bmtrain": "1.0.1"}, "command": "python -m benchmarks.main_job"}
    text = main_job.record([run], machine)
    assert "2026-11-22, H200: bmburst 0.1 (abc), python 3.12, bmtrain 1.0.1." in text
    assert re.search(r"^\| 2 \| 2\.5000 \| 5\.0000 \| 111 \| 0\.50 \| 61 \|$", text, re.M)
    assert "$ bmburst train --nproc 2\ndone\n" in text
