"""What every rank does in the test of preference training: a step on packed pairs, in fp64, and with the trainer."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bmburst.blocks.config import LoRAConfig
from bmburst.checkpoint import hugging_face
from bmburst.train.config import DataConfig, DPOConfig, OptimizerConfig, ParallelConfig, TrainConfig
from bmburst.train.objective import PairObjective
from bmburst.train.trainer import Trainer
from tests import chat, lazy, tiny
from tests.train import cases, run_program

TOKENS, BATCH, BETA = 131, 3, 0.3
SHAPE = tiny.config(vocab_size=chat.VOCAB, num_layers=1, max_position_embeddings=TOKENS)  # of 4 heads on 2: GQA
LORA = LoRAConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))


@dataclass(frozen=True)
class Case(cases.Case):
    tensor: int
    layout: str
    micro: int
    lora: bool
    pack: str = "trees"
    zero_group: Any = "world"

    @property
    def group(self) -> tuple[int, int]:
        return self.data * self.sequence * self.tensor, self.tensor


CASES = [
    Case(1, 1, 1, "zigzag", 3, False),
    Case(1, 1, 1, "zigzag", 1, True, "documents"),
    Case(1, 2, 1, "zigzag", 3, True),
    Case(1, 2, 1, "balanced", 1, False, zero_group=1),
    Case(1, 3, 1, "contiguous", 1, True, zero_group=1),  # the answers of a pair lie on different ranks
]
MORE = [
    Case(1, 1, 1, "zigzag", 1, True),
    Case(1, 3, 1, "zigzag", 3, False, "documents"),
    Case(3, 1, 1, "zigzag", 1, False),
    Case(1, 3, 1, "striped", 3, False),
    Case(1, 1, 2, "zigzag", 1, True),
]
HALF = [CASES[2], MORE[1]]
"""They train in fp16 too: against a model without adapters, and against another model."""


def config(folder: Path, case: Case, **changes: Any) -> TrainConfig:
    """Return a case's configuration."""
    other = None if case.lora else folder / "other"
    values: dict[str, Any] = {
        "model": SHAPE,
        "sequence_length": TOKENS,
        "pack": case.pack,
        "batch_size": BATCH,
        "micro_batch_size": case.micro,
        "init_from": folder / "model",
        "optimizer": OptimizerConfig(lr=2e-3, clip_norm=None),
        "data": DataConfig(source=str(folder / "pairs.jsonl"), tokenizer=str(folder / "model"), held_out_fraction=0.2),
        "parallel": ParallelConfig(
            data_parallel=case.data,
            sequence_parallel=case.sequence,
            tensor_parallel=case.tensor,
            layout=case.layout,  # type: ignore[arg-type]
            zero_group=case.zero_group,
        ),
        "lora": LORA if case.lora else LoRAConfig(),
        "dpo": DPOConfig(beta=BETA, reference=other),
    }
    return run_program.config(folder, f"run-{case}", **values | changes)


def adapter(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an adapter's random numbers by its name: with those of a fresh one the margin would be 0."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator) * 0.1


def train(folder: Path, case: Case) -> None:
    """Do a case, and leave what came of it."""
    trainer = Trainer(config(folder, case, eval_sequences=10**6))
    trainer.restore()
    evaluated = trainer.evaluate()
    batch = trainer.next_batch()
    first = trainer.backward(batch)
    trainer.update(first)
    seen: dict[str, Any] = {
        "trained": [first.loss, first.grad_norm, *(first.rewards or ())],
        "evaluated": [evaluated.loss, evaluated.reward_margin, evaluated.reward_accuracy, evaluated.tokens],
        "second": trainer.step().loss,
    }
    if case in HALF:
        trainer = Trainer(config(folder, case, dtype="float16"))
        trainer.restore()
        seen["half"] = [[each.loss, each.grad_norm, each.loss_scale] for each in (trainer.step(), trainer.step())]

    mesh = trainer.mesh
    make = partial(
        lazy.Llama,
        SHAPE,
        attention=partial(lazy.BurstAttention, group=mesh.sequence, layout=case.layout),
        dtype=torch.float64,
        loss_chunk=16,
    )
    model = make(lora=LORA if case.lora else None, seed=None)
    hugging_face.load(model, folder / "model")
    shards = lazy.named_shards(model)
    for shard in shards:
        if ".lora_" in shard.name:
            lazy.scatter(shard, adapter(shard.name, shard.shape))
    reference = None
    if not case.lora:
        reference = make(seed=None)
        hugging_face.load(reference, folder / "other")
    objective = PairObjective(model, mesh, trainer.cut, trainer.runtime.device, BETA, reference)
    manager = lazy.bmt.optim.OptimManager(loss_scale=None)
    step = objective.begin(batch)
    for part in batch.micro_batches(case.micro):
        manager.backward(step.forward(part))
    seen["exact"] = [mesh.sum(float(each)) / mesh.shape.size for each in (step.share, *step.rewards)]
    # A frozen weight has no gradient on any rank.
    trained = [s for s in shards if not case.lora or ".lora_" in s.name]
    assert all(s.storage.grad is None for s in shards if s not in trained)
    seen["gradients"] = {s.name: lazy.gather(s, s.storage.grad, dtype=torch.float64) for s in trained}

    batch.labels.fill_(-100)  # pairs without answers: the margin is 0, and nothing moves
    for shard in shards:
        shard.storage.grad = None
    empty = objective.begin(batch)
    for part in batch.micro_batches(case.micro):
        manager.backward(empty.forward(part))
    seen["of nothing"] = mesh.sum(float(empty.share)) / mesh.shape.size
    moved = sum(float(s.storage.grad.abs().sum()) for s in trained if s.storage.grad is not None)
    seen["moved"] = mesh.sum(moved)
    if trainer.is_main:
        torch.save(seen, folder / f"{case}.pt")
