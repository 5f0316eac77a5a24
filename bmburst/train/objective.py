"""Training objectives and their value on held-out data: the mean loss over tokens, or the preference loss (DPO)."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmburst.checkpoint.files import verified_together
from bmburst.data import Samples
from bmburst.launch.watchdog import beat
from bmburst.loss import count_valid, global_mean
from bmburst.mesh import Mesh
from bmburst.schedule.documents import Documents
from bmburst.schedule.tree import Tree
from bmburst.sequence import SequenceShard
from bmburst.train.config import TrainConfig
from bmburst.train.loading import LocalBatch, evaluated_part, token_losses
from bmburst.train.metrics import Measurement
from bmburst.train.pipelined import stage_loss
from bmburst_ops import IGNORE_INDEX

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.train.evaluate import LossByPosition


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats."""
    return math.exp(min(loss, 700.0))  # a larger argument overflows a float


class StepObjective(Protocol):
    """The objective of one step. It gets the micro-batches of a rank one after another.

    Attributes:
        tokens: Number of labels of all ranks that count, a scalar int64 tensor.
    """

    tokens: Tensor

    @property
    def share(self) -> Tensor:
        """This rank's contribution to the loss so far, a scalar; the mean over ranks is the loss."""

    @property
    def rewards(self) -> Tensor | None:
        """This rank's contributions to the mean reward margin and the accuracy, `[2]`; None without pairs."""

    def forward(self, part: LocalBatch, stream: Tensor | None = None) -> Tensor:
        """Return the scalar of a micro-batch for `OptimManager.backward`; `stream` as in `token_losses`."""


class Objective(Protocol):
    """The objective of a run. Every rank makes the same calls with its part of the same sequences."""

    def begin(self, batch: LocalBatch) -> StepObjective:
        """Return the objective of a step on a batch."""

    def measure(self, batches: Iterable[Samples]) -> Measurement:
        """Evaluate the model on held-out batches."""


@dataclass(frozen=True)
class _OnRanks:
    """What an objective is computed with.

    Attributes:
        model: The model, sharded over all ranks.
        mesh: The ranks.
        cut: This rank's shard of a sequence.
        device: Device of this rank.
    """

    model: "Llama"
    mesh: Mesh
    cut: SequenceShard
    device: torch.device


class TokenObjective(_OnRanks):
    """The mean loss over the labels of all ranks, in training weighted by the weights of their records.

    The weighted mean of a step is `sum(weight * loss) / sum(weight)`, both over the labels of all ranks and
    micro-batches. An evaluation counts each label once.
    """

    def begin(self, batch: LocalBatch) -> StepObjective:
        """See `Objective`."""
        return _TokenStep(self, batch)

    def measure(self, batches: Iterable[Samples], positions: "LossByPosition | None" = None) -> Measurement:
        """See `Objective`; `positions` gets the losses of this rank's tokens by position, not in a pipeline."""
        stages = self.mesh.shape.pipe
        assert positions is None or stages == 1
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = text_bytes = 0
        with torch.no_grad():
            for batch in batches:
                part = evaluated_part(self.model, self.cut, batch).to(self.device)
                if stages > 1:
                    losses = stage_loss(self.model, part)
                else:
                    losses = token_losses(self.model, part, per_token=positions is not None)
                nats += losses.sum(dtype=torch.float64)
                if positions is not None:
                    positions.add(losses, part.ids[2], part.labels)
                tokens, text_bytes = tokens + batch.label_count, text_bytes + batch.text_bytes
                beat()
        total = self.mesh.sum(nats.item())
        loss, bits = total / max(tokens, 1), total / math.log(2) / max(text_bytes, 1)
        return Measurement(loss=loss, bits_per_byte=bits, perplexity=perplexity(loss), tokens=tokens)


class _TokenStep:
    def __init__(self, objective: TokenObjective, batch: LocalBatch) -> None:
        self._model, shape = objective.model, objective.mesh.shape
        # Counted globally: the mean must not depend on the distribution of labels over ranks and micro-batches.
        (counted,) = objective.mesh.world.all_reduce(count_valid(batch.labels)).wait()
        alike = shape.tensor * shape.pipe  # ranks of a tensor group, and of all stages, that have the same labels
        self.tokens = counted // alike
        self._total = self.tokens
        if batch.weights is not None:
            own = torch.where(batch.labels == IGNORE_INDEX, 0.0, batch.weights).sum()
            (total,) = objective.mesh.world.all_reduce(own).wait()
            self._total = torch.where(total > 0, total / alike, 1.0)
        self.share = torch.zeros((), dtype=torch.float64, device=objective.device)
        self.rewards = None
        self._ranks, self._stages = shape.stage_size, shape.pipe

    def forward(self, part: LocalBatch, stream: Tensor | None = None) -> Tensor:
        losses = token_losses(self._model, part, per_token=part.weights is not None, stream=stream)
        if part.weights is None:
            result = global_mean(losses, self._total, self._ranks)
        else:
            own = self._model.tensor.own(part.weights)
            result = (losses * own.to(losses.dtype)).sum() * (self._ranks / self._total).to(losses.dtype)
        self.share += self._stages * result.detach()  # the other stages contribute nothing to the mean over all ranks
        return result


def make_objective(
    config: TrainConfig,
    model: "Llama",
    make_model: Callable[..., "Llama"],
    mesh: Mesh,
    cut: SequenceShard,
    device: torch.device,
) -> Objective:
    """Return the objective of a run; every rank calls it. Loads the reference model if the run has a separate one.

    Args:
        config: The run.
        model: The trained model.
        make_model: Returns a model of the same configuration without adapters; uninitialized for `seed=None`.
        mesh: The ranks.
        cut: This rank's shard of a sequence.
        device: Device of this rank.

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
    """Losses and margins of pairs of answers, fp64 `[pairs]`, equal on the ranks that share a sequence.

    Attributes:
        losses: `-log sigmoid(margin)`, in nats.
        margins: beta times (log ratio of the chosen answer - log ratio of the rejected answer); a log ratio is the
            log-probability of an answer in the model minus that in the reference.
    """

    losses: Tensor
    margins: Tensor

    def sums(self) -> Tensor:
        """Return the sums of losses, of margins and of pairs with a positive margin, fp64 `[3]`."""
        return torch.stack([self.losses.sum(), self.margins.sum(), (self.margins > 0).double().sum()])


@dataclass(frozen=True)
class PairObjective(_OnRanks):
    """DPO (arXiv:2305.18290): the mean over pairs of `-log sigmoid(margin)`, in training weighted by the pairs.

    The weighted mean of a step is `sum(weight * loss) / sum(weight)`, both over the pairs of all ranks and
    micro-batches. An evaluation, and the means of margins and accuracy, count each pair once.

    An answer is a document of a packed sequence, without the prompt if both share it. Its tokens can be on any
    ranks: each rank sums the log-probabilities of its own tokens, and an all-reduce sums them per document over the
    ranks that share the sequence. The gradient with respect to a token's log-probability equals that of its document's
    sum, so the backward of each rank needs only its own tokens.

    Attributes:
        beta: Weight of the log ratios, above 0.
        reference: The reference, a model of the same shape; None: `model` without its adapters.
    """

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
                part = LocalBatch.read(self.cut, batch).to(self.device)
                found, _ = self.compare(part)
                sums += found.sums()
                pairs, tokens = pairs + pairs_of(part), tokens + batch.label_count
                beat()
        shared = self.mesh.shape.size // self.mesh.shape.data  # ranks with the same pairs
        (total,) = self.mesh.world.all_reduce(torch.cat([sums, sums.new_tensor([pairs])]) / shared).wait()
        *all_sums, count = total.tolist()
        loss, margin, accuracy = (each / max(count, 1) for each in all_sums)
        return Measurement(loss=loss, tokens=tokens, reward_margin=margin, reward_accuracy=accuracy)

    def compare(self, part: LocalBatch, *, is_weighted: bool = False) -> tuple[PairLosses, Tensor]:
        """Return losses and margins of pairs, and a surrogate: a scalar with the gradient of the sum of the losses.

        With `is_weighted`, each loss is multiplied by the weight of its pair. The value of the surrogate is
        meaningless. Its gradients, summed over the ranks that share the sequences, are the gradient of the sum of the
        losses.
        """
        from bmburst.blocks.layers import without_adapters  # imports BMTrain: only after `bmburst.start`

        pieces = _Pieces(self, part)
        is_other = self.reference is not None
        with torch.no_grad(), nullcontext() if is_other else without_adapters(self.model):
            before = pieces.sums(token_losses(self.reference or self.model, part, per_token=True))
        losses = token_losses(self.model, part, per_token=True)
        ratios = before - pieces.sums(losses.detach())  # losses are negative log-probabilities
        chosen = torch.tensor(pieces.chosen, dtype=torch.int64).to(self.device)
        margins = self.beta * (ratios[chosen] - ratios[chosen + 1])
        weights = pieces.weights(part) if is_weighted else torch.ones_like(margins)
        slopes = weights * self.beta * torch.sigmoid(-margins)
        of_documents = torch.zeros_like(ratios)
        of_documents[chosen], of_documents[chosen + 1] = slopes, -slopes
        surrogate = (losses * pieces.spread(of_documents).to(losses.dtype)).sum()
        return PairLosses(weights * torch.nn.functional.softplus(-margins), margins), surrogate


class _PairStep:
    def __init__(self, objective: PairObjective, batch: LocalBatch) -> None:
        self._objective, shape = objective, objective.mesh.shape
        own = torch.stack([count_valid(batch.labels), batch.ids.new_tensor(pairs_of(batch))])
        (counted,) = objective.mesh.world.all_reduce(own).wait()
        self._shared = shape.sequence * shape.tensor
        self.tokens = counted[0] // shape.tensor
        self._pairs = counted[1] // self._shared
        self._total = self._pairs.double()
        if batch.weights is not None:
            weights = _Pieces(objective, batch).weights(batch)
            (total,) = objective.mesh.world.all_reduce(weights.sum()).wait()
            self._total = total / self._shared
        self._sums = torch.zeros(3, dtype=torch.float64, device=objective.device)

    def forward(self, part: LocalBatch, stream: Tensor | None = None) -> Tensor:
        assert stream is None  # not in a pipeline
        found, surrogate = self._objective.compare(part, is_weighted=True)
        self._sums += found.sums()
        return self._mean(surrogate, self._total)

    @property
    def share(self) -> Tensor:
        return self._mean(self._sums[0] / self._shared, self._total)

    @property
    def rewards(self) -> Tensor:
        return self._mean(self._sums[1:] / self._shared, self._pairs)

    def _mean(self, of_pairs: Tensor, total: Tensor) -> Tensor:
        ranks = self._objective.mesh.shape.size
        return of_pairs * (ranks / torch.where(total > 0, total, 1).double()).to(of_pairs.dtype)


def pairs_of(batch: LocalBatch) -> int:
    """Return the number of pairs in the whole sequences of a batch; a row of padding has one document, so no pair."""
    return sum(len(_answers(mask)) // 2 for mask in batch.masks or ())


def _answers(mask: Documents | Tree) -> Sequence[int]:
    """Return the numbers of the documents that are answers of pairs, not prompts: the chosen and the rejected in turn.

    Both answers of a pair are neighbours. No label of a shared prompt counts, so it adds nothing to its answers.
    """
    return mask.leaves if isinstance(mask, Tree) else range(len(mask.lengths))


class _Pieces:
    """Pieces: runs of consecutive tokens of a rank that belong to the same document.

    Documents of all rows are numbered consecutively. Sums are computed per piece, so that they are deterministic: a
    scatter-add by document has no fixed order on a GPU.

    Attributes:
        chosen: Numbers of the chosen answers; the next number is the rejected answer.
    """

    def __init__(self, objective: PairObjective, part: LocalBatch) -> None:
        self._mesh, self._device = objective.mesh, objective.device
        self._own: Any = objective.model.tensor.own
        self.chosen: list[int] = []
        numbers, first = [], 0
        for mask in part.masks or ():
            places, starts = objective.cut.under(mask).positions(), torch.tensor(mask.starts)
            at = torch.searchsorted(starts, places, right=True) - 1 + first
            numbers.append(
                self._own(at[None], pad_value=first + len(starts) - 1)
            )  # padding has no label, so it adds zero
            answers = _answers(mask)
            self.chosen += (first + answers[i] for i in range(0, len(answers) - 1, 2))
            first += len(starts)
        self._numbers = torch.cat(numbers)
        self._documents = first

    @cached_property
    def _of_pieces(self) -> tuple[Tensor, Tensor]:
        """Document and size of each piece, int64 `[pieces]`, on the CPU."""
        found: tuple[Tensor, Tensor] = torch.unique_consecutive(self._numbers.flatten(), return_counts=True)
        return found

    def sums(self, of_tokens: Tensor) -> Tensor:
        """Sum values of tokens per document, over all ranks that share the sequence: `[documents]` fp64."""
        documents, sizes = self._of_pieces
        sums = torch.stack([each.sum() for each in of_tokens.flatten().double().split(sizes.tolist())])
        belongs = (torch.arange(self._documents)[:, None] == documents).double().to(self._device)
        (total,) = self._mesh.sequence.all_reduce(belongs @ sums).wait()
        (total,) = self._mesh.tensor.all_reduce(total).wait()
        return total

    def weights(self, part: LocalBatch) -> Tensor:
        """Return the weights of the pairs, equal on all ranks that share the sequence, fp64 `[pairs]`.

        Each token of a document has its weight, above 0, so the mean over them is the weight.
        """
        chosen = torch.tensor(self.chosen, dtype=torch.int64).to(self._device)
        if part.weights is None:
            return torch.ones(len(chosen), dtype=torch.float64, device=self._device)
        sums, counts = (self.sums(self._own(each)) for each in (part.weights, (part.weights > 0).double()))
        return sums[chosen] / counts[chosen]

    def spread(self, of_documents: Tensor) -> Tensor:
        """Return for each of this rank's tokens the value of its document, `[rows, tokens]`."""
        return of_documents[self._numbers.to(self._device)]
