"""In which order states pass through rows of M and U, and where they are stored: plain numbers.

A row maps the state S before it to `M S + U`. Rows are fragments of pieces, or links of a chain. In backward, the
gradient of the state after a row maps to `M^T S + U`, and paths run from the last row to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor


class Path(NamedTuple):
    """The way of a state.

    Attributes:
        rows: The rows that it passes through, in this order.
        before: For each row, the place where the state before it is stored; -1: nowhere.
        after: The place where the last state is stored, or -1.
        first: Number of the given state that the path begins with; -1: zero.
    """

    rows: tuple[int, ...]
    before: tuple[int, ...]
    after: int = -1
    first: int = -1

    def shortened(self) -> "Path":
        """Return the path to the last state that it stores."""
        stored = [step for step, place in enumerate(self.before) if place >= 0]
        if self.after >= 0 or not stored:
            return self
        last = stored[-1]
        return self._replace(rows=self.rows[:last], before=self.before[:last], after=self.before[last])


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths that store states in places.

    Attributes:
        each: The paths.
        count: Number of places. Those where no path stores anything are zero.
    """

    each: tuple[Path, ...]
    count: int

    @cached_property
    def fills(self) -> bool:
        """Whether the paths store something in every place."""
        places = {place for path in self.each for place in (*path.before, path.after)}
        return len(places - {-1}) == self.count

    def memory(self, like: Tensor, *shape: int) -> Tensor:
        """Return memory for the places, `[count, *shape]`, zero if the paths do not fill it."""
        return (like.new_empty if self.fills else like.new_zeros)(self.count, *shape)


def paths_between(edges: Sequence[int], given: Sequence[int], *, backward: bool) -> Paths:
    """Return paths that store the state before each fragment (backward: the gradient after it).

    Args:
        edges: The first fragment of each piece, and the number of fragments.
        given: Numbers of the pieces that begin with a given state (backward: end with a given gradient), in the order
            of these states. The others begin with zero.
        backward: See the module.
    """
    first = {piece: number for number, piece in enumerate(given)}
    orders = (_order(edges, piece, backward) for piece in range(len(edges) - 1))
    paths = (Path(rows[:-1], rows[:-1], after=rows[-1], first=first.get(i, -1)) for i, rows in enumerate(orders))
    return Paths(tuple(paths), edges[-1])


def paths_after(
    edges: Sequence[int], pieces: Sequence[int], places: Sequence[int], count: int, *, backward: bool
) -> Paths:
    """Return paths that begin with zero and store the state after some pieces (backward: the gradient before them).

    Args:
        edges: See `paths_between`.
        pieces: Numbers of the pieces.
        places: Where their states are stored.
        count: Number of places.
        backward: See the module.
    """
    orders = (_order(edges, piece, backward) for piece in pieces)
    paths = (Path(rows, (-1,) * len(rows), place) for rows, place in zip(orders, places, strict=True))
    return Paths(tuple(paths), count)


def _order(edges: Sequence[int], piece: int, backward: bool) -> tuple[int, ...]:
    """Return the fragments of a piece, in the order in which a state passes through them."""
    order = range(edges[piece], edges[piece + 1])
    return tuple(reversed(order)) if backward else tuple(order)
