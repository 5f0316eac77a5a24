"""Exchanges as plain data: which bytes move between which ranks. Every transport follows them.

Either the senders lay out what moves in one buffer each, an outbox that the others read, or the receivers offer one
buffer each, an inbox that the others write. Ranks that reach each other's memory need one side of an exchange only;
those that send messages need both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

_ALIGN = 512  # bytes: what every kernel can address


class Block(NamedTuple):
    """`rows` runs of `width` bytes of one buffer, the first at byte `offset`, each `pitch` bytes after the last.

    Offsets count from the first element of the buffer's tensor, which may be a view of any strides.
    """

    offset: int
    width: int
    rows: int = 1
    pitch: int = 0
    buffer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.rows * self.width

    @property
    def step(self) -> int:
        """Bytes from one run to the next; no pitch is that of runs without a gap."""
        return self.pitch or self.width

    @property
    def dense(self) -> bool:
        """Whether the runs follow each other without a gap."""
        return self.rows == 1 or self.pitch == self.width


class Move(NamedTuple):
    """A block of one of the sender's buffers, and one of the receiver's of equal width and rows."""

    source: Block
    target: Block


Route = Callable[[int, int], Iterable[Move]]
"""From a sender and a receiver to what moves between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What one rank of a group does in an exchange. Plans are made once and kept: equal is what is the same.

    Attributes:
        rank: The rank.
        nbytes: Size of the outbox or inbox, the same on every rank.
        sends: For each rank of the group, what goes there from this one.
        receives: For each rank of the group, what comes from there.
    """

    rank: int
    nbytes: int
    sends: tuple[tuple[Move, ...], ...]
    receives: tuple[tuple[Move, ...], ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave this rank."""
        return sum(move.source.nbytes for p, moves in enumerate(self.sends) if p != self.rank for move in moves)


def make_exchange(rank: int, size: int, nbytes: int, route: Route) -> Exchange:
    """Return rank's part of the exchange that `route` describes between `size` ranks."""
    return Exchange(
        rank,
        nbytes,
        sends=tuple(tuple(route(rank, peer)) for peer in range(size)),
        receives=tuple(tuple(route(peer, rank)) for peer in range(size)),
    )


def placed(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return where tensors of these sizes in bytes start in a buffer, one after another and aligned, and their end."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return tuple(starts), end
