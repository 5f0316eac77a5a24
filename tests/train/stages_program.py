"""What every rank does in the tests of the pipeline, and one rank alone for comparison."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bmburst.blocks.config import LoRAConfig
from bmburst.train.config import DataConfig, OptimizerConfig, ParallelConfig
from tests.train import run_program

LAYERS, SKIPPED, SAVED, STEPS = 5, 2, 2, 4
_SHAPE = replace(run_program.SHAPE, num_heads=4, num_kv_heads=2, num_layers=LAYERS)
_TIED = replace(_SHAPE, tie_embeddings=True)
# 47 tokens are padded on 2 ranks. As many micro-batches as 4 stages, or as 2 stages with 2 data ranks each.
_SHARED: dict[str, Any] = {"sequence_length": 47, "batch_size": 4, "keep_checkpoints": 9, "steps": 99}
_LORA = LoRAConfig(rank=2, dropout=0.1, modules_to_save=("lm_head",))
CASES: dict[str, dict[str, Any]] = {
    "plain": _SHARED | {"model": _SHAPE, "recompute": "none"},
    "tied": _SHARED
    | {"model": _TIED, "pack": "documents", "recompute": "block", "optimizer": OptimizerConfig(clip_norm=0.1)},
    "lora": _SHARED | {"model": _SHAPE, "lora": _LORA, "checkpoint_every": None},
}
ZERO = {"plain": 3, "tied": 2, "lora": 2}


@dataclass(frozen=True)
class Split:
    """How the ranks share the work."""

    pipe: int
    data: int = 1
    sequence: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return f"{self.pipe}x{self.data}x{self.sequence}x{self.tensor}"

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.sequence * self.tensor


ALONE = Split(1)


def compare(folder: Path, split: Split, names: list[str]) -> None:
    """Train, skip a step, save, evaluate, and leave what came of it."""
    from bmburst.zero import gather, gradient_of, named_shards

    for name in names:
        trainer = _trainer(folder, f"{name}-{split}", split, name)
        seen: dict[str, Any] = {"losses": [], "norms": [], "finite": [], "held": _held(trainer.model)}
        for step in range(1, STEPS + 1):
            with _overflow(trainer, step == SKIPPED):
                facts = trainer.backward(trainer.next_batch())
            if step == 1:
                shards = [each for each in named_shards(trainer.model) if each.storage.requires_grad]
                seen["gradients"] = {each.name: gather(each, gradient_of(each)) for each in shards}
            trainer.update(facts)
            seen["losses"].append(facts.loss)
            seen["norms"].append(facts.grad_norm)
            seen["finite"].append(facts.is_finite)
            if step == SAVED and trainer.config.checkpoint_every is not None:
                trainer.save()
        seen["parameters"] = {s.name: gather(s) for s in named_shards(trainer.model)}
        seen["tokens"], seen["skipped"] = facts.tokens, trainer.progress.skipped
        seen["eval"] = asdict(trainer.evaluate())
        torch.save(seen, folder / f"{name}-{split}-rank{trainer.runtime.rank}.pt")


def resume(folder: Path, split: Split, name: str, source: str, target: str) -> None:
    """Go on from the newest checkpoint of a run for a step, and save as another run."""
    trainer = _trainer(folder, source, split, name, resume=True)
    trainer.restore()
    facts = trainer.backward(trainer.next_batch())
    trainer.update(facts)
    trainer.config = trainer.config.replace(output=folder / target)
    trainer.save()
    if trainer.is_main:
        torch.save((facts.loss, facts.grad_norm), folder / f"{target}.pt")


def result(folder: Path, split: Split, name: str, rank: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{name}-{split}-rank{rank}.pt", weights_only=True)
    return loaded


def _held(model: Any) -> dict[str, int]:
    """Elements that this rank holds of each parameter."""
    return {name: parameter.data.numel() for name, parameter in model.named_parameters()}


def _overflow(trainer: Any, wanted: bool) -> Any:
    """Let the last rank's loss overflow."""
    manager, is_last = trainer._manager, trainer.runtime.rank == trainer.runtime.world_size - 1
    factor = float("inf") if wanted and is_last else 1.0
    scale = type(manager).scale_loss
    return patch.object(manager, "scale_loss", lambda loss: scale(manager, loss) * factor)


def _trainer(folder: Path, run: str, split: Split, name: str, **changes: Any) -> Any:
    from bmburst.train.trainer import Trainer

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
    return Trainer(run_program.config(folder, run, parallel=parallel, data=data, **changes))


def write_text(folder: Path) -> None:
    """Write the documents, of 4 to 60 bytes."""
    lines = (json.dumps({"text": f"{i}: " + "abc def, ghi. "[: 1 + i % 14] * (1 + i % 4)}) for i in range(300))
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")


STAGES = ParallelConfig(pipeline_parallel=2)


def train_and_die(folder: Path, name: str) -> None:
    """Train in stages, and be killed while a checkpoint is written beside training."""
    run_program.train_and_die(folder, name, "training._sync", 10, False, parallel=STAGES)


def go_on(folder: Path, name: str) -> None:
    """Resume in stages."""
    run_program.train(folder, name, resume=True, parallel=STAGES)
