"""Documents packed one after another, as their lengths: from what users give, and where each starts and ends."""

from itertools import pairwise
from typing import Any

import numpy as np

from bmburst.errors import UserError
from bmburst.numbers import brief, digest, whole_numbers
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import IntArray


def document_lengths(values: Any) -> tuple[int, ...]:
    """Return the lengths of documents, from any sequence of numbers or a tensor `[documents]`.

    Raises:
        UserError: There is no document, or one has no token.
    """
    lengths = tuple(whole_numbers("lengths of documents", values))
    if not lengths:
        raise UserError("documents need at least one length, got none")
    if (first := next((i for i, n in enumerate(lengths) if n < 1), None)) is not None:
        raise UserError(f"document {first} has {lengths[first]} tokens\nleave documents without a token out")
    return lengths


def lengths_between(cu_seqlens: Any) -> tuple[int, ...]:
    """Return the lengths of documents, from where each starts and the last one ends.

    Raises:
        UserError: It does not start at 0, or does not ascend.
    """
    edges = whole_numbers("cu_seqlens", cu_seqlens)
    if len(edges) < 2 or edges[0] != 0:
        raise UserError(
            f"cu_seqlens must start at 0 and end with the total, got {brief(edges)}\n"
            "for example [0, 5, 12] for documents of 5 and 7 tokens"
        )
    return document_lengths([after - before for before, after in pairwise(edges)])


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
