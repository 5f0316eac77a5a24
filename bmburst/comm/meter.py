"""How long a rank's work stands still for communication: the time between the two ends of every wait for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.protocol import Transfer
from bmburst.trace import traced


class WaitMeter:
    """Adds up waits. On a GPU an event before and one after each, on the stream that waits: the host never does.

    What it measures is exposed communication: transfers that are over when somebody waits for them add nothing, and a
    wait for a slower rank counts, for the work stands still all the same. On a CPU it is time of the host, in calls
    that move something and in waits.

    Args:
        on_gpu: Whether what waits is a stream.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.running = False
        """Whether waits are measured. Set it on every rank alike."""
        self._on_gpu = on_gpu
        self._depth = 0
        self._seconds = 0.0
        self._pairs: list[tuple[Any, Any]] = []
        self._used = 0

    @contextmanager
    def waiting(self, stream: Any = None) -> Iterator[None]:
        """Measure what the block waits for; of waits inside each other the outer one counts.

        Args:
            stream: Which waits; the current one.
        """
        if not self.running or self._depth:
            yield
            return
        self._depth += 1
        start, end = self._next() if self._on_gpu else (None, None)
        began = time.perf_counter()
        if start is not None:
            start.record(stream or torch.cuda.current_stream())
        try:
            yield
        finally:
            self._depth -= 1
            if end is not None:
                end.record(stream or torch.cuda.current_stream())
            else:
                self._seconds += time.perf_counter() - began

    def read(self) -> float:
        """Return the seconds since the last call. On a GPU the host must have waited for the streams' work."""
        waits, self._used = self._pairs[: self._used], 0
        seconds, self._seconds = self._seconds, 0.0
        return seconds + sum(float(start.elapsed_time(end)) for start, end in waits if end.query()) / 1e3

    def metered(self, transfer: Transfer) -> Transfer:
        """Return the transfer, whose waits are measured."""
        return _Metered(transfer, self)

    def of_stream(self, stream: Any) -> Any:
        """Return a CUDA stream again, so that whoever waits for it by `wait_stream` is measured."""
        return metered_stream(stream, self)

    def _next(self) -> tuple[Any, Any]:
        if self._used == len(self._pairs):
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._used += 1
        return self._pairs[self._used - 1]


class _Metered:
    """A `Transfer` whose waits are measured."""

    def __init__(self, transfer: Transfer, meter: WaitMeter) -> None:
        self._transfer, self._meter = transfer, meter

    def wait(self) -> tuple[Tensor, ...]:
        with traced("wait for exchange"), self._meter.waiting():
            return self._transfer.wait()


def metered_stream(stream: Any, meter: WaitMeter) -> Any:
    """Return a CUDA stream again; see `WaitMeter.of_stream`.

    `Stream.wait_stream` waits for an event that it asks the other stream to record: that event knows of the wait.
    """

    class Recorded(torch.cuda.Event):
        """What somebody is about to wait for."""

        def wait(self, stream: Any = None) -> None:
            with traced("wait for ZeRO"), meter.waiting(stream):
                super().wait(stream)

    class Watched(torch.cuda.Stream):
        """The same stream."""

        def record_event(self, event: Any = None) -> Any:
            return super().record_event(Recorded() if event is None else event)  # type: ignore[no-untyped-call]

    place = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
    return Watched(**place)  # type: ignore[no-untyped-call]
