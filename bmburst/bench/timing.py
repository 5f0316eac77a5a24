"""The clock: the slowest rank's time of a call, and two calls measured in turns so that both meet the same heat."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bmburst.bench.party import Party

LEAST = 3  # pairs that are measured however long they take


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times of one call, in milliseconds.

    Attributes:
        median: Of all.
        least: The shortest.
        most: The longest.
        count: How many.
    """

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Times":
        """Return those of some measurements."""
        return cls(
            median=statistics.median(milliseconds),
            least=min(milliseconds),
            most=max(milliseconds),
            count=len(milliseconds),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them."""
        return asdict(self)


def once(call: Callable[[], object], party: Party) -> float:
    """Return the milliseconds of one call on the slowest rank. Every rank of the party calls it.

    All ranks begin together with nothing queued, so what the host needs to launch the work is in the time.
    """
    if party.size > 1:
        dist.barrier(group=party.group)
    if party.device.type == "cuda":
        torch.cuda.synchronize()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        own = before.elapsed_time(after)
    else:
        begun = time.perf_counter()
        call()
        own = (time.perf_counter() - begun) * 1e3
    slowest = torch.tensor([own], dtype=torch.float64, device=party.device)
    if party.size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=party.group)
    return float(slowest.item())


def in_turns(
    method: Callable[[], object], one_gpu: Callable[[], object], party: Party, *, repeats: int, seconds: float
) -> tuple[Times, Times, float]:
    """Measure a method and one GPU's kernel in turns.

    Args:
        method: One call of the method.
        one_gpu: One call of the kernel alone.
        party: The ranks.
        repeats: Pairs to measure.
        seconds: About how long all pairs may take; fewer are then measured, `LEAST` or `repeats` at least.

    Returns:
        The method's times, the kernel's, and the median over the pairs of the kernel's time over the method's.
    """
    # Kernels are compiled, buffers and communicators made. Long calls need no second round for clocks to settle.
    # What `once` returns is equal on all ranks: they agree on what follows without another word.
    for _ in range(2):
        if once(one_gpu, party) + once(method, party) > seconds * 1e3 / 4:
            break
    first = once(one_gpu, party), once(method, party)
    affordable = int(seconds * 1e3 / max(sum(first), 1e-3))
    count = min(repeats, max(LEAST, affordable))
    pairs = [first, *((once(one_gpu, party), once(method, party)) for _ in range(count - 1))]
    ones, ours = zip(*pairs, strict=True)
    return Times.of(ours), Times.of(ones), statistics.median(one / our for one, our in pairs)
