"""Checkpoints that are written while training goes on hold the step at which they were begun, and no error is lost."""

import contextlib
import errno
import io
import os
import re
import signal
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import pytest

from bmburst.blocks.config import LoRAConfig
from bmburst.checkpoint import files as checkpoint
from bmburst.checkpoint import staging
from bmburst.checkpoint.sharded_files import on_every_rank
from bmburst.checkpoint.staging import Staging
from bmburst.checkpoint.tensor_files import SafetensorsWriter
from bmburst.train.config import OptimizerConfig, ParallelConfig
from tests import lazy, tiny
from tests.distributed.programs import on_program, run_program
from tests.pairs import long
from tests.refusals import refused, says
from tests.train import run_program as program

SHAPE = replace(program.SHAPE, num_heads=4, num_kv_heads=2)
OFFLOADED = OptimizerConfig(offload=True)
STREAMED = replace(OFFLOADED, offload_weights=True)
CASES = {
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "lora": {"lora": LoRAConfig(rank=2)},
    "offload": {"dtype": "bfloat16", "optimizer": OFFLOADED},
    "weights": {"dtype": "bfloat16", "optimizer": STREAMED},
}


def trainer(folder, name, **changes):
    return program.trainer(folder, name, **{"eval_every": 0, **changes})


def beside_training(ours):
    return ours.saves.go_beside_training(ours.progress)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("ranks", "tensor", "cases"),
    [(1, 1, ["fp32"]), (2, 1, ["lora", "weights"]), *long((2, 1, ["fp32", "bf16", "offload"]), (2, 2, ["weights"]))],
)
def test_a_checkpoint_holds_the_step_at_which_it_was_begun(tmp_path, ranks, tensor, cases):
    tiny.save(tmp_path / "base", SHAPE)
    run_program(ranks, _holds_its_step, tmp_path, tensor, cases, tensor=tensor)


def _holds_its_step(folder, tensor, cases):
    options = {"model": SHAPE, "parallel": ParallelConfig(tensor_parallel=tensor), "init_from": folder / "base"}
    update = lazy.updates._update

    def late_update(*args):
        time.sleep(0.3)
        update(*args)

    for name in cases:
        ours, other = (trainer(folder, f"{name}-{n}", steps=9, **options, **CASES[name]) for n in range(2))
        other.restore()
        other.step()
        expected = contents(other.save())
        ours.restore()
        with patch.object(lazy.updates, "_update", late_update):  # of weights in host memory: it still goes on below
            ours.step()
        assert beside_training(ours) == ""
        begun, released = threading.Event(), threading.Event()
        loss, copy, write_run = ours.model.loss, Staging.copy, SafetensorsWriter.write_run

        def noted(*args, loss=loss, begun=begun, **options):
            begun.set()
            return loss(*args, **options)

        def late_copy(*args, copy=copy, begun=begun):
            assert begun.wait(60)
            time.sleep(0.1)  # an update that does not wait comes first
            copy(*args)

        def late_write(*args, write_run=write_run, released=released):
            assert released.wait(60)
            write_run(*args)

        ours.model.loss = noted
        with patch.object(Staging, "copy", late_copy), patch.object(SafetensorsWriter, "write_run", late_write):
            path = ours.save(wait=False)
            for _ in range(3):
                ours.step()
            assert not path.exists() and not ours.saves.has_ended
            on_every_rank(lambda: None)
            released.set()
            ours.saves.wait()
        assert contents(path) == expected, name
        checkpoint.require_whole(path)
        on_every_rank(lambda: None)
        # The next two use the same memory. Each waits for the one before.
        second = ours.save(wait=False)
        ours.step()
        ours.save(wait=False)
        assert second.name == "step-000004" and checkpoint.problem_of(second) is None
        ours.saves.wait()
        assert sorted(each.name for each in path.parent.iterdir()) == ["step-000004", "step-000005"]
        on_every_rank(lambda: None)


@on_program(2)
def test_an_error_of_the_thread_ends_the_on_every_rank(tmp_path):
    put = SafetensorsWriter._put
    # Steps 2, 4 and 6 are saved. An error is raised at a following step, or else at the end.
    for failing, number, left in (
        (2, errno.ENOSPC, []),
        (4, errno.EACCES, ["step-000002"]),
        (6, errno.EFBIG, ["step-000002", "step-000004"]),
    ):
        ours = trainer(tmp_path, f"{failing}", keep_checkpoints=3)

        def full(file, data, ours=ours, number=number, failing=failing):
            if f"step-{failing:06d}" in str(file._path) and ours.is_main:
                raise OSError(number, os.strerror(number))
            put(file, data)

        fix = {errno.ENOSPC: "room", errno.EFBIG: "ulimit -f"}.get(number, "right to write")
        with (
            patch.object(SafetensorsWriter, "_put", full),
            contextlib.redirect_stderr(io.StringIO()),
            refused("cannot write", f"step-{failing:06d}", os.strerror(number), fix, "--resume"),
        ):
            ours.train()
        assert failing <= ours.steps_done
        assert sorted(path.name for path in (ours.folder / "checkpoints").iterdir()) == left
        on_every_rank(lambda: None)
    # An error of another kind is of one rank alone, and is raised there.
    ours = trainer(tmp_path, "odd")
    ours.step()
    assert beside_training(ours) == ""
    with patch.object(Staging, "copy", side_effect=ZeroDivisionError):
        ours.save(wait=False)
        ours.saves._save._thread.join()
        with pytest.raises(ZeroDivisionError):
            ours.saves.settle(ended=False)


@on_program(2)
def test_a_run_that_is_stopped_while_it_writes_leaves_both_checkpoints(tmp_path):
    write_run = SafetensorsWriter.write_run

    def slowly(*args):
        time.sleep(0.01)
        write_run(*args)

    ours = trainer(tmp_path, "run", steps=100)
    loss = ours.model.loss

    def told(*args, **options):
        if ours.steps_done == 2 and ours.runtime.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*args, **options)

    ours.model.loss = told
    with patch.object(SafetensorsWriter, "write_run", slowly), contextlib.redirect_stderr(io.StringIO()) as said:
        ours.train()
    assert ours.steps_done == 3
    for step in (2, 3):
        checkpoint.require_whole(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    if ours.is_main:
        assert "stopped after step 3 by SIGTERM" in said.getvalue()


@on_program(2)
def test_without_host_memory_training_waits(tmp_path):
    rank = int(os.environ["RANK"])
    ours = trainer(tmp_path, "run", steps=3)
    free = patch("bmburst.train.saves.available_bytes", return_value=2**40 if rank else 100_000)
    with free, contextlib.redirect_stderr(io.StringIO()) as said:
        ours.train()
    assert ours.saves.staging is None and checkpoint.newest_complete(ours.folder).name == "step-000003"
    if ours.is_main:
        assert re.search(r"training waits .* host memory, and 97.7 KiB are free", said.getvalue())
    # The limit of a run counts, and ranks that share no memory are told apart; the decision is that of all ranks.
    for name, changes, condition, words in (
        ("limit", {"host_memory": 1e-6}, contextlib.nullcontext(), "1.0 KiB are free"),
        ("hosts", {}, patch("socket.gethostname", return_value=f"host {rank}"), "several hosts"),
        ("memfd", {}, patch("os.memfd_create", side_effect=_once(rank, OSError(errno.ENOSYS, "odd"))), "share | odd"),
    ):
        ours = trainer(tmp_path, name, **changes)
        ours.step()
        with condition:
            says(beside_training(ours), *words.split(" | "))
    # Memory that cannot be pinned on one rank after all.
    ours = trainer(tmp_path, "pinned")
    ours.step()
    paged_in = staging.paged_in

    def not_pinned(*args):
        if rank == 1:
            raise RuntimeError("CUDA cannot register 1 bytes")
        return paged_in(*args)

    with patch.object(staging, "paged_in", not_pinned):
        assert beside_training(ours) == ""
        with (
            contextlib.redirect_stderr(io.StringIO()) as said,
            patch.object(Staging, "copy", side_effect=AssertionError),
        ):
            assert ours.save(wait=False).exists()
    assert bool(said.getvalue()) == ours.is_main and ("register" in said.getvalue()) == ours.is_main


def _once(rank, error):
    """Return the outcomes of a call that fails on rank 1."""
    return error if rank == 1 else [os.memfd_create("test")]
