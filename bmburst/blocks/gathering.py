"""Memory of gathered blocks: the weights that ZeRO gathers before a pass, and the gradients that it scatters after.

BMTrain allocates the weights of a block for each pass, and makes a tensor for each parameter. Here blocks share
`Slot`s, each with room for the weights of one block and with views for its parameters. Events between streams order a
slot's uses.

A slot keeps the weights of its block until another block needs it. With room for two blocks this is ZeRO-3: one block
computes while the next one is gathered. With room for all blocks it is ZeRO-2: backward finds what forward gathered.

The memory is freed after each step, unless CUDA graphs read weights and write gradients there (`stays`). Then each
block finds its weights, and memory for its gradient, in the same place in every step.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.blocks.config import AT_ONCE
from bmburst.comm.streams import current_stream

if TYPE_CHECKING:
    from bmburst.blocks.sharded import ShardedBlock


def current() -> Any:
    """Return the current stream, in less time than torch's own function takes."""
    return current_stream(bmt.config["load_stream"].device_index)


@dataclass(frozen=True)
class Layout:
    """Where ZeRO puts the parameters of a block in its flat storages. Blocks with equal layouts can share memory.

    Attributes:
        storages: Name, elements over all ranks and dtype of each storage.
        parameters: Storage, offset and shape of each parameter.
        device: The GPU.
    """

    storages: tuple[tuple[str, int, torch.dtype], ...]
    parameters: tuple[tuple[str, int, tuple[int, ...]], ...]
    device: torch.device

    @classmethod
    def of(cls, block: bmt.Block) -> "Layout":
        """Return the layout of a block."""
        held = block._storage_params
        sizes = ((name, each["partition_size"] * each["world_size"]) for name, each in block._storage_info.items())
        return cls(
            tuple((name, size, held[name].dtype) for name, size in sizes),
            tuple((each["kw_name"], each["offset"], tuple(each["shape"])) for each in block._param_info),
            next(iter(held.values())).device,
        )

    def allocate(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Return memory for the named storages, filled with zeros: gradients of the padding must be finite."""
        return {
            name: torch.zeros(size, dtype=dtype, device=self.device)
            for name, size, dtype in self.storages
            if name in names
        }

    def views(self, memory: dict[str, Tensor]) -> list[Tensor | None]:
        """Return a view for each parameter; None where its storage has no memory."""
        return [
            memory[name].narrow(0, offset, prod(shape)).view(shape) if name in memory else None
            for name, offset, shape in self.parameters
        ]


@dataclass(eq=False)
class Slot:
    """Memory for the weights of one block at a time.

    Attributes:
        layout: Layout of the blocks that it fits.
        memory: The storages, flat.
        views: A view for each parameter.
        holds: The block whose weights it has; None: nobody's.
        is_busy: Whether that block needs them now.
        number: Its place among the slots at the beginning of a pass.
        gathered: Event after the gather into it.
        left: Event after the work of the block that had it last.
    """

    layout: Layout
    memory: dict[str, Tensor]
    views: list[Tensor | None]
    holds: "ShardedBlock | None" = None
    is_busy: bool = False
    number: int = 0
    gathered: Any = field(default_factory=lambda: torch.cuda.Event())
    left: Any = field(default_factory=lambda: torch.cuda.Event())

    @classmethod
    def of(cls, layout: Layout, number: int) -> "Slot":
        """Allocate a slot on the current stream."""
        memory = layout.allocate(frozenset(name for name, *_ in layout.storages))
        made = cls(layout, memory, layout.views(memory), number=number)
        made.left.record(current())
        return made


@dataclass(eq=False)
class GradientMemory:
    """Memory in which the gradients of one block at a time are put together, to be scattered.

    Backward writes most of them there itself (`bmburst_ops.linears.gradient_memory`).

    Attributes:
        memory: The trained storages, flat.
        views: A view for each parameter; None for those that are not trained.
        number: Its place among those of equal blocks at the beginning of a pass.
        scattered: Event after the last scatter.
    """

    memory: dict[str, Tensor]
    views: list[Tensor | None]
    number: int = 0
    scattered: Any = field(default_factory=lambda: torch.cuda.Event())

    @torch.no_grad()
    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy those gradients of a block's parameters, in order, that backward did not write here; None: zeros."""
        pairs = [(view, each) for view, each in zip(self.views, gradients, strict=True) if view is not None]
        missing = [view for view, gradient in pairs if gradient is None]
        if missing:
            torch._foreach_zero_(missing)
        found = [
            (view, gradient)
            for view, gradient in pairs
            if gradient is not None and gradient.data_ptr() != view.data_ptr()
        ]
        if found:
            torch._foreach_copy_([view for view, _ in found], [gradient for _, gradient in found])


class GatherMemory:
    """Slots of the blocks of a model, and the memory of their gradients.

    Args:
        room: Blocks whose weights may stay gathered while memory is needed for others, at least `AT_ONCE`.

    Attributes:
        stays: Whether the memory is kept from step to step, for CUDA graphs.
    """

    def __init__(self, room: int = AT_ONCE) -> None:
        self.stays = False
        self._room, self._made = max(room, AT_ONCE), 0
        self._slots: list[Slot] = []  # in the order of use, the most recent one last
        self._gradients: dict[tuple[Layout, frozenset[str]], deque[GradientMemory]] = {}  # the last one used last
        self._keeps = False
        self._begun: Any = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Weights do not change inside the `with` block, so they may stay gathered over several passes."""
        self.end()
        self.begin()
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self.end()

    def begin(self) -> None:
        """Begin a forward pass: weights may have changed since the last one."""
        for made in self._gradients.values():
            while self.stays and made and made[0].number > made[-1].number:
                made.rotate()
        if not self._keeps:
            self._forget()
            bmt.config["load_stream"].wait_stream(current())  # after the changes

    def end(self) -> None:
        """Free all memory that does not stay, after a pass that no other follows with the same weights."""
        if self._keeps:
            return
        if self.stays:
            self._forget()
        else:
            self._drop()

    def keep_pace(self) -> None:
        """Let the host wait, before a block, until the GPU has begun the block before it.

        A host that ran further ahead would allocate new memory for each block where `Tensor.record_stream` holds what
        another stream has used. A host that is behind does not wait.
        """
        if self._begun is None:
            self._begun = torch.cuda.Event()
        self._begun.synchronize()
        self._begun.record(current())

    def take(self, layout: Layout, block: "ShardedBlock") -> Slot:
        """Return a slot for a block whose weights are not gathered."""
        idle = [each for each in self._slots if not each.is_busy and each.layout == layout]
        free = next((each for each in idle if each.holds is None), None)
        if free is None and idle and len(self._slots) >= self._room:
            free = idle[0]
        if free is None:
            free, self._made = Slot.of(layout, self._made), self._made + 1
        else:
            self._slots.remove(free)
            if free.holds is not None:
                free.holds.lose_slot()
        free.holds, free.is_busy = block, True
        self._slots.append(free)
        return free

    def leave(self, slot: Slot, *, keep: bool) -> None:
        """Let other blocks use a slot after the work of the current stream.

        Args:
            slot: The slot.
            keep: Whether to keep its weights for its block until another one needs the memory.
        """
        slot.left.record(current())
        slot.is_busy = False
        if not (keep or self._keeps) and slot.holds is not None:
            slot.holds.lose_slot()
            slot.holds = None
        for each in [each for each in self._slots if not each.is_busy][: max(len(self._slots) - self._room, 0)]:
            self._free(each)

    def gradients(self, layout: Layout, trained: frozenset[str], *, is_early: bool) -> GradientMemory:
        """Return memory for the gradients of the trained storages of a block. The current stream waits for it.

        Args:
            layout: The block's layout.
            trained: Names of its trained storages.
            is_early: Whether backward writes there while the gradients of another block may still be scattered. There
                are two memories then, which take turns.
        """
        made = self._gradients.setdefault((layout, trained), deque())
        wanted = AT_ONCE if self.stays else min(len(made) + 1, AT_ONCE if is_early else 1)
        is_new = len(made) < wanted
        while len(made) < wanted:
            memory = layout.allocate(trained)
            made.append(GradientMemory(memory, layout.views(memory), len(made)))
        if is_early and (self.stays or not is_new):
            made.rotate(-1)
        current().wait_event(made[-1].scattered)
        return made[-1]

    def give_away(self, gradients: GradientMemory) -> None:
        """Leave memory of gradients to those who have views of it."""
        for made in self._gradients.values():
            if gradients in made:
                made.remove(gradients)

    def _forget(self) -> None:
        for slot in self._slots:
            if slot.holds is not None:
                slot.holds.lose_slot()
            slot.holds, slot.is_busy = None, False
        self._slots.sort(key=lambda slot: slot.number)

    def _drop(self) -> None:
        self._forget()
        for slot in list(self._slots):
            self._free(slot)
        for gradients in chain.from_iterable(self._gradients.values()):
            for each in gradients.memory.values():
                each.record_stream(bmt.config["load_stream"])  # which may still scatter it
        self._gradients.clear()

    def _free(self, slot: Slot) -> None:
        """Free a slot's memory for the current stream."""
        if slot.holds is not None:
            slot.holds.lose_slot()
        current().wait_event(slot.gathered)  # of a block that was not computed
        self._slots.remove(slot)
