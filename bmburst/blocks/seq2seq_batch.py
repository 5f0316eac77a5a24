"""Batches of the encoder-decoder: checks whole batches in the format of transformers and shards them over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst.amounts import short_text
from bmburst.attention.api import resolve_group
from bmburst.blocks.seq2seq_config import Pairs, Seq2SeqConfig
from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError
from bmburst.loss import IGNORE_INDEX, require_ids
from bmburst.schedule.documents import Documents
from bmburst.sequence import SequenceShard, ShardedBatch

DocumentsOption = Documents | tuple[Documents, ...] | None
PairsOption = Pairs | Sequence[Pairs] | None
"""The same pairs for all samples, or one `Pairs` per sample; None: each sample is one pair without padding."""


class Masks(NamedTuple):
    """The masks of a batch; None: the attention modules' own masks."""

    source: DocumentsOption
    target: DocumentsOption
    cross: DocumentsOption


class Seq2SeqBatch(NamedTuple):
    """This rank's shard of a batch, returned by `Seq2SeqCut.batch`."""

    source: ShardedBatch
    """The encoder's input; its labels are not used."""
    target: ShardedBatch
    """The decoder's input, and the label of each of its tokens."""
    lengths: tuple[int, int] | tuple[None, None]
    """Tokens of the whole source and of the whole target, without padding; None: the lengths of the masks."""
    masks: Masks


class _Whole(NamedTuple):
    """A checked batch before it is sharded."""

    source: Tensor
    target: Tensor
    labels: Tensor
    masks: Masks
    cuts: tuple[SequenceShard, SequenceShard]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqCut:
    """Shards whole batches for a model, which holds one as `Seq2Seq.cut`.

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
        """Return this rank's shard of a batch of whole sequences. Every rank of the group passes the same batch.

        Arguments have the names and meaning of transformers, so a collated batch can be passed unchanged. Every rank
        of the group must call this method: the first calls compare the batches of the ranks.

        Args:
            input_ids: The source, `[batch, source_tokens]`, int64 or int32.
            labels: The decoder's target, `[batch, target_tokens]`, int64 or int32, not shifted; `IGNORE_INDEX`: no
                loss.
            attention_mask: 1 for tokens of the source, 0 for padding at its end; shape of `input_ids`.
            decoder_input_ids: The decoder's input; shape of the labels. Default: in each pair,
                `decoder_start_token_id` followed by the labels shifted by one token, with `pad_token_id` for
                `IGNORE_INDEX`.
            pairs: Source-target pairs that are packed into each sequence. Tokens after the last pair are padding.

        Raises:
            UserError: Shapes do not match, an id is out of range (checked on CPUs), a sequence is longer than the
                position table, padding is not at the end, arguments exclude each other, or ranks have different
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
        """Return the decoder's input: `shift_tokens_right` of transformers, applied to each pair."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise UserError("the configuration has no decoder_start_token_id\nfix: give it, or decoder_input_ids")
        shifted = labels.roll(1, 1)
        shifted[:, 0] = start
        for row, pair in enumerate(each):
            # A start beyond the labels raises an error later.
            shifted[row, [place for place in pair.target.starts if place < labels.shape[1]]] = start
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
    """Return the pairs of each sample; empty if every sample is one pair without padding."""
    if attention_mask is not None:
        if pairs is not None:
            raise UserError("attention_mask with pairs\nfix: give pairs only; tokens after the last one are padding")
        return _padded(source, attention_mask, targets)
    each = (pairs,) * len(source) if isinstance(pairs, Pairs) else pairs or ()
    if not isinstance(each, Sequence) or not all(isinstance(pair, Pairs) for pair in each):
        raise UserError(f"pairs must be Pairs, got {short_text(pairs)}\nfix: Pairs(sources, targets), or one a sample")
    if each and len(each) != len(source):
        raise UserError(f"pairs of {len(each)} samples for a batch of {len(source)}\nfix: one Pairs, or one a sample")
    return tuple(each)


def _padded(source: Tensor, attention_mask: Tensor, targets: int) -> tuple[Pairs, ...]:
    """Return one pair per sample, without its padding; empty if there is no padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != source.shape:
        found = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise UserError(f"attention_mask is {found}\nallowed: {list(source.shape)}, as input_ids\nfix: the tokenizer's")
    seen = attention_mask != 0
    counts: list[int] = seen.sum(1).tolist()
    if bool((~seen[:, :-1] & seen[:, 1:]).any()):
        raise UserError(
            "attention_mask has padding before a token\nallowed: after the last token of a sample\n"
            "fix: tokenizer.padding_side = 'right'"
        )
    if 0 in counts:
        raise UserError(f"attention_mask shows no token of sample {counts.index(0)}\nfix: leave the sample out")
    return () if min(counts) == source.shape[1] else tuple(Pairs((count,), (targets,)) for count in counts)


def _of_samples(masks: list[Documents]) -> DocumentsOption:
    """Return one mask per sample, or a single mask if all are equal: one attention call then computes all samples."""
    if not masks:
        return None
    return masks[0] if all(mask == masks[0] for mask in masks) else tuple(masks)
