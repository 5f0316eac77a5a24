"""fp16 with BMTrain's dynamic loss scale is fp32 to fp16's rounding, and an overflow changes nothing but the scale."""

import math
import shutil
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from bmburst.blocks.config import LoRAConfig
from bmburst.checkpoint.files import newest_complete, read_progress
from bmburst.errors import RunError
from bmburst.train.config import OptimizerConfig, ParallelConfig, ScheduleConfig
from bmburst.train.step import HostFacts, LossScale, SkippedSteps, StepFacts
from tests import lazy, tiny
from tests.distributed.programs import on_program, run_program
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import held, require_equal

INITIAL, INTERVAL = 1024.0, 3
BAD = 4
"""The step whose gradient overflows on one rank."""
SCALES = [1024, 1024, 1024, 2048, 1024, 1024, 1024, 2048]
"""Of steps 1 to 8: three are taken, the fourth is not, three are taken."""
# Each is compared with fp32 on the same ranks; the norms are above 0.1, so that gradients are clipped.
SPLITS = {
    "sequence": {"parallel": ParallelConfig()},
    "data": {"parallel": ParallelConfig(data_parallel=2, zero_level=2), "batch_size": 4},
    "lora": {"lora": LoRAConfig(rank=2), "checkpoint_every": None},
}
OFFLOADS = {
    "offload": {"optimizer.offload": True},
    "weights": {"optimizer.offload": True, "optimizer.offload_weights": True},
}


def make(folder, name, dtype="float16", **changes):
    scaled = {"loss_scale": INITIAL, "loss_scale_steps": INTERVAL} if dtype == "float16" else {}
    rates = {key.partition(".")[2]: changes.pop(key) for key in list(changes) if key.startswith("optimizer.")}
    if "lora" in changes:
        changes["init_from"] = folder / "model"
    values = {
        "dtype": dtype,
        "steps": 8,
        "eval_every": 0,
        "checkpoint_every": 0,
        "schedule": ScheduleConfig(kind="constant", warmup_steps=0),
        "optimizer": OptimizerConfig(lr=4e-3, clip_norm=0.1, **scaled, **rates),
    }
    trainer = program.trainer(folder, name, **values | changes)
    trainer.restore()
    return trainer


def overflowing(trainer, steps):
    """Let the gradient of steps overflow on the last rank, whose loss stays finite."""
    original = trainer.model.loss

    def loss(*args, **kwargs):
        bad = trainer.steps_done + 1 in steps and trainer.runtime.rank == trainer.runtime.world_size - 1
        return original(*args, **kwargs) * (1e9 if bad else 1.0)

    return patch.object(trainer.model, "loss", loss)


def run(trainer, bad=()):
    found = []
    with overflowing(trainer, bad):
        for _ in range(trainer.steps_done, 8):
            found.append(trainer.step())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    tiny.save(folder / "model", program.SHAPE)
    shutil.copytree(folder / "model", folder / "huge")
    weights = load_file(folder / "huge" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = 7e4  # one rank's
    save_file(weights, folder / "huge" / "model.safetensors", {"format": "pt"})
    return folder


def test_two_ranks(folder):
    run_program(2, _two_ranks, folder, seconds=240)
    lines = program.lines(folder / "run")
    assert [line["loss_scale"] for line in lines] == SCALES
    assert [line["skipped_steps"] for line in lines] == [0] * (BAD - 1) + [1] * (9 - BAD)
    assert lines[BAD - 1]["grad_norm"] is None and lines[BAD - 1]["loss"] is not None
    assert read_progress(newest_complete(folder / "run")).loss_scale == (2048, 1)


def _two_ranks(folder):
    _overflow_skips_one_step(folder)
    _resumed_is_uninterrupted(folder)
    with refused("huge", "model.layers.1.mlp.down_proj.weight", "65504", "fix: --dtype bfloat16"):  # on both ranks
        make(folder, "refused", init_from=folder / "huge", checkpoint_every=None)


@pytest.mark.long
@on_program(2, seconds=240)
def test_is_near_fp32_also_in_host_memory(folder):
    for name, changes in SPLITS.items():
        _is_near_fp32(folder, name, changes)
    resident = run(make(folder, "resident"), {BAD})
    for name, changes in OFFLOADS.items():
        _host_memory_gives_the_same(folder, name, changes, resident)


def _is_near_fp32(folder, name, changes):
    half, whole = (run(make(folder, f"{name}-{dtype}", dtype, **changes)) for dtype in ("float16", "float32"))
    for ours, wanted in zip(half, whole, strict=True):
        assert ours.loss == pytest.approx(wanted.loss, rel=1e-4)  # an eighth of bf16's
        assert ours.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)
        assert (ours.skipped_steps, wanted.loss_scale) == (0, None) and wanted.grad_norm > 0.1
    assert whole[-1].loss < whole[0].loss - 1e-3
    assert [each.loss_scale for each in half] == [1024] * 3 + [2048] * 3 + [4096] * 2


def _overflow_skips_one_step(folder):
    trainer = make(folder, "overflow")
    seen, before = [], {}
    with overflowing(trainer, {BAD}):
        for step in range(1, BAD + 2):
            seen.append(trainer.step())
            if step == BAD - 1:
                before = held(trainer)
            elif step == BAD:
                require_equal(held(trainer), before)
            elif step == BAD + 1:
                assert not all(torch.equal(now, before[name]) for name, now in held(trainer).items())
    assert [each.loss_scale for each in seen] == SCALES[: BAD + 1]
    assert math.isfinite(seen[BAD - 1].loss) and not math.isfinite(seen[BAD - 1].grad_norm)
    after = held(trainer)
    assert all(each.isfinite().all() for each in after.values())
    assert {int(each) for name, each in after.items() if name.endswith(".step")} == {BAD}


def _host_memory_gives_the_same(folder, name, changes, resident):
    trainer = make(folder, name, **changes)
    for ours, wanted in zip(run(trainer, {BAD}), resident, strict=True):
        assert ours.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert (ours.loss_scale, ours.skipped_steps) == (wanted.loss_scale, wanted.skipped_steps)


def _resumed_is_uninterrupted(folder):
    """The checkpoint is written one step after the one that was skipped: the counter is at 1."""
    whole, first = make(folder, "whole"), make(folder, "run", steps=5)
    with overflowing(whole, {BAD}):
        whole.train()
    with overflowing(first, {BAD}):
        first.train()
    assert read_progress(newest_complete(folder / "run")).loss_scale == (1024, 1)
    second = make(folder, "run", resume=True)
    second.train()
    require_equal(held(second), held(whole))
    assert second._monitor.scale == whole._monitor.scale == LossScale(2048, INTERVAL, 1)
    if whole.is_main:
        keys = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps")
        files = [program.lines(folder / name) for name in ("whole", "run")]
        ours, wanted = ([[line[key] for key in keys] for line in lines] for lines in files)
        assert ours == wanted


@pytest.mark.long
@on_program(2, tensor=2)
def test_tensor_ranks(folder):
    changes = {"parallel": ParallelConfig(tensor_parallel=2)}
    _is_near_fp32(folder, "tensor", changes)
    assert [each.loss_scale for each in run(make(folder, "tensor", **changes), {BAD})] == SCALES


@on_program(1)
def test_too_many_skipped_steps_end_the_run(folder):
    trainer = make(folder, "skipping", max_skipped_steps=3)
    words = "3 steps | step 1 | 512 | step 3 | 128 | fix: | --optimizer.loss_scale 128 | 65504 | --dtype bfloat16"
    with overflowing(trainer, range(9)), refused(words, error=RunError):
        trainer.train()


@on_program(1)
def test_rules_are_bmtrains():
    """Beside the manager itself, whose optimizer does nothing."""
    manager = lazy.bmt.optim.OptimManager(loss_scale=8.0, loss_scale_steps=INTERVAL)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    manager.add_optimizer(torch.optim.SGD([parameter], lr=0.0))
    ours = LossScale(8.0, INTERVAL)
    for is_finite in map(int, "11101101110000001111"):
        parameter.grad = torch.full_like(parameter, 0.0 if is_finite else math.inf)
        manager.step()
        ours.count(is_finite=bool(is_finite))
        assert ours.value == manager.loss_scale


def test_a_scale_that_never_changes_is_not_spoken_of():
    skips, fixed = SkippedSteps(["a"], most=1), LossScale()
    skips.add(StepFacts(1, (1.0,), (math.inf,), 8, (HostFacts(),)), fixed)
    assert (fixed.value, fixed.state()) == (1.0, None)
    assert "scale" not in skips.message
    with refused("1 steps", "no step was taken", error=RunError) as error:
        skips.require(lambda: False)
    assert error is None or "float16" not in str(error)
