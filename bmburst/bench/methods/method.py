"""What a method is to the suite, and the three ways in which one can hold a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmburst.bench.cells import PLAIN_MASKS, Cell
from bmburst.bench.methods.local import LocalKernel
from bmburst.bench.party import Party
from bmburst.bench.patterns import mask_of
from bmburst.bench.work import Traffic, sizes
from bmburst.schedule.layout import make_layout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of a rank's q, k and v: differentiable, every rank of the party calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a method needs to know of a run, beside the cell.

    Attributes:
        party: The ranks.
        kernel: The kernel under test.
        kernel_name: The name it was asked for by, for methods that choose themselves.
        deterministic: Whether gradients must repeat bit for bit, where the method can.
    """

    party: Party
    kernel: LocalKernel
    kernel_name: str = "auto"
    deterministic: bool = False


class Method(ABC):
    """One way to run attention over ranks. This base holds a sequence cut into equal shares.

    Attributes:
        name: Of the method in cells.
        masks: The masks that it does.
    """

    name = ""
    masks: tuple[str, ...] = PLAIN_MASKS

    def refusal(self, cell: Cell) -> str | None:
        """Return why the cell cannot run, as a phrase, as far as it is known before any tensor is made."""
        return self.mask_refusal(cell) or self.shape_refusal(cell)

    def mask_refusal(self, cell: Cell) -> str | None:
        """Return why it cannot do the cell's mask, or None."""
        if cell.mask in self.masks:
            return None
        return f"it is run under {' and '.join(self.masks)} masks only, not under '{cell.mask}'"

    def shape_refusal(self, cell: Cell) -> str | None:
        """Return why it cannot take the cell's shape, or None."""
        del cell
        return None

    def layout(self, cell: Cell) -> str:
        """Return which tokens a rank holds."""
        del cell
        return "contiguous"

    def traffic(self, cell: Cell) -> Traffic | None:
        """Return the bytes that a rank receives, or None where they are not known."""
        del cell
        return None

    def resolve(self, cell: Cell, setting: Setting) -> tuple[Traffic | None, dict[str, Any]]:
        """Return `traffic` as it is once the method has decided, and for the row what it decided. All ranks call it."""
        del setting
        return self.traffic(cell), {}

    def memory(self, cell: Cell) -> float:
        """Return about how many bytes a rank holds at the peak of forward and backward."""
        own = sizes(cell)
        return own.held + own.q * own.wide

    @abstractmethod
    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """Return the method ready to run on this rank; may raise what a missing package raises."""

    def positions(self, cell: Cell, rank: int) -> Tensor:
        """Return the global positions of a rank's tokens."""
        layout = make_layout(self.layout(cell), cell.ranks, cell.tokens // cell.ranks, mask_of(cell.mask, cell.tokens))
        return torch.cat([run.start + run.stride * torch.arange(run.tokens) for run in layout.runs(rank)])

    def cut_input(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """Return what a rank holds of q, k or v `[batch, tokens, heads, head_dim]`, or of its gradient."""
        return whole[:, self.positions(cell, rank).to(whole.device)]

    def cut_output(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """Return what a rank holds of the output, or of its gradient."""
        return self.cut_input(whole, cell, rank)

    def real(self, held: Tensor, cell: Cell, rank: int) -> Tensor:
        """Return what counts of a rank's output or gradient: all, unless the method pads."""
        del cell, rank
        return held

    def input_shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """Return the shape of a rank's q, k or v."""
        return cell.batch, cell.tokens // cell.ranks, heads, cell.head_dim

    def output_shape(self, cell: Cell) -> tuple[int, ...]:
        """Return the shape of a rank's output."""
        return self.input_shape(cell, cell.heads)


def heads_refusal(cell: Cell) -> str | None:
    """Return why heads cannot be dealt out to the ranks evenly, or None."""
    for kind, heads in (("query", cell.heads), ("key/value", cell.kv_heads)):
        if heads % cell.ranks:
            return f"{heads} {kind} heads cannot be dealt out to {cell.ranks} ranks evenly"
    return None
