"""Measures of a training step: time of each phase, FLOPs utilization (MFU), and traces of torch's profiler."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bmburst.blocks.config import LlamaConfig
from bmburst.comm.meter import WaitMeter
from bmburst.mesh import Mesh
from bmburst.plan.counts import forward_flops, frozen_flops, hardware_flops, step_flops, table
from bmburst.runtime import host
from bmburst.schedule.hardware import hardware_of
from bmburst.train.config import TrainConfig
from bmburst_ops.constants import ATTENTION_BACKWARD

PROFILE_FOLDER = "profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """Seconds of a step on one rank.

    Attributes:
        data: Until the batch was there.
        compute: Forward and backward, without waits.
        waits: What forward and backward waited for other ranks, or weights from host memory: exposed communication.
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
        self.last = StepTiming()
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
        """Time clipping and the optimizer. The events are read one step later, when they have finished."""
        self._last_optimizer = self._optimizer.seconds()
        with self._optimizer.measured():
            yield

    def settle(self) -> None:
        """Make this step the `last` one. The host must have waited for what `work` launched.

        It asks for two events of each wait, milliseconds in all: call it once the optimizer keeps the GPU busy.
        """
        waits = self.meter.read()
        self.last = StepTiming(
            data=self._data,
            compute=max(0.0, self._work.seconds() - waits),
            waits=waits,
            optimizer=self._last_optimizer,
        )


def measure_waits(meter: WaitMeter, mesh: Mesh, *, on_host: bool) -> None:
    """Measure all communication of forward and backward: attention's, the tensor group's, and ZeRO's."""
    import bmtrain as bmt

    for group in (mesh.sequence, mesh.tensor):
        group.meter = meter
    if on_host:
        host.wrap_communication(meter.waiting)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Utilisation of the GPUs in one step.

    Attributes:
        mfu: Model FLOPs over the peak: causal attention halved, backward twice the forward, recomputation not counted;
            None where no peak is known.
        mfu_kernel: The same with attention's backward 2.5 times its forward.
        tflops: TFLOP/s of a rank that were computed, recomputation counted.
    """

    mfu: float | None
    mfu_kernel: float | None
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsMeter:
    """Computes utilisation from the facts that stay the same over a run.

    Attributes:
        model: The shape.
        recompute: Policy of `bmburst.recompute`.
        ranks: In all.
        peak: FLOP/s of a rank; None where it is not known.
        adapters: Parameters of low-rank adapters, where they are trained in place of the weights. No gradient of a
            weight is computed then, and none is counted.
        pairs: Whether a reference computes each step's answers too (DPO): its forward pass is counted, and in what is
            computed also the logits that backward makes again.
    """

    model: LlamaConfig
    recompute: str
    ranks: int
    peak: float | None
    adapters: int = 0
    pairs: bool = False

    def of(self, tokens: float, query_key_pairs: float, seconds: float) -> Utilisation:
        """Return what a step of so many tokens and query-key pairs (`bmburst.plan.counts.causal_pairs`) achieves."""
        frozen = frozen_flops(self.model, tokens, self.adapters)
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


def flops_meter(config: TrainConfig, ranks: int, device: str | None) -> tuple[FlopsMeter, str]:
    """Return the meter of a run, and why it does not know utilisation, empty where it does.

    Args:
        config: The run, with a recompute policy.
        ranks: In all.
        device: The GPU's name; None on a CPU.
    """
    peak, no_peak = known_peak(device, config.dtype)
    adapters = config.lora.parameters(config.model)
    meter = FlopsMeter(
        model=config.model,
        recompute=config.recompute,
        ranks=ranks,
        peak=peak,
        adapters=adapters,
        pairs=config.dpo.is_on,
    )
    return meter, no_peak


def known_peak(device: str | None, dtype: str) -> tuple[float | None, str]:
    """Return the peak FLOP/s of a GPU, of which utilisation is a fraction, or None and the reason.

    Args:
        device: The GPU's name; None on a CPU.
        dtype: Of weights and activations.
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
    """Records the profiled steps of one rank; the file appears after the last of them.

    Attributes:
        steps: Which; empty for none.
        folder: The run folder.
        rank: This rank.
        on_gpu: Whether there is a GPU to record.
        written: The file, when it is there.
    """

    steps: range
    folder: Path
    rank: int
    on_gpu: bool
    written: Path | None = None
    _profiler: Any = field(default=None, repr=False)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Do a step inside. A run that is resumed within the range records the rest of it."""
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
        """Write what is recorded; a second time does nothing."""
        if self._profiler is None:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = self.folder / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.written = folder / f"steps-{self.steps[0]}-{self.steps[-1]}.rank-{self.rank}.json"
        profiler.export_chrome_trace(str(self.written))
