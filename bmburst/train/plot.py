"""The loss plot of a run, drawn from its metrics files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmburst.outputs import save_picture
from bmburst.train.metrics import EVALS_FILE, METRICS_FILE, read_lines

PLOT_FILE = "loss.png"
_TRAIN, _HELD_OUT = "#1f77b4", "#d62728"


def plot_losses(folder: Path) -> Path | None:
    """Draw bits per byte and learning rate over the steps as loss.png, written atomically.

    Reads the run folder's metrics.jsonl and evals.jsonl. Returns the picture's path, or None where no step has a
    finite loss yet.
    """
    steps = [line for line in read_lines(folder / METRICS_FILE) if line.get("bits_per_byte") is not None]
    evals = [line for line in read_lines(folder / EVALS_FILE) if line.get("bits_per_byte") is not None]
    if not steps:
        return None
    # Figure without pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_losses(upper, steps, evals)
    lower.plot([line["step"] for line in steps], [line["lr"] for line in steps], color="#555555")
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.set_ylim(bottom=0)
    lower.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    lower.grid(alpha=0.3)

    path = folder / PLOT_FILE
    save_picture(figure, path)
    return path


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the `width` values around each, `width` odd; fewer, but as many on both sides, at the ends."""
    result = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        around = values[index - reach : index + reach + 1]
        result.append(sum(around) / len(around))
    return result


def _draw_losses(axes: Any, steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> None:
    numbers, bits = [line["step"] for line in steps], [line["bits_per_byte"] for line in steps]
    # About a tenth of the run on both sides together, so that the curve is calm and still falls where the loss falls.
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
        # Not to the end, where there are fewer steps to average and the curve would end on the noise of the last one.
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
    axes.legend(loc="upper right")
    axes.set_title(f"{title} bits per byte")


def _nats_per_token(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return nats per token for one bit per byte, where it is the same at every step, as with byte tokens."""
    ratios = [line["loss"] / line["bits_per_byte"] for line in steps if line["bits_per_byte"] and line.get("loss")]
    if not ratios or max(ratios) > 1.01 * min(ratios):
        return None
    return float(ratios[-1])
