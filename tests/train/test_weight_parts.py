"""Checkpoints of large models: several ranks write, none ever holds the model, and what is read is what was written."""

import dataclasses
import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bmburst.checkpoint import hugging_face
from bmburst.checkpoint import training as checkpoint
from bmburst.checkpoint.files import RunProgress, newest_complete
from bmburst.checkpoint.sharded_files import GatheredTensors, owners_of
from bmburst.checkpoint.tensor_files import SafetensorsWriter
from bmburst.errors import UserError
from tests import lazy
from tests.distributed.programs import on_program, run_program
from tests.train import run_program as program


def test_who_writes_what():
    assert owners_of([5, 1, 1, 1, 5], 8, 100) == [0] * 5
    assert owners_of([5, 1, 1, 1, 5], 2, 1) == [0, 1, 1, 1, 1]
    assert owners_of([4, 4, 4, 4], 8, 8) == [0, 1, 0, 1]
    assert owners_of([4, 4], 8, 1) == [0, 1]
    assert max(owners_of([16 * 2**30 // 290] * 290, 8, 2 << 30)) == 7


def test_parts_hold_what_one_file_does_and_load_on_any_ranks(tmp_path):
    run_program(3, _save_in_parts, tmp_path)
    parts = tmp_path / "parts" / "checkpoints" / "step-000002"
    whole = tmp_path / "whole" / "checkpoints" / "step-000002"
    for stem in ("model", "optimizer"):
        assert not (parts / f"{stem}.safetensors").exists()
        files = sorted(path.name for path in parts.glob(f"{stem}-*"))
        assert files == [f"{stem}-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
        index = json.loads((parts / f"{stem}.safetensors.index.json").read_text())
        expected = load_file(whole / f"{stem}.safetensors")
        assert set(index["weight_map"]) == set(expected)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
        for file in files:
            for name, tensor in load_file(parts / file).items():
                assert index["weight_map"][name] == file and torch.equal(tensor, expected.pop(name))
        assert not expected
    run_program(2, _load_parts, tmp_path)


def save(folder, ours, progress, part_bytes):
    draft = checkpoint.Draft.of(folder, ours.model, ours.optimizer, progress, keep=1, part_bytes=part_bytes)
    draft.write(GatheredTensors())


def _save_in_parts(folder):
    ours = program.trainer(folder, "parts")
    for _ in range(2):
        ours.step()
    progress = RunProgress(step=2, data=ours.batches.state_dict(), tokenizer="bytes")
    for name, part_bytes in (("whole", None), ("parts", 1)):
        save(folder / name, ours, progress, part_bytes)
    target = folder / "export"
    for part_bytes, there in ((None, True), (1, False), (None, True)):
        hugging_face.save(ours.model, target, part_bytes=part_bytes)
        assert (target / "model.safetensors").exists() == there
        assert (target / "model.safetensors.index.json").exists() != there
        hugging_face.check_weights(target, ours.model.config)
    _fails_together(folder, ours)


def _fails_together(folder, ours):
    write = SafetensorsWriter.write

    def full(self, tensor):
        if ours.runtime.rank == 1 and self._written == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, tensor)

    SafetensorsWriter.write = full
    with pytest.raises(UserError, match="No space left on device"):
        hugging_face.save(ours.model, folder / "full", part_bytes=1)
    assert not list((folder / "full").glob("*.index.json"))
    SafetensorsWriter.write = write


def _load_parts(folder):
    found = []
    for name in ("whole", "parts"):
        ours = program.trainer(folder, name, resume=True)
        ours.restore()
        states = [ours.optimizer.state[p] for g in ours.optimizer.param_groups for p in g["params"]]
        found.append((ours.step(), [state["exp_avg_sq"].clone() for state in states]))
    (first, squares), (second, others) = found
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    torch.testing.assert_close(squares, others, rtol=0, atol=0, equal_nan=True)


LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8, "num_heads": 4, "num_kv_heads": 4}


@on_program(2, fresh=True)
def test_no_rank_holds_more_than_a_few_tensors(tmp_path):
    from bmburst import zero

    gather = zero.gather

    def in_step(*args, **kwargs):
        """Gather, and wait for all: on CPUs what is sent is copied, and a rank that runs ahead of a writer holds it."""
        full = gather(*args, **kwargs)
        lazy.bmt.synchronize()
        return full

    zero.gather = in_step
    small = program.trainer(tmp_path, "small")
    small.step()
    small.save()  # what is imported on the way takes more than these tensors do
    checkpoint.load(newest_complete(tmp_path / "small"), small.model, small.optimizer)
    shape = dataclasses.replace(program.SHAPE, head_dim=64, **LARGE)
    ours = program.trainer(tmp_path, "run", model=shape)
    ours.step()
    largest = 4 * LARGE["hidden_size"] * LARGE["intermediate_size"]
    total = 4 * shape.num_parameters
    assert total > 30 * largest
    progress = RunProgress(step=1, data=ours.batches.state_dict(), tokenizer="bytes")
    for part_bytes in (None, 1):

        def write(part_bytes=part_bytes):
            save(tmp_path / "run", ours, progress, part_bytes)

        # One that is gathered with its piece, one that waits, one that is written; how many are freed late is chance.
        grown = _growth(write)
        assert grown < total / 2, grown / largest
    grown = _growth(lambda: checkpoint.load(newest_complete(tmp_path / "run"), ours.model, ours.optimizer))
    assert grown < total / 2, grown / largest


def _growth(action):
    """Return by how many bytes this process's own memory was larger at a time while it did something."""
    seen, over = [_own_memory()], threading.Event()

    def look():
        while not over.is_set():
            seen.append(_own_memory())
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        action()
    finally:
        over.set()
        thread.join()
    return max(seen) - seen[0]


def _own_memory():
    fields = Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()
    return int(fields[0]) * 1024
