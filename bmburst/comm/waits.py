"""Waits for other ranks: how long work waits for transfers (exposed communication), and whether the ranks are alive.

Also names work in profiler timelines.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from bmburst.comm.communicator import Communicator, Transfer, gather_objects
from bmburst.comm.shared_memory import look_during_captures


def traced(name: str) -> AbstractContextManager[Any]:
    """Return a context that names its work in the profiler's timeline; it does nothing if no profiler runs."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


class WaitMeter:
    """Measures exposed communication: the total time in which work waits for transfers.

    On a GPU each wait is measured by two events on the waiting stream; the host does not wait. A transfer that has
    finished before the wait adds nothing; a wait for a slower rank counts. With several streams, a wait counts only
    while no other stream runs work marked by `working`. On a CPU, host time in transfers and waits is measured.

    Args:
        on_gpu: Whether streams wait; else the host does.
        cuda: Streams and events, as `torch.cuda` has them.
        clock: Seconds of the host.
    """

    def __init__(self, *, on_gpu: bool, cuda: Any = torch.cuda, clock: Callable[[], float] = time.perf_counter) -> None:
        self.running = False
        """Whether waits are measured. Set it to the same value on every rank."""
        self._on_gpu, self._cuda, self._clock = on_gpu, cuda, clock
        self._depth = 0
        self._seconds = 0.0
        self._waits, self._works = _Intervals(cuda), _Intervals(cuda)
        self._work_end: Any = None

    @contextmanager
    def waiting(self, stream: Any = None) -> Iterator[None]:
        """Measure the block as a wait; of nested waits only the outer one counts.

        Args:
            stream: The stream that waits; default: the current one.
        """
        if not self.running or self._depth:
            yield
            return
        self._depth += 1
        is_inside = self._work_end is not None
        self._end_work()  # a ring inside a head exchange waits within its own work
        start, end = self._waits.next() if self._on_gpu else (None, None)
        began = self._clock()
        if start is not None:
            start.record(stream or self._cuda.current_stream())
        try:
            yield
        finally:
            self._depth -= 1
            if end is not None:
                end.record(stream or self._cuda.current_stream())
            else:
                self._seconds += self._clock() - began
            if is_inside:
                self._begin_work()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark work of the current stream: waits of other streams that overlap with it are not counted."""
        if not (self.running and self._on_gpu):
            yield
            return
        self._begin_work()
        try:
            yield
        finally:
            self._end_work()

    def read(self) -> float:
        """Return the seconds since the last call. On a GPU the host must have waited for the streams."""
        seconds, self._seconds = self._seconds, 0.0
        first = self._waits.first
        waits = self._waits.read(first)
        works = self._works.read(first)
        return seconds + exposed_time(waits, works) / 1e3

    def _begin_work(self) -> None:
        start, self._work_end = self._works.next()
        start.record(self._cuda.current_stream())

    def _end_work(self) -> None:
        if self._work_end is not None:
            self._work_end.record(self._cuda.current_stream())
            self._work_end = None

    def metered(self, transfer: Transfer) -> Transfer:
        """Return the transfer with its waits measured."""
        return _Metered(transfer, self)

    def of_stream(self, stream: Any) -> Any:
        """Return a copy of a CUDA stream whose `wait_stream` waits are measured.

        `Stream.wait_stream` waits for an event that the other stream records: that event measures the wait.
        """
        meter, cuda = self, self._cuda

        class Recorded(cuda.Event):  # type: ignore[misc, name-defined]
            """An event whose waits are measured on the computing stream only: copy streams delay no kernel."""

            def wait(self, stream: Any = None) -> None:
                if stream is not None and stream != cuda.current_stream():
                    super().wait(stream)
                    return
                with traced("wait for ZeRO"), meter.waiting(stream):
                    super().wait(stream)

        class Watched(cuda.Stream):  # type: ignore[misc, name-defined]
            """The stream, whose events are measured."""

            def record_event(self, event: Any = None) -> Any:
                return super().record_event(Recorded() if event is None else event)

        place = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
        return Watched(**place)


def exposed_time(waits: Iterable[tuple[float, float]], works: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by waits and not by work.

    Args:
        waits: Intervals (start, end) in any unit and order; they may overlap.
        works: Intervals of work, likewise.
    """
    edges = [(moment, change, 0) for wait in waits for moment, change in zip(wait, (1, -1), strict=True)]
    edges += [(moment, 0, change) for work in works for moment, change in zip(work, (1, -1), strict=True)]
    total, waiting, working, before = 0.0, 0, 0, 0.0
    for moment, wait, work in sorted(edges):
        if waiting and not working:
            total += moment - before
        waiting, working, before = waiting + wait, working + work, moment
    return total


def working(comm: object) -> AbstractContextManager[None]:
    """Return the `working` context of a group's meter, if it has one."""
    meter = getattr(comm, "meter", None)
    return meter.working() if isinstance(meter, WaitMeter) else nullcontext()


class _Intervals:
    """Pairs of events, reused after each reading."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._pairs: list[tuple[Any, Any]] = []
        self._used = 0

    @property
    def first(self) -> Any:
        """The first event since the last reading, None if there is none."""
        return self._pairs[0][0] if self._used else None

    def next(self) -> tuple[Any, Any]:
        """Return events for the beginning and the end of an interval."""
        if self._used == len(self._pairs):
            self._pairs.append((self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)))
        self._used += 1
        return self._pairs[self._used - 1]

    def read(self, origin: Any) -> list[tuple[float, float]]:
        """Return the finished intervals in milliseconds after `origin`, and reset."""
        pairs, self._used = self._pairs[: self._used], 0
        if origin is None:
            return []
        return [(origin.elapsed_time(start), origin.elapsed_time(end)) for start, end in pairs if end.query()]


class _Metered:
    """A `Transfer` whose waits are measured."""

    def __init__(self, transfer: Transfer, meter: WaitMeter) -> None:
        self._transfer, self._meter = transfer, meter

    def wait(self) -> tuple[Tensor, ...]:
        with traced("wait for exchange"), self._meter.waiting():
            return self._transfer.wait()


_LOOK_EVERY = 1.0  # seconds
_PATIENCE = 10.0  # seconds: a peer that ended normally has sent all its signals before


class PeerWatch:
    """A thread that checks whether the other processes of a group are alive while this process waits for them.

    If a peer has ended and the work of this rank does not finish, it prints one line and exits with status 1. Peers in
    another PID namespace are not visible and not watched.

    Args:
        inner: The group; construction is collective.
        device: This rank's GPU.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._device = device
        mine = (os.readlink("/proc/self/ns/pid"), os.getpid(), start_ticks(os.getpid()))
        self._peers = {
            rank: (pid, born)
            for rank, (namespace, pid, born) in enumerate(gather_objects(inner, mine))
            if rank != inner.rank and namespace == mine[0]
        }
        self._expected: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bmburst-peer-watch", daemon=True)
        self._thread.start()

    def expect(self, event: Any) -> None:
        """Watch the work before a CUDA event, which needs the other ranks."""
        self._expected = event

    def close(self) -> None:
        """End the thread: one that is inside a CUDA call when Python exits would abort the process."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        torch.cuda.set_device(self._device)
        look_during_captures()
        missed = 0.0
        while not self._over.wait(_LOOK_EVERY):
            gone = self._gone() if self._is_waiting() else None
            missed = missed + _LOOK_EVERY if gone else 0.0
            if gone and missed >= _PATIENCE:
                rank, pid = gone
                sys.stderr.write(
                    f"bmburst: rank {rank} (process {pid}) of this host has ended, and this rank waits for its memory: "
                    "this rank ends too; the cause is in that rank's output\n"
                )
                sys.stderr.flush()
                os._exit(1)

    def _is_waiting(self) -> bool:
        """Return whether the watched work is unfinished."""
        expected = self._expected
        if expected is not None and expected.query() and self._expected is expected:
            self._expected = None
        return self._expected is not None

    def _gone(self) -> tuple[int, int] | None:
        """Return rank and process id of the first peer that has ended."""
        for rank, (pid, born) in self._peers.items():
            if start_ticks(pid) != born:
                return rank, pid
        return None


def start_ticks(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return None if state in "ZX" else fields[18]
