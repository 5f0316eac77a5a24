"""Copies a rank's tokens out of a whole tensor and back, shifts and masks labels, and checks the inputs of `shard`."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bmburst.amounts import array_of, as_whole, short_text
from bmburst.attention.options import require_dense, require_numbers, require_own_memory, require_tensor
from bmburst.comm.checks import contents, describe_tensors
from bmburst.errors import UserError, one_line
from bmburst.schedule.layout import Layout
from bmburst.schedule.mask import Mask, make_mask
from bmburst_ops import IGNORE_INDEX
from bmburst_ops.autocast import no_autocast

Ids = npt.NDArray[np.int64]
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)


def dimension_of(x: Tensor, dim: int) -> int:
    """Return a dimension as a non-negative index; UserError if `x` has none such, or is not a plain tensor."""
    if not isinstance(x, Tensor):
        raise UserError(f"a sequence to split must be a torch tensor, got {type(x).__name__}\nfix: torch.as_tensor(x)")
    require_dense("a sequence to split", x)
    require_own_memory("a sequence to split", x)
    require_numbers("a sequence to split", x)
    if as_whole(dim) is None or not -x.dim() <= dim < x.dim():
        allowed = f"{-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor with at least one dimension"
        raise UserError(
            f"dim {dim!r} is not a dimension of a tensor of shape {list(x.shape)}\nallowed: {allowed}\n"
            "fix: give the dimension of the tokens"
        )
    return dim % x.dim()


def require_batch(tokens: Tensor, labels: Tensor | None, length: int) -> None:
    """Raise UserError unless tokens, and labels if given, are tensors `[batch, length]` of whole numbers."""
    given = [("tokens", tokens), *([] if labels is None else [("labels", labels)])]
    for name, tensor in given:
        require_tensor(name, tensor, f"[batch, {length}]")
        require_numbers(name, tensor)
    shape = (len(tokens) if tokens.dim() else 0, length)
    if tokens.shape != shape or (labels is not None and labels.shape != shape):
        shapes = " and ".join(str(list(t.shape)) for t in (tokens, labels) if t is not None)
        names = "tokens have" if labels is None else "tokens and labels have"
        raise UserError(
            f"{names} shape {shapes}\nallowed: [batch, {length}], as the sequence has {length} tokens\n"
            f"fix: pass whole sequences, or make the SequenceShard for their length"
        )
    for name, tensor in given:
        if tensor.dtype not in _SIGNED:
            fix = "pass token ids; to split other tensors, use bmburst.shard"
            if not tensor.dtype.is_signed and tensor.dtype != torch.bool:
                fix = f"{name}.long()"
            raise UserError(
                f"{name} have dtype {tensor.dtype}\n"
                f"allowed: signed whole numbers, such as torch.int64; labels also hold {IGNORE_INDEX}\nfix: {fix}"
            )


def require_value(x: Tensor, pad_value: float) -> None:
    """Raise UserError unless the dtype of a tensor can represent the padding value; floating-point dtypes round it."""
    try:  # checked on all ranks: some may have no padding
        made = torch.full((), pad_value, dtype=x.dtype, device="cpu").item()
        fits = math.isfinite(made) or not math.isfinite(pad_value) if x.is_floating_point() else made == pad_value
    except (TypeError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise UserError(f"pad_value {pad_value!r} is not a value of {x.dtype}\nfix: a number of that dtype")


def require_device(device: object) -> None:
    """Raise UserError unless tensors can be made on a device; None is the default device."""
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]  # it raises then
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the last: torch has no such backend
        raise UserError(
            f"device {device!r} cannot be used: {one_line(error)[:100]}\n"
            "fix: the device of the tokens, such as tokens.device"
        ) from None


def pair_at(sequence: Callable[[range], tuple[Ids, Ids]], positions: range) -> tuple[Ids, Ids]:
    """Return the inputs and labels of a sequence at some positions, as the caller's function reads them.

    Raises:
        UserError: It is no function, or does not return two arrays of whole numbers, one for each position.
    """
    if not callable(sequence):
        raise UserError(
            f"sequence must be a function, got {type(sequence).__name__}\n"
            "allowed: it maps a range of positions to inputs and labels there\n"
            "fix: lambda at: (tokens[at.start : at.stop : at.step], labels[at.start : at.stop : at.step])"
        )
    found = sequence(positions)
    arrays = [array_of("what sequence returns", each) for each in found] if isinstance(found, tuple | list) else []
    are_ids = all(each.dtype.kind in "iu" or not each.size for each in arrays)
    if not are_ids or [each.shape for each in arrays] != [(len(positions),)] * 2:
        got = ", ".join(f"{each.dtype} of shape {list(each.shape)}" for each in arrays) or type(found).__name__
        raise UserError(
            f"sequence returned {got} for {len(positions)} positions\n"
            f"allowed: inputs and labels, each whole numbers [{len(positions)}]\nfix: one of each for each position"
        )
    return arrays[0], arrays[1]


def take(x: Tensor, layout: Layout, rank: int, dim: int, pad_value: float) -> Tensor:
    """Return a rank's tokens of `x`, whose dimension `dim` is the sequence, padded at the end."""
    length, parts = x.shape[dim], []
    for run in layout.runs(rank):
        real = run.real(length)
        indices = slice(run.start, run.start + run.stride * real, run.stride) if real else slice(0, 0)
        parts.append(x[(slice(None),) * dim + (indices,)])
        if real < run.tokens:
            parts.append(x.new_full((*x.shape[:dim], run.tokens - real, *x.shape[dim + 1 :]), pad_value))
    with no_autocast(x.device.type):  # under autocast, torch.cat refuses 16-bit tensors of another dtype
        return torch.cat(parts, dim)


def put(whole: Tensor, part: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Write a rank's real tokens to their places in `whole`."""
    before, length = (slice(None),) * dim, whole.shape[dim]
    for run in layout.runs(rank):
        real = run.real(length)
        if real:
            places = slice(run.start, run.start + run.stride * real, run.stride)
            whole[(*before, places)] = part[(*before, slice(run.offset, run.offset + real))]
    return whole


def following(tokens: Tensor, masks: tuple[Mask, ...], lengths: list[int]) -> Tensor:
    """Return the label of each token: the next token of its document.

    `masks` and `lengths` have one entry for all rows, one per row, or none.

    Raises:
        UserError: A mask is a tree with branches.
    """
    if any(len(mask.levels) > 1 for mask in masks):
        raise UserError(
            "a tree has several next tokens where it branches, so labels cannot be made from its tokens\n"
            "fix: pass labels; bmburst.pack_tree(rows) makes them with the tree"
        )
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        last = torch.tensor([*mask.starts[1:], length], dtype=torch.int64, device=tokens.device) - 1
        labels[row if len(masks) > 1 else slice(None), last] = IGNORE_INDEX
    return labels


def document_positions(positions: Tensor, masks: tuple[Mask, ...], batch: int) -> Tensor:
    """Return the position of each local token in its document, `[batch, local_tokens]`.

    Positions of padding continue those of the last document. `masks` has one entry for all rows, one per row, or none.

    Args:
        positions: The position of each local token in the sequence, int64 `[local_tokens]`.
        masks: The masks.
        batch: Number of rows.
    """
    rows = []
    for mask in masks:
        starts, offsets = (
            torch.tensor(n or (0,), dtype=torch.int64, device=positions.device)
            for n in (mask.starts, mask.position_offsets)
        )
        rows.append(positions - offsets[torch.searchsorted(starts, positions, right=True) - 1])
    return torch.stack(rows or [positions]).expand(batch, -1)


def without_padding(labels: Tensor, lengths: list[int]) -> Tensor:
    """Return labels with `IGNORE_INDEX` from the given lengths on: one length for all rows, or one per row."""
    if all(length == labels.shape[1] for length in lengths):
        return labels
    column = torch.tensor(lengths, device=labels.device)[:, None]
    return labels.masked_fill(torch.arange(labels.shape[1], device=labels.device) >= column, IGNORE_INDEX)


def batch_facts(tokens: Tensor, labels: Tensor | None, documents: object) -> str:
    """Describe what must be equal for a batch on all ranks of a group."""
    given = [("tokens", tokens), *([] if labels is None else [("labels", labels)])]
    facts = [f"{name} {told}" for name, tensor in given for told in (describe_tensors(tensor), contents(tensor))]
    return "\n".join(["SequenceShard.batch", *facts, f"documents {documents}"])


def fitting(mask: Mask | str | None, length: int) -> Mask | None:
    """Return the mask, or None, after a check that it fits `length` tokens."""
    if mask is None:
        return None
    made = make_mask(mask)
    made.require(length)
    return made


def require_same_documents(masks: Sequence[Mask], lengths: Sequence[int]) -> None:
    """Raise UserError unless the documents of a batch are those of the mask that layout "balanced" was made for.

    Attention under the batch's own documents would take the tokens of the shard for others.

    Args:
        masks: The mask of the layout, then those of the samples.
        lengths: The tokens of each.
    """
    for each, tokens in zip(masks, lengths, strict=True):
        if (each.starts or (0,), tokens) != (masks[0].starts or (0,), lengths[0]):
            raise UserError(
                f"the shard is balanced under mask {masks[0]}, but the batch has other documents: {each}\n"
                "fix: cut.under(documents).batch(...), with the mask of attention as documents; or layout 'zigzag'"
            )


def masks_of_samples(documents: Mask | Sequence[Mask] | None, batch: int) -> tuple[Mask, ...]:
    """Return one mask for all samples, one per sample, or none."""
    if documents is None or isinstance(documents, Mask):
        return () if documents is None else (documents,)
    if not isinstance(documents, Sequence) or not all(isinstance(mask, Mask) for mask in documents):
        raise UserError(f"documents must be masks, got {short_text(documents)}\nfix: bmburst.Documents(lengths)")
    if len(documents) != batch:
        raise UserError(
            f"got documents of {len(documents)} samples for a batch of {batch}\n"
            "fix: give one bmburst.Documents to each sample, or a single one for all"
        )
    return tuple(documents)
