"""What a step minimises: the mean loss of tokens, or the preference loss (DPO) of pairs of answers."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmburst.checkpoint.files import verified_together
from bmburst.data import Samples
from bmburst.loss import count_valid, global_mean
from bmburst.mesh import Mesh
from bmburst.runtime.watchdog import beat
from bmburst.sequence import SequenceShard
from bmburst.train.config import TrainConfig
from bmburst.train.evaluate import Measurement, measure
from bmburst.train.loading import LocalBatch, token_losses

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama


class StepObjective(Protocol):
    """The objective of one step, to which the microbatches of a rank are given one after another.

    Attributes:
        tokens: Labels of all ranks that count, a scalar int64 tensor.
    """

    tokens: Tensor

    @property
    def share(self) -> Tensor:
        """This rank's share of the loss so far; the mean over ranks is the loss."""

    @property
    def rewards(self) -> Tensor | None:
        """This rank's shares of the mean reward margin and of the accuracy, `[2]`; None without pairs."""

    def forward(self, part: LocalBatch) -> Tensor:
        """Return what `OptimManager.backward` gets for a microbatch."""


class Objective(Protocol):
    """What a run minimises. Every rank makes the same calls with its part of the same sequences."""

    def begin(self, batch: LocalBatch) -> StepObjective:
        """Return the objective of a step on a batch."""

    def measure(self, batches: Iterable[Samples]) -> Measurement:
        """Return what the model gives on held-out batches."""


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """The mean loss over the labels of all ranks.

    Attributes:
        model: Trained.
        mesh: The ranks.
        cut: This rank's part of a sequence.
        device: Of this rank.
    """

    model: "Llama"
    mesh: Mesh
    cut: SequenceShard
    device: torch.device

    def begin(self, batch: LocalBatch) -> StepObjective:
        """See `Objective`."""
        return _TokenStep(self, batch)

    def measure(self, batches: Iterable[Samples]) -> Measurement:
        """See `Objective`."""
        return measure(self.model, self.mesh, self.cut, batches, self.device)


class _TokenStep:
    def __init__(self, objective: TokenObjective, batch: LocalBatch) -> None:
        self._model, shape = objective.model, objective.mesh.shape
        # Counted over all: the mean must not depend on how ranks and microbatches share the labels.
        (counted,) = objective.mesh.world.all_reduce(count_valid(batch.labels)).wait()
        self.tokens = counted // shape.tensor  # a tensor group's ranks have the same part
        self.share = torch.zeros((), dtype=torch.float64, device=objective.device)
        self.rewards = None
        self._ranks = shape.size

    def forward(self, part: LocalBatch) -> Tensor:
        result = global_mean(token_losses(self._model, part), self.tokens, self._ranks)
        self.share += result.detach()
        return result


def make_objective(
    config: TrainConfig,
    model: "Llama",
    make_model: Callable[..., "Llama"],
    mesh: Mesh,
    cut: SequenceShard,
    device: torch.device,
) -> Objective:
    """Return the objective of a run; every rank calls it. A reference model of its own is read here.

    Args:
        config: The run.
        model: Trained.
        make_model: Returns another one like it, without adapters and without initial weights for `seed=None`.
        mesh: The ranks.
        cut: This rank's part of a sequence.
        device: Of this rank.

    Raises:
        UserError: The reference cannot be read.
    """
    if config.dpo.beta is None:
        return TokenObjective(model, mesh, cut, device)
    reference = None
    if config.reference is not None:
        from bmburst.checkpoint import hugging_face

        reference = make_model(seed=None)
        reference.requires_grad_(False)
        hugging_face.load(reference, verified_together(config.reference))
    return PairObjective(model, mesh, cut, device, config.dpo.beta, reference)


class PairLosses(NamedTuple):
    """Of pairs of answers, `[pairs]` in fp64, alike on the ranks that share a sequence.

    Attributes:
        losses: `-log sigmoid(margin)`, in nats.
        margins: beta times the log-probability ratio of the chosen answer less that of the rejected one; a ratio is
            the log-probability of an answer in the model less that in the reference.
    """

    losses: Tensor
    margins: Tensor

    def sums(self) -> Tensor:
        """Return the sums of losses, of margins and of pairs with a positive margin, fp64 `[3]`."""
        return torch.stack([self.losses.sum(), self.margins.sum(), (self.margins > 0).double().sum()])


@dataclass(frozen=True)
class PairObjective:
    """DPO (arXiv:2305.18290): the mean over pairs of `-log sigmoid(margin)`.

    An answer is a document of a packed sequence, and its tokens may lie on any ranks: each rank adds up the
    log-probabilities of its own tokens, and the sums of documents are reduced over the ranks that share the sequence.
    The gradient of a token's log-probability is that of its document's sum, so each rank needs only its own tokens.

    Attributes:
        model: Trained.
        mesh: The ranks.
        cut: This rank's part of a sequence.
        device: Of this rank.
        beta: Above 0.
        reference: A model of the same shape; None: `model` without its adapters.
    """

    model: "Llama"
    mesh: Mesh
    cut: SequenceShard
    device: torch.device
    beta: float
    reference: "Llama | None" = None

    def begin(self, batch: LocalBatch) -> StepObjective:
        """See `Objective`."""
        return _PairStep(self, batch)

    def measure(self, batches: Iterable[Samples]) -> Measurement:
        """See `Objective`."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        pairs = tokens = 0
        with torch.no_grad():
            for batch in batches:
                part = LocalBatch.read(self.cut, batch)
                found, _ = self.compare(part.on(part.ids.to(self.device)))
                sums += found.sums()
                pairs, tokens = pairs + pairs_of(part), tokens + batch.label_count
                beat()
        shared = self.mesh.shape.size // self.mesh.shape.data  # ranks with the same pairs
        (total,) = self.mesh.world.all_reduce(torch.cat([sums, sums.new_tensor([pairs])]) / shared).wait()
        *all_sums, count = total.tolist()
        loss, margin, accuracy = (each / max(count, 1) for each in all_sums)
        return Measurement(loss=loss, tokens=tokens, reward_margin=margin, reward_accuracy=accuracy)

    def compare(self, part: LocalBatch) -> tuple[PairLosses, Tensor]:
        """Return what pairs give, and a scalar with the gradient of the sum of their losses, but not its value.

        Over all ranks that share the sequences, the gradients add up to that of the sum.
        """
        from bmburst.blocks.layers import without_adapters  # it defines BMTrain classes: BMTrain must have been started

        pieces = _Pieces(self, part)
        is_other = self.reference is not None
        with torch.no_grad(), nullcontext() if is_other else without_adapters(self.model):
            before = pieces.sums(token_losses(self.reference or self.model, part, per_token=True))
        losses = token_losses(self.model, part, per_token=True)
        ratios = before - pieces.sums(losses.detach())  # of losses: minus log-probabilities
        chosen = torch.tensor(pieces.chosen, dtype=torch.int64).to(self.device)
        margins = self.beta * (ratios[chosen] - ratios[chosen + 1])
        slopes = self.beta * torch.sigmoid(-margins)
        of_documents = torch.zeros_like(ratios)
        of_documents[chosen], of_documents[chosen + 1] = slopes, -slopes
        surrogate = (losses * pieces.spread(of_documents).to(losses.dtype)).sum()
        return PairLosses(torch.nn.functional.softplus(-margins), margins), surrogate


class _PairStep:
    def __init__(self, objective: PairObjective, batch: LocalBatch) -> None:
        self._objective, shape = objective, objective.mesh.shape
        own = torch.stack([count_valid(batch.labels), batch.ids.new_tensor(pairs_of(batch))])
        (counted,) = objective.mesh.world.all_reduce(own).wait()
        self._shared = shape.sequence * shape.tensor
        self.tokens = counted[0] // shape.tensor
        self._pairs = counted[1] // self._shared
        self._sums = torch.zeros(3, dtype=torch.float64, device=objective.device)

    def forward(self, part: LocalBatch) -> Tensor:
        found, surrogate = self._objective.compare(part)
        self._sums += found.sums()
        return self._mean(surrogate)

    @property
    def share(self) -> Tensor:
        return self._mean(self._sums[0] / self._shared)

    @property
    def rewards(self) -> Tensor:
        return self._mean(self._sums[1:] / self._shared)

    def _mean(self, of_pairs: Tensor) -> Tensor:
        return global_mean(of_pairs, self._pairs, self._objective.mesh.shape.size)


def pairs_of(batch: LocalBatch) -> int:
    """Return how many pairs the whole sequences of a batch hold; a row without text has one document, and no pair."""
    return sum(len(lengths) // 2 for lengths in batch.texts)


class _Pieces:
    """Runs of a rank's tokens that are of one document, in the order of its tokens.

    Documents of all rows are numbered one after another. Sums are made piece by piece, so that repeated runs give the
    same bits: adding to documents by number would add in any order on a GPU.

    Attributes:
        chosen: Numbers of the chosen answers; each is followed by the rejected one.
    """

    def __init__(self, objective: PairObjective, part: LocalBatch) -> None:
        self._mesh, self._device = objective.mesh, objective.device
        own: Any = objective.model.tensor.own
        self.chosen: list[int] = []
        numbers, first = [], 0
        for mask in part.masks or ():
            places, starts = objective.cut.under(mask).positions(), torch.tensor(mask.starts)
            at = torch.searchsorted(starts, places, right=True) - 1 + first
            numbers.append(own(at[None], pad_value=first + len(starts) - 1))  # padding has no label, and adds zero
            self.chosen += range(first, first + len(starts) - 1, 2)
            first += len(starts)
        self._numbers = torch.cat(numbers)
        self._documents = first

    @cached_property
    def _of_pieces(self) -> tuple[Tensor, Tensor]:
        """Document and size of each piece, int64 `[pieces]`, on the CPU. A piece may be of two rows' equal numbers."""
        found: tuple[Tensor, Tensor] = torch.unique_consecutive(self._numbers.flatten(), return_counts=True)
        return found

    def sums(self, of_tokens: Tensor) -> Tensor:
        """Return of each document the sum over all ranks, fp64 `[documents]`, of numbers of this rank's tokens."""
        documents, sizes = self._of_pieces
        sums = torch.stack([each.sum() for each in of_tokens.flatten().double().split(sizes.tolist())])
        belongs = (torch.arange(self._documents)[:, None] == documents).double().to(self._device)
        (total,) = self._mesh.sequence.all_reduce(belongs @ sums).wait()
        (total,) = self._mesh.tensor.all_reduce(total).wait()
        return total

    def spread(self, of_documents: Tensor) -> Tensor:
        """Return for each of this rank's tokens the number of its document, `[rows, tokens]`."""
        return of_documents[self._numbers.to(self._device)]
