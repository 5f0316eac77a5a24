"""What every rank does in the test of packed documents: train on given batches and on a text, and evaluate."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bmburst.train.config import DataConfig, ParallelConfig, TrainConfig
from bmburst.train.trainer import Trainer
from tests import lazy
from tests.train import cases, run_program
from tests.train.given import local

STEPS, TOKENS = 2, 37
LENGTHS = ((37,), (1, 20, 16), (5, 5, 5, 5, 5, 5, 5, 2), (1, 1, 1, 1, 1, 1, 30, 1))
SHAPE = dataclasses.replace(run_program.SHAPE, num_heads=4, num_kv_heads=2)


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    layout: str
    micro: int
    recompute: str
    strategy: str = "auto"


CASES = [
    Case(1, 1, "zigzag", 4, "block"),
    Case(1, 2, "balanced", 1, "block-keep-attention"),
    Case(2, 1, "contiguous", 2, "none"),
    Case(1, 3, "striped", 1, "block", "ring"),
]
MORE = [
    Case(1, 1, "zigzag", 1, "none"),
    Case(1, 2, "zigzag", 2, "block-keep-attention", "heads"),
    Case(1, 3, "contiguous", 4, "block-keep-attention", "gather"),
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step's inputs and labels; documents are packed differently in every step."""
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randint(SHAPE.vocab_size, (2, len(LENGTHS), TOKENS), generator=generator).unbind()
    labels[0, 20:] = -100
    return inputs, labels


def lengths(step: int) -> tuple[tuple[int, ...], ...]:
    """Return the documents of each sequence of a step."""
    return LENGTHS[step:] + LENGTHS[:step]


def config(folder: Path, case: Case, **changes: Any) -> TrainConfig:
    """Return a case's configuration."""
    return run_program.config(
        folder,
        f"run-{case}",
        model=SHAPE,
        sequence_length=TOKENS,
        pack="documents",
        batch_size=4,
        micro_batch_size=case.micro,
        recompute=case.recompute,
        init_from=folder / "model",
        data=DataConfig(source=str(folder / "text.jsonl"), held_out_fraction=0.2),
        parallel=ParallelConfig(
            data_parallel=case.data, sequence_parallel=case.sequence, layout=case.layout, strategy=case.strategy
        ),
        **changes,
    )


def train(folder: Path, case: Case) -> None:
    """Do a case, and leave what came of it."""
    trainer = Trainer(config(folder, case, eval_sequences=10**6))
    trainer.restore()
    evaluated = trainer.evaluate()
    share = len(LENGTHS) // case.data
    mine = slice(trainer.mesh.data_rank * share, (trainer.mesh.data_rank + 1) * share)

    def given(step: int) -> Any:
        inputs, labels = batch(step)
        return local(trainer.cut, inputs[mine], labels[mine], lengths(step)[mine], device=trainer.runtime.device)

    seen = cases.record(trainer, map(given, range(STEPS)))
    seen["evaluated"] = [evaluated.loss, evaluated.bits_per_byte]
    seen["parameters"] = {s.name: lazy.gather(s) for s in lazy.named_shards(trainer.model)}
    from bmburst.blocks import model  # here, because it imports BMTrain

    text = trainer.next_batch()
    # On GPUs ids are checked in the first step only. The exchange of a step's facts reads them all at once.
    with cases.NoHostReads(), patch.object(model, "require_ids"), patch("bmburst.loss.require_ids"):
        facts = trainer.backward(text)
    trainer.update(facts)
    seen["text loss"] = facts.loss
    if trainer.is_main:
        torch.save(seen, folder / f"{case}.pt")
