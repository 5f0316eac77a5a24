"""Splits sequences over ranks and joins them: `shard`, `unshard`, and `SequenceShard` for batches."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst.amounts import as_whole, short_text, whole_number
from bmburst.attention.api import resolve_group
from bmburst.attention.graphs import outside_of_graphs
from bmburst.attention.options import gradient_signature, require_dense, require_no_transform
from bmburst.comm.checks import CheckedCommunicator, call_number, contents, describe_tensors, in_backward_of, is_exact
from bmburst.comm.groups import communicator, is_connected
from bmburst.errors import UserError
from bmburst.mesh import current_mesh
from bmburst.schedule.layout import Balanced, Layout, make_layout, padded_layout, real_length, real_tokens
from bmburst.schedule.mask import Mask, make_mask
from bmburst.sequence.packed_tree import PackedTree, require_tree, tree_facts
from bmburst.sequence.parts import (
    Ids,
    batch_facts,
    dimension_of,
    document_positions,
    fitting,
    following,
    masks_of_samples,
    pair_at,
    put,
    require_batch,
    require_device,
    require_same_documents,
    require_value,
    take,
    without_padding,
)
from bmburst_ops import IGNORE_INDEX
from bmburst_ops.autocast import no_autocast
from bmburst_ops.errors import first_order


class ShardedBatch(NamedTuple):
    """One rank's part of a batch: tensors `[batch, local_tokens]`, int64, `weights` fp32."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    """Position of each token in its document, or in the sequence if no documents are given."""
    weights: Tensor
    """1 / (valid labels on all ranks), zero for tokens without a label. The sum over all ranks of weights times token
    losses is the mean loss of the batch."""


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Splits sequences of `length` tokens for one rank: padding, token order, labels, positions, and the inverse.

    Labels are shifted before the split, so that the last local token of a run has the first token of another rank's run
    as its label. Loss weights count labels over the whole batch, so that every valid label has the same weight on any
    rank (for a batch split over data ranks see `bmburst.loss.global_mean`).

    Attributes:
        length: Real tokens of a sequence over all ranks; at least one per rank.
        layout: Which rank holds which positions, padding included.
        rank: This rank in its sequence group.
        group: The ranks that share the sequences; `batch` compares batches over it. None: the default group if it fits.
        mask: The mask that layout "balanced" was made for; None: not known.
    """

    length: int
    layout: Layout
    rank: int
    group: CheckedCommunicator | None = field(default=None, compare=False, repr=False)
    mask: Mask | None = field(default=None, compare=False, repr=False)

    @classmethod
    def cut(
        cls,
        length: int,
        *,
        layout: str,
        size: int | None = None,
        rank: int | None = None,
        mask: Mask | str | None = None,
        group: object = None,
    ) -> "SequenceShard":
        """Return the shard of `rank` among `size`, with as little padding as the layout allows.

        Args:
            length: Real tokens of a sequence.
            layout: "contiguous", "zigzag", "striped" or "balanced".
            size: Ranks of the sequence group; default: the group's.
            rank: The rank; default: this rank of the group.
            mask: The mask of the attention calls. Layout "balanced" needs it; the others ignore it.
            group: As in `burst_attention`, for example `mesh.sequence`; `batch` compares batches over it.

        Raises:
            UserError: The layout is unknown, there are fewer tokens than ranks, the rank does not exist, the mask is
                missing or made for another number of tokens, or neither size and rank nor a group are given.
        """
        comm = None if group is None else resolve_group(group)
        if size is None or rank is None:
            if comm is None:
                raise UserError(
                    "a shard needs size and rank, or a group\nfix: SequenceShard.cut(..., group=mesh.sequence)"
                )
            size, rank = comm.size, comm.rank
        length, size = whole_number("length", length, 0), whole_number("size", size, 1)
        if as_whole(rank) is None or not 0 <= rank < size:
            raise UserError(
                f"rank {rank!r} is not one of {size} ranks\nallowed: 0 to {size - 1}\nfix: pass the rank in its group"
            )
        if comm is not None and (comm.size, comm.rank) != (size, rank):
            raise UserError(
                f"rank {rank} of {size} is not this rank's place in the group, {comm.rank} of {comm.size}\n"
                "fix: leave size and rank out, or the group"
            )
        made = fitting(mask, length)
        return cls(length, padded_layout(layout, size, length, made), rank, comm, made)

    def under(self, mask: Mask | Sequence[Mask]) -> "SequenceShard":
        """Return the shard for a batch with its own mask: layout "balanced" assigns its chunks by the mask.

        Args:
            mask: One for all samples, or one per sample. It may be made for fewer tokens than the sequence: the rest is
                padding then, and attention gets the mask's length as `length`.

        Raises:
            UserError: It is no mask, the layout is "balanced" and each sample has its own mask, or the mask is for more
                tokens.
        """
        given = mask if isinstance(mask, list | tuple) and mask else (mask,)
        if other := [each for each in given if not isinstance(each, Mask)]:
            raise UserError(
                f"mask must be a mask of bmburst, or one for each sample, got {short_text(other[0])}\n"
                "fix: for example bmburst.Documents(lengths), or bmburst.Causal()"
            )
        if not isinstance(self.layout, Balanced):
            return self
        if not isinstance(mask, Mask):
            raise UserError(
                "layout 'balanced' needs one mask, but each sample of the batch has its own\n"
                "fix: use batches (micro_batch_size) of 1 sequence, or layout 'zigzag'"
            )
        made = make_layout("balanced", self.layout.size, self.layout.tokens, mask, self._real(mask))
        return replace(self, layout=made, mask=mask)

    @property
    def local_tokens(self) -> int:
        """Tokens of each rank, padding included."""
        return self.layout.tokens

    @property
    def real_tokens(self) -> int:
        """This rank's tokens that are not padding; they are its first ones."""
        return real_tokens(self.layout, self.rank, self.length)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the global position of each local token, int64 `[local_tokens]`; padding has positions >= `length`.

        Raises:
            UserError: There is no such device.
        """
        require_device(device)
        runs = self.layout.runs(self.rank)
        return torch.cat(
            [torch.arange(run.tokens, dtype=torch.int64, device=device) * run.stride + run.start for run in runs]
        )

    def take(self, x: Tensor, dim: int = 1, pad_value: float = 0) -> Tensor:
        """Return this rank's tokens of a whole tensor: dimension `dim` changes from `length` to `local_tokens`.

        Raises:
            UserError: The dimension is missing or of another length, or `x` cannot represent `pad_value`.
        """
        dim = dimension_of(x, dim)
        require_value(x, pad_value)
        if x.shape[dim] != self.length:
            raise UserError(
                f"dimension {dim} of a tensor of shape {list(x.shape)} is not the sequence\n"
                f"allowed: {self.length} tokens\nfix: give dim=, the dimension of the tokens, or pad the tensor"
            )
        return take(x, self.layout, self.rank, dim, pad_value)

    def batch(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Mask | Sequence[Mask] | None = None
    ) -> ShardedBatch:
        """Return this rank's part of whole sequences, which every rank of the group holds.

        The first calls compare the batches of the ranks, so every rank must make them. They are compared over `group`,
        or by default over the default group if this rank has the same size and rank there. Workers of data loaders and
        other threads do not compare, because they cannot communicate with other ranks.

        With documents, positions restart at each document, and the last token of a document has no label. Tokens after
        the last document are padding without labels. Pass the number of document tokens to attention as `length`, so
        that it skips the padding.

        Args:
            tokens: Token ids `[batch, length]`.
            labels: Label of each token, `[batch, length]`, already shifted, `IGNORE_INDEX` where there is none.
                Default: each token's label is the token after it in its document; the last has none.
            documents: `bmburst.Documents` or another mask with documents: one for all samples, or one per sample.
                Default: a sequence is one document.

        Raises:
            UserError: Shapes or dtypes are wrong, documents do not fit the batch, or the ranks hold different batches.
        """
        comm = self._comparing()
        if comm is None:
            return self._batch(tokens, labels, documents)
        with comm.first_calls("SequenceShard.batch"):

            def decide() -> tuple[ShardedBatch, str]:
                part = self._batch(tokens, labels, documents)
                facts = f"{batch_facts(tokens, labels, documents)}\nlayout={self.layout.name}" if comm.active else ""
                return part, facts

            return comm.decided(decide)

    def tree(self, packed: PackedTree) -> ShardedBatch:
        """Return this rank's part of rows packed as trees, `[1, local_tokens]`; every rank holds the whole tree.

        The shard is `SequenceShard.cut(packed.length, mask=packed.mask, ...)`, and `packed.mask` is the mask of the
        attention calls. The sum over all ranks of weights times token losses is the mean loss of the rows' labels. For
        other losses see `rows`. The ranks are compared as in `batch`.

        Raises:
            UserError: The tree has another number of tokens, or the ranks hold different trees.
        """

        comm = self._comparing()

        def decide() -> tuple[ShardedBatch, str]:
            require_tree(packed)
            part = self._batch(packed.tokens[None], packed.labels[None], packed.mask)
            counts = packed.counts
            weights = self.take(counts[None]).float() / counts.sum().clamp(min=1)
            facts = tree_facts(packed) if comm is not None and comm.active else ""
            return part._replace(weights=weights), f"SequenceShard.tree\n{facts}"

        if comm is None:
            return decide()[0]
        with comm.first_calls("SequenceShard.tree"):
            return comm.decided(decide)

    def rows(self, packed: PackedTree, values: Tensor) -> list[Tensor]:
        """Return on every rank the values of each row, 0 where the row's label does not count.

        They are differentiable. Backward sums the gradients of all ranks, which is the gradient of the sum of the
        ranks' losses. BMTrain, DDP and FSDP2 average over ranks: they compute the gradient of the mean of the ranks'
        losses, whether each rank computes the loss of all rows or of some.

        Args:
            packed: The rows.
            values: A value of each local token, `[1, local_tokens]`, for example its label's log-probability.

        Returns:
            For each row `[tokens of the row - 1]`: the value of the label of each of its tokens.

        Raises:
            UserError: The shape is another, or the ranks disagree.
        """
        comm = resolve_group(self.group)

        def decide() -> tuple[None, str]:
            require_tree(packed)
            if isinstance(values, Tensor):
                require_dense("values", values)
            if not isinstance(values, Tensor) or values.shape != (1, self.local_tokens) or packed.length != self.length:
                got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UserError(
                    f"got values {got} for a tree of {packed.length} tokens\n"
                    f"allowed: [1, {self.local_tokens}], a value of each local token of {self.length}\n"
                    "fix: the log-probabilities of what SequenceShard.tree returns for this tree"
                )
            return None, f"SequenceShard.rows\n{describe_tensors(values)}\n{packed.mask}"

        with comm.first_calls("SequenceShard.rows"):
            comm.decided(decide)
        return packed.counted_rows(gathered(values, 1, self, comm)[0])

    def _comparing(self) -> CheckedCommunicator | None:
        """Return the group over which batches are compared, if there is one and this thread may communicate."""
        is_alone = self.layout.size == 1 or threading.current_thread() is not threading.main_thread()
        if is_alone or torch.utils.data.get_worker_info() is not None:
            return None
        if self.group is None and not is_connected():
            return None
        mesh = current_mesh()
        comm = self.group or (mesh.sequence if mesh is not None else communicator(None))
        return comm if (comm.size, comm.rank) == (self.layout.size, self.rank) else None

    def _batch(self, tokens: Tensor, labels: Tensor | None, documents: Mask | Sequence[Mask] | None) -> ShardedBatch:
        """Return this rank's part as `batch` does, without the comparison."""
        require_batch(tokens, labels, self.length)
        masks = masks_of_samples(documents, len(tokens))
        lengths = [self._real(mask) for mask in masks]
        if isinstance(self.layout, Balanced) and self.mask is not None:
            require_same_documents((self.mask, *masks), (self._real(self.mask), *lengths))
        labels = without_padding(following(tokens, masks, lengths) if labels is None else labels, lengths)
        mine, valid = self.take(labels, pad_value=IGNORE_INDEX), (labels != IGNORE_INDEX).sum()
        weights = (mine != IGNORE_INDEX).float() / valid.clamp(min=1)
        return ShardedBatch(
            self.take(tokens), mine, document_positions(self.positions(tokens.device), masks, len(tokens)), weights
        )

    def read(self, sequence: Callable[[range], tuple[Ids, Ids]], documents: Mask | None = None) -> Ids:
        """Read this rank's part of one sequence: only the tokens of this rank are read.

        The result equals that of `batch` for the whole sequence, in the layout `under` its documents. It is made with
        numpy, because a thread that only reads does not need torch's thread pool.

        Args:
            sequence: Maps positions below `length` to inputs and labels there, each int64 `[len(positions)]`.
            documents: As in `batch`.

        Returns:
            int64 `[3, local_tokens]`: tokens, labels, and the position of each token in its document.

        Raises:
            UserError: The documents have more tokens than the sequence, or `sequence` returns something else.
        """
        documents = None if documents is None else make_mask(documents)
        cut = self if documents is None else self.under(documents)
        part = np.zeros((3, cut.local_tokens), np.int64)
        tokens, labels, positions = part
        labels[:] = IGNORE_INDEX
        for run in cut.layout.runs(cut.rank):
            positions[run.offset : run.offset + run.tokens] = np.arange(run.tokens) * run.stride + run.start
            real = run.real(self.length)
            here = slice(run.offset, run.offset + real)
            tokens[here], labels[here] = pair_at(sequence, range(run.start, run.start + real * run.stride, run.stride))
        if documents is not None:
            labels[positions >= self._real(documents)] = IGNORE_INDEX
            starts, offsets = (np.array(n or (0,)) for n in (documents.starts, documents.position_offsets))
            positions -= offsets[np.searchsorted(starts, positions, side="right") - 1]
        return part

    def join(self, parts: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor without padding.

        Args:
            parts: `[size, ...]`, every rank's tensor in rank order.
            dim: The dimension of `local_tokens` in each part, without the first dimension of `parts`.

        Raises:
            UserError: There is not one part of each rank, or the dimension is missing.
        """
        size, tokens = self.layout.size, self.local_tokens
        is_whole = isinstance(parts, Tensor) and parts.dim() > 0 and len(parts) == size
        if not is_whole or parts.shape[1 + dimension_of(parts[0], dim)] != tokens:
            got = list(parts.shape) if isinstance(parts, Tensor) else type(parts).__name__
            raise UserError(
                f"parts must be a tensor [{size}, ...] with {tokens} tokens in dimension {dim} of each, got {got}\n"
                "fix: torch.stack the tensors of all ranks"
            )
        dim = dimension_of(parts[0], dim)
        whole = parts.new_empty((*parts.shape[1 : dim + 1], self.length, *parts.shape[dim + 2 :]))
        for rank, part in enumerate(parts):
            put(whole, part, self.layout, rank, dim)
        return whole

    def _real(self, mask: Mask) -> int:
        """Return the number of tokens of a mask: `length`, or fewer if the mask is made for fewer."""
        if mask.length is None or mask.length > self.length:
            mask.require(self.length)
            return self.length
        return mask.length


@outside_of_graphs
def shard(
    x: Tensor,
    dim: int = 1,
    layout: str = "zigzag",
    group: object = None,
    pad_value: float = 0,
    mask: Mask | str | None = None,
) -> Tensor:
    """Return this rank's part of a tensor that every rank holds whole. torch.compile breaks its graph here.

    Every rank of the group calls it. On CPUs, and in the first calls on GPUs, the ranks compare their tensors: integers
    bit by bit, floating point numbers by a sample, up to rounding.

    Args:
        x: Any dtype; dimension `dim` is the sequence, with at least one token per rank.
        dim: The sequence dimension.
        layout: "contiguous", "zigzag", "striped" or "balanced".
        group: As in `burst_attention`.
        pad_value: Value of the padding at the end of the sequence.
        mask: As in `burst_attention`; "balanced" needs it, the others ignore it.

    Returns:
        `x` with `local_tokens` in dimension `dim`: equal on all ranks, `ceil(length / size)`, rounded up to an even
        number for zigzag and to a multiple of 8 for balanced. Backward writes this rank's gradient to its tokens and
        zero elsewhere: the gradient of the sum of the ranks' losses is the sum of the ranks' gradients of `x`.

    Raises:
        UserError: The layout is unknown, there are fewer tokens than ranks, the mask is missing or for another number
            of tokens, `x` cannot represent `pad_value`, or the ranks disagree or hold different tensors.
    """
    comm = resolve_group(group)

    def decide() -> tuple[tuple[SequenceShard, int], str]:
        along = dimension_of(x, dim)
        cut = SequenceShard.cut(x.shape[along], layout=layout, size=comm.size, rank=comm.rank, mask=mask)
        require_value(x, pad_value)
        told = f"\ncontents {contents(x)}" if comm.active and comm.size > 1 and is_exact(x) else ""
        return (cut, along), f"shard\n{describe_tensors(x)}\ndim={along}\nlayout={layout}\nmask={mask}{told}"

    with comm.first_calls("shard"):
        cut, along = comm.decided(decide)
        comm.require_alike("shard", x, "contents")
    part: Tensor = _Shard.apply(x, cut, along, pad_value)  # type: ignore[no-untyped-call]
    return part


@outside_of_graphs
def unshard(
    x_local: Tensor,
    dim: int = 1,
    layout: str = "zigzag",
    group: object = None,
    length: int | None = None,
    mask: Mask | str | None = None,
) -> Tensor:
    """Return the whole tensor on every rank: the exact inverse of `shard`. torch.compile breaks its graph here.

    Args:
        x_local: This rank's part; its shape is equal on all ranks.
        dim: The sequence dimension.
        layout: The layout of `shard`.
        group: As in `burst_attention`.
        length: Real tokens of the sequence; padding after them is dropped. Default: there is no padding.
        mask: The mask of `shard`.

    Returns:
        `x_local` with `length` in dimension `dim`. Backward sums the gradients of all ranks and takes this rank's part.

    Raises:
        UserError: The layout is unknown, the length or the mask does not fit the local tokens, or the ranks disagree.
    """
    comm = resolve_group(group)

    def decide() -> tuple[tuple[SequenceShard, int], str]:
        along = dimension_of(x_local, dim)
        size, tokens = comm.size, x_local.shape[along]
        real = real_length(size, tokens, length)
        cut = SequenceShard(real, make_layout(layout, size, tokens, fitting(mask, real), real), comm.rank)
        facts = f"unshard\n{describe_tensors(x_local)}\ndim={along}\nlayout={layout}\nmask={mask}\nlength={real}"
        return (cut, along), f"{facts}\n{gradient_signature(x_local)}"

    with comm.first_calls("unshard"):
        cut, along = comm.decided(decide)
    return gathered(x_local, along, cut, comm)


def gathered(x_local: Tensor, dim: int, cut: SequenceShard, comm: CheckedCommunicator) -> Tensor:
    """Return the whole tensor on every rank, as `unshard` does, for a given layout.

    Args:
        x_local: This rank's part.
        dim: The dimension of the local tokens, from 0 on.
        cut: The layout.
        comm: The ranks.
    """
    joined: Tensor = _Unshard.apply(x_local, cut, dim, comm)  # type: ignore[no-untyped-call]
    return joined


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: SequenceShard, dim: int, pad_value: float) -> Tensor:
        ctx.cut, ctx.dim, ctx.shape = cut, dim, x.shape
        return cut.take(x, dim, pad_value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return put(grad.new_zeros(ctx.shape), grad, ctx.cut.layout, ctx.cut.rank, ctx.dim), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, cut: SequenceShard, dim: int, comm: CheckedCommunicator) -> Tensor:
        ctx.cut, ctx.dim, ctx.comm, ctx.number = cut, dim, comm, call_number(comm)
        with no_autocast(x_local.device.type):
            return cut.join(comm.all_gather(x_local).wait()[0], dim)

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_no_transform("the whole sequence's gradient", grad)
        layout: Layout = ctx.cut.layout
        with no_autocast(grad.device.type), in_backward_of(ctx.number):
            parts = torch.stack([take(grad, layout, rank, ctx.dim, 0) for rank in range(layout.size)])
            return ctx.comm.reduce_scatter(parts).wait()[0], None, None, None
