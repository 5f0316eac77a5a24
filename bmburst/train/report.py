"""Output of a run on rank 0: metrics files, progress bar, plot and summary. Other ranks write nothing."""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from bmburst.config import to_dict
from bmburst.train.config import TrainConfig
from bmburst.train.metrics import EvalMetrics, MetricsWriter, StepMetrics
from bmburst.train.plot import plot_losses
from bmburst.train.wandb import Wandb

SUMMARY_FILE = "summary.json"
_WARM_UP = 1  # steps in which kernels are compiled and memory is taken
_MEDIANS = (
    "seconds",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "mfu",
    "mfu_kernel",
    "hardware_tflops",
    "exposed_seconds",
    "data_seconds",
)
_PEAKS = ("memory_gib", "reserved_gib")


class Summary:
    """Collects the steps of this process, a few numbers of each."""

    def __init__(self) -> None:
        self._steps: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        """Take a step."""
        self._steps.append(metrics)

    def values(self) -> Mapping[str, float]:
        """Return medians of all but the first step, peaks of all, and counts; what is unknown is left out."""
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
        """Write `summary.json` and return the same in words; nothing of a run without a step."""
        found = self.values()
        if not found:
            return ""
        (folder / SUMMARY_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        parts = [
            f"{found['seconds']:.3g} s a step",
            f"{found['tokens_per_second']:,.0f} tokens/s",
            *_said(found, "tokens_per_second_per_gpu", "{:,.0f} a rank"),
            *_said(found, "mfu", "MFU {:.1%}"),
            *_said(found, "mfu_kernel", "{:.1%} with attention's backward at 2.5"),
            *_said(found, "hardware_tflops", "{:.3g} TFLOP/s a rank"),
            *_said(found, "exposed_seconds", "{:.3g} s of communication exposed"),
            *_said(found, "data_seconds", "{:.3g} s for data"),
            *_said(found, "memory_gib", "peak {:.2f} GiB"),
            *_said(found, "reserved_gib", "{:.2f} GiB reserved"),
            f"{found['skipped_steps']:.0f} steps skipped",
        ]
        return f"{found['steps']:.0f} steps, medians: {', '.join(parts)}"


def _said(found: Mapping[str, float], name: str, words: str) -> list[str]:
    return [words.format(found[name])] if name in found else []


# Where nobody watches a bar move, a log wants a line now and then.
_PLAIN_INTERVAL = 10.0


class Progress:
    """A bar on a terminal; elsewhere (a log, a pipe) a plain line at the first and last step and every 10 seconds.

    Args:
        total_steps: Steps of the whole run.
        first_step: First step of this process, 1 unless resumed.
        stream: Where to write; stderr.
        interval: Seconds between plain lines.
    """

    def __init__(
        self, total_steps: int, first_step: int = 1, stream: TextIO | None = None, interval: float = _PLAIN_INTERVAL
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._first, self._interval = total_steps, first_step, interval
        self._start = time.monotonic()
        self._last_line = -float("inf")
        self._bar = self._open_bar() if self._stream.isatty() else None

    def update(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        if self._bar is not None:
            self._bar.set_description_str(_numbers(metrics), refresh=False)
            self._bar.update(1)
            return
        now = time.monotonic()
        if now - self._last_line < self._interval and metrics.step < self._total:
            return
        self._last_line = now
        done = metrics.step - self._first + 1
        left = (now - self._start) / done * (self._total - metrics.step)
        self._print(f"step {metrics.step}/{self._total}  {_numbers(metrics)}  {_clock(left)} left")

    def update_eval(self, metrics: EvalMetrics) -> None:
        """Show an evaluation, as a line that stays."""
        self.note(
            f"step {metrics.step}: held-out loss {metrics.loss:.4f} nats/token, "
            f"{metrics.bits_per_byte:.3f} bits/byte, perplexity {metrics.perplexity:.2f}"
        )

    def note(self, text: str) -> None:
        """Show a line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self._total,
            initial=self._first - 1,
            file=self._stream,
            dynamic_ncols=True,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}  [{elapsed}, {remaining} left]",
        )

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def _numbers(metrics: StepMetrics) -> str:
    return f"loss {metrics.loss:.4f}  {metrics.bits_per_byte:.3f} bits/byte  {metrics.tokens_per_second:,.0f} tokens/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


class Report(contextlib.ExitStack):
    """Metrics files, progress, plot and summary of a run.

    Args:
        config: The run; `output` is set.
        first_step: First step of this process.
        is_main: Whether this rank reports; else every call does nothing.
    """

    def __init__(self, config: TrainConfig, first_step: int, *, is_main: bool) -> None:
        super().__init__()
        assert config.output is not None
        self._folder, self._summary = config.output, Summary()
        self._writer: MetricsWriter | None = None
        self._bar: Progress | None = None
        if is_main:
            online = None if config.wandb is None else Wandb(config.wandb, self._folder, to_dict(config))
            self._writer = self.enter_context(MetricsWriter(self._folder, first_step, online))
            self._bar = self.enter_context(Progress(config.steps, first_step))

    def step(self, metrics: StepMetrics) -> None:
        """Take a step."""
        if self._writer and self._bar:
            self._writer.write(metrics)
            self._bar.update(metrics)
            self._summary.add(metrics)

    def held_out(self, metrics: EvalMetrics) -> None:
        """Take an evaluation; the plot is drawn anew."""
        if self._writer and self._bar:
            self._writer.write_eval(metrics)
            self._bar.update_eval(metrics)
            plot_losses(self._folder)

    def note(self, text: str) -> None:
        """Show a line that stays; nothing where it is empty."""
        if self._bar and text:
            self._bar.note(text)

    def finish(self) -> None:
        """Write and show the summary."""
        if self._bar:
            self.note(self._summary.write(self._folder))
            self.note(f"run folder: {self._folder}")
