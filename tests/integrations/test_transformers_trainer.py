"""What a Trainer cannot do exactly on split sequences is refused by name. docs/trainer.md's scripts show the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from bmburst import Mesh, MeshShape
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import single_rank_group
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_trainer import SplitBatches, share_batches
from tests import tiny
from tests.distributed.threads import run_ranks
from tests.refusals import refusal_of, refused, says

ROWS = [{"input_ids": [3, 4, 5, 6]}] * 4


class SplitTrainer(SplitBatches, Trainer):
    pass


def _mesh(world: CheckedCommunicator | None = None) -> Mesh:
    world = world or single_rank_group()
    return Mesh(MeshShape(1, world.size, 1), world.rank, world, world, single_rank_group())


def _trainer(folder: Path, *, collator: Callable[..., Any] | None = None, args: Any = None, **options: Any) -> Trainer:
    register()
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **(args or {}))
    return SplitTrainer(
        split=SplitSequences(_mesh()),
        model=tiny.transformers_model(attention="bmburst", use_cache=False),
        args=arguments,
        train_dataset=ROWS,
        data_collator=collator or DataCollatorWithFlattening(),
        **options,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compute_metrics": dict}, "compute_metrics | logits | fix: leave it out"),
        ({"compute_loss_func": max}, "compute_loss_func | cross entropy | fix: leave it out"),
        ({"args": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor | 0.1 | allowed: 0"),
        ({"args": {"train_sampling_strategy": "batch_rebalance"}}, "'batch_rebalance' | 'group_by_length' | fix: "),
    ],
)
def test_arguments(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with refused(words):
        _trainer(tmp_path, **options)


def test_predictions(tmp_path: Path) -> None:
    with refused("predictions | logits | trainer.evaluate()"):
        _trainer(tmp_path).predict(ROWS)


def test_batches_without_labels(tmp_path: Path) -> None:
    """As those of trainers that have another loss, such as DPO's."""

    def pairs(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = DataCollatorWithFlattening()(rows)
        return {"input_ids": batch["input_ids"], "completion_mask": batch["input_ids"]}

    with refused("SplitTrainer | labels | completion_mask, input_ids | fix: "):
        _trainer(tmp_path, collator=pairs, args={"remove_unused_columns": False}).train()


class _Endless(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(ROWS)


@pytest.mark.parametrize("rows", [_Endless(), ROWS], ids=["without a length", "not prepared"])
def test_loaders_that_do_not_go_by_rank(rows: Any) -> None:
    loader: DataLoader[Any] = DataLoader(rows)
    if rows is not ROWS:
        loader = Accelerator(cpu=True).prepare(loader)
    for told in run_ranks(2, lambda world: refusal_of(share_batches, loader, _mesh(world))):
        says(told, type(rows).__name__, "Accelerator.prepare | has a length | fix: ")


def test_one_rank_reads_what_it_read() -> None:
    loader: DataLoader[Any] = DataLoader(_Endless())
    assert share_batches(loader, _mesh()) is loader
