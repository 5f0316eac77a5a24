"""What a Trainer cannot do exactly on split sequences is refused by name. docs/hugging_face.md shows the rest."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers import DataCollatorWithFlattening, Seq2SeqTrainer, Trainer, TrainingArguments
from trl import DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

from bmburst import Mesh, MeshShape
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import single_rank_group
from bmburst.integrations.trainer_arguments import require_understood
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_grpo import SplitRows
from bmburst.integrations.transformers_trainer import SplitBatches, _require_plain, share_batches
from tests import tiny
from tests.distributed.threads import mesh_of, run_ranks
from tests.integrations.transformers_grpo_program import tokenizer
from tests.integrations.transformers_trainer_program import Stream
from tests.refusals import refusal_of, refused, says

ROWS = [{"input_ids": [3, 4, 5, 6]}] * 4


class SplitTrainer(SplitBatches, Trainer):
    pass


def _trainer(
    folder: Path,
    *,
    collator: Callable[..., Any] | None = None,
    args: Any = None,
    given: TrainingArguments | None = None,
    **options: Any,
) -> Trainer:
    register()
    arguments = given or TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **(args or {}))
    return SplitTrainer(
        split=SplitSequences(mesh_of()),
        model=options.pop("model", None) or tiny.transformers_model(attention="bmburst", use_cache=False),
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
        (
            {"args": {"average_tokens_across_devices": False}},
            "average_tokens_across_devices | all ranks | allowed: True",
        ),
        ({"args": {"auto_find_batch_size": True}}, "auto_find_batch_size | alone | allowed: False"),
        ({"args": {"label_names": ["targets"]}}, "label_names | targets | allowed: None"),
        ({"args": {"optim": "adalomo"}}, "optim='adalomo' | each backward | adamw_torch"),
        (
            {"args": {"ddp_static_graph": True, "gradient_accumulation_steps": 2}},
            "ddp_static_graph | gradient_accumulation_steps=2 | fix: leave it out",
        ),
    ],
)
def test_arguments(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with refused(words):
        _trainer(tmp_path, **options)


@pytest.mark.parametrize("best", ["entropy", "eval_mean_token_accuracy", "eval_entropy", "aux_loss"])
def test_a_metric_that_trl_would_log(tmp_path: Path, best: str) -> None:
    """It is refused under TRL's trainers. Others, such as the caller's own, are not TRL's."""
    trainer: Any = _trainer(tmp_path, args={"metric_for_best_model": best})
    trainer._metrics = {}
    with refused("metric_for_best_model", repr(best), "only losses | fix: metric_for_best_model='loss'"):
        _require_plain(trainer)
    trainer.aux_loss_enabled = True  # of a model whose router's loss was not read
    with refused("router's loss of LlamaForCausalLM | not read | fix: router_aux_loss_coef=0.0 in SFTConfig"):
        _require_plain(trainer)
    trainer.aux_loss_enabled = False
    for name in ("loss", "my_entropy", "eval_my_entropy", "eval_my_mean_token_accuracy", None):
        trainer.args.metric_for_best_model = name
        _require_plain(trainer)


def _arguments(module: str, folder: Path, **fields: object) -> TrainingArguments:
    """Return arguments of a class in a module, which has one more field."""
    new: Any = dataclasses.make_dataclass("New", [("weight_of_loss", float, 1.0)], bases=(TrainingArguments,))
    new.__module__ = module
    arguments: TrainingArguments = new(output_dir=str(folder), use_cpu=True, report_to="none", **fields)
    return arguments


def test_an_argument_of_a_later_version(tmp_path: Path) -> None:
    """It is refused where it is set. A field of the caller's own class is the caller's."""
    for given in (_arguments("transformers.training_args", tmp_path), _arguments("mine", tmp_path, weight_of_loss=2.0)):
        _trainer(tmp_path, given=given)
    with refused("weight_of_loss of SplitTrainer | docs/settings.md | fix: leave it out"):
        _trainer(tmp_path, given=_arguments("trl.sft_config", tmp_path, weight_of_loss=2.0))


def test_transformers_before_5_19(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides the loss by the number of micro-batches, unless there is a loss function; TRL puts a text there."""
    monkeypatch.delattr(Trainer, "loss_is_scaled_for_ga", raising=False)
    made = _trainer(tmp_path, compute_loss_func="non-None value to disable scaling")
    assert isinstance(made.compute_loss_func, str)
    assert isinstance(_trainer(tmp_path).compute_loss_func, str)


def test_an_argument_of_a_later_trainer(tmp_path: Path) -> None:
    class Later(SplitTrainer):
        def __init__(self, weigh: Any) -> None: ...

    trainer: Any = _trainer(tmp_path)
    trainer.__class__ = Later
    require_understood(trainer, ["model", "weigh"])
    Later.__module__ = "trl.trainer"
    with refused("weigh of Later | docs/settings.md | fix: leave it out"):
        require_understood(trainer, ["model", "weigh"])


@pytest.mark.parametrize("kind", [DPOTrainer, GRPOTrainer, Seq2SeqTrainer])
def test_a_trainer_that_was_not_read(kind: type) -> None:
    """It is refused before it reads the data. Seq2SeqTrainer weights the last batch of an evaluation otherwise."""
    other: Any = type("Other", (SplitBatches, kind), {})
    with refused(f"{kind.__name__} were not read | allowed: Trainer, SFTTrainer | SplitRows | docs/fine_tuning.md"):
        other(split=SplitSequences(mesh_of()), model="folder that does not exist")


def test_a_trainer_with_a_loss_of_its_own(tmp_path: Path) -> None:
    """Behind the mixin its loss was dropped. In front of it, the caller decides."""

    class Mine(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            return 3 * super().compute_loss(*arguments, **options)

    other: Any = type("Other", (SplitBatches, Mine), {})
    with refused("Mine defines compute_loss | SplitBatches | cross entropy | fix: leave it out"):
        other(split=SplitSequences(mesh_of()), model="folder that does not exist")
    losses = []
    for kind in (SplitTrainer, type("Other", (Mine, SplitTrainer), {})):
        trainer: Any = _trainer(tmp_path, args={"max_steps": 1})
        trainer.__class__ = kind
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(3 * losses[0])


@pytest.mark.parametrize(("mixin", "kind"), [(SplitBatches, Trainer), (SplitRows, GRPOTrainer)])
def test_a_mixin_behind_its_trainer(mixin: type, kind: type) -> None:
    """Its methods would have no effect, and the trainer would not know its arguments."""
    with refused(f"Wrong has {kind.__name__} before {mixin.__name__} | fix: class Wrong({mixin.__name__}, "):
        type("Wrong", (kind, mixin), {})
    right: Any = type("Right", (mixin, kind), {})
    mine: Any = type("Mine", (kind,), {})
    assert type("Both", (mine, right), {}).__mro__[1:3] == (mine, right)


def test_models(tmp_path: Path) -> None:
    """They are refused when the trainer is made, as is what does not split."""
    unsplit: Any = None
    with refused("split must be a SplitSequences, got NoneType | fix: SplitSequences(mesh)"):
        SplitTrainer(split=unsplit, model="folder that does not exist")
    for wrong, words in (
        (tiny.transformers_model(), "attention is 'eager' | attn_implementation"),
        (
            tiny.transformers_model("qwen3_moe", attention="bmburst", output_router_logits=True),
            "Trainer adds the router's loss | each micro-batch | SFTTrainer | Part.loss | output_router_logits",
        ),
    ):
        with refused(words):
            _trainer(tmp_path, model=wrong)
    model: Any = tiny.transformers_model(attention="bmburst")
    model.loss_function = max
    with refused("loss_function of LlamaForCausalLM | next token | fix: leave it out"):
        _trainer(tmp_path, model=model)


def test_sequences_are_not_split_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs accelerate refuses the setting itself, so it is set behind accelerate's check."""
    trainer = _trainer(tmp_path)
    monkeypatch.setattr(Accelerator, "parallelism_config", ParallelismConfig(cp_size=2))
    with refused("parallelism_config | cp_size=2 | sp_size=1 | second time | allowed: 1 each | SplitSequences"):
        _require_plain(trainer)


def test_batches_are_not_split_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the training; on one process nothing is split."""
    trainer = _trainer(tmp_path, args={"accelerator_config": {"split_batches": True}})
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with refused("split_batches | by rank | fix: | accelerator_config"):
        _require_plain(trainer)


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


@pytest.mark.parametrize("key", ["token_type_ids", "loss_weights", "completion_mask"])
def test_keys_that_are_not_read(tmp_path: Path, key: str) -> None:
    """They were dropped: a model or a loss that reads them would give another result."""

    def more(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = DataCollatorWithFlattening()(rows)
        return batch | {key: batch["input_ids"]}

    trainer = _trainer(tmp_path, collator=more, eval_dataset=ROWS)
    for run in (trainer.train, trainer.evaluate):
        with refused(f"a batch has {key} | allowed: input_ids | fix: a collator without {key}"):
            run()


@pytest.mark.parametrize("stream", [None, {}, {"accelerator_config": {"dispatch_batches": False}}])
def test_an_incomplete_last_batch_on_one_rank(tmp_path: Path, stream: dict[str, Any] | None) -> None:
    """Its loss has the weight of its samples, as in transformers; there not with dispatch_batches=False of a stream."""
    rows = [{"input_ids": list(range(1, 9 + 5 * i))} for i in range(5)]
    data: Any = rows if stream is None else Stream(rows)
    args = {"per_device_eval_batch_size": 3, **(stream or {})}
    ours = _trainer(tmp_path, args=args, eval_dataset=data)
    model = tiny.transformers_model(attention="sdpa", use_cache=False)
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **args)
    theirs = Trainer(model, given, DataCollatorWithFlattening(), eval_dataset=data)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_without_any_label(tmp_path: Path, kind: type) -> None:
    """The loss of a step, of a batch of an evaluation and of a whole one: none or NaN, and 0 under TRL."""
    none = {"input_ids": [3, 4, 5, 6], "labels": [3, -100, -100, -100]}  # no token predicts the first one
    some = none | {"labels": [3, 4, -100, 6]}
    register()
    found: list[list[float]] = []
    for is_split in (False, True):
        config = SFTConfig if kind is SFTTrainer else TrainingArguments
        fields = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "logging_nan_inf_filter": False}
        trainer: Any = (type("Split", (SplitBatches, kind), {}) if is_split else kind)(
            model=tiny.transformers_model(attention="bmburst" if is_split else "sdpa", use_cache=False),
            args=config(output_dir=str(tmp_path), logging_steps=1, per_device_eval_batch_size=1, **fields),
            train_dataset=Dataset.from_list([none] * 2),
            eval_dataset={"none": Dataset.from_list([none] * 3), "some": Dataset.from_list([none, some, none])},
            **({"split": SplitSequences(mesh_of())} if is_split else {}),
            **({"processing_class": tokenizer()} if kind is SFTTrainer else {}),
        )
        trainer.args.logging_nan_inf_filter = True  # as it is by default, of the evaluation
        evaluated = trainer.evaluate()
        if is_split:
            counts = [evaluated[f"eval_{name}_batches_without_labels"] for name in ("none", "some")]
            assert counts == [3, 2]
        trainer.args.logging_nan_inf_filter = False
        trainer.train()
        losses = [evaluated["eval_none_loss"], evaluated["eval_some_loss"]]
        found.append([*losses, next(line["loss"] for line in trainer.state.log_history if "loss" in line)])
    assert found[1] == pytest.approx(found[0], nan_ok=True)
    assert [found[0][0], found[0][2]] == pytest.approx([0.0 if kind is SFTTrainer else math.nan] * 2, nan_ok=True)


class _Endless(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def test_elements_that_are_batches() -> None:
    """accelerate itself fails on several ranks without batch_size, where it reads them."""
    loader: DataLoader[Any] = DataLoader(ROWS, batch_size=None)
    loader.__dict__["batch_sampler"] = BatchSamplerShard(loader.batch_sampler, 2, 0)  # as accelerate makes it
    for told in run_ranks(2, lambda world: refusal_of(share_batches, loader, mesh_of(world))):
        says(told, "cannot be shared | fix: | batch_size=1 | batch_size=None")


@pytest.mark.parametrize("dispatch", [True, False], ids=["from one rank", "not prepared"])
def test_loaders_that_do_not_go_by_rank(dispatch: bool) -> None:
    loader: DataLoader[Any] = DataLoader(ROWS)
    if dispatch:
        config = DataLoaderConfiguration(dispatch_batches=True)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    for told in run_ranks(2, lambda world: refusal_of(share_batches, loader, mesh_of(world))):
        says(told, "list cannot be shared | Accelerator.prepare | dispatch_batches | only for | fix: ")


def test_groups_of_which_one_would_read_a_batch_more() -> None:
    """The others would end first, and the ranks wait for each other."""

    def shared(world: CheckedCommunicator, rows: int, *, drop_last: bool, plain: Any = None, even: bool = False) -> int:
        plain = plain or BatchSampler(SequentialSampler(range(rows)), 1, drop_last)
        batches = BatchSamplerShard(plain, 2, world.rank, even_batches=even)
        alone = single_rank_group()
        mesh = Mesh(MeshShape(2, 1, 1), world.rank, world, alone, world)
        return len([*share_batches(DataLoader(ROWS, batch_sampler=batches, collate_fn=list), mesh)])

    assert run_ranks(2, lambda world: shared(world, 4, drop_last=False)) == [2, 2]
    assert run_ranks(2, lambda world: shared(world, 3, drop_last=True)) == [1, 1]
    endless = type("Endless", (), {"drop_last": False, "batch_size": 1, "__iter__": lambda _: iter([[0], [1], [2]])})()
    assert run_ranks(2, lambda world: shared(world, 3, drop_last=False, plain=endless, even=True)) == [2, 2]
    for told in run_ranks(2, lambda world: refusal_of(shared, world, 3, drop_last=False, plain=endless)):
        says(told, "batches without a number for 2 groups | even_batches")
    for told in run_ranks(2, lambda world: refusal_of(shared, world, 3, drop_last=False)):
        says(told, "3 batches for 2 groups | even_batches | allowed: a multiple of 2 | drop_last")


def test_one_rank_reads_what_it_read() -> None:
    loader: DataLoader[Any] = DataLoader(_Endless())
    assert share_batches(loader, mesh_of()) is loader
    with refused("mesh | bmburst.Mesh | NoneType | fix: "):
        share_batches(loader, None)  # type: ignore[arg-type]
