"""Completes and checks whole batches of transformers before the split: labels, position ids, padding, documents.

A batch may say in several ways where documents begin: by position ids that restart, an attention_mask whose values
number the documents, `seq_idx`, or `cu_seq_lens_q`. If there are several, they must agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch import Tensor

from bmburst.amounts import whole_number
from bmburst.attention.options import require_numbers
from bmburst.comm.checks import CheckedCommunicator, contents, describe_tensors
from bmburst.config.foreign import by_name
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents, lengths_between
from bmburst.schedule.layout import Balanced, make_layout, padded_layout
from bmburst.schedule.mask import Causal
from bmburst.schedule.tree import Tree
from bmburst.sequence import SequenceShard
from bmburst.sequence.packed_tree import PackedTree, require_tree, tree_facts
from bmburst_ops import IGNORE_INDEX

DocumentsOption = Documents | Sequence[Documents] | None

READ = "read"
BATCH_KEYS: Mapping[str, str] = MappingProxyType(
    by_name(
        {
            READ: """
                input_ids labels position_ids attention_mask cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k
                seq_idx
            """,
            "no effect, because it is for samplers": "length",
            "no effect, because it is for collators": "special_tokens_mask",
            "no effect, because it describes the text": "offset_mapping overflow_to_sample_mapping",
        }
    )
)
"""The keys of a batch that are understood, and what is done with each. All others are refused."""


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A checked batch before the split. Tensors are int64, `[batch, length]`."""

    input_ids: Tensor
    labels: Tensor
    """The label of each token: the token after it, or `IGNORE_INDEX`."""
    position_ids: Tensor
    documents: tuple[Documents | Tree, ...]
    """One for all samples, one per sample, or empty if every sample is one document without padding."""
    largest: int | None
    """The largest id of tokens and labels; None on a GPU, to avoid a synchronization."""
    real: Tensor
    """1 for tokens, 0 for padding."""
    tree: PackedTree | None = None
    """The rows of the only sample, if it is a packed tree."""
    before: Tensor | None = None
    """Tokens of padding before each sample, `[batch, 1]`, that its positions count by default; None: none."""


def batch_of_tree(tree: PackedTree, others: Mapping[str, object]) -> WholeBatch:
    """Return the batch of rows packed as trees; UserError for another value, or with another argument."""
    require_tree(tree)
    given = sorted(name for name, value in others.items() if value is not None)
    if given:
        raise UserError(
            f"{given[0]} cannot be combined with a tree, which has its own\n"
            "fix: pass rows and their labels to bmburst.pack_tree, and nothing but tree= to part"
        )
    largest = max(int(tree.tokens.max()), int(tree.labels.max()))
    ids, labels, positions = (each[None] for each in (tree.tokens, tree.labels, tree.positions))
    return WholeBatch(ids, labels, positions, (tree.mask,), largest, torch.ones_like(ids), tree)


def whole_batch(
    input_ids: Tensor | None,
    labels: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    documents: DocumentsOption,
    others: Mapping[str, object],
) -> WholeBatch:
    """Return the batch with defaults for missing arguments; see `SplitSequences.part`.

    Raises:
        UserError: Types, dtypes or shapes differ, an id is below 0, there is padding inside a document, arguments
            cannot be combined or contradict each other, or another key is unknown.
    """
    if input_ids is None or not _are_integers(input_ids) or input_ids.dim() != 2 or 0 in input_ids.shape:
        is_batch = isinstance(input_ids, Mapping)  # of a collator or a tokenizer
        fix = "part(**batch)" if is_batch else "call the tokenizer with return_tensors='pt'"
        raise UserError(
            f"input_ids must be token ids [batch, length], got {_kind(input_ids)}\n"
            f"allowed: a tensor of int64 with one token or more\nfix: {fix}"
        )
    _require_known(others)
    require_numbers("input_ids", input_ids)
    input_ids = input_ids.long()
    labels, position_ids = (
        _shaped(name, tensor, input_ids, integers=True)
        for name, tensor in (("labels", labels), ("position_ids", position_ids))
    )
    largest = _largest(input_ids, labels)
    numbers = _numbers(_shaped("attention_mask", attention_mask, input_ids, integers=False))
    marks = _marks(input_ids, numbers, others)
    if documents is None:
        packed = _documents(position_ids, numbers, marks)
    else:
        if numbers is not None or marks:
            name = next(iter(marks), "attention_mask")
            raise UserError(
                f"documents cannot be combined with {name} that has padding or bounds of documents\n"
                f"fix: leave {name} out; tokens after the documents are padding"
            )
        packed = _given(documents, input_ids)
    are_given = position_ids is not None or documents is not None or bool(marks)
    if position_ids is None:
        position_ids = _positions(input_ids, packed if documents is not None or marks else ())
    own = _labels(input_ids, packed) if labels is None else labels
    shifted = torch.nn.functional.pad(own[:, 1:], (0, 1), value=IGNORE_INDEX)
    real = torch.ones_like(input_ids) if numbers is None else (numbers > 0).long()
    for row, mask in enumerate(packed if documents is not None else ()):
        real[row if len(packed) > 1 else slice(None), mask.length :] = 0
    before = None if are_given or numbers is None else (numbers > 0).long().argmax(1, keepdim=True)
    counted = _counted(shifted, packed, numbers)
    return WholeBatch(input_ids, counted, position_ids, packed, largest, real, before=before)


def _require_known(others: Mapping[str, object]) -> None:
    """Check that the further keys of a batch are understood. A key whose value is None says nothing."""
    unknown = sorted(name for name, value in others.items() if name not in BATCH_KEYS and value is not None)
    if unknown:
        raise UserError(
            f"a batch has {unknown[0]}, which split sequences cannot use\n"
            f"allowed: {', '.join(name for name, done in BATCH_KEYS.items() if done == READ)}\n"
            f"fix: a collator without {unknown[0]}, if the loss does not depend on it"
        )


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested


def _are_integers(value: object) -> bool:
    """Return whether a value is a dense tensor of integers."""
    return _is_dense(value) and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:  # it has no shape
        return f"nested {value.dtype}"
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


def _numbers(attention_mask: Tensor | None) -> Tensor | None:
    """Return the number of each token's document, 0 for padding; None for a mask of ones."""
    if attention_mask is None or bool((attention_mask == 1).all()):
        return None
    numbers = attention_mask.long()
    if not bool(((numbers == attention_mask) & (numbers >= 0)).all()):
        raise UserError(
            "attention_mask holds other values than 0 and 1, or numbers of documents\n"
            "allowed: 0 for padding; for tokens 1, or 1, 2, 3, ... by document\n"
            "fix: the tokenizer's attention_mask; documents by position_ids or documents="
        )
    return numbers


def _shaped(name: str, tensor: object, input_ids: Tensor, *, integers: bool) -> Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor) or not (_are_integers if integers else _is_dense)(tensor):
        what = "integers" if integers else "0 and 1"
        raise UserError(
            f"{name} must be a tensor of {what}, got {_kind(tensor)}\n"
            f"allowed: {list(input_ids.shape)}, dense\nfix: pass a tensor of the shape of input_ids"
        )
    require_numbers(name, tensor)
    if name == "position_ids" and tensor.dim() == 2 and tensor.shape == (1, input_ids.shape[1]):
        tensor = tensor.expand(len(input_ids), -1)
    if tensor.shape != input_ids.shape:
        raise UserError(
            f"{name} must be {list(input_ids.shape)} as input_ids are, got {list(tensor.shape)}\n"
            "fix: pass the whole batch's tensor, neither shifted nor cut"
        )
    return tensor.to(input_ids.device, torch.int64 if integers else None)


def _marks(input_ids: Tensor, numbers: Tensor | None, others: Mapping[str, object]) -> dict[str, Tensor]:
    """Return by argument what differs between neighbouring documents, int64 `[batch, length]`, without position_ids.

    Args:
        input_ids: `[batch, length]`.
        numbers: As `_numbers` returns them.
        others: Further keys of the batch.
    """
    found = {}
    if numbers is not None and bool((numbers > 1).any()):
        found["attention_mask"] = numbers
    seq_idx = _shaped("seq_idx", others.get("seq_idx"), input_ids, integers=True)
    if seq_idx is not None:
        found["seq_idx"] = seq_idx
    for side in "qk":
        edges, longest = others.get(f"cu_seq_lens_{side}"), others.get(f"max_length_{side}")
        if edges is not None:
            lengths = lengths_between(edges)
            found[f"cu_seq_lens_{side}"] = _of_lengths(f"cu_seq_lens_{side}", lengths, input_ids)
            if longest is not None:
                _require_longest(f"max_length_{side}", longest, max(lengths))
    return found


def _of_lengths(name: str, lengths: tuple[int, ...], input_ids: Tensor) -> Tensor:
    """Return the number of each token's document, for lengths of the documents of all samples one after another."""
    batch, length = input_ids.shape
    numbers = torch.repeat_interleave(torch.tensor(lengths))
    ends = numbers[length::length] != numbers[length - 1 : -1 : length]
    if len(numbers) != batch * length or not bool(ends.all()):
        raise UserError(
            f"{name} ends at {len(numbers)} in a batch of {batch} x {length} tokens, or a document is in two samples\n"
            f"allowed: cumulative lengths from 0 to {batch * length}\n"
            f"fix: {name} of the whole batch, as DataCollatorWithFlattening returns it"
        )
    return numbers.reshape(batch, length).to(input_ids.device)


def _require_longest(name: str, value: object, longest: int) -> None:
    """Check the length that attention kernels of transformers are told."""
    number = whole_number(name, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, 1)
    if number < longest:
        raise UserError(f"{name} is {number}, but a document has {longest} tokens\nfix: {name}={longest}")


def _documents(
    position_ids: Tensor | None, numbers: Tensor | None, marks: Mapping[str, Tensor]
) -> tuple[Documents, ...]:
    """Return the documents that position ids, padding and other arguments mark."""
    if position_ids is not None:  # constant where positions increase by 1
        steps = torch.arange(position_ids.shape[1], device=position_ids.device)
        marks = {"position_ids": position_ids - steps, **marks}
    if numbers is None and not marks:
        return ()
    first = next(iter(marks.values())) if numbers is None else numbers
    hidden = torch.zeros_like(first, dtype=torch.bool) if numbers is None else numbers == 0
    starts = _starts(marks, hidden)
    found = []
    for sample, row in enumerate(hidden):
        own = {name: mark[sample] for name, mark in marks.items()}
        found.append(_of_sample(sample, row, starts[sample], own))
    alone = numbers is None and all(len(mask.lengths) == 1 for mask in found)
    return () if alone else _one_if_equal(found)


def _starts(marks: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Return whether a document begins at the second of two neighbouring tokens, bools `[batch, length - 1]`.

    Raises:
        UserError: Two arguments contradict each other.
    """
    neighbours = ~(hidden[:, 1:] | hidden[:, :-1])
    starts = {name: (mark.diff() != 0) & neighbours for name, mark in marks.items()}
    first = next(iter(starts), None)
    for name, other in starts.items():
        differ = (other != starts[first or name]).nonzero()
        if len(differ):
            sample, place = differ[0].tolist()
            at, not_at = (name, first) if bool(other[sample, place]) else (first, name)
            raise UserError(
                f"{first} and {name} contradict each other in sample {sample}\n"
                f"at token {place + 1} a document begins by {at}, but not by {not_at}\n"
                "fix: leave one of them out; without position_ids, positions restart in each document"
            )
    return starts[first] if first is not None else torch.zeros_like(neighbours)


def _of_sample(sample: int, hidden: Tensor, starts: Tensor, marks: Mapping[str, Tensor]) -> Documents:
    """Return a sample's documents. Padding before a document is a document of its own.

    Args:
        sample: Its index, for messages.
        hidden: True at padding, `[length]`.
        starts: Whether a document begins between two neighbours that are no padding, `[length - 1]`.
        marks: As `_marks` returns them, and position ids less their places; `[length]`.
    """
    lengths = _edges(starts | hidden.diff())
    edges = (0, *accumulate(lengths))
    are_padding = hidden[list(edges[:-1])].tolist()
    texts = [i for i, is_padding in enumerate(are_padding) if not is_padding]
    between = [i for i in range(texts[0], texts[-1]) if are_padding[i]] if texts else []
    broken = [i for i in between if not _are_two(edges[i], edges[i + 1], marks)]
    numbers = marks["attention_mask"][[edges[i] for i in texts]].tolist() if "attention_mask" in marks else []
    if not texts or broken or len(set(numbers)) < len(numbers):
        where = "no token" if not texts else "padding between tokens" if broken else "a document in two places"
        raise UserError(
            f"attention_mask of sample {sample} has {where}\n"
            "allowed: padding before or behind a document, which is in one place\n"
            "fix: pack documents (documents=, or position_ids) instead"
        )
    return Documents(lengths[: texts[-1] + 1])


def _are_two(start: int, stop: int, marks: Mapping[str, Tensor]) -> bool:
    """Return whether the token before some padding and the token behind it are of two documents."""
    ends = {name: (int(mark[start - 1]), int(mark[stop])) for name, mark in marks.items()}
    if "position_ids" in ends:  # positions may count the padding or not: only smaller ones are another document's
        before, behind = ends.pop("position_ids")
        if behind + stop <= before + start - 1:
            return True
    return any(before != behind for before, behind in ends.values())


def _given(documents: Documents | Sequence[Documents], input_ids: Tensor) -> tuple[Documents, ...]:
    """Return the documents of the argument, checked."""
    batch, length = input_ids.shape
    if isinstance(documents, Tree):
        raise UserError(
            f"documents must be bmburst.Documents, got {documents}\n"
            "fix: split.part(tree=bmburst.pack_tree(rows)): a tree has several next tokens where it branches"
        )
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


def _counted(labels: Tensor, documents: tuple[Documents, ...], numbers: Tensor | None) -> Tensor:
    """Return shifted labels without those of padding tokens and of tokens that padding follows.

    An attention_mask that marks padding or documents also says which labels count: a document's first token is no label
    of the token before it.
    """
    counted = labels.clone()
    for row, mask in enumerate(documents):
        rows = row if len(documents) > 1 else slice(None)
        counted[rows, mask.length - 1 :] = IGNORE_INDEX
        if numbers is not None:
            counted[rows, [start - 1 for start in mask.starts[1:]]] = IGNORE_INDEX
    if numbers is not None:
        counted[numbers == 0] = IGNORE_INDEX
    return counted


def shard_of(whole: WholeBatch, layout: str, comm: CheckedCommunicator) -> SequenceShard:
    """Return the shard of this rank.

    Raises:
        UserError: The layout is "balanced", which needs one mask, and samples have documents of their own.
    """
    length = whole.input_ids.shape[1]
    mask = whole.documents[0] if len(whole.documents) == 1 else Causal()
    made = padded_layout(layout, comm.size, max(length, comm.size), Causal())
    if not isinstance(made, Balanced):
        return SequenceShard(length, made, comm.rank)
    if len(whole.documents) > 1:
        raise UserError(
            "layout 'balanced' needs one mask, but each sample of the batch has documents or padding of its own\n"
            "fix: batches of 1 sample, or SplitSequences(mesh, layout='zigzag')"
        )
    # As attention makes it from the mask.
    own = make_layout(layout, comm.size, made.tokens, mask, length if mask.length is None else mask.length)
    return SequenceShard(length, own, comm.rank)


def ends_of(whole: WholeBatch, cut: SequenceShard) -> tuple[int, ...]:
    """Return the largest position + 1 of each rank and of each row of a tree."""
    cuts = [replace(cut, rank=rank) for rank in range(cut.layout.size)]
    of_rows = () if whole.tree is None else (len(path) + 1 for path in whole.tree.paths)
    return (*(int(one.take(whole.position_ids).max()) + 1 for one in cuts), *of_rows)


def signature_of(whole: WholeBatch) -> str:
    """Return a text that differs for different batches; synchronizes with their device."""
    tensors = (whole.input_ids, whole.labels, whole.position_ids)
    names = ("input_ids", "labels", "position_ids")
    told = [f"{name} {contents(tensor)}" for name, tensor in zip(names, tensors, strict=True)]
    documents = "; ".join(map(str, whole.documents)) or "one"
    if whole.tree is not None:
        return f"batch\n{tree_facts(whole.tree)}"
    return "\n".join(["batch", f"shape {list(whole.input_ids.shape)}", *told, f"documents {documents}"])


def checked_count(valid: Tensor | int | None) -> tuple[Tensor | int | None, str]:
    """Return the number of labels, checked, and as a text for the ranks to compare; the host does not wait for it."""
    is_count = isinstance(valid, int) and not isinstance(valid, bool) and valid >= 0
    is_tensor = _are_integers(valid) and isinstance(valid, Tensor) and valid.numel() == 1
    if valid is not None and not is_count and not is_tensor:
        got = describe_tensors(valid) if isinstance(valid, Tensor) else repr(valid)
        raise UserError(f"valid must be a number of labels, got {got}\nfix: what split.valid(*parts) returns, or None")
    if isinstance(valid, Tensor):
        valid = valid.reshape(())  # that of the loss
        return valid, "on the device" if valid.is_cuda else str(valid.item())
    return valid, str(valid)


def nan_of_none(labels: Tensor | int) -> Tensor | float:
    """Return what is added to a mean over labels: 0, or NaN if there is none, as in transformers."""
    if isinstance(labels, Tensor):
        return torch.where(labels > 0, 0.0, math.nan)
    return 0.0 if labels else math.nan


def number_of(loss: Tensor) -> float:
    """Return a loss as a number; blocks the host. UserError unless it is a tensor of one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex() or loss.is_meta:
        got = describe_tensors(loss) if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"a loss must be a tensor of one number, got {got}\nfix: what part.loss(model) returns")
    return float(loss.item())
