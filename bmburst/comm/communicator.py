"""The interface of communicators, and functions that send Python objects over it."""

import json
import pickle
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bmburst.errors import UserError
from bmburst.schedule.exchange import Exchange


class Transfer(Protocol):
    """A communication in flight."""

    def wait(self) -> tuple[Tensor, ...]:
        """Make the current stream wait for the transfer and return the received tensors. The host waits on CPUs only.

        A second call returns the same tensors, and makes the stream that is current then wait.
        """
        ...


class CompletedTransfer:
    """A `Transfer` without communication: its tensors are made by the stream that is current at construction.

    Args:
        tensors: What `wait` returns.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._maker: Any = torch.cuda.current_stream() if on_gpu else None

    def wait(self) -> tuple[Tensor, ...]:
        """See `Transfer.wait`."""
        if self._maker is not None and (current := torch.cuda.current_stream()) != self._maker:
            current.wait_stream(self._maker)
            for tensor in self._tensors:  # the stream that owns the memory has not waited for `current`
                tensor.record_stream(current)
        return self._tensors


class BlockMover(Protocol):
    """The part of a communicator that moves blocks of attention.

    Every rank calls the same operations in the same order with the same shapes and dtypes. Inputs may be views of any
    strides; they may be read but not written until `wait`. Received tensors are contiguous and owned by the receiver.
    """

    @property
    def rank(self) -> int:
        """Position in this group, in [0, size). Not the global rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def transport(self) -> str:
        """The library or engine that moves bytes: "peer", "nccl" or "gloo"; "none" of a rank alone."""
        ...

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """Send `tensors` to rank + shift; receive those of rank - shift, in the same shapes and dtypes."""
        ...

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """Return send memory for the next `pull` of a lane, uint8 `[nbytes]`: write to it, call `pull`, drop it.

        Transfers of one lane start in order; lanes are independent of each other.
        """
        ...

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """Move blocks of the ranks' outboxes into the targets, which `wait` returns.

        Args:
            exchange: The blocks to move; source blocks are in the outbox of `exchange.nbytes`.
            outbox: What `outbox` returned for this lane.
            targets: This rank's buffers by number; bytes that no move covers are left unchanged.
            lane: The lane.
        """
        ...

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """Return receive memory for the next `push` calls of a lane, uint8 `[nbytes]`; valid until the next `inbox`."""
        ...

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """Move blocks of this rank's sources into the other ranks' inboxes; `wait` returns this rank's inbox.

        Args:
            exchange: The blocks to move; target blocks are in the inbox of `exchange.nbytes`.
            sources: This rank's buffers by number, of any strides, made before `inbox` was called.
            inbox: What `inbox` returned for this lane.
            lane: The lane.
        """
        ...


@runtime_checkable
class Communicator(BlockMover, Protocol):
    """A group of ranks that exchange tensors.

    The rules of `BlockMover` hold. A group of one returns its inputs without a copy. Reductions support the dtypes that
    the transport can add; all other operations support any dtype.
    """

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """Send `tensor[r]` to rank r; receive `[size, ...]` whose item r came from rank r."""
        ...

    def all_gather(self, tensor: Tensor) -> Transfer:
        """Receive `[size, *tensor.shape]`, every rank's tensor in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """Receive the sum over ranks of `tensor[rank]`; `tensor` is `[size, ...]`. Summed in the tensor's dtype."""
        ...

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Receive the sum over ranks of `tensor`, in its dtype; the tensor itself is not changed."""
        ...


@runtime_checkable
class OnCurrentStream(Protocol):
    """A communicator that can also launch an all-to-all on the current stream."""

    def all_to_all_here(self, tensor: Tensor) -> Tensor:
        """Return the result of `Communicator.all_to_all` of a contiguous tensor; the current stream waits for it."""
        ...


_BYTES = 1024


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value in rank order; also a barrier. Blocks the host.

    Args:
        comm: The group; every rank must call.
        value: Any value that JSON encodes in at most 1,024 bytes.

    Raises:
        ValueError: The encoded value is longer.
    """
    data = json.dumps(value).encode()
    if len(data) > _BYTES:
        raise ValueError(f"{len(data)} bytes are too many for one object, at most {_BYTES}")
    mine = torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8).to(device_of(comm))
    (gathered,) = comm.all_gather(mine).wait()
    return [json.loads(bytes(row)) for row in gathered.tolist()]


def broadcast_object(comm: Communicator, value: Any) -> Any:
    """Return rank 0's value on every rank of the group. Blocks the host.

    The value is sent as an all-reduce of integers with zeros, which every transport supports. It is pickled: ranks of a
    group run one program and trust each other.

    Args:
        comm: The group; every rank must call.
        value: On rank 0 any object that can be pickled; ignored on the others.

    Raises:
        UserError: On every rank, if the value of rank 0 cannot be pickled.
    """
    if comm.size == 1:
        return value
    data = _pickled(value) if comm.rank == 0 else b""
    (size,) = comm.all_reduce(torch.tensor([len(data)], device=device_of(comm))).wait()
    nbytes = int(size.item())
    mine = torch.frombuffer(bytearray(data.ljust(-(-nbytes // 8) * 8, b"\0")), dtype=torch.int64).to(device_of(comm))
    (sent,) = comm.all_reduce(mine).wait()
    problem, found = pickle.loads(sent.cpu().numpy().tobytes()[:nbytes])
    if problem is not None:
        raise UserError(problem)
    return found


def _pickled(value: Any) -> bytes:
    """Return (None, value) pickled, or (reason, None): the other ranks wait, and must receive the error."""
    try:
        return pickle.dumps((None, value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # which of them depends on the type of the value
        reason = " ".join(str(error).split())
        return pickle.dumps((f"rank 0's {type(value).__name__} cannot be sent: {reason}\nfix: arrays by name", None))


def device_of(comm: Communicator) -> torch.device:
    """Return the device of the tensors that a group moves: this rank's current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if comm.transport == "nccl" else torch.device("cpu")
