"""Cross-attention as data: a layout and a mask for queries and keys of two sequences. Imports no torch.

Every schedule is made from a layout, the real tokens of the queries, and a mask. A `PairedLayout` has a second layout
for the keys (`Layout.keys`). A `CrossMask` has the number of keys (`Mask.key_length`) and the interval of keys that a
query sees. So rings, gathers and head exchanges plan cross-attention with the code for self-attention.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from bmburst.errors import UserError
from bmburst.schedule.documents import Documents, documents_at, edges_of
from bmburst.schedule.layout import Layout, Run, make_layout, real_length
from bmburst.schedule.mask import WIDEST, BlockMap, Causal, Full, Intersection, Mask, SlidingWindow
from bmburst_ops.pattern import IntArray, Need, VisibleRanges

_ONE_BLOCK = BlockMap(WIDEST, np.ones((1, 1), bool))


@dataclass(frozen=True, slots=True)
class PairedLayout(Layout):
    """The layout of queries, with a second layout for the keys.

    Attributes:
        query_layout: Which rank holds which queries.
        key_layout: Which rank holds which keys.
    """

    query_layout: Layout
    key_layout: Layout
    name: ClassVar[str] = "paired"

    @classmethod
    def of(cls, queries: Layout, keys: Layout) -> "PairedLayout":
        """Return the pair of two layouts over the same ranks."""
        return cls(queries.size, queries.tokens, queries, keys)

    @property
    def queries(self) -> Layout:
        """See `Layout.queries`."""
        return self.query_layout

    @property
    def keys(self) -> Layout:
        """See `Layout.keys`."""
        return self.key_layout

    def over_groups(self, degree: int) -> "PairedLayout":
        """See `Layout.over_groups`."""
        return PairedLayout.of(self.query_layout.over_groups(degree), self.key_layout.over_groups(degree))

    def runs(self, rank: int) -> tuple[Run, ...]:
        """See `Layout.runs`; the runs of the queries."""
        return self.query_layout.runs(rank)


@dataclass(frozen=True, slots=True)
class CrossMask(Mask):
    """A mask between queries and keys of two sequences, aligned at the bottom right: the last query sees the last key.

    Attributes:
        mask: `Full`, `Causal`, `SlidingWindow`, or `Documents` with `key_lengths`.
        queries: Real queries.
        keys: Real keys.
        staircase: Whether consecutive local queries may lose or gain several local keys at once, because one side is
            striped and the other is not. Such tiles are one kernel call with an interval for each query.
    """

    mask: Mask
    queries: int
    keys: int
    staircase: bool = False

    @property
    def length(self) -> int:
        """See `Mask.length`."""
        return self.queries

    @property
    def sees_all(self) -> bool:
        """See `Mask.sees_all`."""
        return self.mask.sees_all

    @property
    def blocks(self) -> BlockMap | None:
        """See `Mask.blocks`."""
        return _ONE_BLOCK if self.staircase else None

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Mask.starts`."""
        return self.mask.starts

    @property
    def key_starts(self) -> tuple[int, ...]:
        """See `Mask.key_starts`."""
        return self.mask.key_starts

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        if self.staircase:
            return frozenset({"cells"})
        return self.mask.needs | _band_needs(self.mask)

    def key_length(self, length: int) -> int:
        """See `Mask.key_length`."""
        del length
        return self.keys

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        del length
        mask = self.mask
        if isinstance(mask, Documents):
            return _document_rows(mask, positions)
        if isinstance(mask, Full):
            return VisibleRanges(np.zeros_like(positions), np.full_like(positions, self.keys))
        last = positions + (self.keys - self.queries)  # the key at the same distance from the end
        start, stop = np.zeros_like(last), last + 1
        if isinstance(mask, SlidingWindow):
            tokens = min(mask.tokens, self.queries + self.keys)  # users may pass windows above 64 bits
            start, stop = last - tokens + 1, stop if mask.causal else last + tokens
        stop = np.clip(stop, 0, self.keys)
        return VisibleRanges(np.clip(start, 0, stop), stop)

    def __str__(self) -> str:
        return f"{self.mask}, {self.queries} queries and {self.keys} keys"


class Side(NamedTuple):
    """The arguments of an attention call for its queries, or for its keys.

    Attributes:
        layout: Name of its layout.
        tokens: Local tokens of each rank, padding included.
        length: Real tokens over all ranks; None: not given.
    """

    layout: str
    tokens: int
    length: int | None


def attended(size: int, queries: Side, keys: Side | None, mask: Mask) -> tuple[Layout, int, Mask]:
    """Return the layout, the number of real queries and the mask that all plans of an attention call use.

    Args:
        size: Ranks.
        queries: The queries. Default of their length: that of the mask, or else all of them.
        keys: The keys in cross-attention; None: self-attention.
        mask: Which keys a query sees.

    Raises:
        UserError: A length or a layout does not fit, the mask is made for other lengths, or it has no meaning between
            two sequences.
    """
    length = real_length(size, queries.tokens, mask.length if queries.length is None else queries.length)
    mask.require(length)
    if keys is None:
        _require_one_sequence(mask)
        return make_layout(queries.layout, size, queries.tokens, mask, length), length, mask
    made_for = sum(mask.key_lengths) if isinstance(mask, Documents) and mask.key_lengths is not None else None
    if keys.length is None and made_for is None and keys.tokens != queries.tokens:
        raise UserError(
            f"keys have {keys.tokens} local tokens and queries {queries.tokens}, but key_length is not given\n"
            "fix: key_length=, the number of real keys over all ranks"
        )
    given = next((n for n in (keys.length, made_for) if n is not None), length)
    key_length = real_length(size, keys.tokens, given, "key_length")
    is_same = (queries.layout, queries.tokens, length) == (keys.layout, keys.tokens, key_length)
    if is_same and not isinstance(mask, Documents):  # self-attention needs fewer kernel features
        return make_layout(queries.layout, size, queries.tokens, mask, length), length, mask
    _require_pairs(mask, key_length)
    layout = PairedLayout.of(
        make_layout(queries.layout, size, queries.tokens, mask, length),
        make_layout(keys.layout, size, keys.tokens, _among_keys(mask), key_length),
    )
    is_mixed = size > 1 and layout.queries.is_striped != layout.keys.is_striped
    return layout, length, CrossMask(mask, length, key_length, staircase=is_mixed and bool(_band_needs(mask)))


def _require_one_sequence(mask: Mask) -> None:
    parts = mask.masks if isinstance(mask, Intersection) else (mask,)
    if any(isinstance(part, Documents) and part.key_lengths is not None for part in parts):
        raise UserError(
            "the mask has key_lengths, but queries and keys are one sequence\n"
            "fix: pass key_length= for keys of another sequence, or Documents(lengths)"
        )


def _require_pairs(mask: Mask, key_length: int) -> None:
    """Refuse a mask that has no meaning between two sequences, or is made for another number of keys."""
    if not isinstance(mask, Full | Causal | SlidingWindow | Documents):
        raise UserError(
            f"mask {mask} has no meaning where keys are another sequence (key_length={key_length})\n"
            "allowed: full, causal, SlidingWindow, Documents(lengths, key_lengths=...)\nfix: pass one of these"
        )
    if not isinstance(mask, Documents):
        return
    if mask.key_lengths is None:
        raise UserError(
            f"the mask has {len(mask.lengths)} documents of queries, but none of keys\n"
            "fix: Documents(lengths, causal, key_lengths), the keys of each document, 0 for none"
        )
    if sum(mask.key_lengths) != key_length:
        raise UserError(
            f"the mask's documents have {sum(mask.key_lengths)} keys, but key_length is {key_length}\n"
            f"fix: key_length={sum(mask.key_lengths)}, or key_lengths that add up to {key_length}"
        )


def _among_keys(mask: Mask) -> Mask:
    """Return the mask by which layout "balanced" assigns the keys: that of self-attention among the keys."""
    if not isinstance(mask, Documents) or mask.key_lengths is None:
        return mask
    return Documents(tuple(n for n in mask.key_lengths if n), mask.causal)


def _band_needs(mask: Mask) -> frozenset[Need]:
    """Return the features that a kernel needs for tiles whose queries are not aligned with their keys."""
    is_banded = mask.causal if isinstance(mask, Documents) else isinstance(mask, Causal | SlidingWindow)
    return frozenset({"window"}) if is_banded else frozenset()


def _document_rows(mask: Documents, positions: IntArray) -> VisibleRanges:
    assert mask.key_lengths is not None  # `_require_pairs` refuses other documents
    (document, _, end), key_edges = documents_at(mask.lengths, positions), edges_of(mask.key_lengths)
    start, stop = key_edges[document], key_edges[document + 1]
    if not mask.causal:
        return VisibleRanges(start, stop)
    behind = end - positions - 1  # later queries of the same document
    return VisibleRanges(start, np.maximum(start, stop - behind))
