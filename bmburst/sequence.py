"""Cutting a sequence over ranks and putting it together again. Nothing else in the package cuts one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmburst.attention.api import resolve_group
from bmburst.attention.differentiable import no_autocast
from bmburst.comm.checks import Checked, describe
from bmburst.errors import UserError
from bmburst.numbers import brief, whole_number
from bmburst.schedule.layout import Balanced, Layout, make_layout, padded_layout, real_length, real_tokens
from bmburst.schedule.mask import Mask, make_mask
from bmburst.sequence_parts import dimension_of, put, require_value, take
from bmburst_ops.constants import IGNORE_INDEX

Ids = npt.NDArray[np.int64]


class ShardedBatch(NamedTuple):
    """One rank's part of a batch, each `[batch, local_tokens]`: int64, the weights fp32."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    """Of each token in its document, or in the sequence where documents are not told apart."""
    weights: Tensor
    """One over the number of valid labels on all ranks, zero without a label: summed over all ranks, weights times
    token losses are the mean loss of the batch."""


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """One rank's part of sequences of `length` tokens: padding, order, labels, positions, and the inverse.

    Labels are shifted before the cut, so that the last local token of a run has the first token of another rank's run
    as its label. Loss weights count over the whole batch, so that every valid label weighs the same wherever it is
    (for a batch spread over data ranks too: `bmburst.loss.global_mean`).

    Attributes:
        length: Real tokens of a sequence, over all ranks; any number of at least one a rank.
        layout: Which rank holds which positions, padding included.
        rank: This rank in its sequence group.
    """

    length: int
    layout: Layout
    rank: int

    @classmethod
    def cut(cls, length: int, *, layout: str, size: int, rank: int, mask: Mask | str | None = None) -> "SequenceShard":
        """Return the shard of `rank` among `size`, with as little padding as the layout allows.

        Args:
            length: Real tokens of a sequence.
            layout: "contiguous", "zigzag", "striped" or "balanced".
            size: Ranks of the sequence group.
            rank: One of them.
            mask: What attention will be called with. Layout "balanced" needs it; the others do not look at it.

        Raises:
            UserError: The layout is unknown, there are fewer tokens than ranks, no such rank, or the mask is missing or
                made for another number of tokens.
        """
        length, size = whole_number("length", length, 0), whole_number("size", size, 1)
        if not 0 <= rank < size:
            raise UserError(f"rank {rank} is not one of {size} ranks\nranks count from 0 to {size - 1}")
        return cls(length, padded_layout(layout, size, length, _fitting(mask, length)), rank)

    def under(self, mask: Mask | Sequence[Mask]) -> "SequenceShard":
        """Return the shard of the same ranks for a batch with a mask of its own, by which "balanced" deals its chunks.

        Args:
            mask: Of every sample, or one for each. Made for the sequence's tokens or fewer: then the rest is padding,
                and attention's `length` is the mask's.

        Raises:
            UserError: The layout is "balanced" and the samples have a mask each, or the mask is for more tokens.
        """
        if not isinstance(self.layout, Balanced):
            return self
        if not isinstance(mask, Mask):
            raise UserError(
                "layout 'balanced' is made for one mask, but each sample of the batch has its own\n"
                "use batches (micro_batch_size) of 1 sequence, or layout 'zigzag'"
            )
        real = self._real(mask)
        return replace(self, layout=make_layout("balanced", self.layout.size, self.layout.tokens, mask, real))

    @property
    def local_tokens(self) -> int:
        """Tokens of every rank, padding included."""
        return self.layout.tokens

    @property
    def real_tokens(self) -> int:
        """This rank's tokens that are not padding; they are its first ones."""
        return real_tokens(self.layout, self.rank, self.length)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the global position of each local token, `[local_tokens]` int64; padding stands from `length` on."""
        runs = self.layout.runs(self.rank)
        return torch.cat(
            [torch.arange(run.tokens, dtype=torch.int64, device=device) * run.stride + run.start for run in runs]
        )

    def take(self, x: Tensor, dim: int = 1, pad_value: float = 0) -> Tensor:
        """Return this rank's tokens of a whole tensor: dimension `dim` goes from `length` to `local_tokens`.

        Raises:
            UserError: The dimension is missing or of another length.
        """
        dim = dimension_of(x, dim)
        if x.shape[dim] != self.length:
            raise UserError(f"dimension {dim} must hold the sequence's {self.length} tokens, got shape {list(x.shape)}")
        return take(x, self.layout, self.rank, dim, pad_value)

    def batch(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Mask | Sequence[Mask] | None = None
    ) -> ShardedBatch:
        """Return this rank's part of whole sequences.

        With documents, positions begin again at each of them, and a document's last token has no label. Where they
        have fewer tokens than the sequence, what lies behind them is padding and has no label: give attention their
        number of tokens as `length`, and it costs nothing there.

        Args:
            tokens: Token ids `[batch, length]`.
            labels: Label of each token, `[batch, length]`, `IGNORE_INDEX` where there is none, taken as they are.
                Default: each token's label is the token after it in its document; the last has none.
            documents: `bmburst.Documents`, or another mask with documents, of every sample, or one for each. Default:
                a sequence is one document.

        Raises:
            UserError: The shapes differ from these, or the documents do not fit the batch.
        """
        if not isinstance(tokens, Tensor):
            raise UserError(f"tokens must be a torch tensor [batch, {self.length}], got {type(tokens).__name__}")
        shape = (len(tokens) if tokens.dim() else 0, self.length)
        if tokens.shape != shape or (labels is not None and labels.shape != shape):
            shapes = " and ".join(str(list(t.shape)) for t in (tokens, labels) if t is not None)
            raise UserError(f"tokens and labels must be [batch, {self.length}], got shape {shapes}")
        masks = self._of_samples(documents, len(tokens))
        lengths = [self._real(mask) for mask in masks]
        labels = _without_padding(_following(tokens, masks, lengths) if labels is None else labels, lengths)
        mine, valid = self.take(labels, pad_value=IGNORE_INDEX), (labels != IGNORE_INDEX).sum()
        weights = (mine != IGNORE_INDEX).float() / valid.clamp(min=1)
        return ShardedBatch(self.take(tokens), mine, self._positions_in(masks, tokens), weights)

    def read(self, sequence: Callable[[range], tuple[Ids, Ids]], documents: Mask | None = None) -> Ids:
        """Return this rank's part of one sequence that nobody holds whole: only this rank's places are asked for.

        What comes is what `batch` cuts from the whole sequence, in the layout `under` its documents. It is made without
        torch, whose threads are not for one that only reads.

        Args:
            sequence: Gives inputs and labels at some places, each int64 `[len(places)]`. Places are below `length`.
            documents: As in `batch`.

        Returns:
            int64 `[3, local_tokens]`: tokens, labels, and the position of each token in its document.

        Raises:
            UserError: The documents have more tokens than the sequence.
        """
        cut = self if documents is None else self.under(documents)
        part = np.zeros((3, cut.local_tokens), np.int64)
        tokens, labels, positions = part
        labels[:] = IGNORE_INDEX
        for run in cut.layout.runs(cut.rank):
            positions[run.offset : run.offset + run.tokens] = np.arange(run.tokens) * run.stride + run.start
            real = run.real(self.length)
            here = slice(run.offset, run.offset + real)
            tokens[here], labels[here] = sequence(range(run.start, run.start + real * run.stride, run.stride))
        if documents is not None:
            labels[positions >= self._real(documents)] = IGNORE_INDEX
            starts = np.array(documents.starts or (0,))
            positions -= starts[np.searchsorted(starts, positions, side="right") - 1]
        return part

    def join(self, parts: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor without padding.

        Args:
            parts: `[size, ...]`, every rank's tensor in rank order; `dim` counts without the first dimension.
            dim: The dimension of `local_tokens` in each part.
        """
        dim = dimension_of(parts[0], dim)
        whole = parts.new_empty((*parts.shape[1 : dim + 1], self.length, *parts.shape[dim + 2 :]))
        for rank, part in enumerate(parts):
            put(whole, part, self.layout, rank, dim)
        return whole

    def _real(self, mask: Mask) -> int:
        """Return how many tokens a mask is for: the sequence's, or the fewer that it was made for."""
        if mask.length is None or mask.length > self.length:
            mask.require(self.length)
            return self.length
        return mask.length

    def _of_samples(self, documents: Mask | Sequence[Mask] | None, batch: int) -> tuple[Mask, ...]:
        """Return one mask for all samples, one for each, or none."""
        if documents is None or isinstance(documents, Mask):
            return () if documents is None else (documents,)
        if isinstance(documents, str) or not all(isinstance(mask, Mask) for mask in documents):
            raise UserError(f"documents must be masks, got {brief(documents)}\nfix: bmburst.Documents(lengths)")
        if len(documents) != batch:
            raise UserError(
                f"got documents of {len(documents)} samples for a batch of {batch}\n"
                "give one bmburst.Documents to each sample, or a single one for all"
            )
        return tuple(documents)

    def _positions_in(self, masks: tuple[Mask, ...], tokens: Tensor) -> Tensor:
        """Return the position of each local token in its document, `[batch, local_tokens]`; padding counts on."""
        whole = self.positions(tokens.device)
        rows = []
        for mask in masks:
            starts = torch.tensor(mask.starts or (0,), dtype=torch.int64, device=tokens.device)
            rows.append(whole - starts[torch.searchsorted(starts, whole, right=True) - 1])
        return torch.stack(rows or [whole]).expand(len(tokens), -1)


def shard(
    x: Tensor,
    dim: int = 1,
    layout: str = "zigzag",
    group: object = None,
    pad_value: float = 0,
    mask: Mask | str | None = None,
) -> Tensor:
    """Return this rank's part of a tensor that every rank holds whole. A compiled caller's graph ends before it.

    Args:
        x: Any dtype; dimension `dim` is the sequence, of any length of at least one token a rank.
        dim: The sequence dimension.
        layout: "contiguous", "zigzag", "striped" or "balanced".
        group: As in `burst_attention`.
        pad_value: What the padding at the end of the sequence holds.
        mask: As in `burst_attention`; "balanced" needs it, the others do not look at it.

    Returns:
        `x` with `local_tokens` in dimension `dim`: equal on all ranks, `ceil(length / size)`, rounded up to an even
        number for zigzag and to a multiple of 8 for balanced. Its backward puts this rank's gradient in its places and
        zero elsewhere: the gradient of an objective that is the sum of the ranks' losses is the sum of the ranks'
        gradients of `x`.

    Raises:
        UserError: The layout is unknown, there are fewer tokens than ranks, the mask is missing or for another number
            of tokens, `x` cannot hold the padding's value, or the ranks of the group disagree.
    """
    if torch.compiler.is_compiling():
        from bmburst.uncompiled import shard as run

        return run(x, dim, layout, group, pad_value, mask)
    comm = resolve_group(group)

    def decide() -> tuple[tuple[SequenceShard, int], str]:
        along = dimension_of(x, dim)
        cut = SequenceShard.cut(x.shape[along], layout=layout, size=comm.size, rank=comm.rank, mask=mask)
        require_value(x, pad_value)
        return (cut, along), f"shard\n{describe(x)}\ndim={along}\nlayout={layout}\nmask={mask}"

    cut, along = comm.decided(decide)
    part: Tensor = _Shard.apply(x, cut, along, pad_value)  # type: ignore[no-untyped-call]
    return part


def unshard(
    x_local: Tensor,
    dim: int = 1,
    layout: str = "zigzag",
    group: object = None,
    length: int | None = None,
    mask: Mask | str | None = None,
) -> Tensor:
    """Return the whole tensor on every rank: the exact inverse of `shard`. A compiled caller's graph ends before it.

    Args:
        x_local: This rank's part, of equal shape on all ranks.
        dim: The sequence dimension.
        layout: The one it was cut by.
        group: As in `burst_attention`.
        length: Real tokens of the sequence; what lies behind is padding and dropped. Default: none is padding.
        mask: The one it was cut by; see `shard`.

    Returns:
        `x_local` with `length` in dimension `dim`. Its backward sums the gradients of all ranks and takes this rank's
        part.

    Raises:
        UserError: The layout is unknown, the length or the mask does not fit the local tokens, or the ranks disagree.
    """
    if torch.compiler.is_compiling():
        from bmburst.uncompiled import unshard as run

        return run(x_local, dim, layout, group, length, mask)
    comm = resolve_group(group)

    def decide() -> tuple[tuple[SequenceShard, int], str]:
        along = dimension_of(x_local, dim)
        size, tokens = comm.size, x_local.shape[along]
        real = real_length(size, tokens, length)
        cut = SequenceShard(real, make_layout(layout, size, tokens, _fitting(mask, real), real), comm.rank)
        return (cut, along), f"unshard\n{describe(x_local)}\ndim={along}\nlayout={layout}\nmask={mask}\nlength={real}"

    cut, along = comm.decided(decide)
    joined: Tensor = _Unshard.apply(x_local, cut, along, comm)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, x_local: Tensor, cut: SequenceShard, dim: int, comm: Checked) -> Tensor:
        ctx.cut, ctx.dim, ctx.comm = cut, dim, comm
        with no_autocast(x_local.device.type):
            return cut.join(comm.all_gather(x_local).wait()[0], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: Layout = ctx.cut.layout
        with no_autocast(grad.device.type):
            parts = torch.stack([take(grad, layout, rank, ctx.dim, 0) for rank in range(layout.size)])
            return ctx.comm.reduce_scatter(parts).wait()[0], None, None, None


def _fitting(mask: Mask | str | None, length: int) -> Mask | None:
    """Return the mask, if any, checked to fit `length` tokens."""
    if mask is None:
        return None
    made = make_mask(mask)
    made.require(length)
    return made


def _following(tokens: Tensor, masks: tuple[Mask, ...], lengths: list[int]) -> Tensor:
    """Return each token's follower in its document; a mask and a length for all rows, for each, or none."""
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        last = torch.tensor([*mask.starts[1:], length], dtype=torch.int64, device=tokens.device) - 1
        labels[row if len(masks) > 1 else slice(None), last] = IGNORE_INDEX
    return labels


def _without_padding(labels: Tensor, lengths: list[int]) -> Tensor:
    """Return labels of which those from the given lengths on, one for all rows or one for each, do not count."""
    if all(length == labels.shape[1] for length in lengths):
        return labels
    column = torch.tensor(lengths, device=labels.device)[:, None]
    return labels.masked_fill(torch.arange(labels.shape[1], device=labels.device) >= column, IGNORE_INDEX)
