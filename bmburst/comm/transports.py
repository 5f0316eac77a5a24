"""Chooses the transport of a group and of its sums of small tensors, and makes the two groups of a double ring.

A double ring has a group inside each node and one between nodes. Each has its own communicator if the transport can
make one (torch.distributed, BMTrain). A communicator starts its transfers in order on one stream, so a block between
nodes would delay every later hop, and two streams must not share a communicator (NCCL deadlocks, NVIDIA/nccl#783). Two
communicators may run at once if every rank launches their transfers in the same order, which the schedule ensures. The
transport inside a node is chosen separately: there blocks may move directly between GPUs.

Communicators that cannot be split (a user's own) move the blocks of both rings.

Where GPUs can read each other's memory, `small_sums` adds up small tensors by one kernel. NCCL takes about 25
microseconds for 8 KiB, and decoding needs two all-reduces in each layer. In a one-shot all-reduce each rank writes its
tensor to shared memory and sums the tensors of all ranks (`bmburst_ops.triton_reductions`).
"""

import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.collectives import BMTrainCommunicator, ProcessGroupCommunicator
from bmburst.comm.communicator import BlockMover, Communicator, Transfer, gather_objects
from bmburst.comm.memory import ring_by_pull
from bmburst.comm.peer import PeerCommunicator
from bmburst.comm.shared_memory import SharedMemory, SharedMemoryError, host_identity
from bmburst.errors import UserError
from bmburst.schedule.exchange import Exchange
from bmburst.schedule.hardware import HOST
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.fused import triton_twin


class PeerGroups:
    """The groups of this process for which transport "peer" was requested, with one communicator each.

    Args:
        make: Makes the communicator of a group on a device, or raises `SharedMemoryError` on every rank.
    """

    def __init__(self, make: Callable[[Communicator, torch.device], PeerCommunicator] = PeerCommunicator) -> None:
        self._make_peers = make
        self._outcomes: dict[CheckedCommunicator, CheckedCommunicator | str] = {}
        self._peers: list[PeerCommunicator] = []  # in the same order on all ranks

    def over(self, comm: CheckedCommunicator) -> CheckedCommunicator | str:
        """Return the group over transport "peer", or the reason why that is impossible; rank 0 warns once.

        The first call for a group is collective.
        """
        if comm not in self._outcomes:
            self._outcomes[comm] = self._make(comm)
        return self._outcomes[comm]

    def add(self, peers: PeerCommunicator) -> None:
        """Register a communicator whose memory `release` frees."""
        self._peers.append(peers)

    def release(self) -> None:
        """Free the outboxes and inboxes of all groups. Every rank must call it."""
        for peers in self._peers:
            peers.release()

    def clear(self) -> None:
        """Forget all groups."""
        self._outcomes.clear()
        self._peers.clear()

    def _make(self, comm: CheckedCommunicator) -> CheckedCommunicator | str:
        try:
            peers = self._make_peers(comm.inner, comm.device)
        except SharedMemoryError as error:
            if comm.rank == 0:
                warnings.warn(f"bmburst: blocks move by NCCL, because {error}", stacklevel=3)
            return str(error)
        self.add(peers)
        return comm.over(peers)


PEER_GROUPS = PeerGroups()


def over_transport(comm: CheckedCommunicator, transport: str, groups: PeerGroups = PEER_GROUPS) -> CheckedCommunicator:
    """Return the group over a transport: "auto" is "peer" if every rank can read the GPU memory of the others.

    The first call for a group on GPUs is collective and blocks the host.

    Args:
        comm: The group.
        transport: "auto", "peer", or the transport of the group.
        groups: The groups of this process.

    Raises:
        UserError: On every rank, if "peer" was requested and a rank cannot read the memory of another.
    """
    if comm.size == 1 or comm.transport != "nccl" or transport not in ("auto", "peer"):
        return comm
    outcome = groups.over(comm.base)
    if isinstance(outcome, CheckedCommunicator):
        return outcome
    if transport == "peer":
        raise UserError(f"transport 'peer' cannot work here: {outcome}\nfix: use transport='auto' or 'nccl'")
    return comm


class Subgroup:
    """A subgroup of the given ranks, which include this one. A `BlockMover`.

    The subgroups partition the group into equal sizes, and every rank makes the same calls.

    Args:
        comm: The parent group.
        ranks: The parent ranks of this subgroup, in order.
    """

    def __init__(self, comm: BlockMover, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, tuple(ranks)
        self.rank, self.size, self.transport = self._ranks.index(comm.rank), len(self._ranks), comm.transport

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`. The parent's ring does not connect these ranks, so tensors go through an outbox."""
        return ring_by_pull(self, tensors, shift)

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`."""
        return self._comm.outbox(nbytes, lane)

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        return self._comm.pull(self._spread(exchange), outbox, targets, lane)

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.inbox`."""
        return self._comm.inbox(nbytes, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        return self._comm.push(self._spread(exchange), sources, inbox, lane)

    def _spread(self, exchange: Exchange) -> Exchange:
        return _spread(exchange, self._comm.size, self._ranks)


class StridedSubgroup(Subgroup):
    """The subgroup `rank % n`, `rank % n + n`, ...: its ring is the parent's ring with hops of `n`."""

    def __init__(self, comm: BlockMover, n: int) -> None:
        super().__init__(comm, range(comm.rank % n, comm.size, n))
        self._n = n

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        return self._comm.ring(*tensors, shift=shift * self._n)


@lru_cache(maxsize=1024)
def _spread(exchange: Exchange, size: int, ranks: tuple[int, ...]) -> Exchange:
    """Return an exchange of the subgroup in the ranks of the parent group."""
    place = {rank: i for i, rank in enumerate(ranks)}
    return Exchange(
        ranks[exchange.rank],
        exchange.nbytes,
        sends=tuple(exchange.sends[place[peer]] if peer in place else () for peer in range(size)),
        receives=tuple(exchange.receives[place[peer]] if peer in place else () for peer in range(size)),
    )


NODE_SWITCH = "BMBURST_NODE"
"""The environment variable that names the node of a process; by default the host is its node."""


@dataclass(frozen=True, slots=True)
class RingGroups:
    """The two groups of a rank in a double ring. Its rank in the whole ring is `inter.rank * intra.size + intra.rank`.

    Attributes:
        intra: The ranks of this node.
        inter: The ranks that have this rank's place in each node; in a ring, this rank alone.
    """

    intra: BlockMover
    inter: BlockMover


@runtime_checkable
class Splittable(Communicator, Protocol):
    """A communicator that can be split."""

    def split(self, partition: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the part that holds this rank; every rank must call it with the same partition."""
        ...


@dataclass(frozen=True, slots=True)
class NodeGrouping:
    """The number of nodes of a group. `uneven`: why they do not hold equal runs of consecutive ranks, or None."""

    count: int
    uneven: str | None = None


def find_nodes(comm: CheckedCommunicator) -> NodeGrouping:
    """Return the nodes of a group; the result is the same on every rank.

    It is `comm.nodes` if that is set. Otherwise the first call for a group gathers the node of each rank: it is
    collective and blocks the host. Every node must have equally many ranks, consecutive in the group.
    """
    if comm.nodes is not None:
        if comm.nodes > 0 and comm.size % comm.nodes == 0:
            return NodeGrouping(comm.nodes)
        return NodeGrouping(1, f"{comm.size} ranks cannot be divided evenly among {comm.nodes} nodes")
    found = [(name, len(list(ranks))) for name, ranks in groupby(_node_names(comm.base))]
    if len({name for name, _ in found}) == len(found) and len({count for _, count in found}) == 1:
        return NodeGrouping(len(found))
    order = ", ".join(f"{count} on {name[:20]}" for name, count in found[:4])
    more = ", ..." if len(found) > 4 else ""
    uneven = f"nodes must hold equal numbers of neighbouring ranks, but the group has {order}{more}"
    return NodeGrouping(len({name for name, _ in found}), uneven)


def device_name(comm: CheckedCommunicator, name_of: Callable[[torch.device], str] = torch.cuda.get_device_name) -> str:
    """Return the device name of the first rank, on every rank: it selects the machine of the cost model.

    The first call for a group of GPUs is collective and blocks the host.

    Args:
        comm: The group.
        name_of: Returns the name of a GPU.
    """
    return _first_device(comm.base, name_of) if comm.device.type == "cuda" else HOST


def double_ring_groups(comm: CheckedCommunicator, nodes: int, transport: str, every: int = 1) -> RingGroups:
    """Return this rank's two groups of a double ring. The first call for a group is collective and blocks the host.

    Args:
        comm: The group.
        nodes: Number of nodes, each with equally many consecutive ranks.
        transport: The transport that the user requested; "auto" and "peer" apply inside nodes.
        every: Ranks `rank % every`, `rank % every + every`, ... form this rank's ring. It divides the ranks of a node.
            All these rings must be made and used together.

    Raises:
        UserError: "peer" was requested and ranks of a node cannot read each other's memory.
    """
    return _double_ring_groups(comm.base, nodes, transport, every)


def exchanging_group(comm: CheckedCommunicator) -> CheckedCommunicator:
    """Return the group over a communicator that only moves heads. The first call for a group is collective.

    NCCL runs the operations of a communicator one after another, so an exchange would wait for other collectives, such
    as the gather of a later layer's weights. They use the communicator of all ranks of the job.
    """
    return _exchanging_group(comm.base) if comm.device.type == "cuda" else comm


@lru_cache(maxsize=64)  # each entry owns a communicator
def _exchanging_group(comm: CheckedCommunicator) -> CheckedCommunicator:
    inner = comm.inner
    if isinstance(inner, ProcessGroupCommunicator | BMTrainCommunicator) and inner.is_world:
        return comm.over(inner.split([tuple(range(comm.size))]))
    return comm


@lru_cache(maxsize=64)  # each entry owns communicators
def _double_ring_groups(comm: CheckedCommunicator, nodes: int, transport: str, every: int) -> RingGroups:
    places = comm.size // nodes
    assert comm.size == nodes * places
    assert places % every == 0
    firsts = range(0, comm.size, places)
    intra = _part(comm, [tuple(range(node + i, node + places, every)) for node in firsts for i in range(every)])
    inter = _part(comm, [tuple(range(place, comm.size, places)) for place in range(places)])
    return RingGroups(over_transport(intra, transport) if isinstance(intra, CheckedCommunicator) else intra, inter)


def _part(comm: CheckedCommunicator, partition: Sequence[tuple[int, ...]]) -> BlockMover:
    mine = next(part for part in partition if comm.rank in part)
    if isinstance(comm.inner, Splittable):
        return comm.over(comm.inner.split(partition))
    return Subgroup(comm, mine)


@lru_cache(maxsize=64)
def _first_device(comm: CheckedCommunicator, name_of: Callable[[torch.device], str]) -> str:
    mine = name_of(comm.device)
    return mine if comm.size == 1 else gather_objects(comm, mine)[0]


@lru_cache(maxsize=64)
def _node_names(comm: CheckedCommunicator) -> tuple[str, ...]:
    return tuple(gather_objects(comm, _node_name()))


def _node_name() -> str:
    named = os.environ.get(NODE_SWITCH)
    if named:
        return named[:200]
    try:
        return host_identity()
    except OSError:  # not Linux: use the host name
        return platform.node()


AddUp = Callable[[Tensor], Tensor | None]
"""Returns the sum of a small tensor over the ranks of a group, in its shape and dtype; None if it does not take it."""


def small_sums(comm: CheckedCommunicator, numbers: int, dtype: torch.dtype) -> AddUp:
    """Return a function that sums a tensor over the ranks of a group, with equal bits on all of them.

    It can be captured in a CUDA graph. It takes no tensor if ranks cannot access each other's memory. On GPUs the first
    call for a group, size and dtype is collective.

    Args:
        comm: The group.
        numbers: Most elements of a tensor.
        dtype: Dtype of the tensors.
    """
    if comm.size == 1:
        return lambda tensor: tensor
    one_shot = _one_shots(comm.base, numbers, dtype)

    def add_up(tensor: Tensor) -> Tensor | None:
        if one_shot is None or tensor.numel() > numbers or tensor.dtype != dtype:
            return None
        return one_shot(tensor)

    return add_up


class _OneShot:
    """The shared memory of a group's one-shot all-reduce."""

    def __init__(self, comm: CheckedCommunicator, numbers: int, dtype: torch.dtype, kernels: Any) -> None:
        self._kernels, self._rank, self._most = kernels, comm.rank, numbers
        programs, places = kernels.programs_for(numbers), 2 * numbers * dtype.itemsize
        self._memory = SharedMemory(comm.inner, places + programs * comm.size * 4, comm.device)
        self._memory.local.zero_()
        torch.cuda.synchronize(comm.device)
        gather_objects(comm.inner, None)  # a barrier: all flags are zero before any rank writes one
        addresses = torch.tensor(self._memory.addresses, dtype=torch.int64, device=comm.device)
        self._boxes, self._flags = addresses, addresses + places
        self._calls = torch.zeros(programs, dtype=torch.int32, device=comm.device)

    def __call__(self, tensor: Tensor) -> Tensor:
        places = self._boxes, self._flags, self._calls
        total: Tensor = self._kernels.add_up(tensor.contiguous(), *places, self._rank, self._most)
        return total


@bounded_cache(maxsize=16)
def _one_shots(comm: CheckedCommunicator, numbers: int, dtype: torch.dtype) -> _OneShot | None:
    """Return the one-shot all-reduce of a group, or None if its ranks cannot access each other's memory."""
    if comm.transport != "nccl" or over_transport(comm, "auto").transport != "peer":
        return None
    kernels = triton_twin("triton_reductions", torch.empty(0, dtype=dtype, device=comm.device))
    if not all(gather_objects(comm.inner, kernels is not None)):
        return None
    try:
        return _OneShot(comm, -(-numbers // 8) * 8, dtype, kernels)
    except SharedMemoryError:  # on every rank
        return None
