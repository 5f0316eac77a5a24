"""A communicator over BMTrain's NCCL: the real one on GPUs, gloo underneath where the host runtime is in use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.protocol import Transfer


@dataclass(frozen=True, slots=True)
class _Flat:
    """A contiguous tensor in the shape of the storage that `bmtrain.nccl` takes.

    BMTrain moves whole storages: the storage of a view would be sent from its beginning and in full. Its functions
    ask only for these four names.
    """

    tensor: Tensor
    on_host: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_cuda(self) -> bool:
        return self.tensor.is_cuda or self.on_host  # asserted by BMTrain; the host runtime takes CPU memory

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def size(self) -> int:
        return self.tensor.numel()


@dataclass(frozen=True, slots=True)
class _Pending:
    done: Any  # torch.cuda.Event, or the host runtime's
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        current = torch.cuda.current_stream()
        current.wait_event(self.done)
        for tensor in (*self.received, *self.sent):
            tensor.record_stream(current)
        return self.received


@dataclass(frozen=True, slots=True)
class _Ready:
    received: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.received


class BMTrainCommunicator:
    """`Communicator` over a `bmtrain.nccl` communicator, on a stream of its own.

    Args:
        handle: What `bmtrain.nccl.commInitRank` returned, or `bmtrain.config["comm"]`.
        on_host: Whether the host runtime stands in for CUDA.
    """

    def __init__(self, handle: object, *, on_host: bool) -> None:
        import bmtrain.nccl as nccl

        self._nccl: ModuleType = nccl
        self._handle = handle
        self._on_host = on_host
        self._stream: Any = torch.cuda.Stream(priority=-1)  # the transfer is short, what waits for it is long
        self.rank: int = nccl.commRank(handle)
        self.size: int = nccl.commCount(handle)
        self.transport = "gloo" if on_host else "nccl"

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        if shift % self.size == 0:
            return _Ready(tensors)
        sent = _contiguous(tensors)
        received = tuple(torch.empty_like(t) for t in sent)
        to, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size

        def operations() -> None:
            for outgoing, incoming in zip(sent, received, strict=True):
                self._nccl.send(self._flat(outgoing), to, self._handle)
                self._nccl.recv(self._flat(incoming), source, self._handle)

        return self._start(operations, received, sent)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`. BMTrain 1.0.1 has none: grouped sends and receives."""
        if self.size == 1:
            return _Ready((tensor,))
        (sent,) = _contiguous((tensor,))
        received = torch.empty_like(sent)

        def operations() -> None:
            for peer in range(self.size):
                self._nccl.send(self._flat(sent[peer]), peer, self._handle)
                self._nccl.recv(self._flat(received[peer]), peer, self._handle)

        return self._start(operations, (received,), (sent,))

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        if self.size == 1:
            return _Ready((tensor[None],))
        (sent,) = _contiguous((tensor,))
        received = sent.new_empty((self.size, *sent.shape))
        return self._start(
            lambda: self._nccl.allGather(self._flat(sent), self._flat(received), self._handle), (received,), (sent,)
        )

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        if self.size == 1:
            return _Ready((tensor[0],))
        (sent,) = _contiguous((tensor,))
        received = sent.new_empty(sent.shape[1:])
        return self._start(
            lambda: self._nccl.reduceScatter(self._flat(sent), self._flat(received), "sum", self._handle),
            (received,),
            (sent,),
        )

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return _Ready((total,))
        return self._start(
            lambda: self._nccl.allReduce(self._flat(total), self._flat(total), "sum", self._handle), (total,), ()
        )

    def _flat(self, tensor: Tensor) -> _Flat:
        return _Flat(tensor, self._on_host)

    def _start(
        self, operations: Callable[[], None], received: tuple[Tensor, ...], sent: tuple[Tensor, ...]
    ) -> _Pending:
        """Launch on our stream, after what the current stream has made, without blocking the host."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._group():
            operations()
        for tensor in (*received, *sent):
            tensor.record_stream(self._stream)
        return _Pending(self._stream.record_event(), received, sent)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Launch together: two ranks that both sent first would block each other. Closed also after an exception."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


def _contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().contiguous() for t in tensors)
