"""What every rank does in the tests of the pipeline, and one rank alone for comparison."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bmburst.blocks.config import LoRAConfig
from bmburst.comm.checks import contents
from bmburst.comm.communicator import gather_objects
from bmburst.loss import global_mean
from bmburst.mesh import Mesh, require_mesh
from bmburst.schedule.documents import Documents
from bmburst.schedule.pipeline import stage_layers
from bmburst.train import models
from bmburst.train.config import DataConfig, OptimizerConfig, ParallelConfig
from tests import lazy, tiny
from tests.refusals import refused
from tests.train import cases, run_program

LAYERS, SKIPPED, SAVED, STEPS = 5, 2, 2, 4
_SHAPE = replace(run_program.SHAPE, num_heads=4, num_kv_heads=2, num_layers=LAYERS)
_TIED = replace(_SHAPE, tie_embeddings=True, vocab_size=600)  # its head takes as long as 2.3 layers
# 47 tokens are padded on 2 ranks. As many micro-batches as 4 stages, or as 2 stages with 2 data ranks each.
_SHARED: dict[str, Any] = {"sequence_length": 47, "batch_size": 4, "micro_batch_size": 1}
_SHARED |= {"keep_checkpoints": 9, "steps": 99}
_LORA = LoRAConfig(rank=2, dropout=0.1, modules_to_save=("lm_head",))
RECOMPUTED = {"plain": 4, "tied": 2}  # layers; stages split backward passes where they have others
CASES: dict[str, dict[str, Any]] = {
    "plain": _SHARED | {"model": _SHAPE, "recompute": f"block+first-{RECOMPUTED['plain']}"},
    "tied": _SHARED
    | {
        "model": _TIED,
        "pack": "documents",
        "recompute": f"block+first-{RECOMPUTED['tied']}",
        "optimizer": OptimizerConfig(clip_norm=0.1),
    },
    "lora": _SHARED | {"model": _SHAPE, "lora": _LORA, "checkpoint_every": None},
    "4bit": _SHARED
    | {"model": _SHAPE, "lora": replace(_LORA, base="4bit"), "recompute": "block", "checkpoint_every": 9},
    "offload": _SHARED
    | {"model": _TIED, "recompute": "auto", "optimizer": OptimizerConfig(offload=True, state="bfloat16")},
}
ZERO: dict[str, Any] = {"plain": 3, "tied": 2, "lora": 2, "4bit": "auto", "offload": 3}


@dataclass(frozen=True)
class Split:
    """How the ranks share the work."""

    pipe: int
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    is_even: bool = False  # whether layers are divided without regard to the head, as in older checkpoints

    def __str__(self) -> str:
        return f"{self.pipe}x{self.data}x{self.sequence}x{self.tensor}"

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.sequence * self.tensor


ALONE = Split(1)


def compare(folder: Path, split: Split, names: list[str]) -> None:
    """Train, skip a step, save, evaluate, and leave what came of it."""
    if split == Split(2):
        _refusals()
    for name in names:
        trainer = _trainer(folder, f"{name}-{split}", split, name)
        trainer.restore()  # the base, if there is one
        if split == Split(2):
            with refused(f"stage {trainer.mesh.stage} of 2"):
                trainer.model.logits(torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None])
        if name in RECOMPUTED:
            stage = trainer.model.stage
            splits = stage.number > 0 and stage.layers.stop > RECOMPUTED[name]
            assert trainer.model.model.layers.leaves_weights == splits
        seen: dict[str, Any] = {"losses": [], "norms": [], "finite": [], "held": _held(trainer.model)}
        for step in range(1, STEPS + 1):
            with _overflow(trainer, step == SKIPPED), _watched(trainer) if split.pipe > 1 else nullcontext():
                facts = trainer.backward(trainer.next_batch())
            if step == 1:
                shards = [each for each in lazy.named_shards(trainer.model) if each.storage.requires_grad]
                seen["gradients"] = {each.name: lazy.gather(each, lazy.gradient_of(each)) for each in shards}
            trainer.update(facts)
            seen["losses"].append(facts.loss)
            seen["norms"].append(facts.grad_norm)
            seen["finite"].append(facts.is_finite)
            if step == SAVED and trainer.config.checkpoint_every is not None:
                trainer.save()
        seen["parameters"] = {s.name: lazy.gather(s) for s in lazy.named_shards(trainer.model)}
        seen["tokens"], seen["skipped"] = facts.tokens, trainer.progress.skipped
        seen["eval"] = asdict(trainer.evaluate())
        if split == Split(2):
            _add_twice(trainer)
        torch.save(seen, folder / f"{name}-{split}-rank{trainer.runtime.rank}.pt")


def _add_twice(trainer: Any) -> None:
    """Take the gradient of a batch twice before an update, also that of a tied table; both stages hold equal bits."""
    batch = trainer.next_batch()
    once, twice = (trainer.backward(batch).grad_norm for _ in range(2))
    assert twice == pytest.approx(2 * once, rel=1e-5)
    if trainer.config.model.tie_embeddings:
        (table,) = (each for each in lazy.named_shards(trainer.model) if "embed_tokens" in each.name)
        found = gather_objects(trainer.mesh.world, contents(lazy.gradient_of(table)))
        assert found[0] == found[1]


def _refusals() -> None:
    """What BMTrain's own pipeline would compute wrongly, and what knows no stages."""
    from bmburst.launch.start import start

    class Layer(lazy.bmt.DistributedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = lazy.bmt.DistributedParameter(torch.ones(3))

    mesh, one = Mesh.over_bmtrain(), torch.ones(())
    q, documents = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0)), Documents((1, 3))
    attention = lazy.BurstAttention(group=mesh.sequence)
    for words, attempt in {
        "global_mean over 2 ranks | 2 stages | 2 times too large": lambda: global_mean(one, 4, lazy.bmt.world_size()),
        "Documents | 2 stages | rows of other ranks": lambda: attention(q, q, q, None, documents),
        "tuple | 2 stages": lambda: attention(q, q, q, None, (documents,)),
        "pipe 1 | BMTrain was started with 2": lambda: start(pipe=1),
        "mesh has 2 stages | CPM-Live": lambda: require_mesh(mesh, "", "CPM-Live's"),
        "PipelineTransformerBlockList | bmt.save": lambda: lazy.named_shards(
            lazy.bmt.PipelineTransformerBlockList([lazy.bmt.Block(Layer(), mode="PIPE") for _ in range(2)])
        ),
    }.items():
        with refused(words):
            attempt()
    assert global_mean(one, 4, mesh.shape.stage_size) == 0.25
    assert torch.equal(attention(q, q, q, None, "causal"), attention(q, q, q))
    lazy.BurstAttention(group=mesh.sequence, mask=documents)(q, q, q)


def resume(folder: Path, split: Split, name: str, source: str, target: str) -> None:
    """Go on from the newest checkpoint of a run for a step, and save as another run."""
    with patch.object(models, "head_layers", lambda *_: 0.0) if split.is_even else nullcontext():
        trainer = _trainer(folder, source, split, name, resume=True)
    if split.pipe > 1:
        stage = trainer.model.stage
        seen = stage_layers(LAYERS, stage.count, stage.number) == stage.layers
        assert seen == split.is_even, stage
    trainer.restore()
    facts = trainer.backward(trainer.next_batch())
    trainer.update(facts)
    trainer.saves.folder = folder / target
    trainer.save()
    if trainer.is_main:
        torch.save((facts.loss, facts.grad_norm), folder / f"{target}.pt")


def result(folder: Path, split: Split, name: str, rank: int = 0) -> dict[str, Any]:
    return cases.result(folder, f"{name}-{split}-rank{rank}")


def _held(model: Any) -> dict[str, int]:
    """Elements that this rank holds of each parameter."""
    return {name: parameter.data.numel() for name, parameter in model.named_parameters()}


def _overflow(trainer: Any, wanted: bool) -> Any:
    """Let the last rank's loss overflow."""
    manager, is_last = trainer._manager, trainer.runtime.rank == trainer.runtime.world_size - 1
    factor = float("inf") if wanted and is_last else 1.0
    scale = type(manager).scale_loss
    return patch.object(manager, "scale_loss", lambda loss: scale(manager, loss) * factor)


@contextmanager
def _watched(trainer: Any) -> Iterator[None]:
    """Check that transfers read nothing on the host, and that ZeRO 2 gathers weights once a step.

    The last norm is small, and is gathered in each micro-batch.
    """
    from bmburst.blocks import stages

    model, exchange = trainer.model, stages.exchange

    def watched(*args: Any, **options: Any) -> Any:
        with cases.NoHostReads():
            return exchange(*args, **options)

    with (
        patch.object(stages, "exchange", watched),
        patch.object(lazy.bmt.nccl, "allGather", wraps=lazy.bmt.nccl.allGather) as gathers,
    ):
        yield
    if trainer.config.parallel.zero_level == 2:
        groups = [lazy.bmt.config[name] for name in ("pp_zero_comm", "pp_tp_zero_comm") if name in lazy.bmt.config]
        made = sum(call.args[2] in groups for call in gathers.call_args_list)
        tables = sum(hasattr(*each) for each in ((model.model, "embed_tokens"), (model, "lm_head")))
        storages = sum(len(block._storage_info) for block in model.model.layers)
        micro_batches = trainer.config.batch_size // trainer.mesh.shape.data
        assert made == storages + tables + micro_batches * model.stage.is_last


def _trainer(folder: Path, run: str, split: Split, name: str, **changes: Any) -> Any:
    text = folder / "documents.jsonl"
    data = DataConfig(source=str(text), held_out_fraction=0.2, cache=folder / f"tokens-{split.ranks}")
    parallel = ParallelConfig(
        pipeline_parallel=split.pipe,
        data_parallel=split.data,
        sequence_parallel=split.sequence,
        tensor_parallel=split.tensor,
        zero_level=ZERO[name],
    )
    changes = CASES[name] | changes
    if name == "4bit":
        changes["init_from"] = folder / "base"
    return run_program.trainer(folder, run, parallel=parallel, data=data, **changes)


def write_text(folder: Path) -> None:
    """Write the documents, of 4 to 60 bytes."""
    lines = (json.dumps({"text": f"{i}: " + "abc def, ghi. "[: 1 + i % 14] * (1 + i % 4)}) for i in range(300))
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")
    tiny.save(folder / "base", _SHAPE)


STAGES: dict[str, Any] = {"parallel": ParallelConfig(pipeline_parallel=2), "micro_batch_size": 1}


def train_and_die(folder: Path, name: str) -> None:
    """Train in stages, and be killed while a checkpoint is written beside training."""
    run_program.train_and_die(folder, name, "training._sync", 10, False, **STAGES)


def go_on(folder: Path, name: str) -> None:
    """Resume in stages."""
    run_program.train(folder, name, resume=True, **STAGES)
