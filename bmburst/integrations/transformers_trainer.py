"""Split sequences with accelerate, with transformers' Trainer, and with derived trainers such as TRL's SFTTrainer.

These make three assumptions that do not hold for split sequences: every rank reads its own batches, a rank's loss is
the mean over its own labels, and an evaluation has one loss per rank. `share_batches` handles the first one,
`SplitBatches` all three. docs/hugging_face.md is the guide.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length, seed_worker

from bmburst.errors import UserError, with_fix
from bmburst.integrations.trainer_arguments import require_read, require_trl, require_understood
from bmburst.integrations.trainer_decisions import DecidesTogether
from bmburst.integrations.transformers import Part, SplitSequences
from bmburst.integrations.transformers_models import require_next_token_loss, require_splittable
from bmburst.integrations.transformers_router import asks_router_loss, require_router_loss
from bmburst.integrations.transformers_streams import Stream, is_stream, stream_loader
from bmburst.mesh import Mesh, require_mesh

__all__ = ["SplitBatches", "share_batches"]

_PART = "part"  # key of the part in a micro-batch
_IS_SCALED = "the loss is scaled"
_PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")
"""What accelerate sets in a model that it prepares for an evaluation."""
_NOT_COMPUTED = ("entropy", "mean_token_accuracy", "num_tokens")
"""What TRL logs besides losses."""


def share_batches(loader: DataLoader[Any], mesh: Mesh) -> DataLoader[Any]:
    """Make a loader read the batches of this rank's sequence group instead of those of the rank, and return it.

    Groups read the batches that as many single ranks would read. If all ranks share each sequence, the batches are
    those of one process. Batches of an iterable data set are read by rank 0, which sends them; use the loader that is
    returned then, which is another one.

    Args:
        loader: The result of `Accelerator.prepare`.
        mesh: The ranks.

    Raises:
        UserError: `mesh` is not a mesh, or the loader does not assign batches to ranks: its batches are split
            (`split_batches`), those of a data set with a length come from one rank (`dispatch_batches`), an iterable
            data set of `datasets` was divided into shards by accelerate, or accelerate did not prepare it. Or some
            groups would have one batch more than others (`even_batches=False`).
    """
    require_mesh(mesh, "bmburst.Mesh.over_process_group(), after init_process_group", "transformers'")
    return _shared(loader, mesh, by_rank=not isinstance(loader, DataLoaderDispatcher))


def _shared(loader: DataLoader[Any], mesh: Mesh, *, by_rank: bool) -> DataLoader[Any]:
    """See `share_batches`; `by_rank` is that of `Stream`."""
    if mesh.world.size == 1 or isinstance(loader.dataset, Stream):
        return loader
    if is_stream(loader):
        return stream_loader(loader, mesh, by_rank=by_rank)
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSamplerShard) or batches.split_batches or batches.batch_sampler is None:
        raise UserError(
            f"batches of {type(loader.dataset).__name__} cannot be shared by the ranks of a sequence\n"
            "allowed: a loader from Accelerator.prepare\n"
            "fix: leave out split_batches and use_stateful_dataloader; DataLoaderConfiguration(dispatch_batches=True) "
            "for an iterable data set, and only for it; where elements are batches, batch_size=1 and "
            "collate_fn=lambda batches: batches[0] for batch_size=None"
        )
    groups = mesh.shape.data
    count = batches.total_length if has_length(batches.batch_sampler) else None
    if groups > 1 and (count is None or count % groups) and not (batches.even_batches or batches.drop_last):
        raise UserError(
            f"{'batches without a number' if count is None else f'{count} batches'} for {groups} groups of ranks, with "
            "even_batches=False: some would wait for others\n"
            f"allowed: a multiple of {groups}, or even_batches=True\nfix: leave it out, or set drop_last"
        )
    batches.num_processes, batches.process_index = groups, mesh.data_rank
    if groups == 1:  # do not fill the last batch with samples from the start: a single process does not
        batches.even_batches = False
    # Or Accelerator.gather_for_metrics would cut the last batch to as many ranks as it has samples.
    loader._drop_last = True
    return loader


class SplitBatches(DecidesTogether):
    """Makes a Trainer train on split sequences: `class SplitTrainer(SplitBatches, Trainer): pass`.

    The ranks of a sequence group read the same batches. The groups read them in the order in which as many single ranks
    would. The loss of a step is the mean over the labels of all ranks and all micro-batches. TRL's SFTTrainer adds the
    mean of the router's losses of the micro-batches. An evaluation returns only the losses.

    Args:
        arguments: Positional arguments of the Trainer.
        split: Splits each batch.
        options: Further arguments of the Trainer.

    Raises:
        UserError: An argument asks for another loss, for metrics of logits, or for an order of samples that depends on
            the rank; or the model is not exact on split sequences.
    """

    loss_is_scaled_for_ga = True  # for Trainer: the number of micro-batches must not divide the loss again

    def __init__(self, *arguments: Any, split: SplitSequences, **options: Any) -> None:
        kind = require_read(
            type(self),
            SplitBatches,
            read=("Trainer", "SFTTrainer"),
            replaced="compute_loss",
            by="cross entropy",
            others="for GRPOTrainer and RLOOTrainer the mixin SplitRows (docs/hugging_face.md)",
        )
        require_split(split)
        super().__init__(*arguments, **options)
        self.split = split
        self._trainer: Any = self  # untyped access to the Trainer's attributes
        self._labels = torch.zeros(split.mesh.shape.data, dtype=torch.int64)
        """Labels of the last batch of each sequence group in an evaluation."""
        self._without_labels = 0
        self._last: Callable[[], int] = int
        self._last_trained: Callable[[], int] = int
        self._is_of_group = kind == "SFTTrainer"
        """Whether an evaluation averages the mean losses of groups, as TRL; or counts the labels of all groups."""
        require_understood(self, [name for name, value in options.items() if value is not None])
        _require_plain(self._trainer)
        _tell_scaled(self._trainer)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the batches of this sequence group."""
        loader = self._of_group(super().get_train_dataloader)  # type: ignore[misc]
        reader: Any = getattr(loader, "base_dataloader", loader)  # what accelerate's loader starts workers of
        seeded = reader.worker_init_fn
        if isinstance(seeded, partial) and seeded.func is seed_worker:  # what workers draw is part of the batch
            reader.worker_init_fn = partial(seeded, rank=self.split.mesh.data_rank)
        self._last_trained = self._last_samples(loader)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the batches of this sequence group."""
        return self._of_group(super().get_eval_dataloader, eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the batches of this sequence group."""
        return self._of_group(super().get_test_dataloader, test_dataset)  # type: ignore[misc]

    def _of_group(self, make: Callable[..., DataLoader[Any]], *arguments: Any) -> DataLoader[Any]:
        """Return a loader of the Trainer with the batches of this sequence group.

        With `dispatch_batches=False`, which SFTTrainer sets, accelerate would give shards of iterable data sets to
        ranks, so that those of a group would read different ones.
        """
        config = self._trainer.accelerator.dataloader_config
        asked, mesh = config.dispatch_batches, self.split.mesh
        if asked is False and mesh.world.size > 1:
            config.dispatch_batches = None  # the same for data sets with a length
        try:
            return _shared(make(*arguments), mesh, by_rank=asked is False)
        finally:
            config.dispatch_batches = asked

    def _last_samples(self, loader: DataLoader[Any]) -> Callable[[], int]:
        """Return what says, at the last batch, how many samples all groups have in it; 0 if each counts as full."""
        stream = loader.dataset
        if isinstance(stream, Stream):
            return lambda: stream.last
        if not has_length(loader.dataset):  # on one rank, on which accelerate counts
            state = self._trainer.accelerator.gradient_state
            return lambda: max(0, state.remainder)
        number = _last_samples(loader, self.split.mesh.shape.data)
        return lambda: number

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples of a loader's data set."""
        stream = dataloader.dataset
        found: int = len(stream.source) if isinstance(stream, Stream) else super().num_examples(dataloader)  # type: ignore[misc]
        return found

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Return this rank's parts of the micro-batches of a step, and the number of labels of all ranks in them."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        parts = [self._part(batch) for batch in batches]
        found = [{**self._tokens(part, batch), _PART: part} for part, batch in zip(parts, batches, strict=True)]
        return found, self.split.valid(*parts) if parts else None

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of a step. The ranks of a sequence group train on the same ones."""
        ranks: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return ranks // self.split.mesh.shape.sequence

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return the loss of a batch, a scalar in nats.

        In training it is this rank's share: its mean over the ranks is the mean over the labels of all micro-batches.
        In an evaluation it is the loss of the sequence group. With transformers' Trainer, its mean over the groups is
        the mean over the labels of their batches; with TRL's SFTTrainer, it is the mean over the group's own labels.
        The router's loss is the mean over groups and micro-batches, as TRL computes it.
        """
        _require_no_other_router(self._trainer, model)
        part = inputs.get(_PART)
        if isinstance(part, Part):
            steps = self._trainer.current_gradient_accumulation_steps
            valid = num_items_in_batch
            loss = self._part_loss(model, part, valid, steps)
        else:
            loss = self._group_loss(model, inputs)
        return (loss, {}) if return_outputs else loss

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        """End the training. Trainer would add the losses of steps that no log has as those of this rank alone."""
        world = self.split.mesh.world
        (total,) = world.all_reduce(self._trainer._tr_loss).wait()
        self._trainer._tr_loss = total / world.size
        return super()._finalize_training(*arguments, **options)  # type: ignore[misc]

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the Trainer's evaluation loop with one loss per sequence group, instead of one per rank.

        Batches without labels have no loss, and the loss 0 with TRL's SFTTrainer. If there are any,
        `eval_batches_without_labels` is their number.

        Raises:
            UserError: Predictions are requested.
        """
        if not (self._trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only):
            raise UserError(
                "predictions are not gathered, because logits of a long sequence fit on no rank\n"
                "fix: trainer.evaluate(), which gives the loss; or bmburst.integrations.transformers_cache.generate"
            )
        self._trainer.gather_function = self._gather_groups  # the loop resets it
        self._last = self._last_samples(dataloader)
        self._without_labels = 0
        with still_to_be_prepared(self._trainer):
            output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        if self._without_labels:
            output.metrics[f"{metric_key_prefix}_batches_without_labels"] = self._without_labels
        return output

    def _part(self, batch: dict[str, Any]) -> Part:
        missing = sorted({"input_ids", "labels"} - set(batch))
        if missing:  # a trainer with another loss, such as DPO
            raise UserError(
                f"a batch of {type(self).__name__} has no {missing[0]}, it has {', '.join(sorted(batch))}\n"
                "allowed: batches of a causal LM\nfix: a collator that gives labels, such as DataCollatorWithFlattening"
            )
        return self.split.part(**batch)

    def _tokens(self, part: Part, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return what a Trainer counts tokens and FLOPs from: sums over ranks count each token of a batch once."""
        mine = part.cut.real_tokens  # they are the first ones
        found = {"input_ids": part.input_ids[:, :mine]}
        if batch.get("attention_mask") is not None:
            found["attention_mask"] = part.cut.take((batch["attention_mask"] != 0).long())[:, :mine]
        return found

    def _group_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return the loss that a single process would have instead of the sequence group."""
        mesh, part = self.split.mesh, self._part(batch)
        (labels,) = mesh.sequence.all_reduce(part.label_count).wait()
        (self._labels,) = mesh.data.all_gather(labels).wait()
        self._without_labels += self._labels.tolist().count(0)
        valid = self._labels.sum()
        scale = valid / (labels * mesh.shape.data).clamp(min=1) if self._is_of_group else 1.0
        with torch.no_grad():
            (total,) = mesh.sequence.all_reduce(self._part_loss(model, part, valid, scale=scale)).wait()
        return total / mesh.sequence.size

    def _part_loss(
        self, model: torch.nn.Module, part: Part, valid: Tensor | None, steps: int = 1, scale: Tensor | float = 1.0
    ) -> Tensor:
        """Return this rank's loss of a part, with the router's loss that TRL would add in one of `steps`; log that."""
        if self._is_of_group and valid is not None:  # TRL's loss of a step or batch without any label is 0
            valid = valid.clamp(min=1)
        if not _has_router(self._trainer):
            return part.loss(model, valid) * scale
        loss, share = part.losses(model, valid, output_router_logits=True)
        assert share is not None
        mesh, mode = self.split.mesh, "train" if self._trainer.model.training else "eval"
        (of_group,) = mesh.sequence.all_reduce(share.detach()).wait()
        (of_groups,) = mesh.data.all_gather(of_group).wait()
        kept = self._kept(of_groups, self._last if mode == "eval" else self._last_trained)
        self._trainer._metrics[mode]["aux_loss"].append(kept.mean().item())
        coefficient: float = self._trainer.router_aux_loss_coef
        return loss * scale + mesh.sequence.size * coefficient / steps * share

    def _kept(self, gathered: Tensor, last: Callable[[], int]) -> Tensor:
        """Return what accelerate keeps of gathered values: in the last batch, as many as `last` returns samples."""
        is_last = self._trainer.accelerator.gradient_state.end_of_dataloader
        return gathered.flatten()[: (last() or None) if is_last else None]

    def _gather_groups(self, losses: Tensor) -> Tensor:
        """Return the losses of all sequence groups, without those of samples that only fill the last batch.

        `Accelerator.gather_for_metrics` would count a group once per rank, but in the last batch only once.
        """
        if losses.dim() > 1:  # inputs, with include_for_metrics="inputs": no metric reads them
            return losses
        (gathered,) = self.split.mesh.data.all_gather(losses).wait()
        kept = self._kept(gathered, self._last)
        return kept if self._is_of_group or self._labels.any() else kept[:0]


def require_split(split: object) -> None:
    """Raise UserError unless what splits the sequences of a trainer is valid, before it reads the data."""
    if not isinstance(split, SplitSequences):
        raise UserError(f"split must be a SplitSequences, got {type(split).__name__}\nfix: SplitSequences(mesh)")


@contextmanager
def still_to_be_prepared(trainer: Any) -> Iterator[None]:
    """Let an evaluation before the training not be the preparation for it.

    accelerate prepares a model once. An evaluation prepares it without DDP, so that a training that follows would not
    average gradients; and FSDP2 is prepared with an optimizer only.
    """
    accelerator = trainer.accelerator
    if accelerator._models:
        yield
    elif trainer.is_fsdp_enabled:
        trainer.create_optimizer()
        trainer.model, trainer.optimizer = accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped = trainer.model
        yield
    else:
        model, wrapped = trainer.model, trainer.model_wrapped
        before = {name: vars(model)[name] for name in _PREPARED if name in vars(model)}
        try:
            yield
        finally:
            accelerator._models.clear()
            trainer.model, trainer.model_wrapped = model, wrapped
            for name in _PREPARED:
                vars(model).pop(name, None)
            vars(model).update(before)


def _last_samples(loader: DataLoader[Any], groups: int) -> int:
    """Return how many samples all groups have in the last batch of a data set with a length; 0 if it is full."""
    batches = loader.batch_sampler
    size = getattr(batches, "batch_size", None)
    if size is None or getattr(batches, "drop_last", False):
        return 0
    samples: int = len(loader.dataset) % (size * groups)  # type: ignore[arg-type]
    return samples


def _has_router(trainer: Any) -> bool:
    """Return whether TRL adds the loss of the model's router."""
    return bool(getattr(trainer, "aux_loss_enabled", False))


def _require_no_other_router(trainer: Any, model: torch.nn.Module) -> None:
    """Check that a model adds no loss of its router where TRL does not."""
    if asks_router_loss(model, {}) and not _has_router(trainer):
        raise UserError(
            "Trainer adds the router's loss once for each micro-batch, so a step depends on their number\n"
            "allowed: TRL's SFTTrainer, which adds their mean; a loop of your own with Part.loss\n"
            "fix: config.output_router_logits = False"
        )


def _tell_scaled(trainer: Any) -> None:
    """Tell transformers before 5.19, which has no `loss_is_scaled_for_ga`, in its way; it calls this nowhere."""
    if not hasattr(Trainer, "loss_is_scaled_for_ga"):
        trainer.compute_loss_func = _IS_SCALED


def _require_plain(trainer: Any) -> None:
    """Check that a Trainer uses no model and no feature that is not supported on split sequences."""
    if _has_router(trainer):
        require_trl("router's loss")
        try:
            require_router_loss(trainer.model, is_tree=False)
        except UserError as error:  # TRL sets output_router_logits itself
            raise with_fix(error, "router_aux_loss_coef=0.0 in SFTConfig") from None
    _require_no_other_router(trainer, trainer.model)
    require_splittable(trainer.model, lambda: (1,), routed=_has_router(trainer))
    require_next_token_loss(trainer.model)
    given = {"compute_loss_func": trainer.compute_loss_func, "compute_metrics": trainer.compute_metrics}
    for name, value in given.items():
        if value is not None and not isinstance(value, str):  # a text stands for `loss_is_scaled_for_ga`, as in TRL
            raise UserError(
                f"{name} needs the logits of a whole sequence, which fit on no rank\n"
                "fix: leave it out; the loss on split sequences is cross entropy, and an evaluation gives the loss"
            )
    absent = _NOT_COMPUTED if _has_router(trainer) else ("aux_loss", *_NOT_COMPUTED)
    best = str(trainer.args.metric_for_best_model)
    if best.removeprefix("eval_") in absent and hasattr(trainer, "_metrics"):  # TRL's trainers have it
        raise UserError(
            f"metric_for_best_model is {best!r}, but an evaluation on split sequences gives only losses\n"
            "fix: metric_for_best_model='loss'"
        )
    steps = trainer.args.gradient_accumulation_steps
    if trainer.args.ddp_static_graph and steps > 1:
        raise UserError(
            f"ddp_static_graph=True fails in torch with gradient_accumulation_steps={steps}: its first backward must "
            "average gradients\nallowed: gradient_accumulation_steps=1\nfix: leave it out"
        )
    require_known_engine(trainer)


def require_known_engine(trainer: Any) -> None:
    """Check that DDP or FSDP2 averages the gradients of a Trainer before its steps, and that no batches are split.

    `accelerate launch` can ask for a split without an argument of the Trainer.

    Raises:
        UserError: Another engine would, an optimizer steps before, or accelerate splits batches.
    """
    if "lomo" in trainer.args.optim:
        raise UserError(
            f"optim={str(trainer.args.optim.value)!r} steps in each backward, before ranks average gradients\n"
            "fix: another optimizer, such as optim='adamw_torch'"
        )
    config = getattr(trainer.accelerator, "parallelism_config", None)
    # accelerate has sp_size from 1.12 on.
    sizes = {name: getattr(config, name, 1) for name in ("cp_size", "sp_size", "tp_size")}
    if max(sizes.values()) > 1:
        told = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"parallelism_config would split batches or matrices a second time: {told}\n"
            "allowed: 1 each\nfix: leave them out; SplitSequences(mesh) splits the sequences"
        )
    if trainer.accelerator.split_batches and trainer.accelerator.num_processes > 1:
        raise UserError(
            "split_batches would divide the samples of a batch by rank, but ranks of a sequence read the same ones\n"
            "allowed: False\nfix: leave it out of accelerator_config; per_device_train_batch_size is that of a group"
        )
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        engine = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP version 1"
        raise UserError(
            f"{engine} is not known to average gradients of split sequences exactly\n"
            "allowed: DistributedDataParallel, FSDP2\nfix: fsdp=True in TrainingArguments is FSDP2"
        )
