"""Schedules of a ring and of a double ring: the tiles that each rank computes at each step, and how blocks travel.

Plain data, made from a layout and a mask on the CPU in microseconds and cached. The executors in `bmburst.attention`
follow it; tests count every (query, key) pair of it by brute force.

In a double ring, ranks stand in `nodes` nodes of `places` ranks: rank r is at place r % places of node r // places.
Blocks come in windows: the blocks of one node, one node further down in each window, go round the places of our node.
Links between nodes are slow, so a block crosses them once a window, while the window before it is computed
(BurstEngine's topology-aware ring, LoongTrain's double ring, arXiv:2406.18485); a single ring would wait for the slow
link at every step.

    window:           own            1 node down          2 nodes down   ...
    between nodes:    block -------> block ------------->
    inside a node:    hop hop hop    hop hop hop          hop hop hop

The gradients of a block go the same way one step behind: inside a window from place to place, and what a window has
gathered goes on to the next node, where it arrives while that window is computed. What the own node gathers never
leaves it. Where gradients must return, the window of the own node is cut in two and comes first and last: the last
gradients come home during its second half. So blocks and gradients each cross `windows of other nodes` = nodes - 1
slow links.

Stops at which no rank has work are left out, and so are the hops to them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmburst.schedule.layout import Layout, real_positions
from bmburst.schedule.mask import Mask
from bmburst.schedule.strategy_names import RingTensors
from bmburst.schedule.tiles import Span, Tile, make_tiles, seen_by
from bmburst_ops.bounded_cache import bounded_cache


class Step(NamedTuple):
    """One stop of the ring: whose blocks are here, and what to compute with them."""

    distance: int
    """How far they came: ours are of rank - distance."""
    owner: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does, step by step.

    All ranks have steps of the same distances: 0, and those at which any of them has work. Blocks move from one to the
    next at once, and after the last one what must return goes the rest of the way home.
    """

    size: int
    steps: tuple[Step, ...]

    @property
    def hops(self) -> tuple[int, ...]:
        """How far blocks move behind each step; behind the last one, to be home."""
        distances = [*(step.distance for step in self.steps), self.size]
        return tuple(after - before for before, after in pairwise(distances))


@bounded_cache(maxsize=128)
def make_schedule(layout: Layout, length: int, mask: Mask, rank: int, ring_tensors: RingTensors) -> Schedule:
    """Return the schedule of one rank.

    Args:
        layout: Which rank holds which tokens.
        length: Global number of real tokens; positions from there on are padding, in no tile.
        mask: Which keys a query sees.
        rank: The rank on the sequence ring.
        ring_tensors: "kv": keys and values visit our queries. "q": queries visit our keys and values.
    """
    owners = [(rank - distance) % layout.size for distance in distances(layout, length, mask, ring_tensors)]
    steps = tuple(make_step(layout, length, mask, rank, owner, ring_tensors) for owner in owners)
    return Schedule(layout.size, steps)


def make_step(layout: Layout, length: int, mask: Mask, rank: int, owner: int, ring_tensors: RingTensors) -> Step:
    """Return what a rank computes with the blocks of another; the arguments are those of `make_schedule`."""
    pair = (rank, owner) if ring_tensors == "kv" else (owner, rank)
    return Step((rank - owner) % layout.size, owner, tiles(layout, length, mask, *pair))


@bounded_cache(maxsize=256)
def tiles(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
    """Return the work between one rank's queries and another's keys, in the local coordinates of each."""
    return make_tiles(
        mask, length, real_positions(layout, query_rank, length), real_positions(layout, key_rank, length)
    )


@bounded_cache(maxsize=256)
def distances(layout: Layout, length: int, mask: Mask, ring_tensors: RingTensors) -> tuple[int, ...]:
    """Return 0 and the distances at which a rank's queries may see another's keys."""
    found, ranks = _meetings(layout, length, mask), np.arange(layout.size)
    way = -1 if ring_tensors == "kv" else 1
    return (0, *(d for d in range(1, layout.size) if found[ranks, (ranks + way * d) % layout.size].any()))


def meet(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> bool:
    """Return whether any query of one rank may see a key of another.

    Judged by what runs of neighbouring tokens see. Where a run is of every n-th token, as if it were of all: no work is
    missed.
    """
    return bool(_meetings(layout, length, mask)[query_rank, key_rank])


@bounded_cache(maxsize=64)
def _meetings(layout: Layout, length: int, mask: Mask) -> NDArray[np.bool_]:
    """Return `meet` of all pairs, `[query ranks, key ranks]`."""
    found = np.zeros((layout.size, layout.size), bool)
    keys = [(rank, run) for rank in range(layout.size) for run in layout.runs(rank)]
    owner, start, stride, end = np.array(
        [(rank, run.start, run.stride, run.start + run.stride * run.real(length)) for rank, run in keys]
    ).T
    for rank in range(layout.size):
        for seen in _seen_from(layout, length, mask, rank):
            first = start + np.maximum(0, -((start - seen.start) // stride)) * stride
            found[rank, owner[first < np.minimum(seen.stop, end)]] = True
    return found


def _seen_from(layout: Layout, length: int, mask: Mask, rank: int) -> tuple[Span, ...]:
    """Return the positions that runs of a rank's queries see."""
    runs = [run for run in layout.runs(rank) if run.real(length)]
    ends = ((run.start, run.start + run.stride * (run.real(length) - 1)) for run in runs)
    return tuple(span for first, last in ends for span in seen_by(mask, length, first, last))


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
    layout: Layout, length: int, mask: Mask, rank: int, ring_tensors: RingTensors, nodes: int, *, returning: bool
) -> DoubleSchedule:
    """Return the schedule of one rank.

    Args:
        layout: Which rank holds which tokens.
        length: Global number of real tokens; positions from there on are padding, in no tile.
        mask: Which keys a query sees.
        rank: The rank on the sequence ring.
        ring_tensors: "kv": keys and values visit our queries. "q": queries visit our keys and values.
        nodes: Nodes that the ring lies on.
        returning: Whether gradients follow the tensors and return to their owners.
    """
    itinerary = layout_itinerary(layout, length, mask, ring_tensors, nodes, returning=returning)
    steps = (make_step(layout, length, mask, rank, owner, ring_tensors) for owner in itinerary.owners(rank))
    return DoubleSchedule(itinerary, tuple(steps))


@bounded_cache(maxsize=128)
def layout_itinerary(
    layout: Layout, length: int, mask: Mask, ring_tensors: RingTensors, nodes: int, *, returning: bool
) -> Itinerary:
    """Return how blocks travel under a layout and a mask; the arguments are those of `make_double_schedule`."""

    def works(owner: int, rank: int) -> bool:
        pair = (rank, owner) if ring_tensors == "kv" else (owner, rank)
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
