"""Where a step's time goes on a rank: its data, its computation, waits for other ranks, the optimizer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bmburst.comm.meter import WaitMeter
from bmburst.mesh import Mesh
from bmburst.runtime import host


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of a step on one rank.

    Attributes:
        data: Until the batch was there.
        compute: Forward and backward, without waits.
        waits: What forward and backward waited for other ranks: exposed communication.
        optimizer: Clipping and the optimizer, of the step before.
    """

    data: float = 0.0
    compute: float = 0.0
    waits: float = 0.0
    optimizer: float = 0.0


class StepClock:
    """Times the parts of a step. On a GPU by events, read after the one point at which the host waits for it anyway.

    Args:
        on_gpu: Whether a stream does the work; else the host.

    Attributes:
        meter: To be given to all that communicates in forward and backward.
        last: The newest step that is known.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.meter = WaitMeter(on_gpu=on_gpu)
        self.last = Timing()
        self._work, self._optimizer = _Span(on_gpu=on_gpu), _Span(on_gpu=on_gpu)
        self._data, self._last_optimizer = 0.0, 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Time the host in the block, which gets the batch."""
        began = time.perf_counter()
        yield
        self._data = time.perf_counter() - began

    @contextmanager
    def work(self) -> Iterator[None]:
        """Time forward and backward, and what they wait for."""
        self.meter.running = True
        try:
            with self._work.measured():
                yield
        finally:
            self.meter.running = False

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Time clipping and the optimizer; they are read a step later, when they are surely over."""
        self._last_optimizer = self._optimizer.seconds()
        with self._optimizer.measured():
            yield

    def settle(self) -> None:
        """Make this step the `last` one. The host must have waited for what `work` launched.

        It asks for two events of each wait, milliseconds in all: call it once the optimizer keeps the GPU busy.
        """
        waits = self.meter.read()
        self.last = Timing(
            data=self._data,
            compute=max(0.0, self._work.seconds() - waits),
            waits=waits,
            optimizer=self._last_optimizer,
        )


def measure_waits(meter: WaitMeter, mesh: Mesh, *, on_host: bool) -> None:
    """Have all communication of forward and backward measured: attention's, the tensor group's, and ZeRO's."""
    import bmtrain as bmt

    for group in (mesh.sequence, mesh.tensor):
        group.meter = meter
    if on_host:
        host.measure(meter.waiting)
    else:
        # BMTrain lets the stream of the computation wait for this one, before every block and after backward.
        bmt.config["load_stream"] = meter.of_stream(bmt.config["load_stream"])


class _Span:
    """The time from one mark to another: events of the current stream, or the host's clock."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        self._seconds = 0.0
        self._is_over = False

    @contextmanager
    def measured(self) -> Iterator[None]:
        began = time.perf_counter()
        if self._events:
            self._events[0].record()
        yield
        if self._events:
            self._events[1].record()
        self._seconds, self._is_over = time.perf_counter() - began, True

    def seconds(self) -> float:
        """Return the last measurement; 0 before the first."""
        if not self._is_over:
            return 0.0
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else self._seconds
