"""Output of a run: metrics files, progress bar, plot and summary. Only rank 0 writes."""

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bmburst.config import to_dict
from bmburst.errors import UserError
from bmburst.outputs import blank_picture, save_picture
from bmburst.schedule.parallelism import MeshShape
from bmburst.train.config import TrainConfig
from bmburst.train.metrics import EVALS_FILE, METRICS_FILE, EvalMetrics, MetricsWriter, StepMetrics, read_lines
from bmburst.train.terminal import ProgressBar, beginning, ending

if TYPE_CHECKING:
    from bmburst.plan.memory import Memory  # imports numpy, which --help does not need

PLOT_FILE = "loss.png"
_TRAIN, _HELD_OUT = "#1f77b4", "#d62728"


def plot_losses(folder: Path) -> Path | None:
    """Plot bits per byte over the steps from metrics.jsonl and evals.jsonl, and write loss.png atomically.

    Returns:
        The path of the picture; None if no step has a finite loss in bits per byte.
    """
    steps = [line for line in read_lines(folder / METRICS_FILE) if line.get("bits_per_byte") is not None]
    evals = [line for line in read_lines(folder / EVALS_FILE) if line.get("bits_per_byte") is not None]
    if not steps:
        return None
    figure = blank_picture(4.8, 4.2)
    axes: Any = figure.subplots()
    _draw_losses(axes, steps, evals)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)

    path = folder / PLOT_FILE
    save_picture(figure, path)
    return path


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return the centered moving average over `width` (odd) values; at the ends the window shrinks symmetrically."""
    result = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        around = values[index - reach : index + reach + 1]
        result.append(sum(around) / len(around))
    return result


def _draw_losses(axes: Any, steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> None:
    numbers, bits = [line["step"] for line in steps], [line["bits_per_byte"] for line in steps]
    # A window of a tenth of the run: the curve is smooth, but still follows the loss.
    width = len(bits) // 20 * 2 + 1
    axes.plot(
        numbers,
        bits,
        color=_TRAIN,
        alpha=0.3 if width > 1 else 1,
        linewidth=1,
        marker="." if len(bits) < 10 else "",
        label="training, each step",
    )
    if width > 1:
        # Not up to the end: there the window shrinks, and the curve would end in the noise of the last step.
        drawn = slice(0, len(bits) - width // 2)
        means = smoothed(bits, width)
        axes.plot(numbers[drawn], means[drawn], color=_TRAIN, linewidth=2, label=f"training, mean of {width} steps")
    recent = bits[-width:]
    title = f"Loss after {numbers[-1]:,} steps: training {sum(recent) / len(recent):.3f}"
    if evals:
        points = [line["step"] for line in evals], [line["bits_per_byte"] for line in evals]
        axes.plot(*points, color=_HELD_OUT, marker="o", markersize=5, linewidth=1.2, label="held-out text")
        title += f", held-out {points[1][-1]:.3f}"
    axes.set_ylabel("loss (bits per byte)")
    ratio = _nats_per_token(steps)
    if ratio is not None:
        right = axes.secondary_yaxis("right", functions=(lambda bits: bits * ratio, lambda nats: nats / ratio))
        right.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=9)
    axes.set_title(f"{title}\nbits per byte", fontsize=10)


def _nats_per_token(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the ratio of nats per token to bits per byte if it is constant over steps, as with byte tokens."""
    ratios = [line["loss"] / line["bits_per_byte"] for line in steps if line["bits_per_byte"] and line.get("loss")]
    if not ratios or max(ratios) > 1.01 * min(ratios):
        return None
    return float(ratios[-1])


def require_wandb() -> None:
    """Check that the package wandb is installed, before ranks start.

    Raises:
        UserError: It is not installed.
    """
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--wandb needs the package wandb, which is not installed\nfix: pip install wandb, or leave --wandb out"
        )


class Wandb:
    """A Weights & Biases run. A resumed training run continues it.

    Args:
        project: Name of the project.
        folder: The run folder. Its name is the name of the W&B run; the package writes its own files there.
        config: All fields of the configuration, for the page of the run.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        name = folder.resolve().name
        self._run = wandb.init(
            project=project, name=name, id=name, dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `MetricsLogger.log`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `MetricsLogger.close`."""
        self._run.finish()


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
)
_PEAKS = ("memory_gib", "reserved_gib")


class Summary:
    """Collects the metrics of the steps of this process."""

    def __init__(self) -> None:
        self._steps: list[StepMetrics] = []

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
        (folder / SUMMARY_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return ending(found)


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
            online = None if config.wandb is None else Wandb(config.wandb, self._folder, to_dict(config))
            self._writer = self.enter_context(MetricsWriter(self._folder, first_step, online))
            self._bar = self.enter_context(ProgressBar(config.steps, first_step))

    def begin(self, shape: MeshShape, sequences: tuple[int, int], tokenizer: str, memory: "Memory | None") -> None:
        """Show the lines at the start; see `bmburst.train.terminal.beginning`."""
        if self._bar:
            self._bar.note(beginning(self._config, shape, sequences, tokenizer, memory))
            self._bar.begin()

    def step(self, metrics: StepMetrics) -> None:
        """Record a step."""
        if self._writer and self._bar:
            self._writer.write(metrics)
            self._bar.update(metrics)
            self._summary.add(metrics)

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
