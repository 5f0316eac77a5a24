"""Masks of documents packed one after another, and the lengths that define them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bmburst.amounts import digest, require_flag, short_text, whole_number, whole_numbers
from bmburst.errors import UserError
from bmburst.schedule.mask import Mask
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import IntArray, Need, VisibleRanges


@dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Packed documents: a query sees keys of its own document; if causal, only up to itself.

    Args:
        lengths: Tokens of each document, 1 or more: any sequence of numbers, or a tensor `[documents]`. With
            `key_lengths`: queries of each document, 0 or more.
        causal: Whether a query sees only itself and earlier tokens.
        key_lengths: In cross-attention the keys of each document, 0 or more; queries of document i see keys of
            document i. If causal, the last query of a document sees its last key. Default: self-attention.

    Raises:
        UserError: There is no document, a document has no token, or `causal` is not a bool. With `key_lengths`: all
            queries or all keys are missing, or the numbers of documents differ.
    """

    lengths: tuple[int, ...]
    causal: bool = True
    key_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_flag("causal", self.causal)
        if self.key_lengths is None:
            object.__setattr__(self, "lengths", document_lengths(self.lengths))
            return
        queries, keys = _tokens("queries", self.lengths), _tokens("keys", self.key_lengths)
        if len(keys) != len(queries):
            raise UserError(
                f"got key lengths of {len(keys)} documents for {len(queries)} documents of queries\n"
                "fix: give one key length to each document, 0 for a document without keys"
            )
        object.__setattr__(self, "lengths", queries)
        object.__setattr__(self, "key_lengths", keys)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, causal: bool = True) -> "Documents":
        """Return documents from cumulative lengths: `[0, first, first + second, ...]`.

        Raises:
            UserError: They do not start at 0, or do not ascend.
        """
        return cls(lengths_between(cu_seqlens), causal)

    @property
    def length(self) -> int:
        """See `Mask.length`."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Mask.starts`."""
        return _starts_of(self.lengths)

    @property
    def key_starts(self) -> tuple[int, ...]:
        """See `Mask.key_starts`."""
        return self.starts if self.key_lengths is None else _starts_of(self.key_lengths)

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        return frozenset({"segments"})

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        del length
        _, start, stop = documents_at(self.lengths, positions)
        return VisibleRanges(start, positions + 1 if self.causal else stop)

    def __str__(self) -> str:
        keys = "" if self.key_lengths is None else f", keys {digest(np.asarray(self.key_lengths))}"
        return f"{_described(self.lengths)}{', causal' if self.causal else ''}{keys}"


@dataclass(frozen=True, slots=True)
class PrefixLM(Mask):
    """Causal, but all tokens of a document see its first tokens, the prefix (arXiv:1910.10683, section 3.2.1).

    Args:
        prefix_lengths: Tokens of each document's prefix, 0 or more; a number for a single document.
        lengths: Tokens of each document. Default: the sequence is one document.

    Raises:
        UserError: The numbers of prefixes and documents differ, or a prefix is longer than its document.
    """

    prefix_lengths: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        prefixes = tuple(whole_number("prefix", n, 0) for n in whole_numbers("prefix_lengths", self.prefix_lengths))
        lengths = None if self.lengths is None else document_lengths(self.lengths)
        if len(prefixes) != (1 if lengths is None else len(lengths)):
            documents = "one document (no lengths given)" if lengths is None else f"{len(lengths)} documents"
            raise UserError(
                f"got {len(prefixes)} prefix lengths for {documents}\nfix: give one to each document, 0 for none"
            )
        if lengths is not None and (long := [i for i, n in enumerate(lengths) if prefixes[i] > n]):
            i = long[0]
            raise UserError(
                f"the prefix of document {i} has {prefixes[i]} tokens, but the document has {lengths[i]}\n"
                f"allowed: 0 to {lengths[i]}\nfix: give a shorter prefix"
            )
        object.__setattr__(self, "prefix_lengths", prefixes)
        object.__setattr__(self, "lengths", lengths)

    @property
    def length(self) -> int | None:
        """See `Mask.length`."""
        return None if self.lengths is None else sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Mask.starts`."""
        return () if self.lengths is None else _starts_of(self.lengths)

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        return frozenset() if self.lengths is None else frozenset({"segments"})

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        lengths, prefixes = self.lengths, self.prefix_lengths
        if lengths is None:
            lengths, prefixes = (length,), (min(prefixes[0], length),)  # a prefix may exceed int64
        document, start, stop = documents_at(lengths, positions)
        prefix = np.minimum(start + np.asarray(prefixes)[document], stop)
        return VisibleRanges(start, np.minimum(np.maximum(positions + 1, prefix), stop))

    def __str__(self) -> str:
        packed = "" if self.lengths is None else f" of {_described(self.lengths)}"
        return f"prefixes{packed} ({digest(np.asarray(self.prefix_lengths))})"


def document_lengths(values: Any) -> tuple[int, ...]:
    """Return the lengths of documents, from any sequence of numbers or a tensor `[documents]`.

    Raises:
        UserError: There is no document, or one has no token.
    """
    lengths = tuple(whole_numbers("lengths of documents", values))
    if not lengths:
        raise UserError(
            "lengths of documents are empty\nallowed: at least one\nfix: give the number of tokens of each document"
        )
    if (first := next((i for i, n in enumerate(lengths) if n < 1), None)) is not None:
        fix = "leave out documents without a token"
        if first == lengths[0] == 0 and len(lengths) > 1 and all(a < b for a, b in pairwise(lengths)):
            fix = f"Documents.from_cu_seqlens, as these ascend from 0; else {fix}"
        raise UserError(f"document {first} has {lengths[first]} tokens\nfix: {fix}")
    return lengths


def _tokens(side: str, values: Any) -> tuple[int, ...]:
    """Return the document lengths of a side of cross-attention; UserError unless they are 0 or more, not all 0."""
    lengths = tuple(whole_number(f"{side} of a document", n, 0) for n in whole_numbers(f"{side} of documents", values))
    if not any(lengths):
        raise UserError(
            f"{len(lengths)} documents have no {side}\nfix: at least one token in each of the two sequences"
        )
    return lengths


def lengths_between(cu_seqlens: Any) -> tuple[int, ...]:
    """Return document lengths from cumulative ones; UserError unless these start at 0 and ascend."""
    edges = whole_numbers("cu_seqlens", cu_seqlens)
    if len(edges) < 2 or edges[0] != 0:
        raise UserError(
            f"cu_seqlens must start at 0 and end with the total, got {short_text(edges)}\n"
            "fix: for example [0, 5, 12] for documents of 5 and 7 tokens"
        )
    return document_lengths([after - before for before, after in pairwise(edges)])


@bounded_cache(maxsize=16)
def edges_of(lengths: tuple[int, ...]) -> IntArray:
    """Return the cumulative lengths: the start of each document, and the end of the last."""
    edges: IntArray = np.cumsum((0, *lengths), dtype=np.int64)
    edges.setflags(write=False)
    return edges


def _starts_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the start of each document."""
    return tuple(edges_of(lengths)[:-1].tolist())


def documents_at(lengths: tuple[int, ...], positions: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return for each position the index of its document, and the document's start and end."""
    edges = edges_of(lengths)
    document = np.searchsorted(edges, positions, side="right") - 1
    return document, edges[document], edges[document + 1]


def _described(lengths: tuple[int, ...]) -> str:
    """Return a short text with a digest of the lengths."""
    return f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens ({digest(np.asarray(lengths))})"
