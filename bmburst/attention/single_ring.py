"""How blocks move in a ring of ranks. What is computed with them is the caller's: `ring.py`, `biased.py`."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from bmburst.comm.protocol import BlockMover, Transfer
from bmburst.schedule.ring_schedule import Schedule, Step
from bmburst_ops.merge import add_

Blocks = tuple[Tensor, ...]
Visit = TypeVar("Visit")


def visits(comm: BlockMover, schedule: Schedule, *held: Tensor) -> Iterator[tuple[Step, Blocks]]:
    """Yield each step with its owner's tensors as they pass by, our own first.

    The next hop is under way while the caller works on this one.
    """
    for step, hop in zip(schedule.steps, schedule.hops, strict=True):
        is_last = step is schedule.steps[-1]
        arriving = None if is_last else comm.ring(*held, shift=hop)
        yield step, held
        if arriving is not None:
            held = arriving.wait()


def carry_home(comm: BlockMover, schedule: Schedule, guests: Blocks, work: Callable[[Step, Blocks], Blocks]) -> Blocks:
    """Let guests visit; send what `work` gives for them after them, one step behind, until it is home."""
    *between, home = schedule.hops
    shares = collect_shares(comm, between, visits(comm, schedule, *guests), lambda visit: work(*visit))
    return comm.ring(*shares, shift=home).wait()


def collect_shares(
    mover: BlockMover, hops: Sequence[int], visiting: Iterator[Visit], work: Callable[[Visit], Blocks]
) -> Blocks:
    """Return what a guest's hosts give for it, `hops` apart, at the last of them.

    A guest's gradients leave a rank as its next host still computes; when they arrive, the host's share is added.
    """
    returning: Transfer | None = None
    for hop in (*hops, None):
        shares = work(next(visiting))
        if returning is not None:
            add_blocks(shares, returning.wait())
            returning = None  # what it brought is not needed while the next hop takes memory
        if hop is not None:
            returning = mover.ring(*shares, shift=hop)
    return shares


def add_blocks(shares: Blocks, carried: Blocks) -> None:
    """Add to a rank's shares, in place, those that have come."""
    for share, brought in zip(shares, carried, strict=True):
        add_(share, brought)
