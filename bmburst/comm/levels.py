"""Two levels of a group: the ranks of a node, whose links are fast, and the ranks of one place in every node.

Levels have communicators of their own where the transport can make them (torch.distributed, BMTrain). They must: what
one communicator moves starts in order on one stream, so a block between nodes would hold up every hop behind it, and
two streams must not share a communicator (NCCL deadlocks, NVIDIA/nccl#783). Two communicators may be busy at once as
long as every rank launches their transfers in one order, which ranks that obey one schedule do. Inside a node the
transport is chosen anew, so blocks may go from GPU memory to GPU memory there.

Other communicators (threads, a user's own) are asked to move the blocks of both levels.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch

from bmburst.comm.checks import Checked
from bmburst.comm.local import LocalCommunicator, Wire
from bmburst.comm.objects import gather_objects
from bmburst.comm.protocol import BlockMover, Communicator
from bmburst.comm.shared_memory import host_identity
from bmburst.comm.subgroups import Members
from bmburst.comm.transports import over_transport
from bmburst.schedule.hardware import HOST

NODE_SWITCH = "BMBURST_NODE"
"""The environment variable that names the node of a process; by default the host is its node."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Both levels as this rank sees them: it is rank `outer.rank * inner.size + inner.rank` of the ring they form.

    Attributes:
        inner: The ranks of this node.
        outer: The ranks that have this rank's place in each node.
    """

    inner: BlockMover
    outer: BlockMover


@runtime_checkable
class Splittable(Communicator, Protocol):
    """A communicator that can make others."""

    def split(self, partition: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the part that holds this rank; every rank must call it with the same partition."""
        ...


@dataclass(frozen=True, slots=True)
class Nodes:
    """On how many nodes a group lies, and why they do not hold as many ranks each, in order; None: they do."""

    count: int
    uneven: str | None = None


def find_nodes(comm: Checked) -> Nodes:
    """Return how many nodes the group lies on: the same on every rank.

    It is `comm.nodes` if that is set. Else ranks ask each other where they run, the first time for a group: collective,
    and blocks the host. Nodes must hold as many ranks each, next to each other in the group.
    """
    if comm.size == 1:
        return Nodes(1)
    if comm.nodes is not None:
        fits = comm.nodes > 0 and comm.size % comm.nodes == 0
        return Nodes(comm.nodes) if fits else Nodes(1, f"{comm.size} ranks cannot lie evenly on {comm.nodes} nodes")
    found = [(name, len(list(ranks))) for name, ranks in groupby(_node_names(comm.base))]
    if len({name for name, _ in found}) == len(found) and len({count for _, count in found}) == 1:
        return Nodes(len(found))
    order = ", ".join(f"{count} on {name[:20]}" for name, count in found[:4])
    more = ", ..." if len(found) > 4 else ""
    uneven = f"nodes must hold equal numbers of neighbouring ranks, but the group has {order}{more}"
    return Nodes(len({name for name, _ in found}), uneven)


def device_name(comm: Checked) -> str:
    """Return the device by whose machine attention is priced: the first rank's, the same on every rank.

    A group of GPUs asks for it the first time: collective, and blocks the host.
    """
    return _first_device(comm.base) if comm.device.type == "cuda" else HOST


def over_levels(comm: Checked, nodes: int, transport: str, every: int = 1) -> Levels:
    """Return the two levels of a group. Collective the first time; blocks the host then.

    Args:
        comm: The group.
        nodes: How many nodes it lies on, in order, each with as many ranks.
        transport: What the user asked for; "auto" and "peer" hold inside nodes.
        every: Only ranks `rank % every`, `rank % every + every`, ... form this rank's ring; a node's ranks are a
            multiple of it. All such rings must be made and used together.

    Raises:
        UserError: "peer" was asked for and ranks of a node cannot read each other's memory.
    """
    return _levels(comm.base, nodes, transport, every)


@lru_cache(maxsize=64)  # one for a group: each has communicators
def _levels(comm: Checked, nodes: int, transport: str, every: int) -> Levels:
    places = comm.size // nodes
    assert comm.size == nodes * places
    assert places % every == 0
    firsts = range(0, comm.size, places)
    inner = _part(comm, [tuple(range(node + i, node + places, every)) for node in firsts for i in range(every)])
    outer = _part(comm, [tuple(range(place, comm.size, places)) for place in range(places)])
    return Levels(over_transport(inner, transport) if isinstance(inner, Checked) else inner, outer)


def _part(comm: Checked, partition: Sequence[tuple[int, ...]]) -> BlockMover:
    mine = next(part for part in partition if comm.rank in part)
    if len(mine) == 1:
        return comm.over(LocalCommunicator(0, [[Wire()]]))
    if isinstance(comm.inner, Splittable):
        return comm.over(comm.inner.split(partition))
    return Members(comm, mine)


@lru_cache(maxsize=64)
def _first_device(comm: Checked) -> str:
    mine = torch.cuda.get_device_name(comm.device)
    return mine if comm.size == 1 else gather_objects(comm, mine)[0]


@lru_cache(maxsize=64)
def _node_names(comm: Checked) -> tuple[str, ...]:
    return tuple(gather_objects(comm, _node_name()))


def _node_name() -> str:
    named = os.environ.get(NODE_SWITCH)
    if named:
        return named[:200]
    try:
        return host_identity()
    except OSError:  # no Linux: its name must do
        return platform.node()
