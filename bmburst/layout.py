"""Which rank holds which tokens of a sequence: pure index arithmetic, no tensor, no process group.

A layout cuts `size * tokens` global positions into `size` ranks of `tokens` local ones. Whatever the layout, a rank's
local order is its global order, so the tokens beyond the real length (padding) are always a suffix of its local ones.
"""

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from bmburst.errors import UserError, require_known


class Run(NamedTuple):
    """Local tokens `offset, offset + 1, ...` stand at global positions `start, start + stride, ...`."""

    offset: int
    start: int
    stride: int
    tokens: int

    def real(self, length: int) -> int:
        """Return how many of the run's tokens stand before global position `length`."""
        return min(self.tokens, max(0, -(-(length - self.start) // self.stride)))


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """A permutation of the global sequence over the ranks.

    Attributes:
        size: Ranks of the sequence group.
        tokens: Local tokens of every rank, padding included.
        name: What users call it.
        chunks: Equal runs a rank holds: its local tokens are a multiple of this.

    Raises:
        UserError: There is less than one rank or token, or the tokens are no multiple of the chunks.
    """

    size: int
    tokens: int
    name: ClassVar[str]
    chunks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.tokens < 1:
            raise UserError(f"a layout needs at least 1 rank and 1 token a rank, got {self.size} and {self.tokens}")
        if self.tokens % self.chunks:
            raise UserError(
                f"layout '{self.name}' needs a multiple of {self.chunks} tokens a rank, got {self.tokens}\n"
                f"pad the sequence to a multiple of {self.chunks * self.size} tokens (bmburst.shard does)"
            )

    def over_groups(self, degree: int) -> "Layout":
        """Return the layout of this kind over groups of `degree` neighbours, each with the tokens of all its ranks."""
        return type(self)(self.size // degree, self.tokens * degree)

    @abstractmethod
    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the rank's tokens as arithmetic progressions of global positions, ascending."""


@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank r holds the r-th run of tokens. Simple, but under a causal mask the last rank does most of the work."""

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


LAYOUTS: dict[str, type[Layout]] = {kind.name: kind for kind in (Contiguous, Zigzag, Striped)}


def make_layout(name: str, size: int, tokens: int) -> Layout:
    """Return the layout of that name over `size` ranks of `tokens` local tokens each.

    Raises:
        UserError: The name is unknown, or the layout cannot hold that many tokens a rank.
    """
    require_known("layout", name, LAYOUTS)
    return LAYOUTS[name](size, tokens)


def padded_layout(name: str, size: int, length: int) -> Layout:
    """Return the smallest layout of that name that holds `length` real tokens over `size` ranks.

    Raises:
        UserError: The name is unknown, or there are fewer tokens than ranks.
    """
    require_known("layout", name, LAYOUTS)
    if length < size:
        raise UserError(
            f"a sequence of {length} tokens cannot be split over {size} ranks\n"
            "use at least one token a rank: a longer sequence or a smaller sequence-parallel size"
        )
    chunks = LAYOUTS[name].chunks
    return LAYOUTS[name](size, chunks * -(-length // (chunks * size)))


def real_length(layout: Layout, length: int | None) -> int:
    """Return the number of real tokens of the whole sequence: `length`, or for None as many as the layout holds.

    Raises:
        UserError: It is no whole number, or the layout does not hold that many.
    """
    most = layout.size * layout.tokens
    if length is None:
        return most
    try:
        number = operator.index(length)
    except TypeError:
        raise UserError(f"length must be a whole number, got {length!r}") from None
    if not 1 <= number <= most:
        raise UserError(
            f"length is {number}, but {layout.size} ranks x {layout.tokens} local tokens hold 1 to {most}\n"
            "length is the number of real tokens of the whole sequence, over all ranks"
        )
    return number


def real_tokens(layout: Layout, rank: int, length: int) -> int:
    """Return how many of the rank's local tokens stand before global position `length`; they are its first ones."""
    return sum(run.real(length) for run in layout.runs(rank))
