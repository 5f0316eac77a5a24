"""Steps of whole models of transformers beside those of other projects: hybrids, and GRPO."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import grpo, hybrid
from tests.benchmarks.made import measured
from tests.docs.scripts import run_script

STAND_IN = """
import sys
from types import ModuleType, SimpleNamespace

from bmburst.cli import main
from bmburst.linear.api import burst_causal_conv, burst_linear_attention


def context(cu_seqlens, group, conv1d_kernel_size, layout):
    assert cu_seqlens.tolist() == [0, 64]
    return SimpleNamespace(layout=layout, width=conv1d_kernel_size)


def scan(q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cp_context):
    return burst_linear_attention(q, k, v, g, beta, normalize=use_qk_l2norm_in_kernel, layout=cp_context.layout), None


def convolve(x, weight, bias, *, activation, cp_context):
    assert cp_context.width == weight.shape[-1]
    return burst_causal_conv(x, weight, bias, activation=activation, layout=cp_context.layout), None


def module(name, **content):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(content)


module("fla")
module("fla.ops")
module("fla.ops.cp", build_cp_context=context)
module("fla.modules.convolution", causal_conv1d=convolve)
module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=scan)
sys.exit(main(["bench", "hybrid", *"--small --layers 2 --tokens 64 --repeats 1 --output found.json".split()]))
"""


@pytest.mark.long
def test_a_step_of_a_hybrid_is_measured_beside_flas_context_parallelism(tmp_path):
    """A stand-in takes fla's place: the arguments of its functions are those of fla 0.6."""
    (tmp_path / "script.py").write_text(STAND_IN)
    run_script(tmp_path, 2, ["script.py"])
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert rows.keys() == {*hybrid.METHODS} and "ringmaster" in rows["ringmaster"]["failed"]
    assert rows["fla-cp"]["loss"] == pytest.approx(rows["ours"]["loss"], abs=1e-6)
    assert all(row["seconds"] > 0 for name, row in rows.items() if name != "ringmaster")
    text = (tmp_path / "found.md").read_text()
    assert "| 64, ours | " in text and "64, ringmaster: No module" in text


def test_the_ideal_step_of_a_hybrid_has_attention_of_the_whole_sequence():
    common = {"tokens": 65536, "peak_gib": 40.0, "loss": 10.4}
    rows = [
        {**common, "method": "ours", "seconds": 2.0},
        {**common, "method": "unsplit", "seconds": 1.75, "attention_seconds": 0.125},
    ]
    record = {"rows": rows, "parameters": 2.1e9, "layers": 8, "recompute": "none"}
    text = hybrid.table(record | {"machine": {"ranks": 2, "device": "H200"}})
    assert "| 64K, ours | 2.000 | 1.00 | - | 40.0 | 10.4000 |" in text
    assert "| 64K, unsplit | 1.750 | 0.88 | 1.875 | 40.0 | 10.4000 |" in text


@pytest.mark.long
def test_steps_of_grpo_are_those_of_trl_alone(tmp_path):
    words = "--model llama-tiny --layers 1 --prompt 320 --longest 320 --completion 8 --rows 2 --steps 1"
    split, shared, theirs = measured(tmp_path, 0, "grpo", *words.split())[0]["rows"]
    assert [row["way"] for row in (split, shared, theirs)] == list(grpo.WAYS)
    for row in (split, shared):
        assert row["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=1e-4)
        assert row["rewards"] == theirs["rewards"] and len(row["seconds_of_turns"][0]) == 2
    assert theirs["grad_norms"][0] > 0.1  # the rewards of a group differ


def test_prompts_become_longer_until_trl_alone_is_out_of_memory():
    """`started` stands in for the ranks: from 2K on, TRL alone needs more memory than there is."""
    starts = []

    def started(spec, words):
        folder = Path(words[-1])
        given = json.loads((folder / "options.json").read_text())
        starts.append((given["prompt"], given["ways"]))
        for way in given["ways"]:
            (folder / "started").write_text(way)
            if way == "trl" and given["prompt"] == 2048:
                (folder / "memory-1").write_text("CUDA out of memory. Tried to allocate 9 GiB.")
                return 1
            if way == "shared" and given["prompt"] == 1024:
                return 7
            line = {"way": way, "seconds": [9.0, 1.0, 3.0], "peak_gib": 4.0, "grad_norms": [0.5], "rewards": [1.0]}
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return 0

    options = {"ways": "split,shared,trl", "prompt": 1024, "longest": 65536, "gpus": 2, "turns": 1}
    options |= {"model": "llama-tiny", "layers": None, "rows": 2, "completion": 512, "steps": 2}
    rows = list(grpo.rows(argparse.Namespace(**options), started))
    assert starts == [(1024, ["split", "shared", "trl"]), (1024, ["trl"]), (2048, ["split", "shared", "trl"])]
    assert [(row["tokens"], row["way"], row.get("seconds")) for row in rows] == [
        *((1024, "split", 2.0), (1024, "shared", None), (1024, "trl", 2.0)),
        *((2048, "split", 2.0), (2048, "shared", 2.0), (2048, "trl", None)),
    ]
    assert rows[1]["failed"] == "exit status 7" and "9 GiB" in rows[5]["out_of_memory"]
    text = grpo.table({**options, "rows": rows, "completions_of_a_rank": 2, "machine": {"device": "H200"}})
    assert "| 1K, split | 2.000 | 1.00 | 4.0 | 0.5000 |" in text and "| 2K, trl | - | - | - | - |" in text
    assert "2K, trl: CUDA out of memory" in text
