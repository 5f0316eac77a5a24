"""Measures a cell of the training benchmark on a rank: builds its trainer and records steps or losses."""

import gc
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.attention.cells import Cell, cell_of, forward_flops, one_gpu_cell
from benchmarks.attention.method import Attend, LocalKernel, OneGpu, Setting, prepare
from benchmarks.attention.methods import Ours, all_methods
from benchmarks.engine.job import RankRun
from benchmarks.engine.kinds import Row
from benchmarks.engine.machine import Gauge, RankGroup
from benchmarks.engine.timing import Times, in_turns, mark, milliseconds_between, record_timeline
from benchmarks.training.cells import METHODS, OURS, STEPS, Rates, TrainCell, bound, utilisation
from benchmarks.training.kind import timeline_title
from bmburst.amounts import GIB
from bmburst.attention.options import MaskOption
from bmburst.data.documents import Document
from bmburst.data.token_writer import write_token_file
from bmburst.errors import UserError
from bmburst.schedule.hardware import hardware_of, machine_of
from bmburst.train.config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from bmburst.train.garbage import held_back
from bmburst.train.metrics import StepMetrics
from bmburst.train.trainer import Trainer
from bmburst_ops import ATTENTION_BACKWARD

_DOCUMENTS = 32  # documents of random tokens in the token file
_MORE = 1.25  # random tokens per token of a sequence, since a part of the file is held out
_SLOWLY = OptimizerConfig(lr=1e-5)  # for random tokens, from which nothing can be learned


def build_trainer(
    cell: TrainCell,
    setting: Setting,
    data: DataConfig,
    folder: Path,
    *,
    steps: int,
    make: Callable[[TrainConfig], Trainer] = Trainer,
) -> Trainer:
    """Return a cell's trainer before its first step. All ranks must call it.

    Nothing is written to `folder`, the parent of the run folder. `make` makes the trainer of a configuration.
    """
    method = METHODS[cell.method]
    is_measured = cell.suite in ("step", "save")
    config = TrainConfig(
        preset=None,
        model=cell.model,
        sequence_length=cell.tokens,
        batch_size=cell.batch,
        micro_batch_size=cell.batch,
        steps=steps,
        dtype=cell.dtype,  # type: ignore[arg-type]  # check_fields validates it
        recompute=method.recompute(cell),
        output=folder / "run",
        data=data,
        parallel=replace(method.parallel(cell), kernel=setting.kernel_name),  # type: ignore[arg-type]
        optimizer=_SLOWLY if is_measured else OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0) if is_measured else ScheduleConfig(),
    )
    trainer = make(config)
    if method.replicated:
        from benchmarks.training.tensor_v1 import replicate

        replicate(trainer.model)
    if method.peer:
        put(trainer.model, all_methods(cell.device)[method.peer].bind(attention_cell(cell), setting))
    return trainer


def attention_cell(cell: TrainCell) -> Cell:
    """Return the cell of the attention benchmark with the same attention."""
    return cell_of(cell, cell.model, cell.tokens, cell.batch)


class _Peer(torch.nn.Module):
    """A peer's attention with the interface of `BurstAttention`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return attention's output. Cells have no padding and no documents."""
        del length
        assert mask is None
        return self._attend(q, k, v)


def put(model: torch.nn.Module, attend: Attend) -> None:
    """Replace the attention of all blocks of a model by a peer's, in place."""
    from bmburst.blocks.transformer import SelfAttention

    places = [module for module in model.modules() if isinstance(module, SelfAttention)]
    assert places
    for place in places:
        place.attention = _Peer(attend)


def write_random_tokens(path: Path, *, tokens: int, vocab_size: int) -> None:
    """Write a token file of random ids with at least one training sequence.

    Ids are uniform over the vocabulary without the last one, which ends a document.
    """
    each = int(tokens * _MORE) // _DOCUMENTS + 8
    documents = (Document(name=str(n), pieces=(f"document {n}",)) for n in range(_DOCUMENTS))
    write_token_file(path, documents, _Random(vocab_size, each))


class _Random:
    """A tokenizer that returns random ids for any text."""

    name = identity = "random"

    def __init__(self, vocab_size: int, each: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, vocab_size - 1
        self._each, self._generator = each, np.random.default_rng(0)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return random ids; the text is ignored."""
        del text
        return self._generator.integers(0, self.eos_id, self._each, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return random ids for each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the empty string: random ids have no text."""
        del ids
        return ""


_LEAST = 2  # measured steps, however long they take
_LONGEST = 128 * 1024  # tokens for the attention kernel's rate, which is constant from 64K on
_WIDTH = {"cuda": 8192, "cpu": 256}  # rows and columns of the matrices for the rate of products
_PRODUCTS = 8  # products per call, so that launch overhead is negligible
_RATE_REPEATS, _RATE_SECONDS = 2, 2.0


class TrainRun(RankRun[TrainCell]):
    """See `RankRun`."""

    def prepare(self) -> None:
        """See `RankRun.prepare`."""
        group, name = RankGroup.world(self.device), self.job.kernel
        self.setting = Setting(group=group, kernel=LocalKernel(name), kernel_name=name)

    def refusal(self, cell: TrainCell) -> str | None:
        """See `RankRun.refusal`."""
        method, on_gpu = METHODS[cell.method], self.device.type == "cuda"
        machine = machine_of(torch.cuda.get_device_name(self.device)) if on_gpu else None
        capacity = float(torch.cuda.get_device_properties(self.device).total_memory) if on_gpu else 0.0
        return method.refusal(cell) or method.memory_refusal(cell, machine, capacity)

    def measure(self, cell: TrainCell) -> Row:
        """See `RankRun.measure`."""
        return {"step": _measure_steps, "save": _measure_saves}.get(cell.suite, _measure_losses)(cell, self)


def _measure_steps(cell: TrainCell, run: TrainRun) -> Row:
    """Return a cell's row without its status. All ranks must call it, and all return the same times.

    * `milliseconds`: time of a step on the slowest rank, by device events between consecutive steps.
    * `bound`: seconds of attention and products at the mean of the rates measured before and after the steps.
    * `ratio`: the median time of a step divided by the bound.
    * `peak_memory_gib`: peak of the steps after warm-up, with gradients and optimizer states.
    """
    row = _choices(cell, run.setting)
    before = _measure_rates(cell, run.setting)
    run.gauge.clear()
    trainer = build_trainer(cell, run.setting, _data(cell, run), run.folder, steps=1 << 30)
    warm_up, milliseconds, found = _steps(trainer, run)
    row |= _memory(run.gauge, found[len(warm_up) :])
    if run.job.trace_folder is not None:
        record_timeline(trainer.step, run.job.trace_folder, cell.key, timeline_title(cell), run.setting.group)
    del trainer
    gc.collect()
    run.gauge.clear()
    after = _measure_rates(cell, run.setting)
    rates = Rates(attention=(before.attention + after.attention) / 2, matmul=(before.matmul + after.matmul) / 2)
    losses = [step.loss for step in found]
    row |= {"warm_up_milliseconds": warm_up, "losses": losses, "rates": _teraflops(before, after)}
    return row | _evaluated(cell, Times.of(milliseconds), rates, run.device)


def _timed(trainer: Trainer, count: int, run: TrainRun) -> tuple[list[float], list[StepMetrics]]:
    """Train `count` steps; return the milliseconds of each on the slowest rank, and the steps' metrics.

    Python's garbage collector waits, as in a run (`bmburst.train.garbage`).
    """
    with held_back():
        marks, found = [mark(run.device)], []
        for _ in range(count):
            found.append(trainer.step())
            marks.append(mark(run.device))
    own = [milliseconds_between(*both) for both in pairwise(marks)]
    return [max(step) for step in zip(*run.from_all(own), strict=True)], found


def _steps(trainer: Trainer, run: TrainRun) -> tuple[list[float], list[float], list[StepMetrics]]:
    """Return the milliseconds of warm-up steps and of measured steps, and the metrics of all steps.

    The first step creates optimizer states and compiles kernels. A second warm-up step follows if time allows.
    """
    warm_up, found = _timed(trainer, 1, run)
    if warm_up[0] < run.job.cell_seconds * 1e3 / 4:
        more, again = _timed(trainer, 1, run)
        warm_up, found = warm_up + more, found + again
    milliseconds, rest = _timed(trainer, min(run.job.repeats, _LEAST), run)
    # The estimate uses a measured step, since warm-up includes compilation.
    affordable = int((run.job.cell_seconds * 1e3 - sum(milliseconds)) / milliseconds[-1])
    if (count := min(run.job.repeats - len(milliseconds), affordable)) > 0:
        more, again = _timed(trainer, count, run)
        milliseconds, rest = milliseconds + more, rest + again
    return warm_up, milliseconds, [*found, *rest]


def _data(cell: TrainCell, run: TrainRun) -> DataConfig:
    tokens = cell.tokens * cell.batch
    path = run.folder / f"random-{cell.model.vocab_size}-{tokens}.tokens"
    if run.rank == 0 and not path.exists():
        write_random_tokens(path, tokens=tokens, vocab_size=cell.model.vocab_size)
    run.from_all(None)  # wait for the file
    return DataConfig(source=str(path), cache=run.folder)


def _choices(cell: TrainCell, setting: Setting) -> Row:
    """Return the recompute policy, the layout, and the strategy and transport that our attention chose."""
    method = METHODS[cell.method]
    row: Row = {"recompute": method.recompute(cell), "layout": method.layout, "tensor": method.tensor(cell)}
    row |= {"all_layers": cell.preset == cell.model_name}
    if cell.method == OURS and cell.ranks > 1:
        row |= Ours().resolve(attention_cell(cell), setting)[1]
    return row


def _memory(gauge: Gauge, steps: list[StepMetrics]) -> Row:
    """Return the peak memory of the steps, and the peak of torch's allocator, which each step reads and resets."""
    allocated = max(step.memory_gib for step in steps)
    peak = gauge.peak(allocated * GIB)
    if peak is None:
        return {"peak_memory_gib": None, "allocated_gib": None}
    return {"peak_memory_gib": peak / GIB, "allocated_gib": allocated}


def _teraflops(before: Rates, after: Rates) -> dict[str, list[float]]:
    """Return the rates before and after the steps, in TFLOP/s."""
    return {name: [value / 1e12, asdict(after)[name] / 1e12] for name, value in asdict(before).items()}


def _evaluated(cell: TrainCell, times: Times, rates: Rates, device: torch.device) -> Row:
    """Return the times with the bound, the utilisation and the planner's prediction."""
    seconds, least = times.median / 1e3, bound(cell, rates)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known, machine = hardware_of(name), machine_of(name)
    row: Row = {
        "milliseconds": asdict(times),
        "tokens_per_second": cell.tokens * cell.batch / seconds / cell.ranks,
        "bound": asdict(least) | {"total": least.total},
        "ratio": seconds / least.total,
    }
    for key, backward in (("mfu", 2.0), ("mfu_kernel", ATTENTION_BACKWARD)):
        row[key] = None if known is None else utilisation(cell, seconds, known.peak, attention_backward=backward)
    predicted = METHODS[cell.method].predict(cell, machine)
    if predicted is not None:
        more = METHODS[cell.method].replicated_bytes(cell)
        row["planned"] = {
            "milliseconds": predicted.seconds * 1e3,
            "allocated_gib": (predicted.memory.allocated + more) / GIB,
        }
    return row


def _measure_losses(cell: TrainCell, run: TrainRun) -> Row:
    """Return the losses in nats per token, the gradient norms and the times of the steps. All ranks must call it."""
    text, steps = run.job.options["text"], run.job.options["steps"]  # 0: the suite's default
    data = DataConfig(source=text, tokenizer="bytes", cache=run.folder)
    trainer = build_trainer(cell, run.setting, data, run.folder, steps=steps or STEPS[cell.suite])
    milliseconds, found = _timed(trainer, trainer.config.steps, run)
    return {
        "recompute": METHODS[cell.method].recompute(cell),
        "losses": [step.loss for step in found],
        "grad_norms": [step.grad_norm for step in found],
        "milliseconds": asdict(Times.of(milliseconds[1:] or milliseconds)),
        **_memory(run.gauge, found),
    }


def _measure_saves(cell: TrainCell, run: TrainRun) -> Row:
    """Return the seconds for which training stands still for a checkpoint. All ranks must call it.

    * `waiting_seconds`: of a save that training waits for.
    * `beside_seconds`: of a save beside training: the time from its start to the end of the first step at which it has
      ended on all ranks, without the median time of as many steps.
    * `prepared_seconds`: until the host memory for it was there, during which training went on.
    * `writing_seconds`: from its start until the checkpoint was on disk.
    * `gib`: bytes of the checkpoint.
    """
    trainer = build_trainer(cell, run.setting, _data(cell, run), run.folder, steps=1 << 30)
    warm_up, milliseconds, found = _steps(trainer, run)
    median = Times.of(milliseconds).median / 1e3
    began = time.perf_counter()
    path = trainer.save()
    waiting = time.perf_counter() - began
    run.from_all(None)
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    run.from_all(None)  # all have counted
    if run.rank == 0:
        shutil.rmtree(path)  # there may be room for one
    began = time.perf_counter()
    if reason := trainer.saves.go_beside_training(trainer.progress):
        raise UserError(f"{reason}\nfix: fewer --layers")
    assert trainer.saves.staging is not None
    trainer.saves.staging.wait()
    prepared = time.perf_counter() - began
    beside, writing, steps = _save_beside(trainer, median)
    seconds = [max(each) for each in zip(*run.from_all([waiting, prepared, beside, writing]), strict=True)]
    names = ("waiting_seconds", "prepared_seconds", "beside_seconds", "writing_seconds")
    return {
        "recompute": METHODS[cell.method].recompute(cell),
        "losses": [step.loss for step in (*found, *steps)],
        "milliseconds": asdict(Times.of(milliseconds)),
        "warm_up_milliseconds": warm_up,
        "gib": nbytes / GIB,
        **dict(zip(names, seconds, strict=True)),
        **_memory(run.gauge, found[len(warm_up) :]),
    }


def _save_beside(trainer: Trainer, median: float) -> tuple[float, float, list[StepMetrics]]:
    """Save beside training; return the seconds lost, those until it was written, and the steps."""
    began, steps = time.perf_counter(), []
    trainer.save(wait=False)
    while trainer.saves.is_writing:
        steps.append(trainer.step())
    seconds = time.perf_counter() - began
    return seconds - len(steps) * median, seconds, steps


def _measure_rates(cell: TrainCell, setting: Setting) -> Rates:
    """Return the rates of the slowest rank. All ranks must call it; each computes its own attention with all heads.

    Attention is forward and backward of a causal sequence of S / sqrt(P) tokens, which has a rank's share of the
    FLOPs, but at most 128K tokens. Matrices are 8192 x 8192 (256 x 256 on CPUs). The two calls alternate.
    """
    tokens = min(_LONGEST, max(1, int(cell.tokens / math.sqrt(cell.ranks))))
    one = one_gpu_cell(replace(attention_cell(cell), ranks=1, tokens=tokens, batch=1))
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
