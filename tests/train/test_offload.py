"""A run with the optimizer in host memory is the run without, and one goes on where the other stopped."""

import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from bmburst import memory
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import hardware_like
from bmburst.train import machine, memory_plan
from bmburst.train.config import OptimizerConfig, ParallelConfig
from bmburst.train.trainer import Trainer
from tests import lazy
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import held, require_equal, steps

CASES = [("float32", 2), ("bfloat16", 3)]  # dtype and level of ZeRO


@on_program(2)
def test_trains_and_resumes(tmp_path):
    trains_and_resumes(tmp_path)
    _edges(tmp_path)


def trainer(folder, name, offload, dtype, level, **changes):
    config = program.config(
        folder,
        name,
        dtype=dtype,
        parallel=ParallelConfig(zero_level=level),
        optimizer=OptimizerConfig(offload=offload, clip_norm=0.1),  # less than the norms
        **changes,
    )
    # Every storage in several pieces.
    with patch("bmburst.optim.adamw.HostAdam", side_effect=partial(lazy.HostAdam, piece=64, depth=2)) as host:
        made = Trainer(config)
    assert host.called == offload
    return made


def trains_and_resumes(folder, rel=0.0):
    """Train and resume with and without, and compare; `rel` is how far a device is from repeating its own results."""
    for dtype, level in CASES:
        left = {}
        for offload in (False, True):
            made = trainer(folder, f"{dtype}-{level}-{offload}", offload, dtype, level)
            left[offload] = (steps(made, 2), held(made), made)
        (resident, without, _), (offloaded, within, _) = left[False], left[True]
        assert offloaded[0] == pytest.approx(resident[0], rel=rel, abs=0)
        assert offloaded[1] == pytest.approx(resident[1], rel=1e-3 if dtype == "bfloat16" else 1e-5)
        # The gradient of the second step follows the rounding of the first.
        compare(within, without, 1e-2 if dtype == "bfloat16" else max(rel, 1e-5))
        checkpoints(folder, left, dtype, level, rel)


def compare(ours, wanted, rel):
    """Check all weights and states: rounded weights are their own master's, everything else is close to `wanted`."""
    assert ours.keys() == wanted.keys()
    for key, tensor in ours.items():
        if f"{key}._param_fp32" in ours:
            assert torch.equal(tensor, ours[f"{key}._param_fp32"].bfloat16()), key
        elif tensor.numel():
            off, norm = (tensor - wanted[key]).float().norm(), wanted[key].float().norm()
            assert off <= rel * norm, (key, off, norm)


def checkpoints(folder, left, dtype, level, rel):
    """Whichever wrote it, the other reads bit by bit the same weights, masters and moments, and goes on."""
    for wrote, (_, before, made) in left.items():
        made.save()
        other = trainer(folder, f"{dtype}-{level}-{wrote}", not wrote, dtype, level, resume=True)
        other.restore()
        require_equal(held(other), before)
        assert steps(other, 1)[0] == pytest.approx(steps(made, 1)[0], rel=rel, abs=0)
        compare(held(other), held(made), max(rel, 1e-5))


def _edges(folder):
    # Saved before its first step.
    fresh = trainer(folder, "fresh", True, "bfloat16", 3)
    fresh.save()
    again = trainer(folder, "fresh", True, "bfloat16", 3, resume=True)
    again.restore()
    assert [fresh.step().grad_norm for _ in range(2)] == [again.step().grad_norm for _ in range(2)]
    # A gradient that is not finite, on one rank, changes nothing.
    before = held(fresh)
    parameters = [p for group in fresh.optimizer.param_groups for p in group["params"]]
    if lazy.bmt.rank() == 1:
        parameters[0].grad.fill_(math.nan)  # backward adds to it
    fresh.update(fresh.backward(fresh.next_batch()))
    require_equal(held(fresh), before)
    # One host has too little memory: every rank refuses.
    with pytest.MonkeyPatch.context() as patch:
        if lazy.bmt.rank() == 1:
            patch.setattr(memory_plan, "available_bytes", lambda: 1)
        with refused("optimizer.offload", "host", "in reserve"):
            trainer(folder, "short", True, "bfloat16", 3)
        trainer(folder, "given", True, "bfloat16", 3, host_memory=1.0)  # overrules what is free
        with refused("optimizer.offload", "host_memory is"):
            trainer(folder, "given little", True, "bfloat16", 3, host_memory=1e-6)
    trainer(folder, "resident", False, "bfloat16", 3)


def test_what_a_host_needs_and_has(tmp_path, monkeypatch):
    config = program.config(tmp_path, "run")
    hardware = hardware_like("")

    def needed(ranks, nodes, **changes):
        asked = replace(config, parallel=ParallelConfig(data_parallel=1), **changes)
        return memory_of(machine.planned(asked, ranks, nodes, hardware), hardware).in_host

    every, narrow = config.model.num_parameters, {"dtype": "bfloat16"}
    blocks = every - 2 * config.model.vocab_size * 16 - 16  # embedding, head, last norm
    alone, all_of_it = OptimizerConfig(offload=True), OptimizerConfig(offload=True, offload_weights=True)
    assert needed(2, 1, optimizer=alone) == 8 * every
    assert needed(4, 2, optimizer=alone, **narrow) == 12 * every // 2
    assert needed(2, 1, optimizer=all_of_it) == 16 * blocks + 8 * (every - blocks)
    assert needed(2, 1, optimizer=all_of_it, **narrow) == 14 * blocks + 12 * (every - blocks)
    limit, has = tmp_path / "sys/fs/cgroup/memory.max", tmp_path / "proc/meminfo"
    for file, text in {limit: "max\n", has: "MemTotal: 9 kB\nMemAvailable:    5 kB\n"}.items():
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert memory.available_bytes(tmp_path) == 5 * 1024
    for text, free in [("4096\n", 4096), ("8192\n", 5 * 1024)]:
        limit.write_text(text)
        assert memory.available_bytes(tmp_path) == free
    limit.unlink()
    assert memory.available_bytes(tmp_path) == 5 * 1024
    assert memory.total_bytes(tmp_path) == 9 * 1024
    (tmp_path / "sys/bus/virtio/drivers/virtio_mem/virtio3").mkdir(parents=True)
    assert memory.total_bytes(tmp_path) is None  # there may come more
    has.unlink()
    assert memory.available_bytes(tmp_path) is None
