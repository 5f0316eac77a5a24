"""The progress bar of rank 0: loss, bits per byte, tokens per second and time left, on stderr."""

import sys
import time
from typing import Any, TextIO

from bmburst.train.metrics import EvalMetrics, StepMetrics

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
