"""Measures training steps: time of each phase, FLOPs utilization (MFU), traces of torch's profiler, and slow ranks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from bmburst import host
from bmburst.blocks.config import LlamaConfig
from bmburst.comm.waits import WaitMeter
from bmburst.mesh import Mesh
from bmburst.plan.counts import forward_flops, frozen_flops, hardware_flops, step_flops, table
from bmburst.schedule.hardware import hardware_of
from bmburst_ops import ATTENTION_BACKWARD

PROFILE_FOLDER = "profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """Seconds of a step on one rank.

    Attributes:
        data: Waiting for the batch.
        compute: Forward and backward, without waits.
        waits: Exposed communication: waits of forward and backward for other ranks, or for weights from host memory.
        optimizer: Clipping and optimizer of the previous step.
    """

    data: float = 0.0
    compute: float = 0.0
    waits: float = 0.0
    optimizer: float = 0.0


class StepClock:
    """Times the parts of a step. On a GPU it uses events, which are read after the host has waited for the GPU anyway.

    Args:
        on_gpu: Whether to use CUDA events; else the host's clock.

    Attributes:
        meter: Measures waits; give it to everything that communicates in forward and backward.
        last: Timing of the latest measured step.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.meter = WaitMeter(on_gpu=on_gpu)
        self.last = StepTiming()
        self._work, self._optimizer = _Span(on_gpu=on_gpu), _Span(on_gpu=on_gpu)
        self._data, self._last_optimizer = 0.0, 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Time the block on the host; it loads the batch."""
        began = time.perf_counter()
        yield
        self._data = time.perf_counter() - began

    @contextmanager
    def work(self) -> Iterator[None]:
        """Time forward and backward, and their waits."""
        self.meter.running = True
        try:
            with self._work.measured():
                yield
        finally:
            self.meter.running = False

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Time clipping and the optimizer. The events are read one step later, when they have finished."""
        self._last_optimizer = self._optimizer.seconds()
        with self._optimizer.measured():
            yield

    def settle(self) -> None:
        """Set `last` to this step. The host must have waited for the kernels of `work`.

        It reads two events per wait, which takes milliseconds: call it while the optimizer keeps the GPU busy.
        """
        waits = self.meter.read()
        self.last = StepTiming(
            data=self._data, compute=max(0.0, self._work.seconds() - waits), waits=waits, optimizer=self._last_optimizer
        )


def measure_waits(meter: WaitMeter, mesh: Mesh, *, on_host: bool) -> None:
    """Measure all communication of forward and backward: attention's, the tensor group's, and ZeRO's."""
    import bmtrain as bmt

    for group in (mesh.sequence, mesh.tensor):
        group.meter = meter
    if on_host:
        host.wrap_communication(meter.waiting)
    else:
        # BMTrain makes the compute stream wait for this stream before every block and after backward.
        bmt.config["load_stream"] = meter.of_stream(bmt.config["load_stream"])


class _Span:
    """The duration of a block, by events of the current stream or by the host's clock."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        self._seconds: float | None = None  # None before the first measurement

    @contextmanager
    def measured(self) -> Iterator[None]:
        began = time.perf_counter()
        if self._events:
            self._events[0].record()
        yield
        if self._events:
            self._events[1].record()
        self._seconds = time.perf_counter() - began

    def seconds(self) -> float:
        """Return the last measurement; 0 before the first."""
        if self._seconds is None:
            return 0.0
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else self._seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Utilization of the GPUs in one step.

    Attributes:
        mfu: Model FLOPs utilization: causal attention counted half, backward twice the forward, recompute not counted;
            None if the peak is unknown.
        mfu_kernel: The same with attention's backward counted 2.5 times its forward.
        tflops: Computed TFLOP/s of a rank, including recompute.
    """

    mfu: float | None
    mfu_kernel: float | None
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsMeter:
    """Computes utilization of the steps of a run.

    Attributes:
        model: The model's configuration.
        recompute: Policy of `bmburst.recompute`.
        ranks: Number of ranks in total.
        peak: Peak FLOP/s of a rank; None if unknown.
        adapters: Number of parameters of low-rank adapters if they are trained instead of the weights, else 0. Weight
            gradients are then neither computed nor counted.
        trains_head: Whether the head is trained beside the adapters.
        pairs: Whether the run is DPO. The forward pass of the reference is then counted, and in `tflops` also the
            logits that backward recomputes.
    """

    model: LlamaConfig
    recompute: str
    ranks: int
    peak: float | None
    adapters: int = 0
    trains_head: bool = False
    pairs: bool = False

    def of(self, tokens: float, query_key_pairs: float, seconds: float) -> Utilisation:
        """Return the utilization of a step, given its tokens, `bmburst.plan.counts.causal_pairs` and duration."""
        frozen = frozen_flops(self.model, tokens, self.adapters, trains_head=self.trains_head)
        reference = forward_flops(self.model, tokens, query_key_pairs) if self.pairs else 0.0
        usual, kernel, done = (
            flops - frozen + reference
            for flops in (
                step_flops(self.model, tokens, query_key_pairs),
                step_flops(self.model, tokens, query_key_pairs, attention_backward=ATTENTION_BACKWARD),
                hardware_flops(self.model, tokens, query_key_pairs, self.recompute),
            )
        )
        done += 2.0 * table(self.model) * tokens if self.pairs else 0.0
        rank_seconds = seconds * self.ranks
        return Utilisation(
            mfu=None if self.peak is None else usual / rank_seconds / self.peak,
            mfu_kernel=None if self.peak is None else kernel / rank_seconds / self.peak,
            tflops=done / rank_seconds / 1e12,
        )


def known_peak(device: str | None, dtype: str) -> tuple[float | None, str]:
    """Return the peak FLOP/s of a GPU and an empty text, or None and the reason why it is unknown.

    Args:
        device: Name of the GPU; None on a CPU.
        dtype: dtype of weights and activations.
    """
    if device is None:
        return None, "MFU is left out: there is no GPU"
    if dtype not in ("bfloat16", "float16"):
        return None, f"MFU is left out: the planner knows peaks of 16-bit products, not of {dtype}"
    hardware = hardware_of(device)
    if hardware is None:
        return None, f"MFU is left out: the planner has no file of {device} (bmburst/schedule/machines)"
    return hardware.peak, ""


@dataclass(slots=True)
class Timeline:
    """Records the profiled steps of one rank with torch's profiler; writes the trace after the last of them.

    Attributes:
        steps: The steps to record; may be empty.
        folder: The run folder.
        rank: This rank.
        on_gpu: Whether to record GPU activity.
    """

    steps: range
    folder: Path
    rank: int
    on_gpu: bool
    _profiler: Any = field(default=None, repr=False)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context of step `number`. A run that is resumed within the range records the rest of it."""
        if number not in self.steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        if self._profiler is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
        with record_function(f"step {number}"):
            yield
        if number == self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the recorded steps. A second call has no effect."""
        if self._profiler is None:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = self.folder / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self.steps[0]}-{self.steps[-1]}.rank-{self.rank}.json"
        profiler.export_chrome_trace(str(folder / name))


WINDOW = 20
"""Steps in one measurement window."""
_COLD = 2  # ignored timings: the first exchange has none, the second includes the compilation of kernels
_RATIO = 1.2  # times the median; clocks, temperatures and uneven masks cause smaller differences
_LEAST = 0.01  # seconds per step: no warning for a smaller difference
_CAUSES = (("data", "data loading"), ("compute", "forward and backward"), ("optimizer", "optimizer"))


class LagWatch:
    """Finds slow ranks: compares the ranks' times of data loading, compute and optimizer, without waits for others.

    Args:
        hosts: Host name of each rank.
        window: Number of steps that are averaged for each comparison.
    """

    def __init__(self, hosts: Sequence[str], window: int = WINDOW) -> None:
        self._hosts = tuple(hosts)
        self._window = window
        self._steps: list[tuple[StepTiming, ...]] = []
        self._cold = _COLD

    def add(self, timings: Sequence[StepTiming]) -> str | None:
        """Add the timings of all ranks in one step; return a warning if a rank is slow, at most once per window."""
        if self._cold:
            self._cold -= 1
            return None
        self._steps.append(tuple(timings))
        if len(self._steps) < self._window:
            return None
        said = self._judge()
        self._steps.clear()
        return said

    def _judge(self) -> str | None:
        means = {
            part: [fmean(getattr(step[rank], part) for step in self._steps) for rank in range(len(self._hosts))]
            for part, _ in _CAUSES
        }
        totals = [sum(of_rank) for of_rank in zip(*means.values(), strict=True)]
        slowest, middle = max(range(len(totals)), key=totals.__getitem__), median(totals)
        if totals[slowest] < max(_RATIO * middle, middle + _LEAST):
            return None
        part, cause = max(_CAUSES, key=lambda each: means[each[0]][slowest] - median(means[each[0]]))
        return (
            f"rank {slowest} (host {self._hosts[slowest]}) was {totals[slowest] / max(middle, 1e-9):.1f} times slower "
            f"than the median over the last {self._window} steps: its {cause} took {means[part][slowest]:.3g} s a "
            f"step, the median rank's {median(means[part]):.3g} s"
        )
