"""Chains: which run of tokens continues which, for layers whose state passes from token to token. Imports no torch.

A link is a run of consecutive tokens on one rank. In global order, with M and U of a link's last piece,

    S_in[k] = S_out[k - 1] if continues[k], else 0
    S_out[k] = M[k] S_in[k] + U[k] if through[k], else U[k]

So a rank sends one summary (M, U) for each of its links, whatever its number of tokens.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bmburst.errors import UserError
from bmburst.schedule.layout import Layout
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import IntArray


class Link(NamedTuple):
    """A run of real tokens on a rank; runs that follow each other on one rank are one link.

    Attributes:
        rank: The rank.
        slot: The number of the link on its rank.
        offset: The first local token.
        start: The global position of that token.
        tokens: Real tokens.
    """

    rank: int
    slot: int
    offset: int
    start: int
    tokens: int


class Piece(NamedTuple):
    """Tokens of one sample on one rank that belong to one document and one link, or padding.

    Attributes:
        sample: The sample of the batch.
        offset: The first local token.
        tokens: Tokens.
        link: The number of the link; -1 for padding.
        waits: Whether its first token continues an earlier link, or the initial state.
        exports: Whether a later link, or the final state, continues its last token.
    """

    sample: int
    offset: int
    tokens: int
    link: int
    waits: bool
    exports: bool


@dataclass(frozen=True)
class Chain:
    """The links of a batch of sequences in one layout.

    Attributes:
        size: Ranks.
        tokens: Local tokens of a rank, padding included.
        lengths: Real tokens of each sample.
        links: All links in global order, the same for every sample.
        starts: For each sample the first positions of its documents, ascending, and of padding that other samples do
            not have. Without position 0, the first document continues an initial state.
        has_final: Whether the state after the last token is used.
    """

    size: int
    tokens: int
    lengths: tuple[int, ...]
    links: tuple[Link, ...]
    starts: tuple[tuple[int, ...], ...]
    has_final: bool

    @cached_property
    def slots(self) -> int:
        """The largest number of links on a rank."""
        return max(link.slot for link in self.links) + 1

    @cached_property
    def continues(self) -> tuple[tuple[bool, ...], ...]:
        """For each link and sample: whether the first token of the link continues a document."""
        found = [(set(starts), length) for starts, length in zip(self.starts, self.lengths, strict=True)]
        return tuple(
            tuple(link.start not in starts and link.start < length for starts, length in found) for link in self.links
        )

    @cached_property
    def through(self) -> tuple[tuple[bool, ...], ...]:
        """For each link and sample: whether all tokens of the link continue a document."""
        found = [np.asarray(starts) for starts in self.starts]
        return tuple(
            tuple(not np.any((starts >= link.start) & (starts < link.start + link.tokens)) for starts in found)
            for link in self.links
        )

    @cached_property
    def passes(self) -> bool:
        """Whether any state passes from one link to another."""
        return any(any(flags) for flags in self.continues[1:])

    @cached_property
    def exchanges(self) -> bool:
        """Whether ranks exchange states: some state passes between links, or all ranks need the final state."""
        return self.size > 1 and (self.passes or self.has_final)

    def exports(self, link: int, sample: int) -> bool:
        """Return whether the state after a link is used."""
        return self.has_final if link + 1 == len(self.links) else self.continues[link + 1][sample]

    def passing(self, link: int) -> tuple[bool, ...]:
        """Return for each sample whether a state passes through a link to where it is used."""
        each = zip(self.continues[link], self.through[link], strict=True)
        return tuple(enters and leaves and self.exports(link, i) for i, (enters, leaves) in enumerate(each))

    def own_links(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's links, in the order of their slots."""
        return tuple(number for number, link in enumerate(self.links) if link.rank == rank)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of a rank. In this order they cover `[batch, local_tokens]`, flattened."""
        return tuple(piece for sample in range(len(self.starts)) for piece in self._pieces(rank, sample))

    def _pieces(self, rank: int, sample: int) -> list[Piece]:
        found: list[Piece] = []
        end = 0
        for number in self.own_links(rank):
            link = self.links[number]
            stop = link.start + link.tokens
            cuts = [link.start, *(start for start in self.starts[sample] if link.start < start < stop), stop]
            for first, last in pairwise(cuts):
                waits = first == link.start and self.continues[number][sample]
                exports = last == stop and self.exports(number, sample)
                offset, is_real = link.offset + first - link.start, first < self.lengths[sample]
                found.append(Piece(sample, offset, last - first, number if is_real else -1, waits, exports))
            end = link.offset + link.tokens
        if end < self.tokens:
            found.append(Piece(sample, end, self.tokens - end, -1, False, False))
        return found

    def halos(self, width: int) -> IntArray:
        """Return where the `width` tokens before each link are, `[links, samples, width]`.

        Tails are the last `width` tokens of every link, aligned at the end, as `[size * slots, samples, width]`. They
        are numbered in this order. Then follow the initial tokens, `[samples, width]`. -1 is a token before the start
        of its document.
        """
        found = np.full((len(self.links), len(self.starts), width), -1, np.int64)
        for number, link in enumerate(self.links):
            for sample in range(len(self.starts)):
                if self.continues[number][sample]:
                    found[number, sample] = self._places_before(link.start, sample, width)
        return found

    def final_halo(self, width: int) -> IntArray:
        """Return where the last `width` tokens of each sample are, `[samples, width]`; numbers are those of `halos`."""
        found = [self._places_before(length, sample, width) for sample, length in enumerate(self.lengths)]
        return np.array(found, np.int64).reshape(len(self.lengths), width)

    def _places_before(self, end: int, sample: int, width: int) -> list[int]:
        """Return where the `width` tokens before a position are, of the document that has the last one of them."""
        begin = max((start for start in self.starts[sample] if start < end), default=-width)
        return [
            self._place(position, sample, width) if position >= begin else -1 for position in range(end - width, end)
        ]

    def _place(self, position: int, sample: int, width: int) -> int:
        """Return the number of a position among tails and initial tokens."""
        samples = len(self.starts)
        if position < 0:
            return (self.size * self.slots * samples + sample + 1) * width + position
        link = self.links[bisect_right(self.links, position, key=_start) - 1]
        behind = link.start + link.tokens - position  # 1 for the last token
        return ((link.rank * self.slots + link.slot) * samples + sample + 1) * width - behind


@bounded_cache(maxsize=64)
def make_chain(
    layout: Layout, lengths: tuple[int, ...], starts: tuple[tuple[int, ...], ...], *, has_initial: bool, has_final: bool
) -> Chain:
    """Return the chain of a batch.

    Args:
        layout: Which rank holds which tokens.
        lengths: Real tokens of each sample.
        starts: For each sample the first positions of its documents; empty: one document.
        has_initial: Whether the first document of each sample continues an initial state.
        has_final: Whether the state after the last token is used.

    Raises:
        UserError: Neighbouring tokens are on different ranks, or a final state is used of samples of several lengths.
    """
    if has_final and len(set(lengths)) > 1:
        raise UserError(
            f"final states are those after the same token of each sample, got samples of {min(lengths)} to "
            f"{max(lengths)} tokens\nfix: one call for each length"
        )
    if any(run.stride != 1 for rank in range(layout.size) for run in layout.runs(rank)):
        raise UserError(
            f"layout '{layout.name}' puts neighbouring tokens on different ranks, but a recurrent layer passes its "
            "state from token to token\nallowed: zigzag, contiguous, balanced\nfix: layout='zigzag'"
        )
    longest = max(lengths)
    links = sorted((link for rank in range(layout.size) for link in _links(layout, rank, longest)), key=_start)
    begin: set[int] = set() if has_initial else {0}
    cut = tuple(
        tuple(sorted(set(first) - {0} | begin | ({length} if length < longest else set())))
        for first, length in zip(starts, lengths, strict=True)
    )
    return Chain(layout.size, layout.tokens, lengths, tuple(links), cut, has_final)


def _start(link: Link) -> int:
    return link.start


def _links(layout: Layout, rank: int, length: int) -> list[Link]:
    """Return the links of a rank."""
    found: list[Link] = []
    for run in layout.runs(rank):
        real = run.real(length)
        last = found[-1] if found else None
        if last is not None and last.start + last.tokens == run.start and last.offset + last.tokens == run.offset:
            found[-1] = last._replace(tokens=last.tokens + real)
        elif real:
            found.append(Link(rank, len(found), run.offset, run.start, real))
    return found
