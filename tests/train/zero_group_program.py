"""What ranks do in the test of ZeRO within groups of ranks: 4 ranks as 2 nodes of 2."""

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bmburst.blocks.config import LoRAConfig
from bmburst.comm.checks import contents
from bmburst.comm.communicator import gather_objects
from bmburst.comm.transports import NODE_SWITCH
from bmburst.mesh import Mesh
from bmburst.train.config import OptimizerConfig, ParallelConfig
from bmburst.train.memory_plan import zero_group_for
from tests import lazy
from tests.refusals import refused, says
from tests.train import run_program

SAVED_AT, STEPS = 1, 2
OFFLOAD = OptimizerConfig(offload=True, offload_weights=True)
SAVED: dict[str, Any] = {"steps": STEPS, "checkpoint_every": SAVED_AT, "keep_checkpoints": 9, "batch_size": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of a run, and its mesh on 4 ranks
    "accumulated": ({"micro_batch_size": 1, "optimizer": OptimizerConfig(clip_norm=0.05)}, {"data_parallel": 4}),
    "offloaded": ({"micro_batch_size": 2, "optimizer": OFFLOAD}, {"data_parallel": 2}),
    "across": ({"micro_batch_size": 8}, {"sequence_parallel": 4, "zero_level": 2}),
    "adapters": ({"lora": LoRAConfig(rank=2), "checkpoint_every": None}, {"data_parallel": 2}),
}
TENSOR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # 2 tensor ranks are a node, and share a KV head
    "tensor": ({"micro_batch_size": 4}, {"tensor_parallel": 2, "data_parallel": 2, "layout": "contiguous"})
}


def train(folder: Path, name: str, label: str, group: Any, **changes: Any) -> None:
    """Train a case on all ranks; `group` None: on one rank."""
    own, mesh = (CASES | TENSOR)[name]
    parallel = ParallelConfig(layout=mesh.get("layout", "zigzag"))
    if group is not None:
        parallel = ParallelConfig(**mesh, zero_group=group)
    run_program.train(folder, f"{name}-{label}", parallel=parallel, **{**SAVED, **own, **changes})


def go_on(folder: Path, name: str, before: str, label: str, group: Any) -> None:
    """Go on from the first checkpoint of another mesh."""
    if int(os.environ["RANK"]) == 0:
        shutil.copytree(folder / f"{name}-{before}", folder / f"{name}-{label}")
        shutil.rmtree(folder / f"{name}-{label}" / "checkpoints" / f"step-{STEPS:06d}")
    train(folder, name, label, group, resume=True)


def one_rank(folder: Path, names: list[str]) -> None:
    for name in names:
        train(folder, name, "one", None)


def four_ranks(folder: Path, names: list[str]) -> None:
    """Train on two nodes, and on one node what two have left, and the other way around."""
    os.environ[NODE_SWITCH] = f"node {int(os.environ['RANK']) // 2}"
    for name in names:
        train(folder, name, "nodes", "node" if name == "accumulated" else 2)
    go_on(folder, "accumulated", "nodes", "nodes to world", "world")
    go_on(folder, "accumulated", "one", "one to nodes", 2)
    copies(folder)
    choices(folder)


def tensor_ranks(folder: Path) -> None:
    train(folder, "tensor", "nodes", 2)
    config = run_program.config(folder, "refused", parallel=ParallelConfig(tensor_parallel=2, zero_group=1))
    with refused("zero_group | 1 ranks | 4 ranks | tensor_parallel 2 | allowed: 2, 4"):
        config.validate(4)


def one_again(folder: Path) -> None:
    go_on(folder, "accumulated", "nodes", "nodes to one", None)


def copies(folder: Path) -> None:
    """Sums once a step, several calls of `backward`, a skipped step; both nodes hold the same bits."""
    parallel = ParallelConfig(data_parallel=4, zero_group=2)
    changes = SAVED | {"micro_batch_size": 1, "optimizer": OptimizerConfig(state="8bit")}  # rounded stochastically
    trainer = run_program.trainer(folder, "copies", parallel=parallel, **changes)
    shards = lazy.named_shards(trainer.model)
    assert all(len(each.groups) == 2 and each.is_copy == (each.rank > 1) for each in shards)
    held = sum(each.count for each in shards)
    assert trainer.mesh.sum(held) == 2 * trainer.config.model.num_parameters
    batch, summed = trainer.next_batch(), []
    real = lazy.bmt.nccl.allReduce

    def counted(source: Any, *others: Any) -> None:
        if others[-1] is trainer._sums.groups.between:
            summed.append(source.size())
        real(source, *others)

    with patch.object(lazy.bmt.nccl, "allReduce", counted):
        first = trainer.backward(batch)
    storages = {id(each.storage): each.storage for each in shards}.values()
    assert sorted(summed) == sorted(each.numel() for each in storages if each.numel())
    twice = trainer.backward(batch)  # adds to the gradient
    assert twice.grad_norm == pytest.approx(2 * first.grad_norm, rel=1e-5)
    before = [each.local().clone() for each in shards]
    gradients = [lazy.gradient_of(each).clone() for each in shards if each.count]
    require_alike(trainer, [*before, *gradients])

    trainer.update(twice)
    backward, after = trainer._manager.backward, [each.local().clone() for each in shards]
    require_alike(trainer, after)
    assert trainer.mesh.sum(float(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))) == 4
    if trainer.mesh.rank == 3:  # of the second node
        trainer._manager.backward = lambda loss: backward(loss * float("inf"))
    facts = trainer.backward(trainer.next_batch())
    assert not facts.is_finite
    trainer.update(facts)
    trainer._manager.backward = backward
    assert all(torch.equal(each.local(), wanted) for each, wanted in zip(shards, after, strict=True))
    assert trainer.step().grad_norm > 0  # the gradient that is not finite is gone
    require_alike(trainer, [each.local() for each in shards])


def require_alike(trainer: Any, pieces: list[torch.Tensor]) -> None:
    """Require equal bits on the ranks of one place."""
    found = gather_objects(trainer.mesh.world, [contents(each) for each in pieces])
    assert found[:2] == found[2:]


def choices(folder: Path) -> None:
    """What "auto" and "node" are on these ranks, and nodes of different sizes."""
    from bmburst.zero_group import ranks_of_node

    mesh, rank = Mesh.over_bmtrain(), int(os.environ["RANK"])
    asked = run_program.config(folder, "auto", parallel=ParallelConfig(zero_group="auto"))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert zero_group_for(asked, mesh, 4) in ("world", 2)  # by the links as they are now
    says(said.getvalue(), *(["zero_group auto: ", "B/s a rank between nodes"] if rank == 0 else []))
    assert said.getvalue().count("\n") == (rank == 0)
    assert ranks_of_node(mesh.world) == 2
    del os.environ[NODE_SWITCH]
    assert ranks_of_node(mesh.world) == 4
    node = asked.with_parallel(zero_group="node")
    assert zero_group_for(asked, mesh, 4) == zero_group_for(node, mesh, 4) == "world"
    for names in ("aaab", "abab"):
        os.environ[NODE_SWITCH] = names[rank]
        with refused("zero_group node | on a, 1 on b | equal numbers of neighbouring | zero_group N"):
            ranks_of_node(mesh.world)
