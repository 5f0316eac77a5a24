"""Communicators over libraries of collectives: a torch.distributed process group (gloo or nccl), and `bmtrain.nccl`.

`bmtrain.nccl` is NCCL on GPUs, and gloo if the host runtime is in use.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.comm.communicator import CompletedTransfer, Transfer, device_of, gather_objects
from bmburst.comm.memory import MessageMover, bytes_of, contiguous
from bmburst.comm.streams import SideStreamTransfer, current_handle
from bmburst.errors import UserError

# Names in torch 2.13, and in older releases.
ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")
_SMALL = 1 << 20  # bytes of a collective whose handle is kept
_ended: deque[Sequence[dist.Work]] = deque(maxlen=8)
"""Handles of gloo's last collectives.

A thread of gloo that is the last to hold one frees its tensors, for which it needs Python's lock. A process group that
outlives `destroy_process_group`, as that of DistributedDataParallel, joins this thread with the lock: both would wait
for ever.
"""


class _Pending:
    """Pending works and every tensor that they read or write, so that the allocator does not reuse the memory."""

    def __init__(self, works: Sequence[dist.Work], received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        self._works, self._received, self._sent = works, received, sent
        on_gpu = any(tensor.is_cuda for tensor in received)
        self._maker = torch.cuda.current_stream() if on_gpu else None

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._works:
            work.wait()
        if self._maker is None:
            if self._works and sum(tensor.nbytes for tensor in (*self._received, *self._sent)) <= _SMALL:
                _ended.append(self._works)
            self._works = ()  # a gloo message can be waited for only once
        elif (current := torch.cuda.current_stream()) != self._maker:
            # The stream that owns the memory has not waited for `current`.
            for tensor in (*self._received, *self._sent):
                tensor.record_stream(current)
        self._sent = ()
        return self._received


def number_of_groups() -> int | None:
    """Return the number of process groups that this rank is in; None if torch keeps this private number elsewhere."""
    names = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", None)
    return None if names is None else len(names)


class ProcessGroupCommunicator(MessageMover):
    """`Communicator` over a `torch.distributed` process group.

    It holds a weak reference: a group that outlives `destroy_process_group` would abort the process at exit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # A group has one backend per device type, for example "cpu:gloo,cuda:nccl".
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.transport: str = backends.get("cuda" if torch.cuda.is_available() else "cpu", dist.get_backend(group))
        self._device = device_of(self)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:
            raise UserError("the process group was destroyed\nfix: make modules and meshes again afterwards")
        return group

    @property
    def is_destroyed(self) -> bool:
        """Whether the group was destroyed, even if references to it remain; the same on every rank."""
        try:
            dist.get_backend(self._group)
        except (UserError, ValueError):
            return True
        return False

    @property
    def is_world(self) -> bool:
        """Whether the group has all ranks of torch.distributed."""
        return self.size == dist.get_world_size()

    def split(self, partition: Sequence[Sequence[int]]) -> "ProcessGroupCommunicator":
        """Return the communicator of the part that holds this rank; every rank must call it with the same partition.

        Ranks are in ascending order. The ranks of this group take part; if torch.distributed was initialised with a
        `device_id`, torch splits NCCL's communicator of the world, and all ranks of the world must take part.
        """
        mine = next(part for part in partition if self.rank in part)
        ranks = dist.get_process_group_ranks(self._group)
        backend = dist.get_backend_config(self._group)
        own = number_of_groups()
        if own is None and self.is_world:  # torch names groups that all ranks make alike
            made = [dist.new_group([ranks[rank] for rank in part], backend=backend) for part in partition]
            return ProcessGroupCommunicator(made[list(partition).index(mine)])
        if own is not None:
            self._even_group_counts(own)
        group = dist.new_group([ranks[rank] for rank in mine], backend=backend, use_local_synchronization=True)
        return ProcessGroupCommunicator(group)

    def _even_group_counts(self, own: int) -> None:
        """Let all ranks of this group be in as many process groups, by groups of one rank. Collective.

        torch names a group that only its own ranks make after these ranks and the number of groups that a rank is in.
        Ranks with different numbers, as after `dist.new_group` of some of them, would wait for each other forever.

        Args:
            own: The number of groups that this rank is in.
        """
        (counts,) = self.all_gather(torch.tensor([own], device=self._device)).wait()
        for _ in range(int(counts.max()) - own):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        sent = contiguous(tensors)
        received = tuple(torch.empty_like(t) for t in sent)
        to, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
        if self.transport != "nccl":
            outbound, inbound = ([(peer, bytes_of(t)) for t in part] for peer, part in ((to, sent), (source, received)))
            return _Pending(self._posted(outbound, inbound), received, sent)
        nothing = torch.empty(0, dtype=torch.uint8, device=sent[0].device)
        works: list[dist.Work] = []
        for outgoing, incoming in zip(sent, received, strict=True):
            works += self._works(
                [bytes_of(outgoing) if peer == to else nothing for peer in range(self.size)],
                [bytes_of(incoming) if peer == source else nothing for peer in range(self.size)],
            )
        return _Pending(works, received, sent)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        sent = tensor.detach().contiguous()
        received = torch.empty_like(sent)
        return self._started(dist.all_to_all_single, bytes_of(received), bytes_of(sent), received, sent)

    def all_to_all_here(self, tensor: Tensor) -> Tensor:
        """See `OnCurrentStream.all_to_all_here`."""
        received = torch.empty_like(tensor)
        dist.all_to_all_single(bytes_of(received), bytes_of(tensor), group=self._group)
        return received

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        sent = tensor.detach().contiguous()
        received = sent.new_empty((self.size, *sent.shape))
        return self._started(named_verb(ALL_GATHER), bytes_of(received), bytes_of(sent), received, sent)

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        sent = tensor.detach().contiguous()
        received = sent.new_empty(sent.shape[1:])
        return self._started(named_verb(REDUCE_SCATTER), received.view(-1), sent.view(-1), received, sent)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return _Pending((work,), (total,), ())

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], held: tuple[Tensor, ...]) -> Transfer:
        return _Pending(self._works(outgoing, incoming), tuple(incoming), held)

    def _works(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[dist.Work]:
        """Send message r to rank r and receive the message of rank r; empty messages are skipped."""
        if self.transport == "nccl":
            # A collective, because torch calls `record_stream` on the tensors of isend and irecv: a host that runs
            # ahead of the GPU would allocate new memory for every block. Tensors of a collective are held until wait.
            return [dist.all_to_all(list(incoming), list(outgoing), group=self._group, async_op=True)]
        return self._posted(list(enumerate(outgoing)), list(enumerate(incoming)))

    def _posted(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]
    ) -> list[dist.Work]:
        """Start receives and sends, in order between two ranks; empty messages are skipped.

        Receives are posted first: gloo notifies the sender over the connection that also carries messages to it.
        """
        operations = [
            dist.P2POp(verb, message, group=self._group, group_peer=peer)
            for verb, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
            for peer, message in messages
            if message.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _started(
        self, verb: Callable[..., dist.Work], target: Tensor, source: Tensor, received: Tensor, sent: Tensor
    ) -> _Pending:
        return _Pending((verb(target, source, group=self._group, async_op=True),), (received,), (sent,))


def named_verb(names: tuple[str, str]) -> Callable[..., dist.Work]:
    """Return torch's function of the first name, or of the second name if the first does not exist."""
    name, before = names
    found: Callable[..., dist.Work] = getattr(dist, name, None) or getattr(dist, before)
    return found


@dataclass(frozen=True, slots=True)
class FlatStorage:
    """A contiguous tensor with the storage interface that `bmtrain.nccl` uses.

    BMTrain sends whole storages: for a view it would send the full storage from its beginning. Its functions use only
    these four names.
    """

    tensor: Tensor
    is_cuda: ClassVar[bool] = True  # BMTrain asserts it; the host runtime uses CPU memory instead

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a reduction."""
        return self.tensor.dtype

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.tensor.data_ptr()

    def size(self) -> int:
        """Return the number of elements."""
        return self.tensor.numel()


@contextmanager
def launched_together() -> Iterator[None]:
    """Launch the NCCL calls of this block together at its end: two ranks that both send first would deadlock.

    The NCCL group is also closed after an exception: an open one would delay every later call of the process.
    """
    import bmtrain.nccl as nccl

    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


class BMTrainCommunicator(MessageMover):
    """`Communicator` over a `bmtrain.nccl` communicator, on its own stream.

    Args:
        handle: The result of `bmtrain.nccl.commInitRank`, or `bmtrain.config["comm"]`.
        on_host: Whether the host runtime replaces CUDA.
    """

    def __init__(self, handle: object, *, on_host: bool) -> None:
        import bmtrain.nccl as nccl

        self._nccl: Any = nccl
        self.handle: Any = handle
        self._stream: Any = torch.cuda.Stream(priority=-1)  # high: transfers are short, and long kernels wait for them
        self.rank: int = nccl.commRank(handle)
        self.size: int = nccl.commCount(handle)
        self.transport = "gloo" if on_host else "nccl"
        self._device = torch.device("cpu" if on_host else "cuda")
        self._has_started = False
        """Whether the side stream has work that the current stream has not waited for."""

    @property
    def is_world(self) -> bool:
        """Whether the group has all ranks of BMTrain."""
        import bmtrain as bmt

        return self.size == int(bmt.config["world_size"])

    def split(self, partition: Sequence[Sequence[int]]) -> "BMTrainCommunicator":
        """Return the communicator of the part that holds this rank; every rank must call it with the same partition."""
        mine = next(part for part in partition if self.rank in part)
        ids = gather_objects(self, self._nccl.getUniqueId().hex() if mine[0] == self.rank else "")
        handle = self._nccl.commInitRank(bytes.fromhex(ids[mine[0]]), len(mine), mine.index(self.rank))
        return BMTrainCommunicator(handle, on_host=self.transport == "gloo")

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        sent = contiguous(tensors)
        received = tuple(torch.empty_like(t) for t in sent)
        to, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size

        def operations() -> None:
            for outgoing, incoming in zip(sent, received, strict=True):
                self._nccl.send(FlatStorage(bytes_of(outgoing)), to, self.handle)
                self._nccl.recv(FlatStorage(bytes_of(incoming)), source, self.handle)

        return self._start(operations, received, sent)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`. BMTrain 1.0.1 has none, so these are grouped sends and receives."""
        sent = tensor.detach().contiguous()
        received = torch.empty_like(sent)

        return self._start(
            lambda: self._messages([*map(bytes_of, sent)], [*map(bytes_of, received)]), (received,), (sent,)
        )

    def all_to_all_here(self, tensor: Tensor) -> Tensor:
        """See `OnCurrentStream.all_to_all_here`."""
        received = torch.empty_like(tensor)
        if self._has_started:  # two streams must not share a communicator
            torch.cuda.current_stream().wait_stream(self._stream)
            self._has_started = False
        # Without the wrappers of `bmtrain.nccl`, which look up the current stream for each message.
        library, row = self._nccl.C, tensor.nbytes // self.size
        source, target, handle = tensor.data_ptr(), received.data_ptr(), self.handle.ptr
        stream = self._current_handle()
        with launched_together():
            for peer in range(self.size if row else 0):
                library.ncclSend(source + peer * row, row, self._nccl.ncclUint8, peer, handle, stream)
                library.ncclRecv(target + peer * row, row, self._nccl.ncclUint8, peer, handle, stream)
        return received

    def _current_handle(self) -> int:
        on_host = self.transport == "gloo"
        return int(torch.cuda.current_stream().cuda_stream) if on_host else current_handle(self._stream.device_index)

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        sent = tensor.detach().contiguous()
        received = sent.new_empty((self.size, *sent.shape))
        return self._start(
            lambda: self._nccl.allGather(FlatStorage(bytes_of(sent)), FlatStorage(bytes_of(received)), self.handle),
            (received,),
            (sent,),
        )

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        sent = tensor.detach().contiguous()
        received = sent.new_empty(sent.shape[1:])
        return self._start(
            lambda: self._nccl.reduceScatter(FlatStorage(sent), FlatStorage(received), "sum", self.handle),
            (received,),
            (sent,),
        )

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._start(
            lambda: self._nccl.allReduce(FlatStorage(total), FlatStorage(total), "sum", self.handle), (total,), ()
        )

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], held: tuple[Tensor, ...]) -> Transfer:
        return self._start(lambda: self._messages(outgoing, incoming), tuple(incoming), held)

    def _messages(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send message r to rank r and receive the message of rank r; empty messages are skipped."""
        for peer, (sent, received) in enumerate(zip(outgoing, incoming, strict=True)):
            if sent.numel():
                self._nccl.send(FlatStorage(sent), peer, self.handle)
            if received.numel():
                self._nccl.recv(FlatStorage(received), peer, self.handle)

    def _start(
        self, operations: Callable[[], None], received: tuple[Tensor, ...], sent: tuple[Tensor, ...]
    ) -> Transfer:
        """Launch on the side stream, after the work of the current stream, without blocking the host."""
        if not any(tensor.numel() for tensor in (*received, *sent)):
            return CompletedTransfer(received)  # BMTrain divides by the number of elements
        self._has_started = True
        pending = SideStreamTransfer(self._stream, received, sent)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), launched_together():
            operations()
        pending.done = self._stream.record_event()
        return pending
