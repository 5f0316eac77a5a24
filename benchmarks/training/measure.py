"""What a rank of the training benchmark measures of a cell: steps beside the model's own FLOPs, or losses."""

import gc
import math
import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.cells import alone, forward_flops
from benchmarks.attention.methods import LocalKernel, OneGpu, Ours, Setting
from benchmarks.attention.methods.method import prepare
from benchmarks.engine.kind import Row
from benchmarks.engine.machine import Gauge
from benchmarks.engine.rank import RankRun
from benchmarks.engine.timeline import record
from benchmarks.engine.timing import RankGroup, Times, in_turns
from benchmarks.training.cells import OURS, STEPS, Rates, TrainCell, bound, utilisation
from benchmarks.training.methods import METHODS
from benchmarks.training.trainer import attention_cell, build, write_random_tokens
from bmburst.amounts import GIB
from bmburst.schedule.hardware import hardware_of, machine_of
from bmburst.train.config import DataConfig
from bmburst.train.metrics import StepMetrics
from bmburst.train.trainer import Trainer
from bmburst_ops.constants import ATTENTION_BACKWARD

_LEAST = 2  # steps that are measured however long they take
_LONGEST = 128 * 1024  # tokens: from 64K on the attention kernel's rate does not rise
_WIDTH = {"cuda": 8192, "cpu": 256}  # of the matrices whose product's rate is measured
_PRODUCTS = 8  # in one call, so that launching does not count
_RATE_REPEATS, _RATE_SECONDS = 2, 2.0


class TrainRun(RankRun[TrainCell]):
    """See `RankRun`."""

    def prepare(self) -> None:
        """See `RankRun.prepare`."""
        group = dist.group.WORLD
        assert group is not None  # it was begun
        ranks = RankGroup(process_group=group, rank=self.rank, size=self.world, device=self.device)
        self.setting = Setting(group=ranks, kernel=LocalKernel(self.job.kernel), kernel_name=self.job.kernel)

    def refusal(self, cell: TrainCell) -> str | None:
        """See `RankRun.refusal`."""
        method, on_gpu = METHODS[cell.method], self.device.type == "cuda"
        machine = machine_of(torch.cuda.get_device_name(self.device)) if on_gpu else None
        capacity = float(torch.cuda.get_device_properties(self.device).total_memory) if on_gpu else 0.0
        return method.refusal(cell) or method.memory_refusal(cell, machine, capacity)

    def measure(self, cell: TrainCell) -> Row:
        """See `RankRun.measure`."""
        return _measure_steps(cell, self) if cell.suite == "step" else _measure_losses(cell, self)


def _measure_steps(cell: TrainCell, run: TrainRun) -> Row:
    """Return what a cell's row says beside its state. Every rank calls it, and all return the same times.

    * `milliseconds`: of a step, the slowest rank's, by device events between steps that follow each other.
    * `bound`: seconds of attention and products at the rates measured before and behind the steps, the mean of both.
    * `ratio`: the median step over the bound.
    * `peak_memory_gib`: once gradients and optimizer states are there.
    """
    row = _choices(cell, run.setting)
    before = _measure_rates(cell, run.setting)
    run.gauge.clear()
    trainer = build(cell, run.setting, _data(cell, run), run.folder, steps=1 << 30)
    warm_up, milliseconds, found = _steps(trainer, run)
    row |= _memory(run.gauge, found[len(warm_up) :])
    if run.job.trace_folder is not None:
        record(trainer.step, run.job.trace_folder, cell.key, run.setting.group)
    del trainer
    gc.collect()
    run.gauge.clear()
    after = _measure_rates(cell, run.setting)
    rates = Rates(
        attention=(before.attention + after.attention) / 2,
        matmul=(before.matmul + after.matmul) / 2,
    )
    row |= {"warm_up_milliseconds": warm_up, "losses": [step.loss for step in found], "rates": _said(before, after)}
    return row | _judged(cell, Times.of(milliseconds), rates, run.device)


def _timed(trainer: Trainer, count: int, run: TrainRun) -> tuple[list[float], list[StepMetrics]]:
    """Return milliseconds of so many steps, each the slowest rank's, and what the steps gave."""
    marks, found = [_mark(run.device)], []
    for _ in range(count):
        found.append(trainer.step())
        marks.append(_mark(run.device))
    own = [_milliseconds(*both) for both in pairwise(marks)]
    return [max(step) for step in zip(*run.from_all(own), strict=True)], found


def _steps(trainer: Trainer, run: TrainRun) -> tuple[list[float], list[float], list[StepMetrics]]:
    """Return milliseconds of warm-up, of what is measured, and what all steps gave.

    The first step makes optimizer states and compiles kernels; a second one follows if there is time for it.
    """
    warm_up, found = _timed(trainer, 1, run)
    if warm_up[0] < run.job.cell_seconds * 1e3 / 4:
        more, again = _timed(trainer, 1, run)
        warm_up, found = warm_up + more, found + again
    affordable = int(run.job.cell_seconds * 1e3 / warm_up[-1])
    milliseconds, rest = _timed(trainer, min(run.job.repeats, max(_LEAST, affordable)), run)
    return warm_up, milliseconds, [*found, *rest]


def _data(cell: TrainCell, run: TrainRun) -> DataConfig:
    path = run.folder / f"random-{cell.model.vocab_size}-{cell.tokens}.tokens"
    if run.rank == 0 and not path.exists():
        write_random_tokens(path, tokens=cell.tokens, vocab_size=cell.model.vocab_size)
    run.from_all(None)  # the others read it
    return DataConfig(source=str(path), cache=run.folder)


def _choices(cell: TrainCell, setting: Setting) -> Row:
    """Return how the cell is trained: policy, layout, and what our attention chose."""
    method = METHODS[cell.method]
    row: Row = {"recompute": method.recompute(cell), "layout": method.layout, "tensor": method.tensor(cell)}
    row |= {"all_layers": cell.preset == cell.model_name}
    if cell.method == OURS and cell.ranks > 1:
        row |= Ours().resolve(attention_cell(cell), setting)[1]
    return row


def _memory(gauge: Gauge, steps: list[StepMetrics]) -> Row:
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


def _measure_losses(cell: TrainCell, run: TrainRun) -> Row:
    """Return every step's loss in nats a token and gradient norm, and the time of a step. Every rank calls it."""
    text, steps = run.job.options["text"], run.job.options["steps"]  # 0: as many as the suite has
    data = DataConfig(source=text, tokenizer="bytes", cache=run.folder)
    trainer = build(cell, run.setting, data, run.folder, steps=steps or STEPS[cell.suite])
    milliseconds, found = _timed(trainer, trainer.config.steps, run)
    return {
        "recompute": METHODS[cell.method].recompute(cell),
        "losses": [step.loss for step in found],
        "grad_norms": [step.grad_norm for step in found],
        "milliseconds": Times.of(milliseconds[1:] or milliseconds).to_dict(),
        **_memory(run.gauge, found),
    }


def _measure_rates(cell: TrainCell, setting: Setting) -> Rates:
    """Return the rates of the slowest rank, each rank alone with all heads of the model. Every rank calls it.

    Attention is forward and backward of a causal sequence of S / sqrt(P) tokens, which has a rank's share of the
    FLOPs, or of 128K tokens where that is more; matrices are 8192 x 8192. They are called in turns.
    """
    tokens = min(_LONGEST, max(1, int(cell.tokens / math.sqrt(cell.ranks))))
    one = alone(replace(attention_cell(cell), ranks=1, tokens=tokens))
    attention = prepare(OneGpu(), one, setting)
    width, dtype = _WIDTH[cell.device], getattr(torch, cell.dtype)
    left, right, out = (torch.randn(width, width, device=setting.group.device).to(dtype) for _ in range(3))

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=out)

    rounds = in_turns(attention.both, products, group=setting.group, repeats=_RATE_REPEATS, seconds=_RATE_SECONDS)
    milliseconds = [Times.of(own).median for own in rounds]
    return Rates(
        attention=forward_flops(one) * (1 + ATTENTION_BACKWARD) / milliseconds[0] * 1e3,
        matmul=_PRODUCTS * 2.0 * width**3 / milliseconds[1] * 1e3,
    )
