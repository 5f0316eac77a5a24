"""What every rank does in the test of equality: train on given batches, and leave in a file what came of it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from bmburst.sequence import IGNORE_INDEX
from bmburst.train.config import DataConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, TrainConfig
from bmburst.train.trainer import Trainer
from tests import lazy, tiny
from tests.train import cases
from tests.train.given import local

STEPS, TOKENS, SEQUENCES = 3, 37, 8  # 37 tokens: padded on 2 and 4 ranks; 2 sequences for each of 4 ranks
LONG, FEW_STEPS = 20, 2
LR, DECAY = 1e-3, 0.1
SHAPE = tiny.config(vocab_size=tiny.BYTES)

Split = tuple[int, ...]
"""Data x sequence, or data x sequence x tensor ranks."""


class Case(NamedTuple):
    """How a step is done; none of it may change what comes out."""

    accumulate: bool
    clip_norm: float | None
    layout: str
    zero_level: int
    recompute: str
    steps: int = STEPS

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = [
    Case(True, None, "zigzag", 3, "block-keep-attention"),
    Case(False, 0.05, "striped", 2, "block"),
    Case(True, 0.05, "contiguous", 2, "none"),
    Case(False, None, "zigzag", 3, "block-keep-attention:0.5+offload-all", LONG),
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step's whole batch: sequences hold uneven numbers of valid labels, some ranks none at all."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(SHAPE.vocab_size, (SEQUENCES, TOKENS + 1), generator=generator)
    inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
    labels[0, 7:] = IGNORE_INDEX
    labels[2:4] = IGNORE_INDEX  # all that one of 4 data ranks has
    labels[5, 3:30] = IGNORE_INDEX
    labels[6, :20] = IGNORE_INDEX
    return inputs, labels


def result(folder: Path, split: Split, case: Case, dtype: str) -> dict[str, Any]:
    return cases.result(folder, _name(split, case, dtype))


def train_all(folder: Path, splits: list[Split], cases: list[Case]) -> None:
    """Train each case in each split; the first of all cases also in bfloat16."""
    for split in splits:
        for case in cases:
            _train(folder, split, case, "float32", case.steps)
        if CASES[0] in cases:
            _train(folder, split, CASES[0], "bfloat16", STEPS)


def train_some(folder: Path, runs: list[tuple[Split, Case]]) -> None:
    for split, case in runs:
        _train(folder, split, case, "float32", FEW_STEPS)


def _train(folder: Path, split: Split, case: Case, dtype: Any, steps: int) -> None:
    data, sequence, tensor = (*split, 1)[:3]
    share = SEQUENCES // data
    config = TrainConfig(
        preset=None,
        model=SHAPE,
        sequence_length=TOKENS,
        steps=LONG,
        batch_size=SEQUENCES,
        micro_batch_size=share // 2 if case.accumulate else share,
        dtype=dtype,
        recompute=case.recompute,
        loss_chunk_tokens=5,
        output=folder / "run",
        init_from=folder / "model",
        data=DataConfig(source=str(folder / "text.txt"), held_out_fraction=0.5),
        optimizer=OptimizerConfig(lr=LR, weight_decay=DECAY, clip_norm=case.clip_norm),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0),
        parallel=ParallelConfig(
            data_parallel=data,
            sequence_parallel=sequence,
            tensor_parallel=tensor,
            layout=case.layout,
            zero_level=case.zero_level,
        ),
    )
    trainer = Trainer(config)
    trainer.restore()
    mine, counts = slice(trainer.mesh.data_rank * share, (trainer.mesh.data_rank + 1) * share), []

    def given(step: int) -> Any:
        inputs, labels = batch(step)
        counts.append(int((labels != IGNORE_INDEX).sum()))
        return local(trainer.cut, inputs[mine], labels[mine], device=trainer.runtime.device)

    seen = cases.record(trainer, map(given, range(steps)))
    assert seen["tokens"] == counts
    seen["parameters"] = {s.name: lazy.gather(s) for s in lazy.named_shards(trainer.model)}
    if trainer.is_main:
        torch.save(seen, folder / f"{_name(split, case, dtype)}.pt")


def _name(split: Split, case: Case, dtype: str) -> str:
    return f"{'x'.join(map(str, split))}-{case}-{dtype}"
