"""Times calls on the slowest rank, in alternation, and defines the plain collectives that peer methods use."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.comm.collectives import ALL_GATHER, REDUCE_SCATTER, named_verb
from bmburst.comm.memory import bytes_of
from bmburst.comm.streams import CALLS


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """The ranks that share a sequence.

    Attributes:
        process_group: Theirs.
        rank: This rank's number among them.
        size: How many they are.
        device: Where this rank's tensors live.
        is_world: Whether they are all ranks of the run.
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device
    is_world: bool = True

    @classmethod
    def world(cls, device: torch.device) -> "RankGroup":
        """Return all ranks of torch.distributed, which was started; `device`: this rank's."""
        assert dist.group.WORLD is not None
        return cls(process_group=dist.group.WORLD, rank=dist.get_rank(), size=dist.get_world_size(), device=device)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return `[size, ...]`: part i is what rank i had for this one.

        Args:
            parts: `[size, ...]` contiguous; part i goes to rank i.
        """
        received = torch.empty_like(parts)
        if self.size == 1:
            return received.copy_(parts)
        dist.all_to_all_single(bytes_of(received), bytes_of(parts), group=self.process_group)
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """Return `[size, ...]`: every rank's tensor, in rank order."""
        received = part.new_empty((self.size, *part.shape))
        if self.size == 1:
            return received.copy_(part[None])
        named_verb(ALL_GATHER)(bytes_of(received), bytes_of(part.contiguous()), group=self.process_group)
        return received

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over the ranks of their `parts[rank]`.

        Args:
            parts: `[size, ...]` contiguous.
        """
        received = torch.empty_like(parts[0])
        if self.size == 1:
            return received.copy_(parts[0])
        named_verb(REDUCE_SCATTER)(received.view(-1), parts.view(-1), group=self.process_group)
        return received

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum over the ranks, or what else the operation is, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here with nothing queued on their devices."""
        if self.size > 1:
            dist.barrier(group=self.process_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rotate(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to send a tensor to the next rank; return what comes from the one before, and what to wait for."""
        received = torch.empty_like(tensor)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        hops = [
            dist.P2POp(dist.isend, tensor, group=self.process_group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.process_group, group_peer=source),
        ]
        return received, dist.batch_isend_irecv(hops)


def start_ranks(**options: Any) -> torch.device:
    """Start torch.distributed as a launcher's variables say, and return this rank's device.

    Args:
        options: Further arguments of `torch.distributed.init_process_group`.
    """
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **options)
    return device


LEAST = 3  # rounds that are measured however long they take


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


def mark(device: torch.device) -> torch.cuda.Event | float:
    """Return a point in time: an event on the current stream of a GPU, or the clock of a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    """Return the milliseconds between two marks; waits for the later one."""
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float) and isinstance(after, float)  # marks of one device
        return (after - before) * 1e3
    after.synchronize()
    return float(before.elapsed_time(after))


def once(call: Callable[[], object], group: RankGroup) -> float:
    """Return the milliseconds of one call on the slowest rank. Every rank of the group calls it.

    All ranks begin together with nothing queued, so what the host needs to launch the work is in the time.
    """
    group.barrier()
    before = mark(group.device)
    call()
    own = milliseconds_between(before, mark(group.device))
    slowest = torch.tensor([own], dtype=torch.float64, device=group.device)
    return float(group.all_reduce(slowest, dist.ReduceOp.MAX).item())


def gpu_seconds(call: Callable[[], object], scratch: torch.Tensor | None = None) -> tuple[float, float]:
    """Return the seconds that this GPU is busy with a call, and those that the host is.

    Args:
        call: What is measured.
        scratch: Memory that is written before, so that the GPU's caches are empty and it is busy during the launch.
            None: the GPU has nothing else to do.
    """
    device = torch.device("cuda")
    if scratch is None:
        torch.cuda.synchronize()
    else:
        scratch.zero_()
    begun = time.perf_counter()
    before = mark(device)
    call()
    after = mark(device)
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    return milliseconds_between(before, after) / 1e3, host


def median_seconds(
    calls: Sequence[Callable[[], object]], scratch: torch.Tensor | None = None, *, repeats: int, warm_up: int
) -> list[tuple[float, float]]:
    """Return the medians of `gpu_seconds` of calls, taken in turns after so many rounds that are not measured."""
    rounds = [[gpu_seconds(call, scratch) for call in calls] for _ in range(warm_up + repeats)][warm_up:]
    by_call = [zip(*times, strict=True) for times in zip(*rounds, strict=True)]
    return [(statistics.median(gpu), statistics.median(host)) for gpu, host in by_call]


def in_turns(
    *calls: Callable[[], object], group: RankGroup, repeats: int, seconds: float
) -> tuple[tuple[float, ...], ...]:
    """Measure calls in turns, round by round.

    Args:
        calls: What is measured, in this order.
        group: The ranks.
        repeats: Rounds to measure.
        seconds: About how long all rounds may take; fewer are then measured, `LEAST` or `repeats` at least.

    Returns:
        For each call its milliseconds, round by round.
    """

    def once_each() -> tuple[float, ...]:
        return tuple(once(call, group) for call in calls)

    # Kernels are compiled, buffers and communicators made, short kernels recorded. Long calls need no second round for
    # clocks to settle. What `once` returns is equal on all ranks: they agree on what follows without another word.
    for _ in range(CALLS):
        if sum(once_each()) > seconds * 1e3 / 4:
            break
    first = once_each()
    affordable = int(seconds * 1e3 / max(sum(first), 1e-3))
    count = min(repeats, max(LEAST, affordable))
    return tuple(zip(first, *(once_each() for _ in range(count - 1)), strict=True))


def quotient(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of one call's time over another's."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def beside_one_gpu(
    ours: Callable[[], object], one: Callable[[], object], *, group: RankGroup, repeats: int, seconds: float
) -> dict[str, float]:
    """Return the median times of a call over ranks and of one GPU on the same work, and the ratio of their speeds.

    Args:
        ours: The call over ranks.
        one: One GPU's call for the whole work.
        group: The ranks.
        repeats: See `in_turns`.
        seconds: See `in_turns`.
    """
    times = in_turns(ours, one, group=group, repeats=repeats, seconds=seconds)
    return {
        "milliseconds": Times.of(times[0]).median,
        "one_gpu_milliseconds": Times.of(times[1]).median,
        "ratio": quotient(times[1], times[0]) / group.size,
    }
