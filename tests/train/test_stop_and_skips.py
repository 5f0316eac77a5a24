"""A run that was asked to stop goes on as if it had not been; steps that are not finite change nothing, and count."""

import contextlib
import io
import math
import os
import signal
from functools import partial

import torch

from bmburst.checkpoint import files as checkpoint
from bmburst.errors import RunError
from bmburst.train.config import ScheduleConfig
from bmburst.train.step import HostFacts, LossScale, SkippedSteps, StepFacts
from tests.distributed.programs import on_program, run_program
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.run_program import lines


def numbers(folder):
    return [[line[key] for key in ("step", "loss", "lr", "grad_norm", "skipped_steps")] for line in lines(folder)]


def trainer(folder, name, **changes):
    values = {"schedule": ScheduleConfig(kind="constant", warmup_steps=2), "checkpoint_every": 0} | changes
    made = program.trainer(folder, name, **values)
    made.restore()
    return made


def test_a_signal_on_one_rank_stops_all_after_the_same_step(tmp_path):
    run_program(2, _stopped, tmp_path, fresh=True)
    run = tmp_path / "stopped"
    assert [line["step"] for line in lines(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]
    assert numbers(run) == numbers(tmp_path / "whole")
    evals = [(folder / "evals.jsonl").read_text() for folder in (run, tmp_path / "whole")]
    assert evals[0] == evals[1]
    said = (tmp_path / "said.txt").read_text()
    assert "stopped after step 3 by SIGUSR1 on rank 1 (host" in said and "stopped after step 4 by SIGTERM" in said
    assert not (run / "sample.txt").exists() or "|" in (run / "sample.txt").read_text()


def _stopped(folder):
    trainer(folder, "whole").train()
    for moment, signum in ((3, signal.SIGUSR1), (4, signal.SIGTERM)):
        ours = trainer(folder, "stopped", resume=moment > 3, steps=100)
        forward = ours.backward

        def asked(*batch, ours=ours, forward=forward, moment=moment, signum=signum):
            if ours.steps_done + 1 == moment and ours.runtime.rank == 1:
                for _ in range(2):  # the second one changes nothing
                    os.kill(os.getpid(), signum)
            return forward(*batch)

        ours.backward = asked
        with contextlib.redirect_stderr(io.StringIO()) as said:
            ours.train()
        assert ours.steps_done == moment
        assert checkpoint.read_progress(checkpoint.newest_complete(folder / "stopped")).step == moment
        assert signal.getsignal(signum) is signal.SIG_DFL
        if ours.is_main:
            with (folder / "said.txt").open("a") as file:
                file.write(said.getvalue())
    last = trainer(folder, "stopped", resume=True)
    for name in ("evaluate", "save"):  # there is no step after these: the run ends as it would have
        setattr(last, name, partial(_while_told, last, getattr(last, name)))
    last.train()
    assert last.steps_done == last.config.steps


def _while_told(ours, method, *arguments, **options):
    for _ in range(2 * ours.runtime.rank):
        os.kill(os.getpid(), signal.SIGTERM)
    return method(*arguments, **options)


def facts(step=1, shares=(1.0, 1.0), squares=(1.0, 1.0)):
    return StepFacts(step, shares, squares, 8, (HostFacts(),) * len(shares))


def test_what_is_not_finite_is_said_with_its_rank():
    skips = SkippedSteps(["a", "b"], most=3)
    skips.add(facts(1), LossScale())
    assert (skips.total, skips.message) == (0, "")
    skips.add(facts(2, shares=(1.0, math.nan), squares=(math.inf, math.inf)), LossScale())
    assert skips.message == "step 2 is skipped: the loss is not finite on rank 1 (host b)"
    skips.add(facts(3, squares=(math.nan, math.inf)), LossScale())
    assert (
        skips.message
        == "step 3 is skipped: losses are finite, but the gradient is not in the parts of rank 0 (host a) and 1 more"
    )
    skips.require(lambda: True)
    skips.add(facts(4), LossScale())
    for step in (5, 6, 7):
        skips.require(lambda: True)
        skips.add(facts(step, shares=(-math.inf, 1.0)), LossScale())
    with refused("3 steps", "skipped", "step 5", "rank 0", "fix: --resume", "--optimizer.lr", error=RunError):
        skips.require(lambda: True)
    assert skips.total == 5
    first, scale = SkippedSteps(["a"], most=2), LossScale(2.0**20, 9)
    for step, value in ((1, 2.0**20), (2, 2.0**19), (3, 1.0)):
        scale.value = value
        first.add(facts(step, squares=(math.inf,)), scale)
    said = "fix: numbers beyond float16's 65504"
    with refused("3 steps", said, "--dtype bfloat16", "the same options", error=RunError):
        first.require(lambda: False)
    scale.value = 2.0**18
    with refused("no step was taken | --optimizer.loss_scale 262144 | 65504", error=RunError):
        first.require(lambda: False)
    with refused("--resume | 65504 | --init-from | of adapters in --lora.init_from", error=RunError):
        first.require(lambda: True)
    endless = SkippedSteps(["a"], most=0)
    for step in range(50):
        endless.add(facts(step, shares=(math.nan,), squares=(math.nan,)), LossScale())
    endless.require(lambda: True)


@on_program(2)
def test_a_run_that_took_no_step_fails(tmp_path):
    """Also if it has fewer steps than are allowed to be skipped."""
    ours = trainer(tmp_path, "run", steps=3)
    assert ours.config.max_skipped_steps > 3
    for group in ours.optimizer.param_groups:
        group["params"][0].data.fill_(math.nan)
    with refused("3 steps in a row", "no step was taken", "weights", error=RunError):
        ours.train()


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path):
    run_program(2, _skipping, tmp_path)
    assert [(line["step"], line["loss"] is None, line["skipped_steps"]) for line in lines(tmp_path / "run")] == [
        (1, False, 0),
        (2, True, 1),
        (3, False, 1),
        (4, True, 2),
        (5, True, 3),
    ]
    assert (tmp_path / "said.txt").read_text().count("is skipped: the loss is not finite on rank 1") == 3


def _skipping(folder):
    ours = trainer(folder, "run", steps=9, max_skipped_steps=2, checkpoint_every=3, micro_batch_size=1)
    original, parameters = ours.model.loss, [p for g in ours.optimizer.param_groups for p in g["params"]]
    held = []

    def loss(*args, **kwargs):
        if torch.is_grad_enabled():
            held.append([p.detach().clone() for p in parameters])
        bad = ours.runtime.rank == 1 and ours.steps_done + 1 in (2, 4, 5, 6)
        return original(*args, **kwargs) * (math.nan if bad else 1.0)

    ours.model.loss = loss
    with contextlib.redirect_stderr(io.StringIO()) as said, refused("2 steps", error=RunError):
        ours.train()
    torch.testing.assert_close(held[4], held[2], rtol=0, atol=0, equal_nan=True)  # two microbatches a step
    assert not all(map(torch.equal, held[6], held[4]))
    newest = checkpoint.read_progress(checkpoint.newest_complete(folder / "run"))
    assert (newest.step, newest.skipped) == (3, 1)
    if ours.is_main:
        (folder / "said.txt").write_text(said.getvalue())
