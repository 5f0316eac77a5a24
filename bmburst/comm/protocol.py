"""The protocol of communicators, and Python values that are sent through it."""

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
        """Order the current stream after the transfer and return what arrived. On a GPU the host does not block.

        Waiting again gives the same, and orders the stream that is current then.
        """
        ...


class CompletedTransfer:
    """A `Transfer` of what is here already, or will be once the stream that is current now has made it.

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
            for tensor in self._tensors:  # the stream that will use the memory again has not waited
                tensor.record_stream(current)
        return self._tensors


class BlockMover(Protocol):
    """The part of a communicator that moves blocks of attention.

    Every rank calls the same verbs in the same order with the same shapes and dtypes. Tensors may be views of any
    strides; they may be read but not written until `wait`. What arrives is contiguous and owned by the receiver.
    """

    @property
    def rank(self) -> int:
        """Position in this group, in [0, size). Not the global rank."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    @property
    def transport(self) -> str:
        """What moves the bytes: "peer", "nccl", "gloo" or "threads"."""
        ...

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """Pass `tensors` to rank + shift; receive those of rank - shift, in the same shapes and dtypes."""
        ...

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """Return memory to fill for the next `pull` of that lane, uint8 `[nbytes]`: fill it, pull, drop it.

        Lanes are independent of each other: what a lane moves starts in order.
        """
        ...

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """Move blocks of the ranks' outboxes into the targets, which `wait` returns.

        Args:
            exchange: Who moves what; source blocks lie in the outbox of `exchange.nbytes`.
            outbox: What `outbox` returned for this lane.
            targets: This rank's buffers by number; bytes that no move covers are left alone.
            lane: The lane.
        """
        ...

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """Return memory that the next `push`es of that lane fill, uint8 `[nbytes]`; valid until the next `inbox`."""
        ...

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """Move blocks of this rank's sources into the other ranks' inboxes; `wait` returns the own inbox.

        Args:
            exchange: Who moves what; target blocks lie in the inbox of `exchange.nbytes`.
            sources: This rank's buffers by number, of any strides, made before `inbox` was called.
            inbox: What `inbox` returned for this lane.
            lane: The lane.
        """
        ...


@runtime_checkable
class Communicator(BlockMover, Protocol):
    """A group of ranks that exchange tensors.

    As for a `BlockMover`. A group of one returns what it was given, without a copy. Sums are of the dtypes that the
    transport can add; all else moves in any dtype.
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
        """Receive the sum over ranks of `tensor`, in its dtype; the tensor itself is left alone."""
        ...


_BYTES = 1024


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value in rank order; also a barrier. Blocks the host.

    Args:
        comm: The group; every rank must call.
        value: Anything that JSON holds, in less than 1 KB.
    """
    data = json.dumps(value).encode()
    if len(data) > _BYTES:
        raise ValueError(f"{len(data)} bytes are too many for one object, at most {_BYTES}")
    mine = torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8).to(device_of(comm))
    (gathered,) = comm.all_gather(mine).wait()
    return [json.loads(bytes(row)) for row in gathered.tolist()]


def broadcast_object(comm: Communicator, value: Any) -> Any:
    """Return rank 0's value on every rank of the group. Blocks the host.

    It travels as integers that are added to zeros, which every transport can do. Ranks of a group are one program and
    trust each other: the value is pickled.

    Args:
        comm: The group; every rank must call.
        value: On rank 0 anything that pickle holds; that of the others is not looked at.

    Raises:
        UserError: On every rank: pickle does not hold rank 0's.
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
    """Return None and the value, or why it cannot be sent and None: the others wait, and must be told."""
    try:
        return pickle.dumps((None, value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # as the value's own types have it
        reason = " ".join(str(error).split())
        return pickle.dumps((f"rank 0's {type(value).__name__} cannot be sent: {reason}\nfix: arrays by name", None))


def device_of(comm: Communicator) -> torch.device:
    """Return where the tensors are that a group moves: on this rank's current GPU, or on CPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if comm.transport == "nccl" else torch.device("cpu")
