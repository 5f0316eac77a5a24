"""Splits batches of CPM-Live's data sets over ranks: `SplitSequences`."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bmburst.attention.biased import BiasedSequence
from bmburst.comm.checks import CheckedCommunicator, contents, describe_tensors
from bmburst.comm.communicator import broadcast_object
from bmburst.errors import UserError, require_known
from bmburst.integrations.cpm_live_checks import (
    Data,
    additional_rows,
    lengths,
    relations,
    require_mapping,
    require_segment_types,
    require_segments,
    vectors,
)
from bmburst.loss import IGNORE_INDEX, count_valid, global_mean
from bmburst.mesh import Mesh, require_mesh
from bmburst.schedule.layout import LAYOUTS
from bmburst.schedule.parallelism import TRANSPORTS
from bmburst.sequence import SequenceShard
from bmburst_ops.biased import BIASED_NAMES, RelativeBias, Tokens, ant_relations, ant_tokens, bee_tokens

_BEE_VECTORS = (
    *("inputs", "inputs_sub", "target", "task_ids", "context", "sample_ids", "spans"),
    *("segment_ids", "num_segments", "segment_rel_offset"),
)
_ANT_VECTORS = ("ctx", "tgt", "task", "context", "segment", "span")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTokens:
    """Argument of the position bias modules, instead of positions and matrices.

    Position biases with the same formula share one `BiasedSequence`, so a batch is analysed only once.

    Attributes:
        tokens: Positions and segments of this rank's tokens.
        relations: The relations between all segments.
        most: The largest relation.
        group: The ranks that share the sequences.
        kernel: As in `BiasedSequence`.
        transport: As in `BiasedSequence`.
    """

    tokens: Tokens
    relations: Tensor
    most: int
    group: CheckedCommunicator
    kernel: str
    transport: str
    _sequences: dict[RelativeBias, BiasedSequence] = field(default_factory=dict, init=False, repr=False)

    def under(self, formula: RelativeBias) -> BiasedSequence:
        """Return the mask argument of `Attention`.

        Raises:
            UserError: A relation has no row in the formula's table.
        """
        if not isinstance(formula, RelativeBias):
            raise UserError(
                f"a formula must be a RelativeBias, got {type(formula).__name__}\n"
                "fix: call a position bias module with these tokens"
            )
        if self.most > formula.num_relations:
            raise UserError(
                f"the batch has relation {self.most} between segments, but the bias table holds "
                f"{formula.num_relations}\nfix: a model with more segment buckets, or data of a smaller max_depth"
            )
        if formula not in self._sequences:
            self._sequences[formula] = BiasedSequence(
                formula=formula,
                relations=self.relations,
                tokens=self.tokens,
                group=self.group,
                kernel=self.kernel,
                transport=self.transport,
            )
        return self._sequences[formula]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeePart:
    """One rank's part of a batch of CPM-Bee; int32 `[batch, local_tokens]` on the mesh's device.

    Attributes:
        inputs: Token ids; 0 for padding of the part.
        inputs_sub: Number of each token among the tokens of one name.
        target: Labels; -100 for no label.
        task_ids: Task of each token.
        tokens: Argument of the position bias.
        ext_ids: Ids of the batch's additional vocabulary rows; whole on every rank.
        ext_sub: Numbers of these rows; whole on every rank.
    """

    inputs: Tensor
    inputs_sub: Tensor
    target: Tensor
    task_ids: Tensor
    tokens: SplitTokens
    ext_ids: Tensor
    ext_sub: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AntPart:
    """One rank's part of a batch of CPM-Ant; int32 `[batch, local_tokens]` on the mesh's device.

    Attributes:
        input: Token ids; 0 for padding of the part.
        target: Labels; -100 for no label.
        task: Task of each token; -1 for none.
        segment: Segment types.
        place: Index in the whole sequence. Tokens below `prompt_length` are prompts, which have another embedding.
        tokens: Argument of the position bias.
    """

    input: Tensor
    target: Tensor
    task: Tensor
    segment: Tensor
    place: Tensor
    tokens: SplitTokens


class SplitSequences:
    """Gives each rank its part of CPM-Live's batches.

    Args:
        mesh: The ranks; its sequence groups share each batch. `bmburst.Mesh.over_bmtrain(sequence=...)`.
        layout: "zigzag", "striped" or "contiguous". It changes the load of the ranks, not the result of attention.
        kernel: "auto", "triton" or "reference" (plain torch).
        transport: As in `bmburst.burst_attention`.

    Raises:
        UserError: `mesh` is not a mesh, or it has tensor parallelism; an option is unknown; or the layout is
            "balanced", which needs a mask that is known before the batch.
    """

    def __init__(self, mesh: Mesh, *, layout: str = "zigzag", kernel: str = "auto", transport: str = "auto") -> None:
        require_mesh(mesh, "bmburst.Mesh.over_bmtrain(), after bmt.init_distributed", "CPM-Live's")
        require_known("layout", layout, set(LAYOUTS) - {"balanced"})
        require_known("kernel", kernel, BIASED_NAMES)
        require_known("transport", transport, TRANSPORTS)
        # A single rank has all tokens in order in any layout, and needs no padding for a layout.
        self.layout = layout if mesh.shape.sequence > 1 else "contiguous"
        self.mesh, self.kernel, self.transport = mesh, kernel, transport

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads the batches of its sequence group; `shared` sends them to the other ranks."""
        return self.mesh.sequence_rank == 0

    def shared(self, data: Data | None) -> Data:
        """Return the reader's batch on every rank of a sequence group.

        It is needed because CPM-Live's packer is random, so ranks that read alone would get different batches.

        Args:
            data: The batch on the reader; ignored on the other ranks.

        Raises:
            UserError: The reader has no batch, or one that cannot be sent. Raised on every rank of the group.
        """
        return require_mapping(broadcast_object(self.mesh.sequence, data))

    def bee(self, data: Data) -> BeePart:
        """Return this rank's part of a batch of CPM-Bee's `MixedDataset`. All ranks of the group pass the same batch.

        On CPUs always, and on GPUs the first times, the ranks check that they pass the same batch.

        Raises:
            UserError: A name is missing, shapes differ, or segments have no relations; or the ranks pass different
                batches. If the ranks compare, it is raised on every rank.
        """

        def decide() -> tuple[tuple[dict[str, Tensor], Tensor, Tensor, tuple[Tensor, Tensor]], str]:
            whole = vectors(require_mapping(data), _BEE_VECTORS)
            real = lengths(data, "length", *whole["inputs"].shape)
            related, rows = relations(data, whole, real), additional_rows(data)
            told = whole | {"length": real, "segment_rel": related, "ext_ids": rows[0], "ext_sub": rows[1]}
            return (whole, real, related, rows), self._told("bee", told)

        with self.mesh.sequence.first_calls("CPM-Live's batch"):
            whole, real, related, (ext_ids, ext_sub) = self.mesh.sequence.decided(decide)
        batch, length = whole["inputs"].shape
        cut = self._cut(length)
        part = {name: self._part(cut, whole[name], IGNORE_INDEX if name == "target" else 0) for name in whole}
        tokens = bee_tokens(
            *(self._positions(cut, batch), part["segment_ids"], part["num_segments"], part["segment_rel_offset"]),
            *(part["sample_ids"], part["spans"], part["context"], real.to(self._device)),
        )
        return BeePart(
            **{name: part[name] for name in ("inputs", "inputs_sub", "target", "task_ids")},
            tokens=self._tokens(tokens, related),
            ext_ids=ext_ids.to(self._device),
            ext_sub=ext_sub.to(self._device),
        )

    def ant(self, data: Data, num_segments: int) -> AntPart:
        """Return this rank's part of a batch of CPM-Ant's `BatchPacker`. All ranks of the group pass the same batch.

        As in CPM-Ant, the last `len_ctx` tokens of a sequence are real. Ranks compare batches as in `bee`.

        Args:
            data: The batch.
            num_segments: The model's `segment_types`.

        Raises:
            UserError: A name is missing, shapes differ, or a segment type is out of range; or the ranks pass different
                batches. If the ranks compare, it is raised on every rank.
        """

        def decide() -> tuple[tuple[dict[str, Tensor], Tensor], str]:
            require_segment_types(num_segments)
            whole = vectors(require_mapping(data), _ANT_VECTORS)
            real = lengths(data, "len_ctx", *whole["ctx"].shape)
            require_segments(whole["segment"], num_segments)
            return (whole, real), self._told(f"ant of {num_segments} segments", whole | {"len_ctx": real})

        with self.mesh.sequence.first_calls("CPM-Live's batch"):
            whole, real = self.mesh.sequence.decided(decide)
        batch, length = whole["ctx"].shape
        cut = self._cut(length)
        part = {name: self._part(cut, whole[name], IGNORE_INDEX if name == "tgt" else 0) for name in whole}
        place = self._positions(cut, batch)
        is_real = (place >= length - real.to(self._device)[:, None]) & (place < length)
        tokens = ant_tokens(place, part["segment"], part["span"], part["context"], is_real, num_segments)
        related = ant_relations(num_segments, torch.device("cpu"))
        return AntPart(
            input=part["ctx"],
            target=part["tgt"],
            task=part["task"],
            segment=part["segment"],
            place=place,
            tokens=self._tokens(tokens, related),
        )

    def mean(self, loss_sum: Tensor, target: Tensor) -> Tensor:
        """Return the loss for `OptimManager.backward`; `bmt.sum_loss` of it is the mean loss per token.

        All tokens of all ranks have the same weight. Every rank must call it.

        Args:
            loss_sum: Sum of this rank's token losses: `bmt.loss.FusedCrossEntropy(ignore_index=-100, reduction="sum")`.
            target: The labels of the loss.

        Raises:
            UserError: An argument is wrong. If the ranks compare calls, it is raised on every rank.
        """
        valid = self.mesh.world.decided(lambda: (_valid(loss_sum, target), "SplitSequences.mean"))
        (valid,) = self.mesh.world.all_reduce(valid).wait()
        return global_mean(loss_sum, valid, self.mesh.world.size)

    def _told(self, kind: str, vectors: Data) -> str:
        """Return a text with the properties of a batch that must be equal on the ranks that share it."""
        if not self.mesh.sequence.active or self.mesh.sequence.size == 1:
            return ""
        shape = list(next(iter(vectors.values())).shape)
        facts = [f"{name} {contents(vector)}" for name, vector in vectors.items()]
        return "\n".join([f"batch {kind}", f"shape {shape}", *facts])

    @property
    def _device(self) -> torch.device:
        return self.mesh.sequence.device

    def _cut(self, length: int) -> SequenceShard:
        size, rank = self.mesh.shape.sequence, self.mesh.sequence_rank
        return SequenceShard.cut(length, layout=self.layout, size=size, rank=rank)

    def _part(self, cut: SequenceShard, vector: Tensor, pad_value: int) -> Tensor:
        return cut.take(vector, pad_value=pad_value).to(self._device)

    def _positions(self, cut: SequenceShard, batch: int) -> Tensor:
        return cut.positions(self._device).to(torch.int32).expand(batch, -1)

    def _tokens(self, tokens: Tokens, relations: Tensor) -> SplitTokens:
        return SplitTokens(
            tokens=tokens,
            relations=relations.to(self._device),
            most=int(relations.max()),
            group=self.mesh.sequence,
            kernel=self.kernel,
            transport=self.transport,
        )


def _valid(loss_sum: Tensor, target: Tensor) -> Tensor:
    """Check the arguments of `mean`, and return the number of labels that count."""
    for name, value in (("loss_sum", loss_sum), ("target", target)):
        if not isinstance(value, Tensor):
            raise UserError(
                f"{name} must be a tensor, got {type(value).__name__}\n"
                "fix: split.mean(loss, part.target), of a loss with reduction='sum'"
            )
    if loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        raise UserError(
            f"loss_sum must be one number in floating point, got {describe_tensors(loss_sum)}\n"
            "fix: FusedCrossEntropy(ignore_index=-100, reduction='sum')"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise UserError(f"target must be labels, got {describe_tensors(target)}\nfix: target of the same part")
    return count_valid(target)
