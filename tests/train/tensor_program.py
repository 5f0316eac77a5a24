"""What every rank does in the test of tensor parallelism, and one rank alone for comparison."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from bmburst.comm.groups import communicator
from bmburst.launch.start import start
from bmburst.mesh import Mesh
from bmburst.train.config import DataConfig, OptimizerConfig, ParallelConfig
from bmburst.train.step import LossScale
from bmburst_ops.swiglu import swiglu
from tests import lazy
from tests.blocks.program import MINICPM, _bmtrain_checkpoint, _moved
from tests.comm.test_communicators import check_mesh
from tests.refusals import refused
from tests.train import run_program

# Its one KV head is shared by two tensor ranks; 47 tokens are padded on them. The other has a KV head for each.
SHARED = {"sequence_length": 47, "sample_tokens": 6, "keep_checkpoints": 9}
# With MiniCPM's factors too.
DEALT = SHARED | {"model": replace(run_program.SHAPE, num_heads=4, num_kv_heads=2, tie_embeddings=True, **MINICPM)}
BF16 = DEALT | {"dtype": "bfloat16"}
OFFLOAD = BF16 | {"optimizer": OptimizerConfig(offload=True)}
RUNS = {"shared": SHARED, "dealt": DEALT, "bf16": BF16, "offload": OFFLOAD}
CHUNKS: dict[str, dict[str, Any]] = {  # of 94 rows 5 chunks of 19, the last of 18
    "whole": {"mlp_chunk": 0},
    "kept": {"mlp_chunk": 20},
    "recomputed": {"mlp_chunk": 20, "recompute": "block"},
    "offloaded": {"mlp_chunk": 20, "recompute": "block-keep-attention+offload"},
}
FIRST, THEN = 2, 2


def begin(folder: Path, tensor: int, names: list[str]) -> None:
    """Train runs to a checkpoint and on, and leave what came of each."""
    for name in names:
        changes = RUNS[name]
        trainer = _trainer(folder, f"{name}-{tensor}", tensor, **changes)
        losses = [_step(trainer) for _ in range(FIRST)]
        trainer.save()
        losses += [_step(trainer) for _ in range(THEN)]
        _leave(trainer, {"steps": losses, "eval": asdict(trainer.evaluate()), "sample": trainer.sample()})


def resume(folder: Path, tensor: int, other: int, names: list[str]) -> None:
    """Go on from the checkpoints that another number of ranks left, after writing them again."""
    for name in names:
        changes = RUNS[name]
        trainer = _trainer(folder, f"{name}-{other}", tensor, resume=True, **changes)
        trainer.restore()
        trainer.saves.folder = folder / f"{name}-{other}-again"
        trainer.save()
        losses = [_step(trainer) for _ in range(THEN)]
        _leave(trainer, {"steps": losses})


def storage(folder: Path) -> None:
    """Where the parts of a tensor lie, for ours and for BMTrain's own checkpoints; two ranks that share matrices."""
    mesh = Mesh.over_bmtrain()
    check_mesh(mesh, 1, 1, 2)
    assert mesh.tensor is communicator(lazy.bmt.config["tp_comm"])  # no second one, and the model's
    with mesh.current():
        assert _moved() == []
        assert _bmtrain_checkpoint(folder, 2)


def loss_scale(folder: Path) -> None:
    """A loss scale changes neither the norm nor the step."""
    seen = []
    for scale in (1.0, 8.0):
        trainer = _trainer(folder, f"scale-{scale}", 2, **DEALT)
        trainer._monitor.scale = LossScale(scale)
        seen.append([_step(trainer) for _ in range(2)])
    assert seen[1] == [pytest.approx(step, rel=1e-6) for step in seen[0]]


def chunks(folder: Path) -> None:
    """Gradients of whole MLPs and of those in chunks, of which the last one is shorter, and how many chunks there were.

    Rows of two sequences, all tokens of the tensor group, are cut.
    """
    attention = partial(lazy.BurstAttention, group=Mesh.over_bmtrain().sequence, layout="contiguous")
    ids = torch.randint(run_program.SHAPE.vocab_size, (2, 48), generator=torch.Generator().manual_seed(2))
    positions, found = torch.arange(47).expand(2, -1), {}
    for name, options in CHUNKS.items():
        counted = Mock(side_effect=swiglu)
        with patch("bmburst_ops.gated_mlp.swiglu", counted):
            model = lazy.Llama(DEALT["model"], attention=attention, seed=0, **options)
            model.loss(ids[:, :-1], positions, ids[:, 1:]).backward()
        found[name] = {shard.name: lazy.gather(shard, shard.parameter.grad) for shard in lazy.named_shards(model)}
        found[name]["chunks"] = torch.tensor(counted.call_count)
    if lazy.bmt.rank() == 0:
        torch.save(found, folder / "chunks.pt")


def refusals() -> None:
    """What cannot work is said on every rank, before anything waits."""
    three = replace(run_program.SHAPE, num_heads=3, num_kv_heads=1, head_dim=8)
    wide = replace(run_program.SHAPE, intermediate_size=25)
    for words, attempt in {
        "tensor 2 | 3 query heads | 1 KV heads | 1 and 3": lambda: lazy.Llama(three),
        "tensor 2 | intermediate_size 25 | 1 and 5": lambda: lazy.Llama(wide),
        "tensor parallelism 2 | ranks share a sequence": lambda: lazy.Llama(run_program.SHAPE),
        "tensor 1 | BMTrain | 2": lambda: Mesh.over_bmtrain(tensor=1),
        "tensor 4 | BMTrain | 2": lambda: start(tensor=4),
        "heads 2 | 1 sequence ranks | work: 1": lambda: Mesh.over_bmtrain(heads=2),
    }.items():
        with refused(words):
            attempt()
    assert start().world_size == start(tensor=2).world_size == 2


def two_ranks(folder: Path, names: list[str]) -> None:
    """All that two ranks which share matrices do, after one rank has begun and before it goes on."""
    refusals()
    storage(folder)
    loss_scale(folder)
    chunks(folder)
    begin(folder, 2, names)
    resume(folder, 2, 1, names)


def _trainer(folder: Path, name: str, tensor: int, **changes: Any) -> Any:
    data = DataConfig(source=str(folder / "text.txt"), held_out_fraction=0.2, cache=folder / f"tokens-{tensor}")
    parallel = ParallelConfig(tensor_parallel=tensor, layout="contiguous")
    return run_program.trainer(folder, name, parallel=parallel, data=data, **changes)


def _step(trainer: Any) -> tuple[float, float]:
    metrics = trainer.step()
    return metrics.loss, metrics.grad_norm


def _leave(trainer: Any, seen: dict[str, Any]) -> None:
    if trainer.is_main:
        torch.save(seen, trainer.saves.folder.with_suffix(".pt"))
