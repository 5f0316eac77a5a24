"""What every rank does in the test of training on answers: some steps on packed conversations."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bmburst.train.config import DataConfig, EvalConfig, OptimizerConfig, ParallelConfig, TrainConfig
from bmburst.train.evaluate import evaluate_checkpoint
from bmburst.train.trainer import Trainer
from tests import chat, lazy, tiny
from tests.train import cases, run_program

STEPS, TOKENS = 2, 97
SHAPE = tiny.config(vocab_size=chat.VOCAB, num_layers=1, max_position_embeddings=TOKENS)


@dataclass(frozen=True)
class Case(cases.Case):
    layout: str
    micro: int
    pack: str = "documents"

    @property
    def source(self) -> str:
        """The data: with trees, several answers to each prompt."""
        return "groups.jsonl" if self.pack == "trees" else "chats.jsonl"


CASES = [
    Case(1, 1, "zigzag", 4),
    Case(2, 1, "contiguous", 1),
    Case(1, 2, "zigzag", 2),
    Case(1, 3, "contiguous", 1),  # the first rank of a sequence may have no answer, and the last only padding
    Case(1, 1, "zigzag", 2, "trees"),
    Case(1, 2, "balanced", 1, "trees"),
]
MORE = [Case(1, 1, "zigzag", 1), Case(1, 3, "striped", 4), Case(1, 3, "zigzag", 4, "trees")]


def config(folder: Path, case: Case, **changes: Any) -> TrainConfig:
    """Return a case's configuration."""
    return run_program.config(
        folder,
        f"run-{case}",
        model=SHAPE,
        sequence_length=TOKENS,
        pack=case.pack,
        batch_size=4,
        micro_batch_size=case.micro,
        init_from=folder / "model",
        optimizer=OptimizerConfig(clip_norm=None),
        data=DataConfig(source=str(folder / case.source), tokenizer=str(folder / "model"), held_out_fraction=0.2),
        parallel=ParallelConfig(data_parallel=case.data, sequence_parallel=case.sequence, layout=case.layout),
        **changes,
    )


def train(folder: Path, case: Case) -> None:
    """Do a case, and leave what came of it."""
    trainer = Trainer(config(folder, case, eval_sequences=10**6))
    trainer.restore()
    evaluated = trainer.evaluate().loss
    seen = cases.record(trainer, (trainer.next_batch() for _ in range(STEPS)))
    # A batch of which no label counts: no gradient, no loss, and all ranks go on.
    batch = trainer.next_batch()
    batch.labels.fill_(-100)
    facts = trainer.backward(batch)
    trainer.update(facts)
    seen |= {"evaluated": evaluated, "of nothing": [facts.loss, facts.grad_norm, float(facts.tokens)]}
    if trainer.is_main:
        torch.save(seen, folder / f"{case}.pt")


def evaluate(folder: Path) -> None:
    """Leave loss and number of tokens of what `bmburst eval` gives for records, text and a mixture of both."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found = []
    for data in ("chats.jsonl", "book.txt", "mix.yaml"):
        measured, _ = evaluate_checkpoint(
            EvalConfig(
                checkpoint=folder / "model",
                data=str(folder / data),
                tokenizer=str(folder / "model"),
                sequence_length=TOKENS,
                pack="documents",
            )
        )
        found.append([measured.loss, measured.tokens])
    if lazy.bmt.rank() == 0:
        (folder / "evaluated.json").write_text(json.dumps(found))
