"""Seconds that transfers take on a machine's links, and how much of it nothing hides."""

from dataclasses import dataclass, replace

from bmburst.plan.candidates import Candidate
from bmburst.schedule.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Pipe:
    """A way into a rank.

    Attributes:
        bandwidth: Bytes a second.
        latency: Seconds.
        share: Of the transfer's time, by which kernels beside it take longer.
    """

    bandwidth: float
    latency: float
    share: float

    def seconds(self, nbytes: float) -> float:
        """Return the time of a transfer."""
        return nbytes / self.bandwidth + self.latency if nbytes else 0.0

    def exposed(self, nbytes: float, hidden_behind: float) -> float:
        """Return by how much a transfer beside so many seconds of kernels lengthens them."""
        seconds = self.seconds(nbytes)
        return max(seconds * self.share, seconds - hidden_behind)


def inside(hardware: Hardware, transport: str) -> Pipe:
    """Return the way between two GPUs of a node."""
    if transport == "peer":
        return Pipe(hardware.peer_bandwidth, hardware.peer_latency, hardware.peer_exposed)
    return Pipe(hardware.nccl_bandwidth, hardware.nccl_latency, hardware.nccl_exposed)


def between(hardware: Hardware, candidate: Candidate, crossing: float) -> Pipe:
    """Return the way between two nodes, where so many GPUs of each receive at once."""
    node = hardware.inter_bandwidth * candidate.task.gpus_per_node
    bandwidth = min(hardware.inter_lone_bandwidth, node / max(1.0, crossing))
    return Pipe(bandwidth, hardware.inter_latency, hardware.inter_exposed)


def mixed(hardware: Hardware, candidate: Candidate, ranks: int, near: int) -> Pipe:
    """Return the way into a rank that receives alike from `ranks` ranks, itself among them, `near` on its node."""
    home = inside(hardware, candidate.transport)
    if candidate.transport == "nccl":
        home = replace(home, bandwidth=hardware.all_to_all_bandwidth)
    if ranks <= near:
        return home
    away = between(hardware, candidate, candidate.task.gpus_per_node)
    far = (ranks - near) / max(1, ranks - 1)
    # Both ways are open at once: the slower one counts.
    slowest = max((1 - far) / home.bandwidth, far / away.bandwidth)
    return Pipe(1 / slowest, away.latency, away.share)


def collective(hardware: Hardware, candidate: Candidate, nbytes: float, ranks: int) -> float:
    """Return the seconds of an all-gather to, or a reduce-scatter of, so many bytes on each of `ranks` ranks.

    The ranks lie evenly over the nodes. Into a GPU by the node's links, into a node by all of its NICs.
    """
    if ranks == 1 or not nbytes:
        return 0.0
    nodes = min(candidate.task.nodes, ranks)
    near = ranks / nodes
    home = nbytes * (ranks - 1) / ranks / hardware.collective_bandwidth if near > 1 else 0.0
    groups = candidate.task.gpus_per_node / near  # as many such groups share the NICs
    node = hardware.inter_bandwidth * candidate.task.gpus_per_node
    away = groups * nbytes * (nodes - 1) / nodes / node
    # A ring: its first byte passes every node.
    latency = (nodes - 1) * hardware.inter_latency / 2 + hardware.nccl_latency
    return max(home, away) + latency
