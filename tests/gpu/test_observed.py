"""What a run on GPUs says of itself, and that it costs no wait: `tests/train/test_observed.py` has the rest."""

import json
import warnings

import pytest
import torch

from bmburst.schedule.hardware import hardware_of
from tests.distributed.programs import on_program, run_program
from tests.train import run_program as program

pytestmark = pytest.mark.gpu
SIZES = range(1, min(torch.cuda.device_count(), 2) + 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_run_says_how_it_went(size, tmp_path):
    run_program(size, _observed, tmp_path, on_gpus=True, seconds=300)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    known = hardware_of(torch.cuda.get_device_name()) is not None
    for line in lines:
        assert (line["mfu"] is not None) == (line["mfu_kernel"] is not None) == known
        assert 0 < line["memory_gib"] <= line["reserved_gib"]
        assert 0 <= line["exposed_seconds"] < line["seconds"]
    if size > 1:
        assert all(line["exposed_seconds"] > 0 for line in lines)
    for rank in range(size):
        events = json.loads((tmp_path / "run" / "profile" / f"steps-3-4.rank-{rank}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"forward", "backward", "optimizer", "attention forward", "step 3", "step 4"} <= names
        assert any(event.get("cat") == "kernel" for event in events)


def _observed(folder):
    program.trainer(folder, "run", dtype="bfloat16", profile="3-4").train()


@pytest.mark.parametrize("size", SIZES)
@on_program(on_gpus=True, seconds=300)
def test_the_host_waits_for_the_device_once_a_step(size, tmp_path):
    trainer = program.trainer(tmp_path, "run", dtype="bfloat16", batch_size=4)
    for _ in range(2):
        trainer.step()
    batch = trainer.next_batch()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.update(trainer.backward(batch))
    torch.cuda.set_sync_debug_mode("default")
    waits = [(each.filename, each.lineno) for each in seen if "synchroniz" in str(each.message)]
    assert len(waits) == 1, waits


@on_program(1, on_gpus=True, seconds=300)
def test_the_peak_is_of_the_step(tmp_path):
    trainer = program.trainer(tmp_path, "run", dtype="bfloat16")
    trainer.step()
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del block
    assert trainer.step().memory_gib > 1
    assert trainer.step().memory_gib < 1
