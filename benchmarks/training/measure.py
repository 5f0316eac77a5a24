"""Trains one cell of the training benchmark on a rank: builds its trainer and measures steps or losses."""

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.attention import Cell, forward_flops, one_gpu_cell
from benchmarks.attention.method import Attend, LocalKernel, OneGpu, Setting, prepare
from benchmarks.attention.methods import Ours, all_methods
from benchmarks.engine import Row
from benchmarks.engine.job import RankRun
from benchmarks.engine.machine import Gauge, RankGroup
from benchmarks.engine.timing import Times, in_turns, mark, milliseconds_between, record_timeline
from benchmarks.training import METHODS, OURS, STEPS, Rates, TrainCell, bound, utilisation
from benchmarks.training.kind import timeline_title
from bmburst.amounts import GIB
from bmburst.attention.options import MaskOption
from bmburst.data.documents import Document
from bmburst.data.token_writer import write_token_file
from bmburst.schedule.hardware import hardware_of, machine_of
from bmburst.train.config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from bmburst.train.metrics import StepMetrics
from bmburst.train.trainer import Trainer
from bmburst_ops import ATTENTION_BACKWARD

_DOCUMENTS = 32  # of random tokens
_MORE = 1.25  # random tokens over those of a sequence: a part is held out
_SLOWLY = OptimizerConfig(lr=1e-5)  # of steps that are measured: random tokens teach nothing


def build_trainer(cell: TrainCell, setting: Setting, data: DataConfig, folder: Path, *, steps: int) -> Trainer:
    """Return a cell's trainer, before its first step. Every rank calls it.

    Args:
        cell: What is trained, and how.
        setting: Ranks and kernel.
        data: On what.
        folder: For the run folder, in which nothing is written.
        steps: How many there will be, for the learning rate.
    """
    method = METHODS[cell.method]
    is_measured = cell.suite == "step"
    config = TrainConfig(
        preset=None,
        model=cell.model,
        sequence_length=cell.tokens,
        batch_size=cell.batch,
        micro_batch_size=cell.batch,
        steps=steps,
        dtype=cell.dtype,  # type: ignore[arg-type]  # check_fields looks
        recompute=method.recompute(cell),
        output=folder / "run",
        data=data,
        parallel=replace(method.parallel(cell), kernel=setting.kernel_name),  # type: ignore[arg-type]
        optimizer=_SLOWLY if is_measured else OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0) if is_measured else ScheduleConfig(),
    )
    trainer = Trainer(config)
    if method.replicated:
        from benchmarks.training.tensor_v1 import replicate

        replicate(trainer.model)
    if method.peer:
        put(trainer.model, all_methods(cell.device)[method.peer].bind(attention_cell(cell), setting))
    return trainer


def attention_cell(cell: TrainCell) -> Cell:
    """Return a cell's attention as the attention benchmark knows it."""
    return Cell(
        suite="sequence",
        method=cell.method,
        ranks=cell.ranks,
        device=cell.device,
        tokens=cell.tokens,
        batch=cell.batch,
        heads=cell.model.num_heads,
        kv_heads=cell.model.num_kv_heads,
        head_dim=cell.model.head_dim,
        dtype=cell.dtype,
    )


class _Peer(torch.nn.Module):
    """A peer's attention in the place of `BurstAttention`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return attention's output; cells have neither padding nor documents."""
        del length
        assert mask is None
        return self._attend(q, k, v)


def put(model: torch.nn.Module, attend: Attend) -> None:
    """Put a peer's attention into all blocks of a model, in place."""
    from bmburst.blocks.transformer import SelfAttention

    places = [module for module in model.modules() if isinstance(module, SelfAttention)]
    assert places
    for place in places:
        place.attention = _Peer(attend)


def write_random_tokens(path: Path, *, tokens: int, vocab_size: int) -> None:
    """Write a token file of random ids that has one training sequence of so many tokens, or more.

    A step then costs what any text would cost, whatever the vocabulary.

    Args:
        path: Where.
        tokens: Of a sequence.
        vocab_size: Ids are drawn evenly from all but the last, which ends a document.
    """
    each = int(tokens * _MORE) // _DOCUMENTS + 8
    documents = (Document(name=str(n), pieces=(f"document {n}",)) for n in range(_DOCUMENTS))
    write_token_file(path, documents, _Random(vocab_size, each))


class _Random:
    """A tokenizer that makes random ids of any text."""

    name = identity = "random"

    def __init__(self, vocab_size: int, each: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, vocab_size - 1
        self._each, self._generator = each, np.random.default_rng(0)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return random ids, whatever the text."""
        del text
        return self._generator.integers(0, self.eos_id, self._each, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return random ids for each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return nothing: they stand for no text."""
        del ids
        return ""


_LEAST = 2  # steps that are measured however long they take
_LONGEST = 128 * 1024  # tokens: from 64K on the attention kernel's rate does not rise
_WIDTH = {"cuda": 8192, "cpu": 256}  # of the matrices whose product's rate is measured
_PRODUCTS = 8  # in one call, so that launching does not count
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
    trainer = build_trainer(cell, run.setting, _data(cell, run), run.folder, steps=1 << 30)
    warm_up, milliseconds, found = _steps(trainer, run)
    row |= _memory(run.gauge, found[len(warm_up) :])
    if run.job.trace_folder is not None:
        record_timeline(trainer.step, run.job.trace_folder, cell.key, timeline_title(cell), run.setting.group)
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
    marks, found = [mark(run.device)], []
    for _ in range(count):
        found.append(trainer.step())
        marks.append(mark(run.device))
    own = [milliseconds_between(*both) for both in pairwise(marks)]
    return [max(step) for step in zip(*run.from_all(own), strict=True)], found


def _steps(trainer: Trainer, run: TrainRun) -> tuple[list[float], list[float], list[StepMetrics]]:
    """Return milliseconds of warm-up, of what is measured, and what all steps gave.

    The first step makes optimizer states and compiles kernels; a second one follows if there is time for it.
    """
    warm_up, found = _timed(trainer, 1, run)
    if warm_up[0] < run.job.cell_seconds * 1e3 / 4:
        more, again = _timed(trainer, 1, run)
        warm_up, found = warm_up + more, found + again
    milliseconds, rest = _timed(trainer, min(run.job.repeats, _LEAST), run)
    # Not by the warm-up, which compiled kernels.
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
    """Return every step's loss in nats a token and gradient norm, and the time of a step. Every rank calls it."""
    text, steps = run.job.options["text"], run.job.options["steps"]  # 0: as many as the suite has
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


def _measure_rates(cell: TrainCell, setting: Setting) -> Rates:
    """Return the rates of the slowest rank, each rank alone with all heads of the model. Every rank calls it.

    Attention is forward and backward of a causal sequence of S / sqrt(P) tokens, which has a rank's share of the
    FLOPs, or of 128K tokens where that is more; matrices are 8192 x 8192. They are called in turns.
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
