"""Checks of CPM-Live's batches before they are split. They are needed because kernels do not check their inputs."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmburst.amounts import array_of, whole_number
from bmburst.errors import UserError, with_fix

Data = Mapping[str, Any]
"""A batch of CPM-Live's loaders: NumPy arrays or tensors of whole sequences, by name."""

_INT32 = torch.iinfo(torch.int32)
_TRUTHS = ("context",)  # arrays that may hold bools; the others hold whole numbers


def require_mapping(data: object) -> Data:
    """Return a batch; UserError unless it is a mapping."""
    if not isinstance(data, Mapping):
        raise UserError(
            f"a batch must be a mapping of arrays by name, got {type(data).__name__}\n"
            "fix: pass what CPM-Live's loader yields; SplitSequences.shared gives it to ranks that do not read"
        )
    return data


def ints(data: Data, name: str) -> Tensor:
    """Return an array of a batch, int32 on the CPU.

    Raises:
        UserError: The name is missing, or the array does not hold whole numbers in the range of int32.
    """
    if name not in data:
        raise UserError(
            f"the batch has no '{name}'\n"
            f"known: {', '.join(sorted(map(str, data))) or 'nothing'}\nfix: pass what CPM-Live's loader yields"
        )
    try:
        found = array_of(f"'{name}' of the batch", data[name])
    except UserError as error:
        raise with_fix(error, "pass what CPM-Live's loader yields") from None
    if found.size and found.dtype.kind not in ("iub" if name in _TRUTHS else "iu"):  # an empty list becomes float64
        kind = type(data[name]).__name__ if found.dtype.kind in "OUS" else f"{found.dtype} of shape {list(found.shape)}"
        raise UserError(
            f"'{name}' of the batch must be whole numbers, got {kind}\nfix: pass what CPM-Live's loader yields"
        )
    for value in (found.min(initial=0), found.max(initial=0)):
        if not _INT32.min <= int(value) <= _INT32.max:
            raise UserError(
                f"'{name}' of the batch holds {value}\nallowed: {_INT32.min} to {_INT32.max}, as int32 holds\n"
                "fix: pass what CPM-Live's loader yields"
            )
    return torch.from_numpy(found.astype(np.int32))


def vectors(data: Data, names: Iterable[str]) -> dict[str, Tensor]:
    """Return vectors of whole sequences, all of the same shape `[batch, length]`.

    Raises:
        UserError: One is missing or of another shape, or there is no token.
    """
    found = {name: ints(data, name) for name in names}
    first, shape = next((name, vector.shape) for name, vector in found.items())
    if len(shape) != 2 or not shape.numel():
        raise UserError(
            f"'{first}' of the batch must be [batch, length], got {list(shape)}\n"
            "allowed: one sequence and one token, or more of both\nfix: pass what CPM-Live's loader yields"
        )
    for name, vector in found.items():
        if vector.shape != shape:
            raise UserError(
                f"'{name}' must be [batch, length] as '{first}' {list(shape)}, got {list(vector.shape)}\n"
                "fix: pass what CPM-Live's loader yields, each of whole sequences"
            )
    return found


def lengths(data: Data, name: str, batch: int, length: int) -> Tensor:
    """Return the number of real tokens of each sequence, int32 `[batch]`; UserError unless all are in range."""
    found = ints(data, name)
    if found.shape != (batch,) or bool(((found < 0) | (found > length)).any()):
        got = found.tolist() if found.numel() <= 16 else f"{list(found.shape)} from {found.min()} to {found.max()}"
        raise UserError(
            f"'{name}' must be {batch} lengths from 0 to {length}, got {got}\n"
            f"fix: one to each of the {batch} sequences, its real tokens"
        )
    return found


def relations(data: Data, whole: Mapping[str, Tensor], real: Tensor) -> Tensor:
    """Return CPM-Bee's relations between all segments of each sample, int32 `[batch, entries]`.

    Raises:
        UserError: A token refers to relations that are not in the batch.
    """
    found = ints(data, "segment_rel")
    batch, length = whole["inputs"].shape
    if found.dim() != 2 or len(found) != batch or not found.numel() or int(found.min()) < 0:
        least = f", the least {int(found.min())}" if found.numel() else ""
        raise UserError(
            f"'segment_rel' must be [{batch}, entries], none below 0, got {list(found.shape)}{least}\n"
            "allowed: for each sequence the squares of relations of its samples, one after another\n"
            "fix: pass what CPM-Bee's loader yields"
        )
    segment, count, first = (whole[name] for name in ("segment_ids", "num_segments", "segment_rel_offset"))
    is_real = torch.arange(length) < real[:, None]
    wrong = (segment < 0) | (segment >= count) | (first < 0) | (first + count.long() ** 2 > found.shape[1])
    if bool((wrong & is_real).any()):
        b, at = (int(i) for i in (wrong & is_real).nonzero()[0])
        raise UserError(
            f"token {at} of sequence {b} has segment {int(segment[b, at])} of {int(count[b, at])}, with relations at "
            f"offset {int(first[b, at])} of {found.shape[1]}\n"
            "allowed: a segment below their number, and a whole square of relations at its offset\n"
            "fix: pass what CPM-Bee's loader yields"
        )
    return found


def additional_rows(data: Data) -> tuple[Tensor, Tensor]:
    """Return ids and numbers of a batch's additional rows of the vocabulary, int32 `[rows]` each.

    Raises:
        UserError: They are not two vectors of the same length.
    """
    ids, numbers = ints(data, "ext_ids"), ints(data, "ext_sub")
    if ids.dim() != 1 or numbers.shape != ids.shape:
        raise UserError(
            f"'ext_ids' and 'ext_sub' must be vectors of one length, got {list(ids.shape)} and {list(numbers.shape)}\n"
            "fix: pass what CPM-Live's loader yields, unchanged"
        )
    return ids, numbers


def require_segment_types(num_segments: object) -> None:
    """Raise UserError unless the number of CPM-Ant's segment types is a whole number above 0."""
    try:
        whole_number("num_segments", num_segments, 1)
    except UserError as error:
        raise with_fix(error, "the model's segment_types") from None


def require_segments(segment: Tensor, num_segments: int) -> None:
    """Raise UserError unless segments are in the range of the segment types."""
    if bool(((segment < 0) | (segment >= num_segments)).any()):
        raise UserError(
            f"segments go from {int(segment.min())} to {int(segment.max())}, num_segments={num_segments}\n"
            f"allowed: 0 to {num_segments - 1}\nfix: pass the num_segments that the data were made for"
        )
