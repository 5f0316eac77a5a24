"""Small optimizer states in the planner: 70B on 4 H200s fits with them, and what does not fit says what it needs."""

from dataclasses import replace

import pytest

from bmburst.amounts import GIB
from bmburst.blocks.presets import PRESETS
from bmburst.cli.program import NOTHING_FITS, main
from bmburst.optim.config import OptimizerConfig
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import adam_bytes
from bmburst.plan.memory import memory_of
from bmburst.plan.search import search
from bmburst.schedule.hardware import load_hardware
from bmburst.train.config import TrainConfig
from bmburst.train.machine import planned
from tests.refusals import refused, says

H200 = load_hardware("h200")
LARGE = ["--preset", "llama-3-70b", "--nproc", "4", "--tensor-parallel", "1", "--ways", "1"]


def task(sequence, state):
    return Task(model=PRESETS["llama-3-70b"], preset="llama-3-70b", sequence=sequence, gpus=4, state=state)


def fits(asked, host):
    return search(asked, replace(H200, host_memory=host * GIB), tensor=[1], zero=[3])[0].memory.fits


def test_70b_fits_4_gpus_with_bf16_moments_and_says_so(capsys):
    words = ["plan", *LARGE, "--sequence-length", "32K", "--host-memory", "512G"]
    assert main(words) == NOTHING_FITS
    first, *rest = capsys.readouterr().out.splitlines()
    says(first, "No configuration fits", "364 GiB more of host memory", "--optimizer.state bfloat16")
    assert not any("best:" in line or line.startswith("bmburst train") for line in rest)
    assert not fits(task(1 << 15, "float32"), 512 + 363) and fits(task(1 << 15, "float32"), 512 + 365)
    assert main([*words, "--optimizer.state", "bfloat16"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "fits" not in first and rest[-1].startswith("bmburst train") and "--optimizer.state bfloat16" in rest[-1]
    assert fits(task(1 << 17, "bfloat16"), 512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_of_a_state(dtype):
    """Two moments, and of a 16-bit weight the master; its other half where bf16 weights have it."""
    master = {"bfloat16": (4, 2), "float16": (4, 4), "float32": (0, 0)}[dtype]
    for state, moments in (("float32", 8), ("bfloat16", 4), ("8bit", 2 + 8 / 256)):
        for with_weights in (False, True):
            half = with_weights or state != "float32"
            assert adam_bytes(dtype, state, with_weights=with_weights) == moments + master[half]
            offload = Offload.WEIGHTS if with_weights else Offload.OPTIMIZER
            way = Candidate(task=replace(task(4096, state), dtype=dtype), offload=offload)
            parameters, tables = way.task.parameters, 2 * 128256 * 8192 + 8192
            there = (parameters - tables) * (moments + master[1]) + tables * (moments + master[state != "float32"])
            wanted = there if with_weights else parameters * (moments + master[state != "float32"])
            assert memory_of(way, H200).host["optimizer"] == pytest.approx(wanted)
            resident = memory_of(replace(way, offload=Offload.NOTHING), H200).lines["optimizer"]
            assert resident == pytest.approx(parameters / 4 * (moments + master[state != "float32"]))


def test_what_would_make_it_fit_is_named_by_every_refusal(capsys, tmp_path):
    words = ["plan", *LARGE, "--sequence-length", "32K", "--host-memory", "330G"]
    assert main([*words, "--write", str(tmp_path / "recipe.yaml"), "--optimizer.offload"]) == NOTHING_FITS
    says(capsys.readouterr().err, "--write", "GiB more of host memory", "--optimizer.state 8bit")
    from bmburst.plan.longest import longest

    with refused("llama-3-70b", "at any length", "GiB more of host memory", "--optimizer.state 8bit"):
        longest(task(4096, "float32"), replace(H200, host_memory=330 * GIB), tensor=[1], recompute=["block"])
    small = ["plan", *LARGE[:2], "--nproc", "1", "--sequence-length", "32K", "--host-memory", "64G", "--ways", "1"]
    assert main([*small, "--json"]) == main(small) == NOTHING_FITS
    first = capsys.readouterr().out.splitlines()
    says(next(line for line in first if "No configuration" in line), "needs", "GiB more of host memory")
    assert main(["plan", *LARGE[:2], "--sequence-length", "4K", "--optimizer.state", "int8"]) == 2
    says(capsys.readouterr().err, "state", "'int8'", "bfloat16", "8bit", "fix: ")
    assert main(["plan", "--generate", *LARGE[:2], "--nproc", "1", "--sequence-length", "4M"]) == NOTHING_FITS
    assert capsys.readouterr().out.startswith("It does not fit into memory")


@pytest.mark.usefixtures("no_ranks")
def test_train_names_the_state_that_fits_this_host(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--optimizer.offload", "--steps", "1", "--dtype", "bfloat16", "--host-memory", "9M"]
    assert main(words) == 2
    says(capsys.readouterr().err, "optimizer.offload", "in reserve", "fix: --optimizer.state bfloat16")


def test_a_run_is_planned_with_its_own_settings():
    config = TrainConfig(
        **{"sequence_length": 512, "batch_size": 4, "micro_batch_size": 2, "dtype": "float16"},
        **{"loss_chunk_tokens": 256, "mlp_chunk_tokens": 128},
        optimizer=OptimizerConfig(state="8bit"),
    )
    task = planned(config, 1, 1, load_hardware("h200")).task
    chunks = task.loss_chunk, task.mlp_chunk
    assert (task.sequence, task.batch, task.micro_batch, *chunks) == (512, 4, 2, 256, 128)
    assert (task.dtype, task.state) == ("float16", "8bit")
