"""A run as it is observed: its metrics, trace, lagging rank and summary; and that observing costs no wait."""

import contextlib
import io
import json
import re
import sys
import time
from functools import partial
from unittest.mock import patch

import torch

from bmburst.train.clock import LagWatch
from tests.distributed.programs import on_program, run_program
from tests.distributed.threads import past_first_calls
from tests.train import run_program as program

RANGES = ("data", "forward", "backward", "optimizer", "attention forward", "attention backward", "attention tile")


def test_a_run_says_how_it_went(tmp_path):
    run_program(2, _observed, tmp_path)
    run = tmp_path / "run"
    lines = program.lines(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line["mfu"] is None and line["mfu_kernel"] is None and line["reserved_gib"] is None
        assert line["tokens_per_second_per_gpu"] * 2 == line["tokens_per_second"]
        assert line["hardware_tflops"] > 0 and line["skipped_steps"] == 0
        assert 0 < line["exposed_seconds"] < line["seconds"] and 0 < line["data_seconds"] < line["seconds"]
    stderr = (tmp_path / "stderr.txt").read_text()
    assert stderr.count("MFU is left out: there is no GPU") == 1
    assert "rank 1 (host " in stderr and "times slower than the median over the last 4 steps: its data" in stderr
    assert re.search(r"steps +6; medians", stderr) and re.search(r"ranks +2: sequence 2", stderr)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["memory_gib"] == lines[-1]["memory_gib"]
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        f"steps-2-3.rank-{rank}.json" for rank in range(2)
    ]
    for path in (run / "profile").iterdir():
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert {*RANGES, "step 2", "step 3", "exchange", "wait for exchange"} <= names
        assert not {"step 1", "step 4"} & names


def _observed(folder):
    with patch("bmburst.train.monitor.LagWatch", partial(LagWatch, window=4)):
        trainer = program.trainer(folder, "run", profile="2-3")
    read = trainer.next_batch

    def slowly():
        if trainer.runtime.rank == 1:
            time.sleep(0.2)
        return read()

    trainer.next_batch = slowly
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer.train()
    if trainer.is_main:
        (folder / "stderr.txt").write_text(said.getvalue())


@on_program(2)
def test_the_host_waits_for_the_device_once_a_step(tmp_path):
    trainer = program.trainer(tmp_path, "run", batch_size=4)
    for group in (trainer.mesh.world, trainer.mesh.sequence, trainer.mesh.data, trainer.mesh.tensor):
        past_first_calls(group).always = False  # on CPUs, and in first calls, the host compares calls
    trainer.step()
    seen = []

    def spying(name):
        original = getattr(torch.Tensor, name)

        def spy(self, *args):
            frame = sys._getframe(1)
            if frame.f_globals["__name__"].split(".")[0] in ("bmburst", "bmtrain", "bmburst_ops"):
                seen.append((name, frame.f_code.co_name))
            return original(self, *args)

        return spy

    import bmburst.blocks.model
    import bmburst.loss

    # The look at ids that a GPU gets in the first pass only.
    bmburst.loss.require_ids = bmburst.blocks.model.require_ids = lambda *_, **__: None
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        setattr(torch.Tensor, name, spying(name))
    trainer.step()
    assert seen == [("tolist", "exchange")], seen
