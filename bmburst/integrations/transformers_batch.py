"""Completes and checks whole batches of transformers before the split: labels, position ids, padding, documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bmburst.attention.options import require_numbers
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents
from bmburst_ops import IGNORE_INDEX

DocumentsOption = Documents | Sequence[Documents] | None


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A checked batch before the split. Tensors are int64, `[batch, length]`."""

    input_ids: Tensor
    labels: Tensor
    """The label of each token: the token after it, or `IGNORE_INDEX`."""
    position_ids: Tensor
    documents: tuple[Documents, ...]
    """One for all samples, one per sample, or empty if every sample is one document without padding."""
    largest: int | None
    """The largest id of tokens and labels; None on a GPU, to avoid a synchronization."""


def whole_batch(
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    documents: DocumentsOption,
) -> WholeBatch:
    """Return the batch with defaults for missing arguments; see `SplitSequences.part`.

    Raises:
        UserError: Types, dtypes or shapes differ, an id is below 0, there is padding between tokens, or arguments
            cannot be combined.
    """
    if not _are_integers(input_ids) or input_ids.dim() != 2 or 0 in input_ids.shape:
        raise UserError(
            f"input_ids must be token ids [batch, length], got {_kind(input_ids)}\n"
            "allowed: a tensor of int64 with one token or more\nfix: call the tokenizer with return_tensors='pt'"
        )
    given = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "attention_mask": attention_mask}
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            require_numbers(name, tensor)
    input_ids = input_ids.long()
    labels, position_ids = (
        _shaped(name, tensor, input_ids, integers=True)
        for name, tensor in (("labels", labels), ("position_ids", position_ids))
    )
    largest = _largest(input_ids, labels)
    hidden = _hidden(_shaped("attention_mask", attention_mask, input_ids, integers=False))
    packed = _documents(input_ids, position_ids, hidden, documents)
    if position_ids is None:
        restarted = packed if documents is not None else ()
        position_ids = _positions(input_ids, restarted)
    own = _labels(input_ids, packed) if labels is None else labels
    shifted = torch.nn.functional.pad(own[:, 1:], (0, 1), value=IGNORE_INDEX)
    return WholeBatch(input_ids, _counted(shifted, packed, hidden), position_ids, packed, largest)


def _are_integers(value: object) -> bool:
    """Return whether a value is a dense tensor of integers."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)}" + ("" if value.layout == torch.strided else f" of {value.layout}")


def _largest(input_ids: Tensor, labels: Tensor | None) -> int | None:
    """Check ids and labels and return the largest; None, without checks, for tensors on a GPU."""
    if input_ids.is_cuda:
        return None
    if bool((input_ids < 0).any()):
        raise UserError(
            f"input_ids hold {int(input_ids.min())}\nallowed: at least 0\n"
            "fix: use the padding token; -100 is for labels only"
        )
    if labels is None:
        return int(input_ids.max())
    wrong = (labels < 0) & (labels != IGNORE_INDEX)
    if bool(wrong.any()):
        raise UserError(
            f"labels hold {int(labels[wrong][0])}\nallowed: at least 0, or {IGNORE_INDEX}\n"
            f"fix: mark tokens without a loss by {IGNORE_INDEX}"
        )
    return max(int(input_ids.max()), int(labels.max()))


def _hidden(attention_mask: Tensor | None) -> Tensor | None:
    """Return a mask that is true at padding; None if there is no padding."""
    if attention_mask is None or bool((attention_mask == 1).all()):
        return None
    hidden = attention_mask == 0
    if not bool((hidden | (attention_mask == 1)).all()):
        raise UserError(
            "attention_mask holds other values than 0 and 1\n"
            "allowed: 1 for tokens, 0 for padding; fix: pack documents by documents= or position_ids"
        )
    return hidden


def _shaped(name: str, tensor: Tensor | None, input_ids: Tensor, *, integers: bool) -> Tensor | None:
    if tensor is None:
        return None
    if not (_are_integers(tensor) if integers else isinstance(tensor, Tensor) and tensor.layout == torch.strided):
        what = "integers" if integers else "0 and 1"
        raise UserError(
            f"{name} must be a tensor of {what}, got {_kind(tensor)}\n"
            f"allowed: {list(input_ids.shape)}, dense\nfix: pass a tensor of the shape of input_ids"
        )
    if name == "position_ids" and tensor.dim() == 2 and tensor.shape == (1, input_ids.shape[1]):
        tensor = tensor.expand(len(input_ids), -1)
    if tensor.shape != input_ids.shape:
        raise UserError(
            f"{name} must be {list(input_ids.shape)} as input_ids are, got {list(tensor.shape)}\n"
            "fix: pass the whole batch's tensor, neither shifted nor cut"
        )
    return tensor.to(input_ids.device, torch.int64 if integers else None)


def _documents(
    input_ids: Tensor, position_ids: Tensor | None, hidden: Tensor | None, documents: DocumentsOption
) -> tuple[Documents, ...]:
    """Return the given documents, or those that padding or restarting position ids mark."""
    if documents is not None:
        if hidden is not None:
            raise UserError(
                "documents cannot be combined with an attention_mask that has padding\n"
                "fix: leave attention_mask out; tokens after the documents are padding"
            )
        return _given(documents, input_ids)
    if hidden is not None:
        return _one_if_equal([_without_padding(row, sample) for sample, row in enumerate(hidden)])
    if position_ids is None:
        return ()
    found = [_edges(row.diff() != 1) for row in position_ids]
    return () if all(len(lengths) == 1 for lengths in found) else _one_if_equal([Documents(n) for n in found])


def _given(documents: Documents | Sequence[Documents], input_ids: Tensor) -> tuple[Documents, ...]:
    batch, length = input_ids.shape
    if not isinstance(documents, Documents | Sequence):
        raise UserError(
            f"documents must be bmburst.Documents, or a list of them, got {type(documents).__name__}\n"
            "fix: bmburst.Documents(lengths) of all samples, or one for each"
        )
    masks = (documents,) if isinstance(documents, Documents) else tuple(documents)
    wrong = [mask for mask in masks if not isinstance(mask, Documents)]
    if wrong:
        raise UserError(
            f"documents must be causal bmburst.Documents, or a list of them, got a list with {wrong[0]}\n"
            "fix: bmburst.Documents(lengths) of all samples, or one for each"
        )
    if len(masks) not in (1, batch):
        raise UserError(
            f"got documents of {len(masks)} samples for a batch of {batch}\n"
            "fix: give one for all samples, or one for each"
        )
    for mask in masks:
        if not mask.causal:
            raise UserError(
                f"documents must be causal bmburst.Documents, got {mask}\n"
                "fix: bmburst.Documents(lengths), without causal=False"
            )
        if mask.length > length:
            mask.require(length)
    return _one_if_equal(masks)


def _without_padding(hidden: Tensor, sample: int) -> Documents:
    """Return a sample's tokens as a document, after a document of the padding before them, if any."""
    edges = _edges(hidden.diff())
    kinds = [bool(hidden[sum(edges[:i])]) for i in range(len(edges))]
    if kinds.count(False) != 1:
        where = "no token" if False not in kinds else "padding between tokens"
        raise UserError(
            f"attention_mask of sample {sample} has {where}\n"
            "allowed: padding before or behind the tokens; fix: pack documents (documents=, or position_ids) instead"
        )
    return Documents(tuple(edges[: kinds.index(False) + 1]))


def _edges(changes: Tensor) -> tuple[int, ...]:
    """Return the lengths of the pieces between changes; `changes` is `[length - 1]` bools."""
    inner = (changes.nonzero().flatten() + 1).tolist()
    edges = [0, *inner, len(changes) + 1]
    return tuple(after - before for before, after in pairwise(edges))


def _one_if_equal(masks: Sequence[Documents]) -> tuple[Documents, ...]:
    return tuple(masks[:1]) if len(set(masks)) == 1 else tuple(masks)


def _positions(input_ids: Tensor, documents: tuple[Documents, ...]) -> Tensor:
    """Return positions that restart at each document, and 0 after the last."""
    batch, length = input_ids.shape
    rows = []
    for mask in documents or (Documents((length,)),):
        row = torch.zeros(length, dtype=torch.int64)
        row[: mask.length] = torch.cat([torch.arange(n) for n in mask.lengths])
        rows.append(row)
    return torch.stack(rows).expand(batch, -1).to(input_ids.device)


def _labels(input_ids: Tensor, documents: tuple[Documents, ...]) -> Tensor:
    """Return the tokens as labels, except the first of each document, which no token predicts."""
    labels = input_ids.clone()
    for row, mask in enumerate(documents):
        labels[row if len(documents) > 1 else slice(None), list(mask.starts)] = IGNORE_INDEX
    return labels


def _counted(labels: Tensor, documents: tuple[Documents, ...], hidden: Tensor | None) -> Tensor:
    """Return shifted labels without those of padding tokens and of tokens that padding follows."""
    counted = labels.clone()
    for row, mask in enumerate(documents):
        rows = row if len(documents) > 1 else slice(None)
        counted[rows, mask.length - 1 :] = IGNORE_INDEX
    if hidden is not None:
        counted[hidden] = IGNORE_INDEX
    return counted
