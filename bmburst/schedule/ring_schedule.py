"""Schedules of a ring and of a double ring: which tiles each rank computes at each step, and how blocks move.

Schedules are plain data, made from a layout and a mask on the CPU in microseconds and cached. The executors in
`bmburst.attention` follow them; tests count every (query, key) pair by brute force.

In a double ring there are `nodes` nodes of `places` ranks: rank r is place r % places of node r // places. Steps are
grouped into windows. In each window the blocks of one node rotate over the places of this node; the next window has
the blocks of the node before. Links between nodes are slow, so a block crosses them once per window, while the window
before is computed (BurstEngine's topology-aware ring, LoongTrain's double ring, arXiv:2406.18485). A flat ring would
wait for the slow link at every step.

    window:           own            1 node down          2 nodes down   ...
    between nodes:    block -------> block ------------->
    inside a node:    hop hop hop    hop hop hop          hop hop hop

The gradients of a block follow it one step behind: inside a window from place to place; the sum of a window goes to
the next node, where it arrives while that window is computed. Gradients of the own node's window stay on the node. In
a backward pass the window of the own node is divided in two, which come first and last: the last gradients return to
their owners during the second half. So blocks and gradients each cross `nodes - 1` slow links.

Steps at which no rank has work are left out, and so are their hops.
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
from bmburst.schedule.parallelism import RingTensors
from bmburst.schedule.tiles import Span, Tile, make_tiles, seen_by
from bmburst_ops.bounded_cache import bounded_cache


class Step(NamedTuple):
    """One step of a ring: the owner of the received blocks, and the tiles to compute with them."""

    distance: int
    """Hops since the start: the blocks are of rank - distance."""
    owner: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one rank in a ring, or in a double ring.

    In a ring all ranks have steps of the same distances: 0, and those at which any rank has work. Blocks move from one
    distance to the next in one hop. After the last step, gradients make one more hop to their owners.

    Attributes:
        ring_order: How blocks move; a ring is a double ring of one node.
        steps: The tiles of each step.
    """

    ring_order: "RingOrder"
    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ring_order.nodes * self.ring_order.places

    @property
    def hops(self) -> tuple[int, ...]:
        """By how many ranks blocks of a ring move after each step; after the last step, back to their owners."""
        distances = [*(step.distance for step in self.steps), self.size]
        return tuple(after - before for before, after in pairwise(distances))


@bounded_cache(maxsize=256)
def make_schedule(
    layout: Layout,
    length: int,
    mask: Mask,
    rank: int,
    ring_tensors: RingTensors,
    nodes: int = 1,
    *,
    returning: bool = False,
) -> Schedule:
    """Return the schedule of one rank.

    Args:
        layout: Which rank holds which tokens.
        length: Global number of real tokens; positions from there on are padding, in no tile.
        mask: Which keys a query sees.
        rank: The rank on the sequence ring.
        ring_tensors: "kv": the ring moves keys and values. "q": it moves queries.
        nodes: Number of nodes of a double ring; 1: a ring.
        returning: Whether gradients follow the tensors and return to their owners.
    """
    ring_order = layout_ring_order(layout, length, mask, ring_tensors, nodes, returning=returning)
    steps = []
    for owner in ring_order.owners(rank):
        pair = (rank, owner) if ring_tensors == "kv" else (owner, rank)
        steps.append(Step((rank - owner) % layout.size, owner, tiles(layout, length, mask, *pair)))
    return Schedule(ring_order, tuple(steps))


@bounded_cache(maxsize=256)
def tiles(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
    """Return the tiles of one rank's queries and another rank's keys, in local coordinates of each."""
    keys = real_positions(layout.keys, key_rank, mask.key_length(length))
    return make_tiles(mask, length, real_positions(layout, query_rank, length), keys)


@bounded_cache(maxsize=256)
def distances(layout: Layout, length: int, mask: Mask, ring_tensors: RingTensors) -> tuple[int, ...]:
    """Return 0 and the ring distances at which any rank's queries may see another rank's keys."""
    found, ranks = _meetings(layout, length, mask), np.arange(layout.size)
    way = -1 if ring_tensors == "kv" else 1
    return (0, *(d for d in range(1, layout.size) if found[ranks, (ranks + way * d) % layout.size].any()))


def have_visible_pair(layout: Layout, length: int, mask: Mask, query_rank: int, key_rank: int) -> bool:
    """Return whether any query of one rank may see a key of another.

    It is decided for runs of tokens. A run of every n-th token is treated as a run of all tokens, so no work is missed.
    """
    return bool(_meetings(layout, length, mask)[query_rank, key_rank])


@bounded_cache(maxsize=64)
def _meetings(layout: Layout, length: int, mask: Mask) -> NDArray[np.bool_]:
    """Return `have_visible_pair` of all pairs, `[query ranks, key ranks]`."""
    found = np.zeros((layout.size, layout.size), bool)
    keys = [(rank, run) for rank in range(layout.size) for run in layout.keys.runs(rank)]
    key_length = mask.key_length(length)
    owner, start, stride, end = np.array(
        [(rank, run.start, run.stride, run.start + run.stride * run.real(key_length)) for rank, run in keys]
    ).T
    for rank in range(layout.size):
        for seen in seen_from(layout, length, mask, rank):
            first = start + np.maximum(0, -((start - seen.start) // stride)) * stride
            found[rank, owner[first < np.minimum(seen.stop, end)]] = True
    return found


def seen_from(layout: Layout, length: int, mask: Mask, rank: int) -> tuple[Span, ...]:
    """Return the positions of the keys that runs of a rank's queries see."""
    runs = [run for run in layout.runs(rank) if run.real(length)]
    ends = ((run.start, run.start + run.stride * (run.real(length) - 1)) for run in runs)
    return tuple(span for first, last in ends for span in seen_by(mask, length, first, last))


class Window(NamedTuple):
    """The steps with the blocks of one node."""

    nodes: int
    """Node hops since the start; 0: the blocks are of this node."""
    stops: tuple[int, ...]
    """Hops inside the node at each step, in order; 0: the blocks are where they entered the node."""

    @property
    def hops(self) -> tuple[int, ...]:
        """By how many places blocks move between steps."""
        return tuple(b - a for a, b in pairwise(self.stops))


@dataclass(frozen=True, slots=True)
class RingOrder:
    """The order in which blocks go through a ring or a double ring, the same for all ranks.

    Attributes:
        nodes: Number of nodes; 1: a ring.
        places: Ranks on each node.
        windows: The windows in order; the first is of the own node and begins with the own block.
        exit: Hops inside a node, from the owner's place, at which the gradient of a block leaves a node.
    """

    nodes: int
    places: int
    windows: tuple[Window, ...]
    exit: int

    def owners(self, rank: int) -> tuple[int, ...]:
        """Return the owner of the blocks of a rank at each step."""
        shape = (self.nodes, self.places)
        return tuple(_owner(*shape, rank, window.nodes, stop) for window in self.windows for stop in window.stops)

    @property
    def outer_hops(self) -> int:
        """Number of hops of a block between nodes; the same as that of gradients."""
        return sum(window.nodes > 0 for window in self.windows)

    @property
    def inner_hops(self) -> int:
        """Number of hops of a block inside nodes."""
        return sum(len(window.hops) + (window.stops[0] > 0) for window in self.windows)

    def __str__(self) -> str:
        """Return one line per window."""
        lines = [f"{self.nodes} nodes x {self.places} ranks; gradients leave a node {self.exit} places up"]
        for window in self.windows:
            whose = f"{window.nodes} node{'s' * (window.nodes > 1)} down" if window.nodes else "own node"
            lines.append(f"{whose}: " + ", ".join(f"{stop} down" if stop else "same place" for stop in window.stops))
        return "\n".join(lines)


@bounded_cache(maxsize=128)
def layout_ring_order(
    layout: Layout, length: int, mask: Mask, ring_tensors: RingTensors, nodes: int, *, returning: bool
) -> RingOrder:
    """Return how blocks move under a layout and a mask; the arguments are those of `make_schedule`."""
    if nodes == 1:
        stops = distances(layout, length, mask, ring_tensors)
        return RingOrder(1, layout.size, (Window(0, stops),), exit=stops[-1])

    def works(owner: int, rank: int) -> bool:
        pair = (rank, owner) if ring_tensors == "kv" else (owner, rank)
        return have_visible_pair(layout, length, mask, *pair)

    return make_ring_order(nodes, layout.size // nodes, works, returning=returning)


def make_ring_order(nodes: int, places: int, works: Callable[[int, int], bool], *, returning: bool) -> RingOrder:
    """Return how blocks move in a double ring.

    Args:
        nodes: Number of nodes.
        places: Ranks on each node.
        works: Maps the owner of a block and a rank to whether the rank has work with the block.
        returning: Whether gradients follow the blocks and return to their owners.
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
    return RingOrder(nodes, places, tuple(windows), exit_place)


def _owner(nodes: int, places: int, rank: int, up: int, stop: int) -> int:
    """Return the owner of a rank's block after `up` hops between nodes and `stop` hops inside them."""
    node, place = divmod(rank, places)
    return (node - up) % nodes * places + (place - stop) % places
