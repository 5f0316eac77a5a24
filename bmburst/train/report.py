"""Output of a run: lines at the start, progress bar and table at the end, 80 columns wide, and files by `metrics`."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from bmburst.amounts import GIB, bytes_text, short
from bmburst.config import to_dict
from bmburst.launch.beginning import Beginning
from bmburst.schedule.parallelism import MeshShape
from bmburst.train.config import TrainConfig
from bmburst.train.metrics import EvalMetrics, MetricsWriter, StepMetrics, Wandb, plot_losses

if TYPE_CHECKING:
    from bmburst.plan.memory import Memory  # imports numpy, which --help does not need

Row = tuple[str, str]
SUMMARY_FILE = "summary.json"
_WARM_UP = 1  # steps in which kernels are compiled and memory is allocated
_MEDIANS = (
    "seconds",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "mfu",
    "mfu_kernel",
    "hardware_tflops",
    "exposed_seconds",
    "data_seconds",
    "data_balance",
    "data_balance_drawn",
)
_PEAKS = ("memory_gib", "reserved_gib")


def start_text(
    config: TrainConfig, shape: MeshShape, sequences: tuple[int, int], tokenizer: str, memory: "Memory | None"
) -> str:
    """Return the lines at the start of a run: model, data, ranks, step, learning rate, memory and folder.

    Args:
        config: The run, with a recompute policy and `output`.
        shape: The mesh.
        sequences: Number of sequences of an epoch, and number of held-out sequences.
        tokenizer: Name of the tokenizer.
        memory: Estimate of the planner; None if it has none.
    """
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    name = config.preset or (config.init_from.name if config.init_from else "model")
    adapters = config.lora.parameters(model)
    whole = f" and {counted(saved)} of whole modules" if (saved := config.lora.saved(model)) else ""
    trained = f", {counted(adapters)} of adapters{whole} trained" if adapters else ""
    held = f"{config.dtype}, matrices of blocks in 4 bits" if config.lora.is_4bit else config.dtype
    tokens = config.batch_size * config.sequence_length
    axes = [(axis, getattr(shape, axis)) for axis in ("pipe", "data", "sequence", "tensor")]
    mesh = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1)
    warmup = schedule.warmup(config.steps)
    reached = optimizer.lr * config.steps / max(warmup, 1)
    ends = f"; the run ends at {reached:.3g}" if config.steps < warmup else ""
    epochs = config.epochs or config.steps * config.batch_size / max(sequences[0], 1)
    rows = [
        ("model", f"{name}: {counted(model.num_parameters)} parameters{trained}, {held}"),
        ("data", f"{config.data.source} ({tokenizer}): {sequences[0]:,} sequences, {sequences[1]:,} held out"),
        ("ranks", f"{shape.size}{f': {mesh}' if mesh else ''}; recompute {config.recompute}"),
        ("step", f"{short(tokens, commas=True)} tokens: {config.batch_size} x {config.sequence_length:,}"),
        ("steps", f"{config.steps:,}: {counted(config.steps * tokens)} tokens, {epochs:.2g} epochs"),
        ("lr", f"{optimizer.lr:.3g}, {schedule.kind}, after {warmup} steps of warm-up{ends}"),
    ]
    if memory is not None:
        host = f", {bytes_text(memory.in_host)} of each host" if memory.in_host else ""
        rows.append(("memory", f"{bytes_text(memory.total)} of each rank expected{host}"))
    return table([*rows, ("folder", str(config.output))])


def end_text(found: Mapping[str, float]) -> str:
    """Return the table at the end of a run.

    Args:
        found: Result of `Summary.values`.
    """
    skipped = f", {found['skipped_steps']:.0f} skipped" if found["skipped_steps"] else ""
    rows: list[Row] = [("steps", f"{found['steps']:,.0f}{skipped}; medians of all but the first:")]
    rows.append(("time a step", seconds_text(found["seconds"])))
    rows += _one(found, "data_seconds", "waiting for data", seconds_text)
    rows += _one(found, "exposed_seconds", "exposed communication", seconds_text)
    drawn = f" by predicted cost, {found['data_balance_drawn']:.3f} as drawn" if "data_balance" in found else ""
    rows += _one(found, "data_balance", "data groups", lambda value: f"slowest / mean {value:.3f}{drawn}")
    rank = found.get("tokens_per_second_per_gpu")
    of_rank = "" if rank is None else f", {_digits(rank)} a rank"
    rows.append(("tokens/s", f"{_digits(found['tokens_per_second'])}{of_rank}"))
    rows += _one(found, "mfu", "MFU", "{:.1%}".format)
    rows += _one(found, "mfu_kernel", "MFU of kernels", "{:.1%}, attention's backward counted 2.5 times".format)
    rows += _one(found, "hardware_tflops", "FLOP/s a rank", lambda value: prefixed(1e12 * value, "FLOP/s"))
    reserved = found.get("reserved_gib")
    held = "" if reserved is None else f", {bytes_text(reserved * GIB)} reserved"
    rows += _one(found, "memory_gib", "peak memory", lambda value: f"{bytes_text(value * GIB)}{held}")
    return table(rows)


def _one(found: Mapping[str, float], name: str, title: str, show: Callable[[float], str]) -> list[Row]:
    return [(title, show(found[name]))] if name in found else []


def table(rows: Sequence[Row]) -> str:
    """Return a line per row, with aligned values."""
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"  {title:<{width}}  {value}" for title, value in rows)


def counted(number: float) -> str:
    """Return a count in three digits: 8.03B, 1.07M, 819K, 50."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{_digits(number / size)}{unit}"
    return f"{number:.0f}"


def prefixed(value: float, unit: str) -> str:
    """Return a rate in three digits with its prefix: 412 TFLOP/s, 6.44 GFLOP/s."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a time in three digits: 1,969 s, 2.43 s, 375 ms, 336 us."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(number: float) -> str:
    """Return a number with three digits, or all digits before the decimal point: 12,346, 98.7, 4.61."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


_PLAIN_INTERVAL = 10.0  # seconds between lines in a log
_FIRST = "the first step takes longest"
_WIDE = 100  # minimum columns of a terminal for a bar with all numbers
_NARROW = 79  # assumed columns if the terminal does not report them


class ProgressBar:
    """A progress bar on a terminal; in a log or a pipe, a line at the first and the last step and every 10 seconds.

    Args:
        total_steps: Number of steps of the whole run.
        first_step: First step of this process, 1 unless resumed.
        stream: Output stream. Default: stderr.
        interval: Seconds between lines in a log.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 1,
        stream: TextIO | None = None,
        interval: float = _PLAIN_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._first, self._interval = total_steps, first_step, interval
        self._clock, self._start = clock, clock()
        self._last_line = -float("inf")
        self._bar = self._open_bar() if self._stream.isatty() else None

    def begin(self) -> None:
        """Print in a log that the first step takes longest; the bar shows it as its description."""
        if self._bar is None:
            self._print(_FIRST)

    def update(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        if self._bar is not None:
            self._bar.set_description_str(_numbers(metrics, is_short=self._columns() < _WIDE), refresh=False)
            self._bar.update(1)
            return
        now = self._clock()
        if now - self._last_line < self._interval and metrics.step < self._total:
            return
        self._last_line = now
        done = metrics.step - self._first + 1
        left = (now - self._start) / done * (self._total - metrics.step)
        self._print(f"step {metrics.step}/{self._total}  {_numbers(metrics)}  {_clock(left)} left")

    def update_eval(self, metrics: EvalMetrics) -> None:
        """Print a line about an evaluation."""
        rest = "" if metrics.perplexity is None else f", perplexity {metrics.perplexity:.2f}"
        unit = "nats/pair" if metrics.reward_margin is not None else "nats/token"
        numbers = ", ".join(_quality(metrics))
        name = metrics.data.replace("_", "-")
        self.note(f"step {metrics.step}: {name} loss {metrics.loss:.4f} {unit}, {numbers}{rest}")

    @contextlib.contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Show `text` beside the bar during the block; no output in a log."""
        if self._bar is None:
            yield
            return
        before = self._bar.desc
        self._bar.set_description_str(text)
        yield
        self._bar.set_description_str(before)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def piece(self, text: str) -> None:
        """Print text without a newline, below a closed bar."""
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """Close the bar in its current state; later lines are below it."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self._total,
            initial=self._first - 1,
            file=self._stream,
            dynamic_ncols=self._columns() > 0,
            ncols=None if self._columns() else _NARROW,
            desc=_FIRST,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}  {remaining} left",
        )

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except OSError:  # the size is unknown
            return 0

    def _print(self, text: str) -> None:
        self.piece(text + "\n")


def _numbers(metrics: StepMetrics, *, is_short: bool = False) -> str:
    quality = [] if is_short else _quality(metrics)
    return "  ".join((f"loss {metrics.loss:.4f}", *quality, f"{metrics.tokens_per_second:,.0f} tokens/s"))


def _quality(metrics: StepMetrics | EvalMetrics) -> list[str]:
    """Return the metrics beside a loss as text: bits per byte of text, or margin and accuracy of pairs."""
    words = [] if metrics.bits_per_byte is None else [f"{metrics.bits_per_byte:.3f} bits/byte"]
    if metrics.reward_margin is not None and metrics.reward_accuracy is not None:
        words += [f"margin {metrics.reward_margin:.4f}", f"accuracy {metrics.reward_accuracy:.3f}"]
    return words


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


class Summary:
    """Collects the metrics of the steps of this process.

    Attributes:
        beginning: Seconds of each part of the time from the start of the command to the end of the first step.
    """

    def __init__(self) -> None:
        self._steps: list[StepMetrics] = []
        self.beginning: Mapping[str, float] = {}

    def add(self, metrics: StepMetrics) -> None:
        """Add a step."""
        self._steps.append(metrics)

    def values(self) -> Mapping[str, float]:
        """Return medians of all steps but the first, peaks of all steps, and counts. Unknown values are left out."""
        if not self._steps:
            return {}
        warm = self._steps[_WARM_UP:] or self._steps
        found: dict[str, float] = {"steps": len(self._steps), "skipped_steps": self._steps[-1].skipped_steps}
        for names, steps, of in ((_MEDIANS, warm, median), (_PEAKS, self._steps, max)):
            for name in names:
                known = [value for step in steps if (value := getattr(step, name)) is not None]
                if known:
                    found[name] = float(of(known))
        return found

    def write(self, folder: Path) -> str:
        """Write `summary.json` and return the summary as a table; empty, and no file, without a step."""
        found = self.values()
        if not found:
            return ""
        written = {**found, **({"beginning_seconds": self.beginning} if self.beginning else {})}
        (folder / SUMMARY_FILE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        return end_text(found)


class RunReport(contextlib.ExitStack):
    """Metrics files, progress, plot and summary of a run.

    Args:
        config: The run; `output` is set.
        first_step: First step of this process.
        is_main: Whether this rank reports; otherwise calls have no effect.
    """

    def __init__(self, config: TrainConfig, first_step: int, *, is_main: bool) -> None:
        super().__init__()
        assert config.output is not None
        self._config, self._folder, self._summary = config, config.output, Summary()
        self._writer: MetricsWriter | None = None
        self._bar: ProgressBar | None = None
        if is_main:
            online = None
            if config.wandb is not None:
                names: dict[str, Any] = {"entity": config.wandb_entity, "name": config.wandb_name}
                online = Wandb(config.wandb, self._folder, to_dict(config), tags=config.wandb_tags, **names)
            self._writer = self.enter_context(MetricsWriter(self._folder, first_step, online))
            self._bar = self.enter_context(ProgressBar(config.steps, first_step))

    def begin(self, shape: MeshShape, sequences: tuple[int, int], tokenizer: str, memory: "Memory | None") -> None:
        """Show the lines at the start; see `start_text`."""
        if self._bar:
            self._bar.note(start_text(self._config, shape, sequences, tokenizer, memory))
            self._bar.begin()

    def step(self, metrics: StepMetrics) -> None:
        """Record a step."""
        if self._writer and self._bar:
            self._writer.write(metrics)
            self._bar.update(metrics)
            self._summary.add(metrics)

    def began(self, beginning: Beginning) -> None:
        """Record and show how the time up to the end of the first step was spent."""
        self._summary.beginning = beginning.seconds
        self.note(beginning.until("the end of the first step"))

    def held_out(self, metrics: EvalMetrics) -> None:
        """Record an evaluation and draw the plot again."""
        if self._writer and self._bar:
            self._writer.write_eval(metrics)
            self._bar.update_eval(metrics)
            plot_losses(self._folder)

    def doing(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show `text` beside the bar during the block."""
        return self._bar.doing(text) if self._bar else contextlib.nullcontext()

    def note(self, text: str) -> None:
        """Print a line; nothing if it is empty."""
        if self._bar and text:
            self._bar.note(text)

    def piece(self, text: str) -> None:
        """Print text without a newline, after `close_bar`."""
        if self._bar:
            self._bar.piece(text)

    def close_bar(self) -> None:
        """Close the bar; later output is below it."""
        if self._bar:
            self._bar.close()

    def finish(self) -> None:
        """Write and show the summary."""
        if self._bar:
            self.note(self._summary.write(self._folder))
            self.note(f"run folder: {self._folder}")
