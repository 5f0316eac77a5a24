"""Who moves which bytes where, as plain data: what every transport obeys, and what a test can count.

A rank fills one buffer, its outbox, of the same size on every rank. An exchange then moves blocks of it to where other
ranks want them. Ranks that read each other's memory only obey `receives`; those that send messages obey both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Block(NamedTuple):
    """`rows` runs of `width` bytes of one buffer, the first at byte `offset`, each `pitch` bytes after the last."""

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
    def dense(self) -> bool:
        """Whether the runs follow each other without a gap."""
        return self.rows == 1 or self.pitch == self.width


class Move(NamedTuple):
    """A block of the sender's outbox, and where it lies in the receiver's target of number `target.buffer`."""

    source: Block
    target: Block


Route = Callable[[int, int], Iterable[Move]]
"""From a sender and a receiver to what moves between them."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank of a group does in an exchange.

    Attributes:
        nbytes: Size of the outbox, the same on every rank.
        sends: For each rank of the group, the blocks of this rank's outbox that it gets, in the order of its moves.
        receives: For each rank of the group, what comes from its outbox.
    """

    rank: int
    nbytes: int
    sends: tuple[tuple[Block, ...], ...]
    receives: tuple[tuple[Move, ...], ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave this rank."""
        return sum(block.nbytes for p, blocks in enumerate(self.sends) if p != self.rank for block in blocks)


def make_exchange(rank: int, size: int, nbytes: int, route: Route) -> Exchange:
    """Return rank's part of the exchange that `route` describes between `size` ranks."""
    return Exchange(
        rank,
        nbytes,
        sends=tuple(tuple(move.source for move in route(rank, peer)) for peer in range(size)),
        receives=tuple(tuple(route(peer, rank)) for peer in range(size)),
    )
