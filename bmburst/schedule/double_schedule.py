"""The double ring as plain data: which blocks visit a rank in which order, and how they get there.

Ranks stand in `nodes` nodes of `places` ranks: rank r is at place r % places of node r // places. Blocks come in
windows: those of one node, one node further down in each window, go round the places of ours. Links between nodes are
slow, so a block crosses them once a window, while the window before it is computed (BurstEngine's topology-aware ring,
LoongTrain's double ring, arXiv:2406.18485); a ring of all ranks would wait for the slow link at every step.

    window:           own            1 node down          2 nodes down   ...
    between nodes:    block -------> block ------------->
    inside a node:    hop hop hop    hop hop hop          hop hop hop

What follows a block (its gradients) goes the same way one step behind: inside a window from place to place, and what a
window has gathered goes on to the next node, where it arrives while that window is computed. What the own node gathers
never leaves it. Where gradients must return, the own node's window is cut in two and ends the whole: the last gradients
come home while it is computed. So blocks and gradients each cross `windows of other nodes` = nodes - 1 slow links.

Stops at which no rank has work are left out, and so are the hops to them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from bmburst.schedule.layout import Layout
from bmburst.schedule.mask import Mask
from bmburst.schedule.ring_schedule import Step, make_step, meet
from bmburst.schedule.strategy_names import Travellers
from bmburst_ops.bounded_cache import bounded_cache


class Window(NamedTuple):
    """Visits of the blocks of one node."""

    nodes: int
    """How many nodes up the blocks have come; 0: they are of this node."""
    stops: tuple[int, ...]
    """How many places up they have come at each step, in order; at 0 they are where they entered the node."""

    @property
    def hops(self) -> tuple[int, ...]:
        """Places that blocks move from each stop to the next."""
        return tuple(b - a for a, b in pairwise(self.stops))


@dataclass(frozen=True, slots=True)
class Itinerary:
    """How blocks travel, the same for all ranks.

    Attributes:
        nodes: Nodes.
        places: Ranks of a node.
        windows: In order; the first is of the own node and begins with the own block.
        exit: How many places up from its owner's a block's gradient is when it leaves a node.
    """

    nodes: int
    places: int
    windows: tuple[Window, ...]
    exit: int

    def owners(self, rank: int) -> tuple[int, ...]:
        """Return whose blocks a rank has at each step."""
        shape = (self.nodes, self.places)
        return tuple(_owner(*shape, rank, window.nodes, stop) for window in self.windows for stop in window.stops)

    @property
    def outer_hops(self) -> int:
        """How often a rank sends a block to another node; so often it sends gradients there, too."""
        return sum(window.nodes > 0 for window in self.windows)

    @property
    def inner_hops(self) -> int:
        """How often a rank sends a block inside its node."""
        return sum(len(window.hops) + (window.stops[0] > 0) for window in self.windows)

    def __str__(self) -> str:
        """Return a line a window."""
        lines = [f"{self.nodes} nodes x {self.places} ranks; gradients leave a node {self.exit} places up"]
        for window in self.windows:
            whose = f"{window.nodes} node{'s' * (window.nodes > 1)} down" if window.nodes else "own node"
            lines.append(f"{whose}: " + ", ".join(f"{stop} down" if stop else "same place" for stop in window.stops))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class DoubleSchedule:
    """What one rank does, step by step.

    Attributes:
        itinerary: How blocks travel.
        steps: What to compute at each stop.
    """

    itinerary: Itinerary
    steps: tuple[Step, ...]


@bounded_cache(maxsize=128)
def make_double_schedule(
    layout: Layout, length: int, mask: Mask, rank: int, travellers: Travellers, nodes: int, *, returning: bool
) -> DoubleSchedule:
    """Return the schedule of one rank.

    Args:
        layout: Which rank holds which tokens.
        length: Global number of real tokens; positions from there on are padding, in no tile.
        mask: Which keys a query sees.
        rank: The rank on the sequence ring.
        travellers: "kv": keys and values visit our queries. "q": queries visit our keys and values.
        nodes: Nodes that the ring lies on.
        returning: Whether gradients follow the travellers home.
    """
    itinerary = layout_itinerary(layout, length, mask, travellers, nodes, returning=returning)
    steps = (make_step(layout, length, mask, rank, owner, travellers) for owner in itinerary.owners(rank))
    return DoubleSchedule(itinerary, tuple(steps))


@bounded_cache(maxsize=128)
def layout_itinerary(
    layout: Layout, length: int, mask: Mask, travellers: Travellers, nodes: int, *, returning: bool
) -> Itinerary:
    """Return how blocks travel under a layout and a mask; the arguments are those of `make_double_schedule`."""

    def works(owner: int, rank: int) -> bool:
        pair = (rank, owner) if travellers == "kv" else (owner, rank)
        return meet(layout, length, mask, *pair)

    return make_itinerary(nodes, layout.size // nodes, works, returning=returning)


def make_itinerary(nodes: int, places: int, works: Callable[[int, int], bool], *, returning: bool) -> Itinerary:
    """Return how blocks travel.

    Args:
        nodes: Nodes.
        places: Ranks of a node.
        works: From the owner of a block and a rank to whether the rank has work with it.
        returning: Whether something follows the blocks and must come home.
    """
    size = nodes * places

    def needed(up: int, stop: int) -> bool:
        return up == stop == 0 or any(works(_owner(nodes, places, rank, up, stop), rank) for rank in range(size))

    found = [Window(up, tuple(stop for stop in range(places) if needed(up, stop))) for up in range(nodes)]
    windows = [window for window in found if window.stops]
    own = windows[0].stops
    if returning and len(windows) > 1 and len(own) > 1:
        half = -(-len(own) // 2)
        windows = [Window(0, own[:half]), *windows[1:], Window(0, own[half:])]
    leaving = windows[1:] or windows
    ((exit_place, _),) = Counter(window.stops[-1] for window in leaving).most_common(1)
    return Itinerary(nodes, places, tuple(windows), exit_place)


def _owner(nodes: int, places: int, rank: int, up: int, stop: int) -> int:
    """Return whose block a rank has when blocks are so many nodes and places up from their owners."""
    node, place = divmod(rank, places)
    return (node - up) % nodes * places + (place - stop) % places
