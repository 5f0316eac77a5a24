"""What attention and the trainer ask of the network: a few verbs, no backend names."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bmburst.schedule.exchange import Exchange


class Transfer(Protocol):
    """A communication in flight."""

    def wait(self) -> tuple[Tensor, ...]:
        """Order the current stream after the transfer and return what arrived. On a GPU the host does not block.

        Waiting again gives the same, and orders the stream that is current then.
        """
        ...


class Arrived:
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
