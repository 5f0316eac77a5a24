"""Which transport moves a group's blocks."""

import warnings
from functools import lru_cache

from bmburst.comm.checks import Checked
from bmburst.comm.peer import PeerCommunicator
from bmburst.comm.shared_memory import SharedMemoryError
from bmburst.errors import UserError

TRANSPORTS = ("auto", "peer", "nccl", "gloo")


def over_transport(comm: Checked, transport: str) -> Checked:
    """Return the group over a transport: "auto" pulls from the other GPUs' memory where every rank can.

    The first call for a group on GPUs is collective and blocks the host.

    Raises:
        UserError: "peer" was asked for and some rank cannot read another's memory; on every rank.
    """
    if comm.size == 1 or comm.transport != "nccl" or transport not in ("auto", "peer"):
        return comm
    outcome = _over_peers(comm.base)
    if isinstance(outcome, Checked):
        return outcome
    if transport == "peer":
        raise UserError(f"transport 'peer' cannot work here: {outcome}\nuse transport='auto' or 'nccl'")
    return comm


def release_boxes() -> None:
    """Give back what transport "peer" keeps for the next calls. All ranks of all its groups must call it."""
    for peers in _peers():
        peers.release()


@lru_cache(maxsize=64)
def _over_peers(comm: Checked) -> Checked | str:
    """Return the group over its GPUs' memory, or why that cannot be; says so once."""
    try:
        peers = PeerCommunicator(comm.inner, comm.device)
    except SharedMemoryError as error:
        if comm.rank == 0:
            warnings.warn(f"bmburst: blocks move by NCCL, because {error}", stacklevel=2)
        return str(error)
    _peers().append(peers)
    return comm.over(peers)


@lru_cache(maxsize=1)
def _peers() -> list[PeerCommunicator]:
    """Return all of this process as they were made: ranks that share two groups made them in one order."""
    return []
