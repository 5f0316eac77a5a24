"""Trains causal language models of transformers on sequences that are split over ranks.

`register` adds attn_implementation="bmburst". `SplitSequences` gives each rank its part of every batch and computes the
loss. docs/hugging_face.md is the guide.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from bmburst.amounts import require_flag
from bmburst.attention.options import AttentionOptions
from bmburst.errors import UserError
from bmburst.integrations.transformers_attention import NAME, SequenceMask, attention, layer_mask
from bmburst.integrations.transformers_batch import (
    DocumentsOption,
    WholeBatch,
    batch_of_tree,
    checked_count,
    ends_of,
    nan_of_none,
    number_of,
    shard_of,
    signature_of,
    whole_batch,
)
from bmburst.integrations.transformers_head import (
    Gathered,
    OfHead,
    computed_in_head,
    decided_tokens,
    label_logps,
    label_logps_of,
    require_temperature,
)
from bmburst.integrations.transformers_models import (
    positions_of,
    recompute,
    refuse_other_tables,
    require_inputs,
    require_next_token_loss,
    require_rows,
    require_splittable,
    require_tokens,
)
from bmburst.integrations.transformers_modules import Modules
from bmburst.integrations.transformers_noise import noise_of_whole_sequences
from bmburst.integrations.transformers_recurrent import require_layout
from bmburst.integrations.transformers_router import (
    asks_router_loss,
    require_router_loss,
    require_router_loss_elsewhere,
    router_loss,
    router_share,
    router_shares,
)
from bmburst.integrations.transformers_weights import EqualWeights
from bmburst.loss import count_valid, global_mean
from bmburst.mesh import Mesh, require_mesh
from bmburst.sequence import SequenceShard, gathered
from bmburst.sequence.packed_tree import PackedTree
from bmburst_ops import IGNORE_INDEX
from bmburst_ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["NAME", "Part", "SplitSequences", "recompute", "register"]

T = TypeVar("T")
_OPTIONS = frozenset({"deterministic", "kernel", "strategy", "transport"})


def register() -> None:
    """Register attn_implementation="bmburst" in transformers. Further calls have no effect.

    Constructing a model that does not use transformers' attention registry then raises an error.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, layer_mask)
    refuse_other_tables()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a batch. Tensors are int64, `[batch, local_tokens]`, on the mesh's device.

    Attributes:
        input_ids: Token ids.
        labels: The next token of each token, or `IGNORE_INDEX`. Already shifted: do not shift them again.
        position_ids: Position ids of the whole batch; 0 for padding of the part.
        mask: The attention_mask for the model.
        mesh: The ranks.
        cut: The layout, which defines this rank's tokens.
        ends: Returns the largest position id + 1 of each rank of the sequence.
        largest: The largest id of the whole batch; None on a GPU, to avoid a synchronization.
        tree: The rows of the batch, if they are packed as trees.
        counts: In how many rows of the tree each label counts.
        real: Which tokens are no padding, bool.
        changing: Models that were found to change their logits after the head.
        weights: What was seen of the models' weights in the first steps.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    mask: SequenceMask
    mesh: Mesh
    cut: SequenceShard
    ends: Callable[[], tuple[int, ...]]
    largest: int | None = None
    tree: PackedTree | None = None
    counts: Tensor | None = None
    real: Tensor
    changing: "WeakSet[torch.nn.Module]" = field(default_factory=WeakSet)
    weights: EqualWeights = field(default_factory=EqualWeights)

    def logits(self, model: torch.nn.Module, **inputs: object) -> Tensor:
        """Return the model's logits of this rank's tokens, `[batch, local_tokens, vocabulary]`.

        In the first steps the ranks of a sequence compare their weights: they differ if gradients are not averaged.

        Args:
            model: A causal LM of transformers, also wrapped by FSDP2, DDP or PEFT. All ranks call it.
            inputs: Further arguments of the model.

        Raises:
            UserError: The model is not exact on split sequences, its result is not that of each token, a token id is
                not in its vocabulary, an argument is already part of the split batch, or the ranks' weights differ.
        """
        found = self._call(model, inputs)
        require_tokens(model, found, self.input_ids.shape)
        return found

    def loss(self, model: torch.nn.Module, valid: Tensor | int | None = None, **inputs: object) -> Tensor:
        """Return this rank's loss for backward, a scalar in fp32.

        Its mean over all ranks is the mean loss of all labels of all ranks, in nats. DDP and FSDP2 average gradients
        over ranks, so they compute the gradient of that mean. Logits are computed for some thousand tokens at a time.
        All logits are computed at once if the head is not a plain linear layer, if a compiled graph contains it, or if
        the model changes its logits after the head. The last case costs one more call of the model the first time.
        Without any label, the loss is NaN, and the gradient is zero. With `output_router_logits`, the load balancing
        loss of each sequence group's part is added, times `router_aux_loss_coef` and weighted by the part's labels.

        Args:
            model: As in `logits`.
            valid: Number of labels on all ranks in all parts of the step, from `SplitSequences.valid`. Default: the
                labels of this part on all ranks.
            inputs: As in `logits`.

        Raises:
            UserError: As in `logits`, the model's loss is not of the next token, or `valid` is not a number of labels.
        """
        loss, share, total = self._losses(model, valid, inputs)
        if share is None:
            return loss
        (own,) = self.mesh.sequence.all_reduce(self.label_count).wait()
        return loss + router_loss(model, share, own, total, self.mesh.world.size)

    def losses(
        self, model: torch.nn.Module, valid: Tensor | int | None = None, **inputs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return `loss` without the router's loss, and this rank's share of that, or None.

        The sum of the shares over the ranks of the sequence is the load balancing loss of the part, with no factor.
        The arguments and errors are those of `loss`.
        """
        return self._losses(model, valid, inputs)[:2]

    def _losses(
        self, model: torch.nn.Module, valid: Tensor | int | None, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | int]:
        """Return `losses`, and the number of labels of the step."""

        def decide() -> tuple[tuple[Tensor | int | None, bool], str]:
            require_next_token_loss(model)
            if routed := asks_router_loss(model, inputs):
                require_router_loss(model, is_tree=self.tree is not None)
            counted, told = checked_count(valid)
            return (counted, routed), f"Part.loss\nrouter's loss {routed}\nvalid {told}"

        counted, routed = _decided(self.mesh, decide)
        with router_shares(model if routed else None, self.real, self.mesh.sequence) as shares:
            if self.counts is None:
                summed = self._of_head(
                    model,
                    inputs,
                    lambda hidden, weight: linear_cross_entropy(hidden, weight, self.labels).reshape(1),
                    lambda logits: -label_logps_of(logits, self.labels).sum(0, keepdim=True),
                ).sum()
            else:
                summed = -(self._logps(model, inputs)[0] * self.counts).sum()
        (total,) = self.mesh.world.all_reduce(self.label_count).wait() if counted is None else (counted,)
        loss = global_mean(summed, total, self.mesh.world.size) + nan_of_none(total)
        return loss, router_share(model, shares) if routed else None, total

    def row_logps(self, model: torch.nn.Module, *, temperature: float = 1.0, **inputs: object) -> list[Tensor]:
        """Return on every rank the log-probabilities of the labels of each row of a packed tree.

        They are those of the rows one by one, and differentiable, for any loss of them. DDP and FSDP2 average gradients
        over ranks: they compute the gradient of the mean over ranks of the ranks' losses. Logits are computed for some
        thousand tokens at a time, as in `loss`. The arguments are those of `logits`, and `temperature` as in `logps`.

        Returns:
            For each row `[tokens of the row - 1]` in nats, fp32 or wider: of its tokens from the second on; 0 where a
            label does not count.

        Raises:
            UserError: As in `logps`, or the part is not of a tree.
        """

        def decide() -> tuple[tuple[PackedTree, float], str]:
            if self.tree is None:
                problem = "row_logps is for rows that are packed as trees, but this part is of a plain batch"
                raise UserError(f"{problem}\nfix: split.part(tree=bmburst.pack_tree(rows))")
            return (self.tree, require_temperature(temperature)), f"Part.row_logps\ntemperature {temperature}"

        tree, divisor = _decided(self.mesh, decide)
        return tree.counted_rows(self.whole(self._logps(model, inputs, divisor)[0])[0])

    @property
    def label_count(self) -> Tensor:
        """Number of labels of this rank that count, a scalar int64 tensor; those of all rows of a tree."""
        return count_valid(self.labels) if self.counts is None else self.counts.sum()

    def logps(
        self, model: torch.nn.Module, *, temperature: float = 1.0, entropy: bool = False, **inputs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each label of this rank, and the entropy of its distribution, in nats.

        Both are differentiable. Logits are computed for some thousand tokens at a time, as in `loss`, and only for
        tokens with a label. `gathered` returns whole tensors on every rank, for a loss that every rank computes.

        Args:
            model: As in `logits`.
            temperature: Divides the logits, above 0.
            entropy: Whether to compute entropies.
            inputs: As in `logits`.

        Returns:
            Two tensors `[batch, local_tokens]`, in fp32 or wider; 0 where there is no label. The second is None without
            `entropy`.

        Raises:
            UserError: As in `logits`, or `temperature` is not above 0.
        """

        def decide() -> tuple[float, str]:
            divisor = require_temperature(temperature)
            require_flag("entropy", entropy)
            return divisor, f"Part.logps\ntemperature {temperature}\nentropy {entropy}"

        return self._logps(model, inputs, _decided(self.mesh, decide), entropy)

    def _logps(
        self, model: torch.nn.Module, inputs: dict[str, Any], temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `logps`."""
        found = self._of_head(
            model,
            inputs,
            label_logps(self.labels, temperature, entropy=entropy),
            lambda logits: label_logps_of(logits, self.labels, temperature, entropy=entropy),
        )
        has_label = (self.labels != IGNORE_INDEX).nonzero(as_tuple=True)
        rows = found.view(1 + entropy, len(has_label[0]))
        placed = [values.new_zeros(self.labels.shape).index_put(has_label, values) for values in rows]
        return placed[0], placed[1] if entropy else None

    def gathered(self, x: Tensor) -> Tensor:
        """Return the whole tensor on every rank, for a loss whose gradients are summed over the ranks.

        Backward takes this rank's part of the gradient, without communication. DDP and FSDP2 average gradients over
        ranks: behind them, use `whole`, or multiply the loss by the ranks of the sequence.

        Args:
            x: `[batch, local_tokens, ...]`.

        Returns:
            `[batch, length, ...]`.
        """
        decided_tokens(self, "gathered", x, 1)
        return cast(Tensor, Gathered.apply(x, self))  # type: ignore[no-untyped-call]

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor on every rank: gather local tokens, which are in dimension `dim`; differentiable.

        Backward sums the gradients of all ranks and takes this rank's part. So if every rank computes the same loss of
        whole tensors, DDP and FSDP2, which average over ranks, compute the gradient of that loss.

        Raises:
            UserError: The dimension does not hold a rank's tokens, or the ranks disagree.
        """
        return gathered(x, decided_tokens(self, "whole", x, dim), self.cut, self.mesh.sequence)

    def _of_head(
        self, model: torch.nn.Module, inputs: dict[str, Any], compute: OfHead, otherwise: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return what `compute` returns in the model's head, or `otherwise` of its logits where that is not possible.

        Args:
            model: As in `logits`.
            inputs: As in `logits`.
            compute: See `computed_in_head`.
            otherwise: Computes the same from logits `[batch, local_tokens, vocabulary]`.
        """
        found: Tensor | None = None
        logits: Tensor | None = None
        random, of_devices = torch.get_rng_state(), get_device_states(self.input_ids)
        if not isinstance(model, torch.nn.Module) or model not in self.changing:  # other types are refused below
            shape = self.input_ids.shape
            found, logits = computed_in_head(model, shape, compute, lambda: self._call(model, inputs))
        if found is not None:
            return found
        if logits is None:
            self.changing.add(model)
            torch.set_rng_state(random)  # the second call draws what the first one drew
            set_device_states(*of_devices)
            logits = self._call(model, inputs)
        require_tokens(model, logits, self.input_ids.shape)
        return otherwise(logits)

    def _call(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Check the model, call it, and return its logits."""

        def decide() -> tuple[Modules, str]:
            require_inputs(inputs)
            require_router_loss_elsewhere(model, inputs)
            found = require_splittable(model, self.ends, of_rows=self.tree is not None, routed=True)  # see above
            require_layout(found, self.cut.layout.name, is_tree=self.tree is not None)
            require_rows(model, self.largest)
            told = f"{type(model).__name__} on a split sequence\ninputs {', '.join(sorted(inputs))}"
            mode = "training" if model.training else "evaluation"
            return found, f"{told}\nmode {mode}\n{'with' if torch.is_grad_enabled() else 'without'} gradient"

        def compare() -> tuple[None, str]:
            self.weights.compare(model, self.mesh.sequence)
            return None, "weights of the ranks"

        modules = _decided(self.mesh, decide)
        if self.mesh.sequence.size > 1 and self.weights.are_compared(model):
            with self.mesh.world.checking():  # the other groups end, too
                self.mesh.world.decided(compare)
        positions = positions_of(model, self.position_ids, self.mask.before)
        ours: dict[str, Any] = {"attention_mask": self.mask, "position_ids": positions, "use_cache": False}
        with noise_of_whole_sequences(modules, self.cut, self.mesh.sequence, is_tree=self.tree is not None):
            result = model(input_ids=self.input_ids, **(ours | inputs))
        found: Tensor | None = getattr(result, "logits", None)
        if found is None:
            fix = "leave return_dict out" if isinstance(result, tuple) else "give a causal LM, AutoModelForCausalLM"
            raise UserError(f"{type(model).__name__} returns no logits\nfix: {fix}")
        return found


def _decided(mesh: Mesh, decide: Callable[[], tuple[T, str]]) -> T:
    """Return a decision on which all ranks agree; on GPUs, they compare the first ones."""
    with mesh.world.first_calls("a split batch"):
        return mesh.world.decided(decide)


class SplitSequences:
    """Gives each rank its part of whole batches.

    Args:
        mesh: The ranks; its sequence groups share each batch. `bmburst.Mesh.over_process_group(sequence=...)`.
        layout: "zigzag", "striped" (better load balance for packed documents), "contiguous", or "balanced" for models
            whose layers all have the mask of the batch: none has a window that is shorter than a document.
        options: kernel, strategy, transport and deterministic of `bmburst.burst_attention`.

    Raises:
        UserError: `mesh` is not a mesh, or it has tensor parallelism, or the value of an option is unknown.
    """

    def __init__(self, mesh: Mesh, *, layout: str = "zigzag", **options: Any) -> None:
        require_mesh(mesh, "bmburst.Mesh.over_process_group(), after init_process_group", "transformers'")
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise UserError(
                f"SplitSequences has no option {unknown[0]!r}\n"
                f"allowed: {', '.join(sorted(_OPTIONS))}\nfix: leave it out; the model itself sets scale and mask"
            )
        self.mesh = mesh
        self.options = AttentionOptions(layout=layout, **options)
        self.options.validate()
        self._told = "\n".join(f"{name} {value}" for name, value in sorted({"layout": layout, **options}.items()))
        self._compared = False
        self._changing: WeakSet[torch.nn.Module] = WeakSet()
        self._weights = EqualWeights()

    def part(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: DocumentsOption = None,
        tree: PackedTree | None = None,
        **others: object,
    ) -> Part:
        """Return this rank's part of a batch. All ranks of its sequence group pass the same whole batch.

        On CPUs always, and on GPUs the first time, the ranks check that they pass the same batch.

        Args:
            input_ids: `[batch, length]` on any device. Samples with fewer tokens than ranks are padded.
            labels: `[batch, length]`, as in transformers: the token of each position, not shifted, and `IGNORE_INDEX`
                (-100) for no loss. They are shifted here, before the split. Default: all tokens except the first of
                each document.
            position_ids: `[batch, length]` or `[1, length]`. As in transformers, a document begins where they do not
                increase by 1, and documents do not see each other. Default: they restart in each document, if the other
                arguments number documents, but not at padding (except in OPT, as in transformers).
            attention_mask: `[batch, length]`, 0 for padding, which may be before or after a document's tokens, and 1
                for tokens, or the number of a token's document: 1, 2, 3, ... If there is padding or a number above 1,
                the first token of a document is not counted as a label.
            documents: One `bmburst.Documents` for all samples, or one per sample; tokens after them are padding.
            tree: Rows that share prefixes, from `bmburst.pack_tree(rows, labels)`, instead of all other arguments.
                `Part.row_logps` returns the log-probabilities of each row. `Part.loss` is the mean over the labels of
                the rows, of which a shared token may have several.
            others: Other keys of transformers' batches (`BATCH_KEYS`). `cu_seq_lens_q` and `cu_seq_lens_k`, cumulative
                lengths of the documents of all samples, and `seq_idx`, `[batch, length]`, say where documents begin.

        Raises:
            UserError: Shapes differ, there is padding inside a document, arguments contradict each other, a key is
                unknown, or the ranks pass different batches; or the layout is "balanced" and samples have documents of
                their own.
        """
        comm = self.mesh.sequence

        def decide() -> tuple[tuple[WholeBatch, SequenceShard], str]:
            if tree is None:
                whole = whole_batch(input_ids, labels, position_ids, attention_mask, documents, others)
            else:
                own = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "documents": documents}
                whole = batch_of_tree(tree, own | {"attention_mask": attention_mask} | others)
            cut = shard_of(whole, self.options.layout, comm)
            return (whole, cut), f"{signature_of(whole)}\n{self._told}" if comm.active else ""

        with nullcontext() if self._compared else comm.checking():
            whole, cut = comm.decided(decide)
        self._compared = True
        return self._cut(whole, cut)

    def valid(self, *parts: Part) -> Tensor:
        """Return the number of labels in some parts on all ranks, a scalar int64 tensor.

        Raises:
            UserError: There is no part, or an argument is not a part, or the ranks pass other numbers of parts.
        """

        def decide() -> tuple[Tensor, str]:
            wrong = [part for part in parts if not isinstance(part, Part)]
            if wrong or not parts:
                got = type(wrong[0]).__name__ if wrong else "none"
                raise UserError(f"labels are counted of parts of SplitSequences, got {got}\nfix: valid(*parts)")
            return torch.stack([part.label_count for part in parts]).sum(), f"valid labels\nof {len(parts)} parts"

        (total,) = self.mesh.world.all_reduce(_decided(self.mesh, decide)).wait()
        return total

    def mean(self, loss: Tensor) -> float:
        """Return the mean of the ranks' losses, which is the mean loss per label in nats. Blocks the host.

        Raises:
            UserError: A loss is not a tensor of one number. If the ranks compare calls, it is raised on every rank.
        """
        mine = _decided(self.mesh, lambda: (number_of(loss), "SplitSequences.mean"))
        return self.mesh.sum(mine) / self.mesh.world.size

    def _cut(self, whole: WholeBatch, cut: SequenceShard) -> Part:
        device = self.mesh.sequence.device
        mask = SequenceMask(
            comm=self.mesh.sequence,
            options=self.options,
            shape=(len(whole.input_ids), cut.local_tokens),
            length=cut.length,
            documents=whole.documents,
            before=None if whole.before is None else whole.before.to(device),
        )
        return Part(
            input_ids=cut.take(whole.input_ids).to(device),
            labels=cut.take(whole.labels, pad_value=IGNORE_INDEX).to(device),
            position_ids=cut.take(whole.position_ids).to(device),
            mask=mask,
            mesh=self.mesh,
            cut=cut,
            ends=lambda: ends_of(whole, cut),
            largest=whole.largest,
            tree=whole.tree,
            counts=None if whole.tree is None else cut.take(whole.tree.counts[None]).to(device),
            real=cut.take(whole.real).bool().to(device),
            changing=self._changing,
            weights=self._weights,
        )
