"""Layouts: which rank holds which tokens of a sequence. Imports no torch.

A layout distributes `size * tokens` global positions over `size` ranks with `tokens` local tokens each. In every layout
the local tokens of a rank are in global order, so padding is always at the end of its local tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np

from bmburst.amounts import as_whole
from bmburst.errors import UserError, require_known
from bmburst.schedule.balance import deal_chunks
from bmburst.schedule.mask import Causal, Full, Mask, SlidingWindow
from bmburst.schedule.tiles import Span, seen_counts, visible_area
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import BLOCK, IntArray, Need


class Run(NamedTuple):
    """Local tokens `offset, offset + 1, ...` have global positions `start, start + stride, ...`."""

    offset: int
    start: int
    stride: int
    tokens: int

    def real(self, length: int) -> int:
        """Return how many tokens of the run have global positions below `length`."""
        return min(self.tokens, max(0, -(-(length - self.start) // self.stride)))

    def mirrored(self, length: int) -> "Run":
        """Return the run of its tokens below `length` in a sequence of `length` tokens in reverse."""
        tokens = self.real(length)
        return Run(self.offset, length - 1 - self.start - (tokens - 1) * self.stride, self.stride, tokens)


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """A permutation of the global sequence over the ranks.

    Attributes:
        size: Ranks of the sequence group.
        tokens: Local tokens of each rank, padding included.
        name: The name in options.
        chunks: The local tokens of a rank must be a multiple of this.

    Raises:
        UserError: There is less than one rank or token, or `tokens` is not a multiple of `chunks`.
    """

    size: int
    tokens: int
    name: ClassVar[str]
    chunks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.require(self.size, self.tokens)

    @classmethod
    def require(cls, size: int, tokens: int) -> None:
        """Check these numbers; they raise the errors of the class."""
        if size < 1 or tokens < 1:
            raise UserError(
                f"layout '{cls.name}' got {size} ranks and {tokens} tokens per rank\n"
                "allowed: at least 1 of each\nfix: use fewer ranks or a longer sequence"
            )
        if tokens % cls.chunks:
            raise UserError(
                f"layout '{cls.name}' needs a multiple of {cls.chunks} tokens a rank, got {tokens}\n"
                f"fix: pad the sequence to a multiple of {cls.chunks * size} tokens (bmburst.shard does)"
            )

    @property
    def queries(self) -> "Layout":
        """The layout of the queries, without that of their keys."""
        return self

    @property
    def keys(self) -> "Layout":
        """The layout of the keys: this one, except in cross-attention."""
        return self

    @property
    def is_striped(self) -> bool:
        """Whether neighbouring queries, or neighbouring keys, are on different ranks."""
        return "striped" in (self.queries.name, self.keys.name)

    def over_groups(self, degree: int) -> "Layout":
        """Return the layout over groups of `degree` neighbouring ranks, each group with the tokens of its ranks."""
        return type(self)(self.size // degree, self.tokens * degree)

    @abstractmethod
    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the rank's tokens as arithmetic progressions of global positions, ascending."""


@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank r holds the r-th run of tokens. Under a causal mask the last rank has the most work."""

    name: ClassVar[str] = "contiguous"

    def runs(self, rank: int) -> tuple[Run, ...]:
        """See `Layout.runs`."""
        return (Run(0, rank * self.tokens, 1, self.tokens),)


@dataclass(frozen=True, slots=True)
class Zigzag(Layout):
    """Rank r holds chunks r and 2 * size - 1 - r of 2 * size, so under a causal mask every rank has the same work.

    Source: the "zigzag" order of ring-flash-attention and BurstAttention (arXiv:2403.09347).
    """

    name: ClassVar[str] = "zigzag"
    chunks: ClassVar[int] = 2

    def runs(self, rank: int) -> tuple[Run, ...]:
        """See `Layout.runs`."""
        chunk = self.tokens // 2
        return (Run(0, rank * chunk, 1, chunk), Run(chunk, (2 * self.size - 1 - rank) * chunk, 1, chunk))


@dataclass(frozen=True, slots=True)
class Striped(Layout):
    """Rank r holds tokens r, r + size, r + 2 * size, ... (Striped Attention, arXiv:2311.09431)."""

    name: ClassVar[str] = "striped"

    def runs(self, rank: int) -> tuple[Run, ...]:
        """See `Layout.runs`."""
        return (Run(0, rank, self.size, self.tokens),)


@dataclass(frozen=True, slots=True)
class StripedGroups(Layout):
    """Groups of neighbouring ranks hold stripes: group g has tokens g, g + groups, ..., and each rank a run of these.

    After a head exchange inside the groups, the layout over groups is `Striped`. A sharded KV cache uses this.

    Attributes:
        degree: Ranks of a group.
    """

    degree: int
    name: ClassVar[str] = "striped groups"

    def over_groups(self, degree: int) -> Striped:
        """See `Layout.over_groups`; `degree` must be that of this layout."""
        assert degree == self.degree, f"groups of {self.degree} ranks exchange heads, not of {degree}"
        return Striped(self.size // degree, self.tokens * degree)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """See `Layout.runs`."""
        groups = self.size // self.degree
        group, member = divmod(rank, self.degree)
        return (Run(0, group + member * self.tokens * groups, groups, self.tokens),)


@dataclass(frozen=True, slots=True)
class Balanced(Layout):
    """Chunks of the sequence, assigned to ranks by `deal_chunks`: nearly equal work for all under a mask.

    Attributes:
        owners: The rank of each chunk in global order; all ranks have the same number of chunks.
    """

    owners: tuple[int, ...]
    name: ClassVar[str] = "balanced"
    chunks: ClassVar[int] = 8

    def over_groups(self, degree: int) -> "Balanced":
        """See `Layout.over_groups`."""
        owners = tuple(owner // degree for owner in self.owners)
        return Balanced(self.size // degree, self.tokens * degree, owners)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """See `Layout.runs`. Consecutive chunks are one run."""
        return _balanced_runs(self)[rank]

    @classmethod
    def under(cls, mask: Mask, size: int, tokens: int, length: int) -> "Balanced":
        """Return the layout for a mask over `length` real tokens."""
        # Chunks of one token would interleave into staircases, which kernels can only compute with windows.
        chunks = cls.chunks if tokens > cls.chunks else cls.chunks // 2
        return cls(size, tokens, _owners(mask, length, size, chunks, tokens // chunks))


@bounded_cache(maxsize=64)
def _owners(mask: Mask, length: int, size: int, chunks: int, tokens: int) -> tuple[int, ...]:
    """Return the owner of each chunk of `tokens`, `chunks` for each of `size` ranks. Each call of attention asks."""
    starts = (min(i * tokens, length) for i in range(size * chunks))
    areas = [visible_area(mask, length, np.arange(i, min(i + tokens, length))) for i in starts]
    first = np.array([start for start in mask.starts if start < length], np.int64)
    roots = first[mask.rows(first, length).start == first]  # they see nothing before themselves
    documents, trees = (
        [Span(a // tokens, -(-b // tokens)) for a, b in pairwise([*edges.tolist(), length])] for edges in (first, roots)
    )
    return deal_chunks(areas, size, documents, trees)


@lru_cache(maxsize=64)
def _balanced_runs(layout: Balanced) -> tuple[tuple[Run, ...], ...]:
    chunk = layout.tokens * layout.size // len(layout.owners)
    found: list[list[Run]] = [[] for _ in range(layout.size)]
    for i, owner in enumerate(layout.owners):
        runs = found[owner]
        if runs and runs[-1].start + runs[-1].tokens == i * chunk:
            runs[-1] = runs[-1]._replace(tokens=runs[-1].tokens + chunk)
        else:
            offset = runs[-1].offset + runs[-1].tokens if runs else 0
            runs.append(Run(offset, i * chunk, 1, chunk))
    return tuple(map(tuple, found))


LAYOUTS: dict[str, type[Layout]] = {kind.name: kind for kind in (Contiguous, Zigzag, Striped, Balanced)}


def make_layout(name: str, size: int, tokens: int, mask: Mask | None = None, length: int | None = None) -> Layout:
    """Return the layout of that name over `size` ranks of `tokens` local tokens each.

    Args:
        name: The name.
        size: Ranks.
        tokens: Local tokens of each rank, padding included.
        mask: The mask for which "balanced" distributes work; the others ignore it.
        length: Real tokens of the sequence. Default: all.

    Raises:
        UserError: The name is unknown, the layout cannot hold that many tokens per rank, or "balanced" has no mask or
            a mask for another number of tokens.
    """
    require_known("layout", name, LAYOUTS)
    kind = LAYOUTS[name]
    if kind is not Balanced:
        return kind(size, tokens)
    if mask is None:
        raise UserError("layout 'balanced' balances the work under a mask, but there is none\nfix: pass mask=")
    kind.require(size, tokens)  # before the work is measured
    real = size * tokens if length is None else length
    mask.require(real)
    return Balanced.under(mask, size, tokens, real)


def padded_layout(name: str, size: int, length: int, mask: Mask | None = None) -> Layout:
    """Return the smallest layout of that name that holds `length` real tokens over `size` ranks.

    Raises:
        UserError: The name is unknown, there are fewer tokens than ranks, or "balanced" has no mask.
    """
    require_known("layout", name, LAYOUTS)
    if length < size:
        raise UserError(
            f"a sequence of {length} tokens cannot be split over {size} ranks\n"
            "fix: at least one token a rank: a longer sequence or fewer ranks that share it"
        )
    chunks = LAYOUTS[name].chunks
    return make_layout(name, size, chunks * -(-length // (chunks * size)), mask, length)


def real_length(size: int, tokens: int, length: int | None, name: str = "length") -> int:
    """Return the number of real tokens of a whole sequence: `length`, or all tokens if it is None.

    Args:
        size: Ranks.
        tokens: Local tokens of each rank.
        length: The requested number of real tokens.
        name: What messages call it.

    Raises:
        UserError: The length is not an integer, or is larger than the number of tokens on the ranks.
    """
    most = size * tokens
    if length is None:
        return most
    number = as_whole(length)
    if number is None:
        raise UserError(
            f"{name} must be a whole number, got {length!r}\nallowed: 1 to {most}\n"
            "fix: pass the number of tokens in the whole sequence as an int"
        )
    if not 1 <= number <= most:
        raise UserError(
            f"{name} is {number}, but {size} ranks x {tokens} local tokens hold 1 to {most}\n"
            "fix: the number of real tokens of the whole sequence, over all ranks"
        )
    return number


def real_tokens(layout: Layout, rank: int, length: int) -> int:
    """Return how many local tokens of a rank have global positions below `length`; they are its first ones."""
    return sum(run.real(length) for run in layout.runs(rank))


@bounded_cache(maxsize=32)
def real_positions(layout: Layout, rank: int, length: int) -> IntArray:
    """Return the global positions below `length` of a rank's local tokens, ascending."""
    return np.concatenate([np.arange(run.real(length)) * run.stride + run.start for run in layout.runs(rank)])


def kernel_needs(layout: Layout, mask: Mask) -> frozenset[Need]:
    """Return the features that a kernel needs for a mask over each rank's tokens: a layout may cut inside blocks."""
    if "blocks" not in mask.needs or all(_keeps_blocks(layout.runs(rank)) for rank in range(layout.size)):
        return mask.needs
    return mask.needs - {"blocks"} | {"cells"}


def _keeps_blocks(runs: Sequence[Run]) -> bool:
    """Return whether local tokens change their block of the sequence only at multiples of `BLOCK`."""
    for i, run in enumerate(runs):
        follows = i > 0 and runs[i - 1].start + runs[i - 1].tokens == run.start
        if run.stride > 1 or (run.start - run.offset) % BLOCK or (run.offset % BLOCK and not follows):
            return False
    return True


@bounded_cache(maxsize=128)
def rank_areas(layout: Layout, length: int, mask: Mask) -> tuple[int, ...]:
    """Return the number of visible (query, key) pairs of each rank's queries."""
    if not isinstance(mask, Causal | Full | SlidingWindow) or not getattr(mask, "causal", True):
        return tuple(visible_area(mask, length, real_positions(layout, rank, length)) for rank in range(layout.size))
    return tuple(sum(_run_area(mask, length, run) for run in layout.runs(rank)) for rank in range(layout.size))


@bounded_cache(maxsize=128)
def key_areas(layout: Layout, length: int, mask: Mask) -> tuple[int, ...]:
    """Return the number of visible (query, key) pairs of each rank's keys."""
    if isinstance(mask, Causal | SlidingWindow) and getattr(mask, "causal", True):
        # From the end of the sequence, keys are seen by as many queries as queries see keys from its beginning.
        runs = [[run.mirrored(length) for run in layout.keys.runs(rank)] for rank in range(layout.size)]
        return tuple(sum(_run_area(mask, length, run) for run in of_rank) for of_rank in runs)
    key_length, seen = mask.key_length(length), seen_counts(mask, length)
    return tuple(int(seen[real_positions(layout.keys, rank, key_length)].sum()) for rank in range(layout.size))


@bounded_cache(maxsize=128)
def narrowed_queries(layout: Layout, length: int, mask: Mask) -> tuple[int, ...]:
    """Return how many of each rank's queries do not see the first key of the sequence, regardless of block maps."""
    if isinstance(mask, Causal | Full):
        return (0,) * layout.size
    if isinstance(mask, SlidingWindow):
        first = min(mask.tokens, length)
        runs = (layout.runs(rank) for rank in range(layout.size))
        return tuple(sum(run.real(length) - run.real(first) for run in of_rank) for of_rank in runs)
    return tuple(_narrowed(mask, length, real_positions(layout, rank, length)) for rank in range(layout.size))


def _narrowed(mask: Mask, length: int, queries: IntArray) -> int:
    """Return how many of the queries see keys, but not the first, summed over the levels of the mask."""
    rows = (level.rows(queries, length) for level in mask.levels)
    return sum(int(np.count_nonzero((start > 0) & (stop > start))) for start, stop in rows)


@bounded_cache(maxsize=64)
def most_keys(mask: Mask, length: int) -> int:
    """Return the maximum over queries of the number of keys from the first to the last visible one of a level."""
    if isinstance(mask, Causal | Full):
        return length
    if isinstance(mask, SlidingWindow) and mask.causal:
        return min(mask.tokens, length)
    rows = (level.rows(np.arange(length), length) for level in mask.levels)
    return max(int((stop - start).max()) for start, stop in rows)


@bounded_cache(maxsize=64)
def merged_queries(mask: Mask, length: int) -> int:
    """Return how many results of queries are merged over the levels of a mask: 0 unless it is a tree."""
    rows = (level.rows(np.arange(length), length) for level in mask.levels[1:])
    return sum(int(np.count_nonzero(stop > start)) for start, stop in rows)


def _run_area(mask: Mask, length: int, run: Run) -> int:
    """Return the number of visible pairs of a run's queries by a formula, without an array of queries."""
    queries = run.real(length)
    if isinstance(mask, Full):
        return queries * length
    window = mask.tokens if isinstance(mask, SlidingWindow) else length
    # Query i of the run sees `start + i * stride + 1` keys, or its window.
    narrow = min(queries, max(0, -(-(window - 1 - run.start) // run.stride)))
    return narrow * (run.start + 1) + run.stride * narrow * (narrow - 1) // 2 + (queries - narrow) * window
