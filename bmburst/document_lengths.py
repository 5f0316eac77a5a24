"""Documents packed one after another, as their lengths: from what users give, and where each starts and ends."""

from typing import Any

import numpy as np

from bmburst.errors import UserError
from bmburst.numbers import digest, whole_number, whole_numbers
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import IntArray


def document_lengths(values: Any) -> tuple[int, ...]:
    """Return the lengths of documents, from any sequence of numbers or a tensor `[documents]`.

    Raises:
        UserError: There is no document, or one has no token.
    """
    lengths = tuple(whole_number("document", n, 1) for n in whole_numbers("lengths of documents", values))
    if not lengths:
        raise UserError("documents need at least one length, got none")
    return lengths


def lengths_between(cu_seqlens: Any) -> tuple[int, ...]:
    """Return the lengths of documents, from where each starts and the last one ends.

    Raises:
        UserError: It does not start at 0, or does not ascend.
    """
    edges = np.asarray([whole_number("entry of cu_seqlens", n, 0) for n in whole_numbers("cu_seqlens", cu_seqlens)])
    if len(edges) < 2 or edges[0] != 0 or (np.diff(edges) < 1).any():
        raise UserError("cu_seqlens must start at 0 and ascend, with the total at its end: [0, 5, 12] for 5 and 7")
    return tuple(np.diff(edges).tolist())


@bounded_cache(maxsize=16)
def edges_of(lengths: tuple[int, ...]) -> IntArray:
    """Return where each document starts, and where the last one ends."""
    edges: IntArray = np.cumsum((0, *lengths), dtype=np.int64)
    edges.setflags(write=False)
    return edges


def starts_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each document starts."""
    return tuple(edges_of(lengths)[:-1].tolist())


def documents_at(lengths: tuple[int, ...], positions: IntArray) -> IntArray:
    """Return which document is at each position."""
    return np.searchsorted(edges_of(lengths), positions, side="right") - 1


def described(lengths: tuple[int, ...]) -> str:
    """Return a short text that differs for different lengths."""
    return f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens ({digest(np.asarray(lengths))})"
