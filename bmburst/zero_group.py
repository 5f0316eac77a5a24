"""ZeRO within groups of neighbouring ranks, such as those of a node: `ZeroGroups`.

BMTrain gathers the weights of a block in each forward and backward pass, and scatters its gradient in each backward
pass. Over slow links between nodes that takes longer than the computation. If every node holds all shards, these
transfers stay inside the node, and only an all-reduce of each rank's shard of the gradient goes between nodes, once a
step (hybrid sharding: MiCS, arXiv:2205.00119; `HYBRID_SHARD` of FSDP, arXiv:2304.11277). Each rank then holds more of
weights, gradients and optimizer states.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import bmtrain as bmt

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.collectives import BMTrainCommunicator
from bmburst.comm.communicator import gather_objects
from bmburst.comm.transports import NODE_SWITCH
from bmburst.errors import UserError
from bmburst.mesh import Mesh


def ranks_of_node(world: CheckedCommunicator) -> int:
    """Return the number of ranks on each node. Every rank must call it, and gets the same.

    A node has the ranks of one launcher (LOCAL_WORLD_SIZE), or those with the same BMBURST_NODE.

    Raises:
        UserError: On all ranks, if nodes have different numbers of ranks, or their ranks are not neighbours.
    """
    first = bmt.rank() - bmt.config["local_rank"]
    names = gather_objects(world, os.environ.get(NODE_SWITCH) or f"the node of rank {first}")
    found = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    if len({name for name, _ in found}) < len(found) or len({count for _, count in found}) > 1:
        order = ", ".join(f"{count} on {name[:40]}" for name, count in found[:4])
        raise UserError(
            f"parallel.zero_group node is not possible: there are {order}{', ...' if len(found) > 4 else ''}\n"
            "allowed: equal numbers of neighbouring ranks on each node\n"
            "fix: start as many ranks on each node, or give the ranks of a group: --parallel.zero_group N"
        )
    return found[0][1]


@dataclass(frozen=True)
class ZeroGroups:
    """The partition of all ranks into groups of neighbours, over each of which ZeRO shards all parameters.

    Attributes:
        ranks: Ranks of a group.
        count: Number of groups.
        inner: Communicators of this rank's group, by their names in BMTrain's configuration; empty for one group.
        between: Communicator of the ranks that hold copies of this rank's shards; None for one group.
    """

    ranks: int
    count: int
    inner: Mapping[str, Any]
    between: Any = None

    @classmethod
    def of(cls, mesh: Mesh, group: Literal["world"] | int) -> "ZeroGroups":
        """Return the groups of a mesh over BMTrain. Every rank must call it.

        Args:
            mesh: All ranks.
            group: Ranks of a group, or "world", the same on all ranks.

        Raises:
            UserError: See `MeshShape.require_zero_group`.
        """
        world, size, tensor = mesh.world.inner, mesh.shape.size, mesh.shape.tensor
        ranks = size if group == "world" else group
        mesh.shape.require_zero_group(ranks)
        if ranks == size:
            return cls(ranks, 1, {})
        assert isinstance(world, BMTrainCommunicator)
        firsts = range(0, size, ranks)
        inner = {"zero_comm": world.split([range(first, first + ranks) for first in firsts]).handle}
        if tensor > 1:
            alike = [range(first + part, first + ranks, tensor) for first in firsts for part in range(tensor)]
            inner["tp_zero_comm"] = world.split(alike).handle
        between = world.split([range(place, size, ranks) for place in range(ranks)])
        return cls(ranks, len(firsts), inner, between.handle)

    @contextmanager
    def sharding(self) -> Iterator[None]:
        """Shard the parameters that are created inside the `with` block over this rank's group."""
        before = {name: bmt.config[name] for name in self.inner}
        bmt.config.update(self.inner)  # BMTrain reads them when it creates a parameter or a block
        try:
            yield
        finally:
            bmt.config.update(before)
