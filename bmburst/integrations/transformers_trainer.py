"""Split sequences with accelerate, with transformers' Trainer, and with derived trainers such as TRL's SFTTrainer.

These make three assumptions that do not hold for split sequences: every rank reads its own batches, a rank's loss is
the mean over its own labels, and an evaluation has one loss per rank. `share_batches` handles the first one,
`SplitBatches` all three. docs/trainer.md is the guide.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from torch.utils.data import DataLoader

from bmburst.errors import UserError
from bmburst.integrations.transformers import Part, SplitSequences
from bmburst.mesh import Mesh

__all__ = ["SplitBatches", "share_batches"]

_TAKEN = ("input_ids", "labels", "position_ids", "attention_mask")
_PART = "part"  # key of the part in a micro-batch
_ALLOWED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "label_smoothing_factor": (0,),
        "loss_type": ("nll",),  # TRL
        "train_sampling_strategy": ("random", "sequential", "group_by_length"),  # "batch_rebalance" depends on ranks
    }
)
"""Values of a Trainer's arguments that are exact on split sequences."""


def share_batches(loader: DataLoader[Any], mesh: Mesh) -> DataLoader[Any]:
    """Make a loader read the batches of this rank's sequence group instead of those of the rank, and return it.

    Groups read the batches that as many single ranks would read. If all ranks share each sequence, the batches are
    those of one process.

    Args:
        loader: The result of `Accelerator.prepare` for a loader whose data set has a length.
        mesh: The ranks.

    Raises:
        UserError: The loader does not assign batches to ranks: its data set has no length, its batches come from one
            rank (`dispatch_batches`) or are split (`split_batches`), or accelerate did not prepare it.
    """
    if mesh.world.size == 1:
        return loader
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSamplerShard) or batches.split_batches:
        raise UserError(
            f"batches of a {type(loader.dataset).__name__} cannot be shared by the ranks of a sequence\n"
            "allowed: a loader from Accelerator.prepare whose data set has a length\n"
            "fix: leave out dispatch_batches and split_batches; read an iterable data set into a list or a Dataset"
        )
    batches.num_processes, batches.process_index = mesh.shape.data, mesh.data_rank
    if mesh.shape.data == 1:  # do not fill the last batch with samples from the start: a single process does not
        batches.even_batches = False
    return loader


class SplitBatches:
    """Makes a Trainer train on split sequences: `class SplitTrainer(SplitBatches, Trainer): pass`.

    The ranks of a sequence group read the same batches. The groups read them in the order in which as many single ranks
    would. The loss of a step is the mean over the labels of all ranks and all micro-batches. An evaluation returns only
    the loss.

    Args:
        arguments: Positional arguments of the Trainer.
        split: Splits each batch.
        options: Further arguments of the Trainer.

    Raises:
        UserError: An argument asks for another loss, for metrics of logits, or for an order of samples that depends on
            the rank.
    """

    loss_is_scaled_for_ga = True  # for Trainer: the number of micro-batches must not divide the loss again

    def __init__(self, *arguments: Any, split: SplitSequences, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.split = split
        self._trainer: Any = self  # untyped access to the Trainer's attributes
        _require_plain(self._trainer)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the batches of this sequence group."""
        return share_batches(super().get_train_dataloader(), self.split.mesh)  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the batches of this sequence group."""
        return share_batches(super().get_eval_dataloader(eval_dataset), self.split.mesh)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the batches of this sequence group."""
        return share_batches(super().get_test_dataloader(test_dataset), self.split.mesh)  # type: ignore[misc]

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Return this rank's parts of the micro-batches of a step, and the number of labels of all ranks in them."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        parts = [self._part(batch) for batch in batches]
        # A Trainer counts tokens and FLOPs from input_ids and sums them over ranks.
        found = [{"input_ids": part.input_ids, _PART: part} for part in parts]
        return found, self.split.valid(*parts) if parts else None

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return the loss of a batch, a scalar in nats.

        In training it is this rank's share: its mean over the ranks is the mean over the labels of all micro-batches.
        In an evaluation it is the loss of the sequence group: its mean over the groups is the mean over the labels of
        their batches.
        """
        part = inputs.get(_PART)
        loss = part.loss(model, num_items_in_batch) if isinstance(part, Part) else self._group_loss(model, inputs)
        return (loss, {}) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Run the Trainer's evaluation loop with one loss per sequence group, instead of one per rank.

        Raises:
            UserError: Predictions are requested.
        """
        if not (self._trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only):
            raise UserError(
                "predictions are not gathered, because logits of a long sequence fit on no rank\n"
                "fix: trainer.evaluate(), which gives the loss; or bmburst.integrations.transformers_cache.generate"
            )
        self._trainer.gather_function = self._gather_groups  # the loop resets it
        return super().evaluation_loop(dataloader, description, True, *arguments, **options)  # type: ignore[misc]

    def _part(self, batch: dict[str, Any]) -> Part:
        missing = sorted({"input_ids", "labels"} - set(batch))
        if missing:  # a trainer with another loss, such as DPO
            raise UserError(
                f"a batch of {type(self).__name__} has no {missing[0]}, it has {', '.join(sorted(batch))}\n"
                "allowed: batches of a causal LM\nfix: a collator that gives labels, such as DataCollatorWithFlattening"
            )
        return self.split.part(**{name: batch[name] for name in _TAKEN if batch.get(name) is not None})

    def _group_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return the loss that a single process would have instead of the sequence group."""
        group = self.split.mesh.sequence
        with torch.no_grad():
            (total,) = group.all_reduce(self._part(batch).loss(model)).wait()
        return total / group.size

    def _gather_groups(self, losses: Tensor) -> Tensor:
        """Return the losses of all sequence groups, without those of samples that only fill the last batch.

        `Accelerator.gather_for_metrics` would count a group once per rank, but in the last batch only once.
        """
        (gathered,) = self.split.mesh.data.all_gather(losses).wait()
        state = self._trainer.accelerator.gradient_state
        kept = state.remainder if state.end_of_dataloader and state.remainder > 0 else gathered.numel()
        return gathered.flatten()[:kept]


def _require_plain(trainer: Any) -> None:
    """Check that a Trainer uses no feature that is not supported on split sequences."""
    given = {"compute_loss_func": trainer.compute_loss_func, "compute_metrics": trainer.compute_metrics}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"{name} needs the logits of a whole sequence, which fit on no rank\n"
                "fix: leave it out; the loss on split sequences is cross entropy, and an evaluation gives the loss"
            )
    for name, allowed in _ALLOWED.items():
        value = getattr(trainer.args, name, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{name}={value!r} is not exact on split sequences\n"
                f"allowed: {', '.join(map(repr, allowed))}\nfix: leave it out"
            )
