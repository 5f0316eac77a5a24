"""What a checked call over a chain of links knows: the group, the links, and this rank's pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.schedule.chain import Chain, Piece
from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device
from bmburst_ops.linear.kernel import LinearKernel, Pieces, Recurrence, Slots


def as_result(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a result of an autograd function in another shape. It is no view, so a caller may change it in place."""
    found: Tensor = torch.ops.aten._unsafe_view(tensor, list(shape))
    return found


class Places(NamedTuple):
    """Where tensors of a call lie, int64 on a device.

    Attributes:
        waiting: This rank's waiting pieces in `[slots, samples]`, flat.
        exporting: Its exporting pieces, likewise.
    """

    waiting: Tensor
    exporting: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainCall:
    """A checked call over ranks.

    Attributes:
        comm: The group.
        chain: Which link continues which.
        has_initial: Whether the first link continues given values.
    """

    comm: CheckedCommunicator
    chain: Chain
    has_initial: bool

    @cached_property
    def own(self) -> tuple[Piece, ...]:
        """The pieces of this rank."""
        return self.chain.pieces(self.comm.rank)

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of this rank, for a kernel."""
        edges = [0]
        for piece in self.own:
            edges.append(edges[-1] + piece.tokens)

        def chosen(flags: Sequence[bool]) -> tuple[int, ...]:
            return tuple(number for number, flag in enumerate(flags) if flag)

        return Pieces(
            tuple(edges),
            padding=chosen([piece.link < 0 for piece in self.own]),
            waiting=chosen([piece.waits for piece in self.own]),
            exporting=chosen([piece.exports for piece in self.own]),
        )

    @property
    def has_states(self) -> bool:
        """Whether any state is given, passes from one link to another, or is used at the end."""
        return self.has_initial or self.chain.has_final or self.chain.passes

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first token, and so the gradient of what comes before it."""
        return self.comm.rank == self.chain.links[0].rank

    def places(self, device: torch.device) -> Places:
        """Return where tensors lie, copied to the device once, without blocking the host."""
        return Places(*_sent_places(self, device).here())

    def slots(self, pieces: Sequence[int], extra: int = 0) -> Slots:
        """Return where some of this rank's pieces lie in `[slots + extra, samples]`, flat."""
        samples, own = len(self.chain.starts), [self.own[number] for number in pieces]
        places = tuple(self.chain.links[piece.link].slot * samples + piece.sample for piece in own)
        return Slots(places, (self.chain.slots + extra) * samples)

    def in_slots(self, places: Tensor, tensors: Tensor, extra: int = 0) -> Tensor:
        """Return tensors of some pieces, `[pieces, ...]`, as `[slots + extra, samples, ...]`; zero where none is."""
        samples, slots = len(self.chain.starts), self.chain.slots + extra
        flat = tensors.new_zeros((slots * samples, *tensors.shape[1:])).index_copy_(0, places, tensors)
        return flat.view(slots, samples, *tensors.shape[1:])

    def of_links(self, slots: Tensor) -> list[Tensor]:
        """Return the tensors of all links in order, given `[ranks, slots, ...]`; further slots are left out."""
        rows = slots.flatten(0, 1).unbind()
        return [rows[link.rank * slots.shape[1] + link.slot] for link in self.chain.links]

    def gathered(self, slots: Tensor) -> Tensor:
        """Return all ranks' slots, `[ranks, *slots.shape]`; where nothing passes between ranks, zero for the others."""
        if self.comm.size == 1:
            return slots[None]
        if self.chain.exchanges and slots.numel():
            return self.comm.all_gather(slots).wait()[0]
        found = slots.new_zeros((self.comm.size, *slots.shape))
        found[self.comm.rank] = slots
        return found


@lru_cache(maxsize=64)
def _sent_places(call: ChainCall, device: torch.device) -> DeviceVectors:
    each = (call.slots(pieces).places for pieces in (call.pieces.waiting, call.pieces.exporting))
    return copy_to_device([np.array(places, np.int64) for places in each], device, torch.int64)


def zero_padding(chain: Chain, rank: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors `[batch, local_tokens, ...]` of a rank with zeros at its padding; as they are if it has none.

    Products with parameters would otherwise add what padding holds, NaN too, to the parameters' gradients.
    """
    sent = _sent_padding(chain, rank, tensors[0].device)
    if sent is None:
        return tensors
    (places,) = sent.here()
    return tuple(t.flatten(0, 1).index_fill(0, places, 0).view_as(t) for t in tensors)


@lru_cache(maxsize=64)
def _sent_padding(chain: Chain, rank: int, device: torch.device) -> DeviceVectors | None:
    pieces = [piece for piece in chain.pieces(rank) if piece.link < 0]
    if not pieces:
        return None
    places = [piece.sample * chain.tokens + piece.offset + np.arange(piece.tokens) for piece in pieces]
    return copy_to_device([np.concatenate(places)], device, torch.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanCall(ChainCall):
    """A checked call of a recurrence.

    Attributes:
        recurrence: The recurrence.
        kernel: Computes it for the pieces of a rank.
        hops: 1 or 2; see `bmburst.linear.fold`.
    """

    recurrence: Recurrence
    kernel: LinearKernel
    hops: int

    @cached_property
    def sent(self) -> Slots:
        """Where summaries of this rank's exporting pieces lie in what it sends in forward; nothing without states."""
        return self.slots(self.pieces.exporting) if self.has_states else Slots((), 0)

    @cached_property
    def sent_back(self) -> Slots:
        """Likewise, gradients of waiting pieces in backward; a slot more for that of the final state."""
        return self.slots(self.pieces.waiting, extra=self.chain.has_final) if self.has_states else Slots((), 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvCall(ChainCall):
    """A checked call of a causal convolution.

    Attributes:
        activation: "silu" or None.
    """

    activation: str | None
