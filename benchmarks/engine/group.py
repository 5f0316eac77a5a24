"""The ranks of a cell, and torch.distributed's plain collectives on them: what the peers are written with."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.comm.memory import bytes_of
from bmburst.comm.process_group import ALL_GATHER, REDUCE_SCATTER, named_verb


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """The ranks that share a sequence.

    Attributes:
        process_group: Theirs.
        rank: This rank's number among them.
        size: How many they are.
        device: Where this rank's tensors live.
        is_world: Whether they are all ranks of the run.
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device
    is_world: bool = True

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return `[size, ...]`: part i is what rank i had for this one.

        Args:
            parts: `[size, ...]` contiguous; part i goes to rank i.
        """
        received = torch.empty_like(parts)
        if self.size == 1:
            return received.copy_(parts)
        dist.all_to_all_single(bytes_of(received), bytes_of(parts), group=self.process_group)
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """Return `[size, ...]`: every rank's tensor, in rank order."""
        received = part.new_empty((self.size, *part.shape))
        if self.size == 1:
            return received.copy_(part[None])
        named_verb(ALL_GATHER)(bytes_of(received), bytes_of(part.contiguous()), group=self.process_group)
        return received

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over the ranks of their `parts[rank]`.

        Args:
            parts: `[size, ...]` contiguous.
        """
        received = torch.empty_like(parts[0])
        if self.size == 1:
            return received.copy_(parts[0])
        named_verb(REDUCE_SCATTER)(received.view(-1), parts.view(-1), group=self.process_group)
        return received

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum over the ranks, or what else the operation is, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here with nothing queued on their devices."""
        if self.size > 1:
            dist.barrier(group=self.process_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rotate(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to send a tensor to the next rank; return what comes from the one before, and what to wait for."""
        received = torch.empty_like(tensor)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        hops = [
            dist.P2POp(dist.isend, tensor, group=self.process_group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.process_group, group_peer=source),
        ]
        return received, dist.batch_isend_irecv(hops)
