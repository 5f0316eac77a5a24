"""A communicator over `bmtrain.nccl`: NCCL on GPUs, gloo if the host runtime is in use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bmburst.comm.memory import MessageMover, bytes_of, contiguous
from bmburst.comm.protocol import CompletedTransfer, Transfer, gather_objects
from bmburst.comm.streams import SideStreamTransfer


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
        self._handle = handle
        self._stream: Any = torch.cuda.Stream(priority=-1)  # high: transfers are short, and long kernels wait for them
        self.rank: int = nccl.commRank(handle)
        self.size: int = nccl.commCount(handle)
        self.transport = "gloo" if on_host else "nccl"
        self._device = torch.device("cpu" if on_host else "cuda")

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
                self._nccl.send(FlatStorage(bytes_of(outgoing)), to, self._handle)
                self._nccl.recv(FlatStorage(bytes_of(incoming)), source, self._handle)

        return self._start(operations, received, sent)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`. BMTrain 1.0.1 has none, so these are grouped sends and receives."""
        (sent,) = contiguous((tensor,))
        received = torch.empty_like(sent)

        return self._start(
            lambda: self._messages([*map(bytes_of, sent)], [*map(bytes_of, received)]), (received,), (sent,)
        )

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        (sent,) = contiguous((tensor,))
        received = sent.new_empty((self.size, *sent.shape))
        return self._start(
            lambda: self._nccl.allGather(FlatStorage(bytes_of(sent)), FlatStorage(bytes_of(received)), self._handle),
            (received,),
            (sent,),
        )

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        (sent,) = contiguous((tensor,))
        received = sent.new_empty(sent.shape[1:])
        return self._start(
            lambda: self._nccl.reduceScatter(FlatStorage(sent), FlatStorage(received), "sum", self._handle),
            (received,),
            (sent,),
        )

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._start(
            lambda: self._nccl.allReduce(FlatStorage(total), FlatStorage(total), "sum", self._handle), (total,), ()
        )

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], held: tuple[Tensor, ...]) -> Transfer:
        return self._start(lambda: self._messages(outgoing, incoming), tuple(incoming), held)

    def _messages(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send message r to rank r and receive the message of rank r; empty messages are skipped."""
        for peer, (sent, received) in enumerate(zip(outgoing, incoming, strict=True)):
            if sent.numel():
                self._nccl.send(FlatStorage(sent), peer, self._handle)
            if received.numel():
                self._nccl.recv(FlatStorage(received), peer, self._handle)

    def _start(
        self, operations: Callable[[], None], received: tuple[Tensor, ...], sent: tuple[Tensor, ...]
    ) -> Transfer:
        """Launch on the side stream, after the work of the current stream, without blocking the host."""
        if not any(tensor.numel() for tensor in (*received, *sent)):
            return CompletedTransfer(received)  # BMTrain divides by the number of elements
        pending = SideStreamTransfer(self._stream, received, sent)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), launched_together():
            operations()
        pending.done = self._stream.record_event()
        return pending
