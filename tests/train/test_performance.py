"""What a run says of its own speed: utilisation, lagging ranks, the summary, and where the numbers go."""

import json
import re
import textwrap

import pytest

from bmburst.blocks.presets import preset
from bmburst.plan.counts import causal_pairs, hardware_flops, step_flops
from bmburst.schedule.hardware import hardware_of
from bmburst.train.clock import FlopsMeter, LagWatch, StepTiming, known_peak
from bmburst.train.config import TrainConfig, profiled_steps
from bmburst.train.metrics import StepMetrics
from bmburst.train.report import Summary
from tests.distributed.started import run_python
from tests.refusals import refused

MODEL = preset("llama-3-8b")


def test_scores_are_counted_where_they_are_visible():
    def brute(n, window):  # each query sees itself as half, as the convention has it
        return sum(min(i, (window or n) - 1) + 0.5 for i in range(n))

    for lengths, window in (([7], None), ([5, 1, 12], None), ([40], 9), ([6, 40], 9), ([9, 3], 9)):
        exact = sum(brute(n, window) for n in lengths)
        assert causal_pairs(lengths, window) == pytest.approx(exact, abs=sum(lengths) / 2 if window else 1e-9)


def test_utilisation_in_both_conventions():
    tokens, pairs = 2**20, causal_pairs([2**20])
    matrices = MODEL.num_parameters - MODEL.vocab_size * MODEL.hidden_size
    attention = 32 * 2 * 2**40 * 32 * 128  # layers, causal half of 4 S^2 H D
    assert step_flops(MODEL, tokens, pairs) == pytest.approx(6 * matrices * tokens + 3 * attention)
    flops_meter = FlopsMeter(model=MODEL, recompute="block", ranks=8, peak=989.5e12)
    used = flops_meter.of(tokens, pairs, 100.0)
    assert used.mfu == pytest.approx((6 * matrices * tokens + 3 * attention) / 800 / 989.5e12)
    assert used.mfu_kernel == pytest.approx((6 * matrices * tokens + 3.5 * attention) / 800 / 989.5e12)
    again = matrices - MODEL.vocab_size * MODEL.hidden_size - 32 * MODEL.hidden_size * MODEL.intermediate_size
    done = 6 * matrices * tokens + 2 * again * tokens + 4.5 * attention
    assert used.tflops == pytest.approx(done / 800 / 1e12, rel=1e-4)  # norms are no products
    keep = hardware_flops(MODEL, tokens, pairs, "block-keep-attention")
    none = hardware_flops(MODEL, tokens, pairs, "none")
    assert done - keep == pytest.approx(attention, rel=1e-2)
    assert keep - none == pytest.approx(2 * again * tokens, rel=1e-3)
    half = hardware_flops(MODEL, tokens, pairs, "block-keep-attention:0.5+offload")
    assert half - keep == pytest.approx(attention / 4, rel=1e-2)
    first = hardware_flops(MODEL, tokens, pairs, "block-keep-attention:0.5+offload+first-8")
    assert first - none == pytest.approx((half - none) / 4)
    # A reference (DPO) computes its forward pass, a third of the step, and backward makes the logits again.
    compared = FlopsMeter(model=MODEL, recompute="block", ranks=8, peak=989.5e12, pairs=True).of(tokens, pairs, 100.0)
    assert compared.mfu == pytest.approx(4 / 3 * used.mfu)
    assert compared.mfu_kernel - used.mfu_kernel == pytest.approx(used.mfu / 3)
    logits = 2 * MODEL.vocab_size * MODEL.hidden_size * tokens
    forward = 2 * matrices * tokens + attention
    assert compared.tflops - used.tflops == pytest.approx((forward + logits) / 800 / 1e12)
    packed = flops_meter.of(tokens, causal_pairs([2**10] * 2**10), 100.0)
    assert packed.mfu * 800 * 989.5e12 == pytest.approx(6 * matrices * tokens + 3 * attention / 2**10)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_board(device, name):
    found = hardware_of(device)
    assert (found and found.name) == name
    peak, why = known_peak(device, "bfloat16")
    assert (peak is None) == (name is None) == bool(why)


def test_no_peak_is_said_why():
    assert known_peak("NVIDIA H200", "bfloat16") == (9.895e14, "")
    assert "16-bit" in known_peak("NVIDIA H200", "float32")[1]
    assert "no GPU" in known_peak(None, "bfloat16")[1]
    assert FlopsMeter(model=MODEL, recompute="none", ranks=1, peak=None).of(8, 32, 1.0).mfu is None


def test_profiled_steps():
    for text, steps in (("3", [3]), ("3-5", [3, 4, 5]), (" 7-7 ", [7])):
        assert list(profiled_steps(text)) == steps
    for text in ("", "0", "5-3", "3-", "-3", "a", "1,2"):
        with refused("profile", f"'{text}'", "3 or 3-5"):
            profiled_steps(text)
    assert TrainConfig(steps=5, profile="3-5").profile == "3-5"
    for beyond in ("6", "5-6"):  # a run never comes to them
        with refused("profile", f"'{beyond}'", "1 to 5", "fix: "):
            TrainConfig(steps=5, profile=beyond)


def timings(ranks, **of_rank_2):
    usual = {"data": 0.1, "compute": 2.0, "waits": 0.5, "optimizer": 0.1}
    return [StepTiming(**usual | (of_rank_2 if rank == 2 else {})) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({"data": 1.2}, "data loading took 1.2 s a step, the median rank's 0.1 s"),
        ({"compute": 3.1}, "forward and backward took 3.1 s a step, the median rank's 2 s"),
        ({"optimizer": 1.2}, "optimizer took 1.2 s a step, the median rank's 0.1 s"),
    ],
)
def test_a_lagging_rank_is_named_with_its_cause(slow, said):
    watch = LagWatch([f"node{rank // 2}" for rank in range(4)], window=5)
    heard = [watch.add(timings(4, **slow)) for _ in range(12)]
    assert [step for step, text in enumerate(heard, 1) if text] == [7, 12]
    assert heard[6] == f"rank 2 (host node1) was 1.5 times slower than the median over the last 5 steps: its {said}"


def test_who_waits_or_is_slow_once_does_not_lag():
    watch = LagWatch(["a"] * 4, window=20)
    assert not any(watch.add(timings(4, waits=9.0)) for _ in range(40))
    assert not any(watch.add(timings(4, data=5.0 if step == 3 else 0.1)) for step in range(20))
    compiling = LagWatch(["a"] * 4, window=4)
    assert not any(compiling.add(timings(4, compute=90.0 if step == 1 else 2.0)) for step in range(10))
    short = LagWatch(["a"] * 4, window=2)
    assert not any(
        short.add([StepTiming(compute=0.001 * (1 + 5 * (rank == 1))) for rank in range(4)]) for _ in range(6)
    )


def step(number, seconds, **values):
    usual = {"loss": 1.0, "bits_per_byte": 1.0, "lr": 1.0, "grad_norm": 1.0, "memory_gib": 1.0}
    return StepMetrics(step=number, seconds=seconds, tokens_per_second=100 / seconds, **usual | values)


def test_the_summary_is_of_warm_steps_and_leaves_out_what_is_unknown(tmp_path):
    summary = Summary()
    assert summary.write(tmp_path) == "" and not list(tmp_path.iterdir())
    for number, (seconds, memory) in enumerate([(9.0, 5.0), (2.0, 3.0), (4.0, 2.0), (2.5, 1.0)], 1):
        summary.add(step(number, seconds, memory_gib=memory, exposed_seconds=0.1 * number, skipped_steps=number // 2))
    text = summary.write(tmp_path)
    values = json.loads((tmp_path / "summary.json").read_text())
    assert values == {
        "steps": 4,
        "skipped_steps": 2,
        "seconds": 2.5,
        "tokens_per_second": 40.0,
        "exposed_seconds": pytest.approx(0.3),
        "memory_gib": 5.0,
    }
    said = dict(re.split(r"  +", line.strip()) for line in text.splitlines())
    assert said["steps"].startswith("4, 2 skipped") and said["time a step"] == "2.5 s" and said["tokens/s"] == "40"
    assert said["peak memory"] == "5.00 GiB" and said["exposed communication"] == "300 ms" and "MFU" not in said
    summary.add(step(5, 2.5, mfu=0.512, mfu_kernel=0.58))
    assert re.search(r"MFU +51\.2%\n +MFU of kernels +58\.0%", summary.write(tmp_path))


WANDB = """
import json, sys
class Run:
    def __init__(self, given): self.lines = [given]
    def log(self, values, step): self.lines.append([step, values])
    def finish(self):
        open("wandb.json", "w").write(json.dumps(self.lines))
def init(**given): return Run(given)
"""
USE = """
import sys
from pathlib import Path
from bmburst.train.metrics import EvalMetrics, MetricsWriter, StepMetrics
from bmburst.train.metrics import Wandb, require_wandb
require_wandb()
with MetricsWriter(Path("run7"), 1, Wandb("longer", Path("run7"), {"steps": 3}, **MORE)) as writer:
    writer.write(StepMetrics(step=1, loss=2.0, bits_per_byte=float("nan"), lr=1, grad_norm=1, tokens_per_second=1,
                             seconds=1, memory_gib=1))
    writer.write_eval(EvalMetrics(step=1, loss=3.0, bits_per_byte=1, perplexity=1, tokens=5))
"""


@pytest.mark.parametrize("more", [{}, {"entity": "team", "name": "mine", "tags": ("a", "b")}])
def test_weights_and_biases_gets_every_finite_number(tmp_path, more):
    (tmp_path / "wandb.py").write_text(WANDB)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); MORE = {more!r}\n" + textwrap.dedent(USE)
    done = run_python("-c", code, cwd=tmp_path, env={})
    assert done.returncode == 0, done.stderr
    given, first, second = json.loads((tmp_path / "wandb.json").read_text())
    assert (given["project"], given["id"], given["config"]) == ("longer", "run7", {"steps": 3})
    assert (given["entity"], given["name"]) == (more.get("entity"), more.get("name", "run7"))
    assert given["tags"] == list(more.get("tags", ()))
    assert first[0] == 1 and first[1]["train/loss"] == 2.0
    assert "train/bits_per_byte" not in first[1] and "train/mfu" not in first[1]
    assert second == [
        1,
        {"held_out/loss": 3, "held_out/bits_per_byte": 1, "held_out/perplexity": 1, "held_out/tokens": 5},
    ]
