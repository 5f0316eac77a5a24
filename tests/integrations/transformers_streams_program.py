"""Trainers that read iterable data sets, on the ranks of one job and on one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from bmburst.integrations.transformers import SplitSequences
from tests import tiny
from tests.integrations.transformers_trainer_program import (
    COMMON,
    SplitTrainer,
    SplitTuner,
    reset,
    rows,
    save,
    start,
    tokenizer,
    whole_weight,
)

TRAINED = rows(13, 9, 11, 19, 7, 1, 23, 12, 17, 8, 21)
EVALUATED = rows(14, 1, 9, 12, 5)
TEXTS = ["BCDEFGHIJKLMNOPQRSTUVWX"[3 * i % 11 :][: 5 + 4 * i % 9] for i in range(11)]


class Rows(IterableDataset[dict[str, Any]]):
    """Samples in another order in each epoch."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self._samples, self._epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = 3 * self._epoch
        return iter(self._samples[first:] + self._samples[:first])


class RowsOfRank(Rows):
    """Samples that every rank reads in an order of its own, as after a shuffle without a seed."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        found = [*super().__iter__()]
        return iter(found[rank:] + found[:rank])


def trainer(name: str, folder: Path, split: SplitSequences | None, *, alike: bool) -> Any:
    """Return a trainer, split or not. Its data set ends in the third of seven steps.

    Args:
        name: Of the trainer.
        folder: For checkpoints.
        split: Splits each batch.
        alike: Whether all ranks read the samples in one order, of which accelerate gives none a shard.
    """
    options: dict[str, Any] = COMMON | {
        **{"output_dir": str(folder), "max_steps": 7, "optim": "sgd", "learning_rate": 0.1},
        **{"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2},
    }
    given: dict[str, Any] = {"split": split} if split else {}
    given["model"] = tiny.transformers_model("qwen3", attention="bmburst" if split else "sdpa", use_cache=False)
    if name == "SFTTrainer":
        texts = Dataset.from_list([{"text": text} for text in TEXTS])
        return (SplitTuner if split else SFTTrainer)(
            args=SFTConfig(bf16=False, **options),
            train_dataset=texts.to_iterable_dataset(num_shards=1 if alike else 3),
            eval_dataset=texts.select(range(5)).to_iterable_dataset(num_shards=1 if alike else 5),
            processing_class=tokenizer(),
            **given,
        )
    kind = Rows if alike else RowsOfRank
    # Where one rank reads, accelerate fails to join batches of several lengths.
    options |= {"accelerator_config": {"dispatch_batches": False}} if alike else {"dataloader_num_workers": 1}
    return (SplitTrainer if split else Trainer)(
        args=TrainingArguments(**options),
        train_dataset=kind(TRAINED),
        eval_dataset=kind(EVALUATED),
        data_collator=DataCollatorWithFlattening(),
        **given,
    )


NAMES = ("Trainer", "SFTTrainer")


def trained(name: str, folder: Path, split: SplitSequences | None, *, alike: bool = False) -> dict[str, Any]:
    """Train past the end of the data set, train again from a checkpoint before it, and evaluate."""
    found: dict[str, Any] = {}
    for checkpoint in (None, str(folder / "checkpoint-2")):
        reset()
        made = trainer(name, folder, split, alike=alike)
        made.train(resume_from_checkpoint=checkpoint)
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        weights = {name: whole_weight(weight) for name, weight in made.model.named_parameters()}
        found["again" if checkpoint else "first"] = {"losses": losses, "weights": weights}
    found["eval_loss"] = made.evaluate()["eval_loss"]
    return found


def run(folder: Path) -> None:
    """Train on ranks that share each sequence."""
    split = start()
    save(folder, {name: trained(name, folder / name, split) for name in NAMES})


def run_groups(folder: Path) -> None:
    """Train on ranks that are groups of their own, and as the libraries do on the same ranks."""
    found: dict[str, Any] = {}
    for who, split in (("ours", start(sequence=1)), ("theirs", None)):
        found[who] = {name: trained(name, folder / f"{who} {name}", split, alike=True) for name in NAMES}
    save(folder, found)
