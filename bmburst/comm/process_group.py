"""A communicator over a torch.distributed process group, gloo or nccl."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.comm.protocol import Transfer


@dataclass(frozen=True, slots=True)
class _Pending:
    works: Sequence[dist.Work]
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]  # kept alive: the allocator may not reuse them in flight

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.received


class ProcessGroupCommunicator:
    """`Communicator` over a `torch.distributed` process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.transport: str = dist.get_backend(group)

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        if shift % self.size == 0:
            return _Pending((), tensors, ())
        sent = _contiguous(tensors)
        received = tuple(torch.empty_like(t) for t in sent)
        to, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
        operations = [self._hop(dist.isend, t, to) for t in sent]
        operations += [self._hop(dist.irecv, t, source) for t in received]
        return _Pending(dist.batch_isend_irecv(operations), received, sent)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        if self.size == 1:
            return _Pending((), (tensor,), ())
        (sent,) = _contiguous((tensor,))
        received = torch.empty_like(sent)
        return self._started(dist.all_to_all_single(received, sent, group=self._group, async_op=True), received, sent)

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        if self.size == 1:
            return _Pending((), (tensor[None],), ())
        (sent,) = _contiguous((tensor,))
        received = sent.new_empty((self.size, *sent.shape))
        flat = received.view(-1) if sent.dim() == 0 else received.flatten(0, 1)
        source = sent.view(1) if sent.dim() == 0 else sent
        work = _verb("all_gather_single", "all_gather_into_tensor")(flat, source, group=self._group, async_op=True)
        return self._started(work, received, sent)

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        if self.size == 1:
            return _Pending((), (tensor[0],), ())
        (sent,) = _contiguous((tensor,))
        received = sent.new_empty(sent.shape[1:])
        flat = received.view(1) if received.dim() == 0 else received
        source = sent if received.dim() == 0 else sent.flatten(0, 1)
        work = _verb("reduce_scatter_single", "reduce_scatter_tensor")(flat, source, group=self._group, async_op=True)
        return self._started(work, received, sent)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return _Pending((), (total,), ())
        return self._started(dist.all_reduce(total, group=self._group, async_op=True), total, total)

    def _hop(self, verb: Callable[..., object], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(verb, tensor, group=self._group, group_peer=peer)

    def _started(self, work: dist.Work | None, received: Tensor, sent: Tensor) -> _Pending:
        return _Pending((work,) if work is not None else (), (received,), (sent,))


def _verb(name: str, before: str) -> Callable[..., dist.Work | None]:
    """Return torch's function under the name of torch 2.13, or under the one that it had before."""
    found: Callable[..., dist.Work | None] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().contiguous() for t in tensors)
