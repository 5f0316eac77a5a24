"""Batches of the encoder-decoder: whole sources and labels, as transformers takes them, cut to this rank's parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst.amounts import brief
from bmburst.attention.api import resolve_group
from bmburst.blocks.seq2seq_config import Pairs, Seq2SeqConfig
from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError
from bmburst.loss import IGNORE_INDEX, require_ids
from bmburst.schedule.documents import Documents
from bmburst.sequence import SequenceShard, ShardedBatch

DocumentsOption = Documents | tuple[Documents, ...] | None
PairsOption = Pairs | Sequence[Pairs] | None
"""The pairs of all samples, or of each; None: a sample is one pair without padding."""


class Masks(NamedTuple):
    """The masks of a batch; None: those of the attention modules."""

    source: DocumentsOption
    target: DocumentsOption
    cross: DocumentsOption


class Seq2SeqBatch(NamedTuple):
    """This rank's part of a batch, from `Seq2SeqCut.batch`."""

    source: ShardedBatch
    """Its labels are not used."""
    target: ShardedBatch
    """The decoder's input, and the label of each of its tokens."""
    lengths: tuple[int, int] | tuple[None, None]
    """Real tokens of the whole source and of the whole target; None: those of the masks."""
    masks: Masks


class _Whole(NamedTuple):
    """A checked batch before the split."""

    source: Tensor
    target: Tensor
    labels: Tensor
    masks: Masks
    cuts: tuple[SequenceShard, SequenceShard]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqCut:
    """Cuts whole batches as a model needs them; the model's own is `Seq2Seq.cut`.

    Attributes:
        config: The model's configuration.
        source_layout: Layout of sources.
        target_layout: Layout of targets.
        group: The ranks that share the sequences; None: as in `bmburst.burst_attention`.
    """

    config: Seq2SeqConfig
    source_layout: str
    target_layout: str
    group: object

    def batch(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        pairs: PairsOption = None,
    ) -> Seq2SeqBatch:
        """Return this rank's part of whole sequences, which every rank of the group holds.

        Arguments are named as in transformers, and mean the same, so a collated batch may be passed as it is. Every
        rank of the group calls it, because the first calls compare what the ranks hold.

        Args:
            input_ids: The source, `[batch, source_tokens]`.
            labels: What the decoder is to say, `[batch, target_tokens]`, not shifted; `IGNORE_INDEX` for no loss.
            attention_mask: 1 for tokens of the source and 0 for the padding behind them, shaped as `input_ids`.
            decoder_input_ids: The decoder's input, shaped as the labels. Default: labels shifted by one token behind
                `decoder_start_token_id`, at the start of each pair, with `pad_token_id` where there is no label.
            pairs: Source-target pairs that are packed into each sequence. Tokens behind the last are padding.

        Raises:
            UserError: Shapes do not fit, an id is out of range (checked on CPUs), a sequence is longer than the
                position table, padding stands between tokens, arguments exclude each other, or ranks hold different
                batches.
        """
        comm = resolve_group(self.group)
        given = (input_ids, labels, attention_mask, decoder_input_ids, pairs)
        with comm.first_calls("Seq2SeqCut.batch"):
            whole = comm.decided(lambda: (self._whole(comm, *given), ""))
            (of_source, of_target), masks = whole.cuts, whole.masks
            return Seq2SeqBatch(
                of_source.batch(whole.source, documents=masks.source),
                of_target.batch(whole.target, whole.labels, documents=masks.target),
                (of_source.length, of_target.length) if masks.cross is None else (None, None),
                masks,
            )

    def _whole(
        self,
        comm: CheckedCommunicator,
        source: Tensor,
        labels: Tensor | None,
        attention_mask: Tensor | None,
        target: Tensor | None,
        pairs: PairsOption,
    ) -> _Whole:
        if labels is None and target is None:
            raise UserError("neither labels nor decoder_input_ids are given\nfix: labels, which are shifted here")
        for name, tensor in (("input_ids", source), ("labels", labels), ("decoder_input_ids", target)):
            if tensor is not None or name == "input_ids":
                _require_ids(name, tensor, self.config.vocab_size)
        if labels is None:
            assert target is not None
            labels = torch.full_like(target, IGNORE_INDEX)
        if len(source) != len(labels) or (target is not None and target.shape != labels.shape):
            shapes = f"input_ids {list(source.shape)}, labels {list(labels.shape)}"
            also = "" if target is None else f" and decoder_input_ids {list(target.shape)}"
            raise UserError(f"{shapes}{also} do not fit\nfix: as many samples of each, and an input for each label")
        each = _pairs(source, labels.shape[1], attention_mask, pairs)
        lengths = source.shape[1], labels.shape[1]
        longest = max((n for pair in each for n in (*pair.sources, *pair.targets)), default=max(lengths))
        if longest > (most := self.config.max_position_embeddings):
            raise UserError(
                f"a sequence has {longest} tokens\nallowed: max_position_embeddings {most}\n"
                "fix: a model with more positions, or a shorter sequence"
            )
        of_source = SequenceShard.cut(lengths[0], layout=self.source_layout, group=comm)
        of_target = SequenceShard.cut(lengths[1], layout=self.target_layout, group=comm)
        shifted = self._shifted(labels, each) if target is None else target
        masks = Masks(*(_of_samples([getattr(pair, name) for pair in each]) for name in Masks._fields))
        return _Whole(source.long(), shifted.long(), labels.long(), masks, (of_source, of_target))

    def _shifted(self, labels: Tensor, each: tuple[Pairs, ...]) -> Tensor:
        """Return the decoder's input; as `shift_tokens_right` of transformers, but in each pair."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise UserError("the configuration has no decoder_start_token_id\nfix: give it, or decoder_input_ids")
        shifted = labels.roll(1, 1)
        shifted[:, 0] = start
        for row, pair in enumerate(each):
            shifted[row, [place for place in pair.target.starts if place < labels.shape[1]]] = start  # more are refused
        ignored = shifted == IGNORE_INDEX
        if padding is None and bool(ignored.any()):
            raise UserError(
                f"labels hold {IGNORE_INDEX}, but the configuration has no pad_token_id for the decoder to read there\n"
                "fix: give it, or decoder_input_ids"
            )
        return shifted if padding is None else shifted.masked_fill(ignored, padding)


def _require_ids(name: str, ids: Tensor | None, vocab_size: int) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2 or 0 in ids.shape:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(
            f"{name} must be token ids [batch, tokens], got {found}\nfix: call the tokenizer with return_tensors='pt'"
        )
    if not ids.is_cuda:
        require_ids(name, ids, vocab_size, ignored=IGNORE_INDEX if name == "labels" else None)


def _pairs(source: Tensor, targets: int, attention_mask: Tensor | None, pairs: PairsOption) -> tuple[Pairs, ...]:
    """Return the pairs of each sample, or nothing where every sample is one pair without padding."""
    if attention_mask is not None:
        if pairs is not None:
            raise UserError("attention_mask beside pairs\nfix: pairs alone; tokens behind the last one are padding")
        return _padded(source, attention_mask, targets)
    each = (pairs,) * len(source) if isinstance(pairs, Pairs) else tuple(pairs or ())
    if not all(isinstance(pair, Pairs) for pair in each):
        raise UserError(f"pairs must be Pairs, got {brief(pairs)}\nfix: Pairs(sources, targets), or one a sample")
    if each and len(each) != len(source):
        raise UserError(f"pairs of {len(each)} samples for a batch of {len(source)}\nfix: one Pairs, or one a sample")
    return each


def _padded(source: Tensor, attention_mask: Tensor, targets: int) -> tuple[Pairs, ...]:
    """Return one pair for each sample, of its tokens before the padding; nothing where there is no padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != source.shape:
        found = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise UserError(f"attention_mask is {found}\nallowed: {list(source.shape)}, as input_ids\nfix: the tokenizer's")
    seen = attention_mask != 0
    counts: list[int] = seen.sum(1).tolist()
    if bool((~seen[:, :-1] & seen[:, 1:]).any()):
        raise UserError(
            "attention_mask has padding before a token\nallowed: behind the last token of a sample\n"
            "fix: tokenizer.padding_side = 'right'"
        )
    if 0 in counts:
        raise UserError(f"attention_mask shows no token of sample {counts.index(0)}\nfix: leave the sample out")
    return () if min(counts) == source.shape[1] else tuple(Pairs((count,), (targets,)) for count in counts)


def _of_samples(masks: list[Documents]) -> DocumentsOption:
    """Return the masks of each sample, or one where all have the same, which is attended with at once."""
    if not masks:
        return None
    return masks[0] if all(mask == masks[0] for mask in masks) else tuple(masks)
