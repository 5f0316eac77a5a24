"""The single measurements in `benchmarks/` start, and what they share with the engine."""

import json
import math
import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import families, hugging_face, large_models, links, lora_peers, sparse_cross, train_jobs
from benchmarks.engine.rows import ROWS, load_rows, publish, write_record
from bmburst.cli import main
from bmburst.errors import UserError
from bmburst.integrations.transformers import register
from tests.benchmarks.made import ROOT, measured
from tests.mask_oracle import visible
from tests.pairs import long
from tests.refusals import says

SCRIPTS = ("accuracy", "records", "suite", "train_jobs")  # programs that measure no rows


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_used(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_a_benchmark_of_rows_says_how_it_is_used(capsys):
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\nBENCHMARKS = " in path.read_text()}
    assert {module.removeprefix("benchmarks.") for module in ROWS.values()} == modules
    for name in ROWS:
        assert main(["bench", name, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: bmburst bench {name} ") and "--output" in text
        assert "--gpus" in text or not load_rows(name).ranks
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # a line ends at a hyphen
    assert f"rows with options of its own: {', '.join(ROWS)}." in text
    assert main(["bench", "linear", "--gates", "none", "--cells", "*"]) == 2
    assert says(capsys.readouterr().err, "--cells", "bmburst bench linear --help")


def test_a_benchmark_of_rows_records_what_was_run_and_where(tmp_path, capsys):
    path = tmp_path / "found.json"
    words = ["bench", "mixed-lengths", "--steps", "1", "--output", str(path)]
    assert main(words) == 0
    content, printed = json.loads(path.read_text()), capsys.readouterr()
    assert (content["model"], content["steps"], len(content["rows"])) == ("llama-3-8b", 1, 8)
    assert content["machine"]["command"] == f"bmburst {' '.join(words)}" and content["machine"]["ranks"] == 1
    assert {"date", "device", "python", "torch", "bmburst", "commit"} <= content["machine"].keys()
    assert printed.out == path.with_suffix(".md").read_text() == load_rows("mixed-lengths").table(content) + "\n"
    assert [json.loads(line) for line in printed.err.splitlines()] == content["rows"]
    (tmp_path / "notes.md").write_text("by hand")
    (tmp_path / "other.json").write_text("[1]")
    for name, word in (("notes.json", "notes.md"), ("other.json", "record"), ("found.txt", ".json")):
        assert main([*words[:-1], str(tmp_path / name)]) == 2
        assert says(capsys.readouterr().err, word)
    assert not (tmp_path / "notes.json").exists() and (tmp_path / "notes.md").read_text() == "by hand"


def test_a_row_that_shows_a_fault_is_the_exit_status():
    for name, fault, fine in (
        ("linear", {"right": False}, {"first s": 1.0}),
        ("families", {"result": "failed"}, {"result": "exact"}),
        ("grpo", {"failed": "exit status 1"}, {"out_of_memory": "9 GiB"}),
        ("hybrid", {"method": "ours", "failed": "no"}, {"method": "ringmaster", "failed": "no"}),
    ):
        assert load_rows(name).is_wrong(fault) and not load_rows(name).is_wrong(fine)


def test_what_is_written_by_hand_above_a_table_stays_when_it_is_measured_again(tmp_path):
    path, page = tmp_path / "r.json", tmp_path / "r.md"
    publish(path, {}, "65 tokens; ms:\n\n| a |")
    assert page.read_text() == "65 tokens; ms:\n\n| a |\n"
    page.write_text("# By hand\n\nA note.\n\n" + page.read_text())
    publish(path, {}, "65 tokens; ms:\n\n| b |")
    assert page.read_text() == "# By hand\n\nA note.\n\n65 tokens; ms:\n\n| b |\n"
    write_record(None, {})


def test_a_pass_of_log_probabilities_is_measured_on_two_ranks(tmp_path):
    found, text = measured(tmp_path, 2, "logprobs", "--small", "--tokens", "65", "--repeats", "1")
    assert found["tokens"] == 65
    assert [row["pass"].split(",")[0] for row in found["rows"]] == ["log-probabilities"] * 2 + ["mean loss"]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert "65 tokens over 2 ranks" in text
    assert text.count("| - |") == 3  # no memory without a GPU


@pytest.mark.parametrize(("words", "cases"), [(["--case", "causal/striped/striped"], 1), *long(([], 3))])
def test_cross_attention_is_measured_beside_one_rank(tmp_path, words, cases):
    found, text = measured(tmp_path, 2, "cross", "--small", *words)
    rows = found["rows"]
    assert len(rows) == 5 * cases
    for row in rows:
        if row["transport"] == "nccl":  # there is none on a CPU
            assert "nccl" in row["refused"]
        elif row["strategy"] == "gather" and row["key_layout"] == "striped":
            assert "striped" in row["refused"]
        else:
            assert row["forward"]["ratio"] > 0 and row["forward and backward"]["ratio"] > 0
    assert text.count("| causal |") == 5 * min(cases, 2)


def test_block_sparse_kernels_are_measured_beside_dense(tmp_path):
    found, text = measured(tmp_path, 1, "block-sparse", "--small", "--kernels", "reference,fa4")
    rows = found["rows"]
    assert [(row["asked"], row["kernel"]) for row in rows] == [
        (density, kernel) for density in (0.1, 0.25, 0.5) for kernel in ("reference", "fa4")
    ]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert 0 < ours["density"] == theirs["density"] <= 1 and "'fa4'" in theirs["refused"]  # there is no GPU
        for direction in ("forward", "forward and backward"):
            assert ours[direction]["ratio"] > 0 and ours[direction]["milliseconds"] > 0
    assert text == sparse_cross.block_sparse_table(found) + "\n" and text.count("| reference |") == 3


@pytest.mark.parametrize(("layout", "skipped"), [("contiguous", 0.25), *long(("zigzag", 0.0))])
def test_block_sparse_attention_over_two_ranks_is_measured_beside_one(tmp_path, layout, skipped):
    """Two blocks, a rank each under "contiguous": the first sees nothing of the second."""
    words = ["block-sparse", "--small", "--kernels", "reference,fa4", "--layout", layout]
    found, text = measured(tmp_path, 2, *words)
    rows = found["rows"]
    assert (found["sequence_ranks"], found["layout"], found["machine"]["ranks"], len(rows)) == (2, layout, 2, 6)
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert ours["skipped"] == skipped and "'fa4'" in theirs["refused"] and "skipped" not in theirs
        for direction in ("forward", "forward and backward"):
            assert ours[direction]["ratio"] > 0 and ours[direction]["one_gpu_milliseconds"] > 0
    assert text == sparse_cross.block_sparse_table(found) + "\n" and "over 2 ranks" in text
    assert text.count(f"| reference | {skipped:.0%} | ") == 3 and text.count("| fa4 | - | ") == 3


@pytest.mark.long
def test_errors_of_block_sparse_kernels_are_measured(tmp_path):
    """On a CPU the reference kernel computes in float32: errors of its rounding, none of them zero."""
    found, text = measured(tmp_path, 1, "block-sparse-errors", "--small", "--kernels", "reference,fa4")
    ours, theirs = found["rows"][::2], found["rows"][1::2]
    assert [row["head_dim"] for row in ours] == [64] * 4 + [96] * 4 + [128] * 4 and ours[3]["density"] == 1
    assert all(1e-8 < row[name] < 1e-6 for row in ours for name in ("out", "dq", "dk", "dv"))
    assert all("'fa4'" in row["refused"] for row in theirs)
    assert text == sparse_cross.errors_table(found) + "\n"


def test_the_density_of_a_block_sparse_mask_is_that_of_its_pairs():
    mask, density = sparse_cross.sparse_mask(700, 0.5)
    seen = visible(mask, 700)
    assert density == pytest.approx(seen.sum() / np.tri(700).sum()) and seen.any(1).all()
    assert sparse_cross.sparse_mask(131_072, 0.1)[1] == pytest.approx(0.1, abs=2e-3)
    row = {"density": 0.1009, "kernel": "fa4", "refused": "no"}
    row["forward"] = {"milliseconds": 30.0, "dense_milliseconds": 240.0, "ratio": 1.2388}
    found = {"tokens": 131072, "block_size": 128, "heads": 32, "kv_heads": 8, "head_dim": 128, "rows": [row]}
    assert "| 10.1% | fa4 | 30.0, 240.0, 1.24 | no |" in sparse_cross.block_sparse_table(found)


def test_families_are_tried_on_two_ranks(tmp_path):
    """Qwen2-MoE's window of 0 is none, gpt-oss has sinks, Gemma 2 a softcap; a table of attention classes is refused;
    other sizes are too large to try.
    """
    types = ["mistral", "qwen2_moe", "gpt_oss", "gemma2", "gpt_neo", "xlm-roberta-xl"]
    found, text = measured(tmp_path, 2, "families", "--types", *types)
    rows = found["rows"]
    assert [row["type"] for row in rows] == types
    assert [row["result"] for row in rows] == ["exact"] * 4 + ["refused"] * 2
    assert "GPT_NEO_ATTENTION_CLASSES" in rows[4]["reason"]
    assert "4 exact" in text and "\nmistral, qwen2_moe, gpt_oss, gemma2.\n" in text
    assert re.search(r"^\| gpt_neo \| refused \| .*GPT_NEO", text, re.M) and "failed" not in text


def test_an_error_that_is_no_refusal_counts_as_failed():
    def raises(error):
        def part(_):
            raise error

        return families._tried("gpt2", SimpleNamespace(part=part))

    register()
    assert raises(UserError("no\nfix: another")) == ("refused", "no")
    assert raises(KeyError("bmburst")) == ("failed", "KeyError: 'bmburst'")
    rows = [{"type": "gpt2", "result": "failed", "reason": "KeyError", "transformers": "5"}]
    assert "1 failed" in families.table({"rows": rows, "machine": {"ranks": 2}}) and "failed" in families.BUGS


@pytest.mark.long
def test_a_step_of_transformers_is_measured_on_two_ranks(tmp_path):
    words = ["--model", "llama-tiny", "--layers", "1", "--tokens", "128,65", "--steps", "2", "--warmup", "1"]
    found, text = measured(tmp_path, 2, "hugging-face", *words)
    assert (found["layers"], found["reshard_after_forward"]) == (1, True)
    assert [(row["tokens"], row["labels"], len(row["losses"])) for row in found["rows"]] == [(128, 127, 3), (65, 64, 3)]
    assert all(row["losses"][-1] < row["losses"][0] and row["seconds"] > 0 for row in found["rows"])
    assert found["rows"][0]["losses"][0] == pytest.approx(math.log(320), abs=0.2)  # of its vocabulary
    assert text.count("| eager |") == 2


def machine(ranks, device):
    return {"machine": {"ranks": ranks, "device": device}}


def test_a_step_of_transformers_is_compared_where_the_trainers_ran():
    row = {"tokens": 32768, "compiled": False, "seconds": 2.5, "tokens_per_second_a_rank": 6742.0, "losses": [11.9]}
    row |= {"peak_allocated_gib": 90.1, "peak_reserved_gib": 95.0}
    full = {"tokens": 131072, "compiled": True, "out_of_memory": "CUDA out of memory. Tried to allocate 31 GiB."}
    found = {"model": "llama-3-8b", "layers": 32, "parameters": 8.03e9, "transformers": "5", "recompute": "block"}
    found["rows"] = [row, full]
    text = hugging_face.table(found | machine(2, "NVIDIA H200"))
    assert "| 32K | eager | 2.500 | 6,742 | 90.1 | 95.0 | 11.9000 | 1.00 | 1.46 |" in text
    assert re.search(r"^\| 128K \| compiled \| out of memory( \| -){6} \|$", text, re.M)
    assert "31 GiB" in hugging_face.line_of(full)
    for ranks, device, layers in ((4, "NVIDIA H200", 32), (2, "NVIDIA H100", 32), (2, "NVIDIA H200", 2)):
        assert "| 11.9000 | - | - |" in hugging_face.table(found | {"layers": layers} | machine(ranks, device))


@pytest.mark.long
def test_lora_of_peers_is_measured_and_what_cannot_run_is_named(tmp_path):
    words = "--model llama-tiny --layers 1 --tokens 64 --methods peft,peft-liger,peft-bmburst --steps 1 --warmup 1"
    found, text = measured(tmp_path, 0, "lora-peers", *words.split())
    theirs, liger, mixed = found["rows"]
    assert theirs["losses"] == pytest.approx(mixed["losses"], abs=1e-4)
    assert theirs["trained"] == mixed["trained"] == 16 * (128 + 128 + 128 + 64)
    assert "liger-kernel" in liger["failed"]
    assert "| peft-liger | - | - | - | - | - |" in text


def test_out_of_memory_is_a_result_of_lora():
    row = {"method": "peft", "out_of_memory": "CUDA out of memory. Tried to allocate 31.31 GiB."}
    text = lora_peers.table({"model": "llama-3-8b", "layers": None, "tokens": 65536, "rows": [row]})
    assert "64K tokens" in text and "peft: out of memory: CUDA out of memory. Tried to allocate 31.31 GiB." in text


def test_the_main_jobs_record_has_the_machine_and_a_row_a_run():
    metrics = [{"tokens_per_second": 100.0 + n, "loss": 5.0, "memory_gib": 0.5} for n in range(13)]
    run = train_jobs.FinishedRun(2, "bmburst train --nproc 2", "done", 61.4, metrics, {"bits_per_byte": 2.5})
    machine = {"date": "2026-11-22", "device": "H200", "bmburst": "0.1", "commit": "abc", "python": "3.12"}
    machine |= {"packages": {"bmtrain": "1.0.1"}, "command": "python -m benchmarks.train_jobs main-job"}
    text = train_jobs.main_job_record([run], machine)
    assert "2026-11-22, H200: bmburst 0.1 (abc), python 3.12, bmtrain 1.0.1." in text
    assert re.search(r"^\| 2 \| 2\.5000 \| 5\.0000 \| 111 \| 0\.50 \| 61 \|$", text, re.M)
    assert "$ bmburst train --nproc 2\ndone\n" in text


def test_held_out_losses_of_small_moments_stand_beside_those_of_fp32():
    metrics = [{"tokens_per_second": 100.0, "loss": 5.0, "memory_gib": 0.5}]
    runs = {
        state: train_jobs.FinishedRun(1, "train", "", 1.0, metrics, {"loss": loss, "bits_per_byte": 2.5})
        for state, loss in (("float32", 2.0), ("bfloat16", 2.002), ("8bit", 1.99))
    }
    rows = train_jobs.states_table(runs).splitlines()[2:]
    assert [row.split("|")[3].strip() for row in rows] == ["+0.000%", "+0.100%", "-0.500%"]


def test_runs_of_large_models_share_the_gpus_of_a_machine():
    def gpus(suite, count):
        runs = dict(enumerate(large_models.SUITES[suite]))
        return [[runs[number].gpus for number in wave] for wave in large_models.waves(runs, count)]

    assert gpus("adapters", 4) == [[1, 1, 1], [2, 2], [2, 2], [1], [1], [4]]
    assert gpus("full", 4) == [[2], [2], [4], [4]]  # their optimizers need the host
    assert gpus("pipeline", 4) == [[2, 2], [4], [4]]


@pytest.mark.long
def test_a_large_model_is_planned_and_its_plan_is_run_in_small(tmp_path):
    found, text = measured(tmp_path, 0, "large-models", *["pipeline", "--runs", "0", "--steps", "1", "--small"])
    rows = found["rows"]
    assert [row["case"].split(", ")[2] for row in rows] == ["8 x 4K", "8 x 16K"]
    for row in rows:
        assert len(row["seconds_of_steps"]) == 2 and row["planned"]["fits"]
        assert row["losses"][0] == pytest.approx(math.log(256), rel=0.05)  # of random tokens
        assert "--pipeline-parallel 2" in row["command"]
    assert text.count("pipe 2 x data 1 x sequence 1") == 2


@pytest.mark.long
def test_stages_are_faster_over_slow_links_only(tmp_path):
    """The bubble of 64 micro-batches costs less than gathers over 50 Gbit/s, and more than those over 3200 Gbit/s."""
    assert main(["bench", "links", "--cases", "1", "--output", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    seconds = [[row[name]["seconds"] for name in links.WAYS] for row in rows]
    assert [each.index(min(each)) for each in (seconds[0], seconds[-1])] == [2, 0]
