"""Measure training steps: time, memory, and what of them the model's own FLOPs would take."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bmburst.amounts import GIB
from bmburst.bench.memory import Gauge
from bmburst.bench.methods import Ours, Setting
from bmburst.bench.rows import Row
from bmburst.bench.timing import Times
from bmburst.bench.trace import record
from bmburst.bench.training.bound import Rates, bound, utilisation
from bmburst.bench.training.cells import OURS, TrainCell
from bmburst.bench.training.methods import METHODS
from bmburst.bench.training.peers import attention_cell, build
from bmburst.bench.training.random_text import write_random_tokens
from bmburst.bench.training.rates import measure_rates
from bmburst.schedule.hardware import hardware_of, machine_of
from bmburst.train.config import DataConfig
from bmburst.train.metrics import StepMetrics
from bmburst.train.trainer import Trainer
from bmburst_ops.constants import ATTENTION_BACKWARD

_LEAST = 2  # steps that are measured however long they take


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a cell is measured with.

    Attributes:
        setting: Ranks and kernel.
        gauge: Of this rank's memory.
        from_all: Returns every rank's value; every rank calls it.
        folder: The job's.
        repeats: Steps to measure.
        seconds: About how long they may take; fewer are then measured, 2 at least.
        trace: Folder for a timeline of one more step, or None.
    """

    setting: Setting
    gauge: Gauge
    from_all: Callable[[Any], list[Any]]
    folder: Path
    repeats: int
    seconds: float
    trace: Path | None = None


def measure_steps(cell: TrainCell, means: Means) -> Row:
    """Return what a cell's row says beside its state. Every rank calls it, and all return the same times.

    * `milliseconds`: of a step, the slowest rank's, by device events between steps that follow each other.
    * `bound`: seconds of attention and products at the rates measured before and behind the steps, the mean of both.
    * `ratio`: the median step over the bound.
    * `peak_memory_gib`: once gradients and optimizer states are there.
    """
    row = _choices(cell, means.setting)
    before = measure_rates(cell, means.setting)
    means.gauge.clear()
    trainer = build(cell, means.setting, _data(cell, means), means.folder, steps=1 << 30)
    warm_up, milliseconds, found = _steps(trainer, means)
    row |= memory(means.gauge, found[len(warm_up) :])
    if means.trace is not None:
        record(trainer.step, means.trace, cell.key, means.setting.party)
    del trainer
    gc.collect()
    means.gauge.clear()
    after = measure_rates(cell, means.setting)
    rates = Rates(
        attention=(before.attention + after.attention) / 2,
        matmul=(before.matmul + after.matmul) / 2,
    )
    row |= {"warm_up_milliseconds": warm_up, "losses": [step.loss for step in found], "rates": _said(before, after)}
    return row | _judged(cell, Times.of(milliseconds), rates, means.setting.party.device)


def timed(trainer: Trainer, count: int, means: Means) -> tuple[list[float], list[StepMetrics]]:
    """Return milliseconds of so many steps, each the slowest rank's, and what the steps gave."""
    marks, found = [_mark(means.setting.party.device)], []
    for _ in range(count):
        found.append(trainer.step())
        marks.append(_mark(means.setting.party.device))
    own = [_milliseconds(*both) for both in pairwise(marks)]
    return [max(step) for step in zip(*means.from_all(own), strict=True)], found


def _steps(trainer: Trainer, means: Means) -> tuple[list[float], list[float], list[StepMetrics]]:
    """Return milliseconds of warm-up, of what is measured, and what all steps gave.

    The first step makes optimizer states and compiles kernels; a second one follows if there is time for it.
    """
    warm_up, found = timed(trainer, 1, means)
    if warm_up[0] < means.seconds * 1e3 / 4:
        more, again = timed(trainer, 1, means)
        warm_up, found = warm_up + more, found + again
    affordable = int(means.seconds * 1e3 / warm_up[-1])
    milliseconds, rest = timed(trainer, min(means.repeats, max(_LEAST, affordable)), means)
    return warm_up, milliseconds, [*found, *rest]


def _data(cell: TrainCell, means: Means) -> DataConfig:
    path = means.folder / f"random-{cell.model.vocab_size}-{cell.tokens}.tokens"
    if means.setting.party.rank == 0 and not path.exists():
        write_random_tokens(path, tokens=cell.tokens, vocab_size=cell.model.vocab_size)
    means.from_all(None)  # the others read it
    return DataConfig(source=str(path), cache=means.folder)


def _choices(cell: TrainCell, setting: Setting) -> Row:
    """Return how the cell is trained: policy, layout, and what our attention chose."""
    method = METHODS[cell.method]
    row: Row = {"recompute": method.recompute(cell), "layout": method.layout, "tensor": method.tensor(cell)}
    row |= {"all_layers": cell.preset == cell.model_name}
    if cell.method == OURS and cell.ranks > 1:
        row |= Ours().resolve(attention_cell(cell), setting)[1]
    return row


def memory(gauge: Gauge, steps: list[StepMetrics]) -> Row:
    """Return the peak of steps, and torch's share of it. A step reads torch's peak itself, and begins a new one."""
    allocated = max(step.memory_gib for step in steps)
    peak = gauge.peak(allocated * GIB)
    if peak is None:
        return {"peak_memory_gib": None, "allocated_gib": None}
    return {"peak_memory_gib": peak / GIB, "allocated_gib": allocated}


def _said(before: Rates, after: Rates) -> dict[str, list[float]]:
    """Return TFLOP/s before and behind the steps."""
    return {name: [value / 1e12, asdict(after)[name] / 1e12] for name, value in asdict(before).items()}


def _judged(cell: TrainCell, times: Times, rates: Rates, device: torch.device) -> Row:
    seconds, least = times.median / 1e3, bound(cell, rates)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known, machine = hardware_of(name), machine_of(name)
    row: Row = {
        "milliseconds": times.to_dict(),
        "tokens_per_second": cell.tokens / seconds / cell.ranks,
        "bound": asdict(least) | {"total": least.total},
        "ratio": seconds / least.total,
    }
    for key, backward in (("mfu", 2.0), ("mfu_kernel", ATTENTION_BACKWARD)):
        row[key] = None if known is None else utilisation(cell, seconds, known.peak, attention_backward=backward)
    predicted = None if machine is None else METHODS[cell.method].predict(cell, machine)
    if predicted is not None:
        more = METHODS[cell.method].replicated_bytes(cell)
        row["planned"] = {
            "milliseconds": predicted.seconds * 1e3,
            "allocated_gib": (predicted.memory.allocated + more) / GIB,
        }
    return row


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(before: Any, after: Any) -> float:
    if isinstance(before, float):
        return float(after - before) * 1e3
    after.synchronize()
    return float(before.elapsed_time(after))
