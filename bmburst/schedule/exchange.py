"""Exchanges as plain data: which bytes move between which ranks, independent of the transport.

In a pull each sender writes its blocks to one buffer, the outbox, which the receivers read. In a push each receiver
offers one buffer, the inbox, which the senders write. Ranks that can access each other's memory need one side of an
exchange; ranks that send messages need both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

_ALIGN = 512  # bytes: an alignment that every kernel accepts


class Block(NamedTuple):
    """`rows` rows of `width` bytes in one buffer: the first at byte `offset`, with `pitch` bytes between their starts.

    Offsets count from the first element of the buffer's tensor, which may be a view of any strides.
    """

    offset: int
    width: int
    rows: int = 1
    pitch: int = 0
    buffer: int = 0

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return self.rows * self.width

    @property
    def step(self) -> int:
        """Bytes from one row to the next; a pitch of 0 means rows without gaps."""
        return self.pitch or self.width

    @property
    def dense(self) -> bool:
        """Whether the rows have no gaps between them."""
        return self.rows == 1 or self.pitch == self.width


class Move(NamedTuple):
    """A block in a buffer of the sender, and a block of equal width and rows in a buffer of the receiver."""

    source: Block
    target: Block


Route = Callable[[int, int], Iterable[Move]]
"""Maps a sender and a receiver to the moves between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One rank's part of an exchange. Plans are cached, so exchanges are compared by identity.

    Attributes:
        rank: The rank.
        nbytes: Size of the outbox or inbox, the same on every rank.
        sends: The moves from this rank to each rank of the group.
        receives: The moves from each rank of the group to this rank.
    """

    rank: int
    nbytes: int
    sends: tuple[tuple[Move, ...], ...]
    receives: tuple[tuple[Move, ...], ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return sum(move.source.nbytes for p, moves in enumerate(self.sends) if p != self.rank for move in moves)


def make_exchange(rank: int, size: int, nbytes: int, route: Route) -> Exchange:
    """Return one rank's part of the exchange between `size` ranks that `route` describes."""
    return Exchange(
        rank,
        nbytes,
        sends=tuple(tuple(route(rank, peer)) for peer in range(size)),
        receives=tuple(tuple(route(peer, rank)) for peer in range(size)),
    )


def offsets_of(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the aligned byte offsets of consecutive tensors of these sizes in a buffer, and their total size."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return tuple(starts), end
