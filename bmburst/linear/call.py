"""What a checked call over a chain of links knows: the group, the links, and this rank's pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.schedule.chain import Chain, Piece
from bmburst_ops.linear.kernel import LinearKernel, Pieces, Recurrence


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

    def in_slots(self, numbers: Sequence[int], tensors: Tensor, extra: int = 0) -> Tensor:
        """Return tensors of some pieces, `[pieces, ...]`, as `[slots + extra, samples, ...]`; zero where none is."""
        chain = self.chain
        slots = tensors.new_zeros((chain.slots + extra, len(chain.starts), *tensors.shape[1:]))
        for i, number in enumerate(numbers):
            piece = self.own[number]
            slots[chain.links[piece.link].slot, piece.sample] = tensors[i]
        return slots

    def of_pieces(self, numbers: Sequence[int], slots: Tensor) -> Tensor:
        """Return the tensors of some pieces, `[pieces, ...]`, from `[slots, samples, ...]`."""
        pieces = [self.own[number] for number in numbers]
        found = [slots[self.chain.links[piece.link].slot, piece.sample] for piece in pieces]
        return torch.stack(found) if found else slots.new_zeros((0, *slots.shape[2:]))

    def gathered(self, slots: Tensor) -> Tensor:
        """Return all ranks' slots, `[ranks, *slots.shape]`; where nothing passes between ranks, zero for the others."""
        if self.comm.size == 1:
            return slots[None]
        if self.chain.exchanges and slots.numel():
            return self.comm.all_gather(slots).wait()[0]
        found = slots.new_zeros((self.comm.size, *slots.shape))
        found[self.comm.rank] = slots
        return found


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


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvCall(ChainCall):
    """A checked call of a causal convolution.

    Attributes:
        activation: "silu" or None.
    """

    activation: str | None
