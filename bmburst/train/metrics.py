"""Writes metrics of a run on rank 0: metrics.jsonl and evals.jsonl, flushed per line, TensorBoard, W&B, loss.png."""

import dataclasses
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from bmburst.amounts import finite
from bmburst.config import parse_json
from bmburst.errors import UserError
from bmburst.outputs import blank_picture, replacing, save_picture
from bmburst.train.sections import HELD_OUT

METRICS_FILE, EVALS_FILE, EVENTS_FOLDER = "metrics.jsonl", "evals.jsonl", "tensorboard"
PLOT_FILE = "loss.png"
_TRAIN, _EVALUATED = "#1f77b4", ("#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
_TITLED = 2  # evaluations whose losses are in the title of the picture
_NO_SCALARS = ("step", "data")
_NOT_ALWAYS = ("reward_", "loss_scale", "data_balance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step: a line of metrics.jsonl. None (null in the file) means unknown.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean over the step's tokens, in nats per token; in preference training over its pairs, in nats.
        bits_per_byte: The loss in bits per byte of text; None in preference training.
        lr: Learning rate of the step.
        grad_norm: Norm of the gradient before clipping.
        tokens_per_second: Trained tokens of all ranks per second of this step.
        seconds: Duration of the step, in seconds.
        memory_gib: Peak memory in GiB, maximum over the ranks: on a GPU, allocated in this step; on a CPU, of the
            process so far.
        tokens_per_second_per_gpu: `tokens_per_second` divided by the number of ranks.
        mfu: Model FLOPs utilization: causal attention counted half, backward twice the forward, recompute not counted.
        mfu_kernel: The same with attention's backward counted 2.5 times its forward, as in attention kernels.
        hardware_tflops: Computed TFLOP/s of a rank, including recompute.
        exposed_seconds: Time that forward and backward of rank 0 waited for other ranks or for weights from the host.
        data_seconds: Time that rank 0 waited for its batch.
        reserved_gib: Peak memory in GiB reserved by torch's allocator in this step, maximum over the ranks.
        skipped_steps: Number of skipped steps of the run so far (loss or gradient not finite).
        loss_scale: Loss scale of the step; left out unless weights are fp16.
        reward_margin: Mean over pairs of the chosen answer's reward minus the rejected one's; left out without pairs.
        reward_accuracy: Fraction of the pairs with a positive margin; left out without pairs.
        grad_norms: Norm of the gradient of each kind of parameter that is trained (`bmburst.blocks.kinds`); written as
            `grad_norm_attention` and so on.
        data_balance: Predicted cost of the step's slowest data group in each micro-batch, divided by the mean of the
            groups; left out with one group, or if all samples cost the same.
        data_balance_drawn: The same if each group computed an equal share of the samples in the order they are drawn.
    """

    step: int
    loss: float
    bits_per_byte: float | None
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    memory_gib: float
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    mfu_kernel: float | None = None
    hardware_tflops: float | None = None
    exposed_seconds: float | None = None
    data_seconds: float | None = None
    reserved_gib: float | None = None
    skipped_steps: int = 0
    loss_scale: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None
    grad_norms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    data_balance: float | None = None
    data_balance_drawn: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of an evaluation.

    Attributes:
        loss: Mean over the labels, in nats per token; in preference training over the pairs, in nats.
        bits_per_byte: The loss in bits per byte of the text in UTF-8; None for pairs.
        perplexity: exp(loss); None for pairs.
        tokens: Number of evaluated labels.
        reward_margin: Mean over pairs of the chosen answer's reward minus the rejected one's; None without pairs.
        reward_accuracy: Fraction of the pairs with a positive margin; None without pairs.
    """

    loss: float
    bits_per_byte: float | None = None
    perplexity: float | None = None
    tokens: int
    reward_margin: float | None = None
    reward_accuracy: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalMetrics(Measurement):
    """One evaluation on held-out text or on a validation file: a line of evals.jsonl.

    Attributes:
        step: Number of optimizer steps before the evaluation.
        data: "held_out", or the name of the validation file.
    """

    step: int
    data: str = HELD_OUT


class MetricsWriter:
    """Writes a run's metrics to its folder.

    A resumed run removes the lines after the checkpoint that it continues from, and an incomplete last line, so that
    the files are those of an uninterrupted run.

    Args:
        folder: Run folder; created if missing.
        first_step: First step that will be written; 1 for a new run.
        online: Weights & Biases run that also gets every line.
    """

    def __init__(self, folder: Path, first_step: int = 1, online: "Wandb | None" = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._online = online
        self._metrics = _open_lines(folder / METRICS_FILE, first_step)
        self._evals = _open_lines(folder / EVALS_FILE, first_step)
        self._events = _open_events(folder / EVENTS_FOLDER, first_step)

    def write(self, metrics: StepMetrics) -> None:
        """Add a step."""
        self._add(self._metrics, "train", metrics)

    def write_eval(self, metrics: EvalMetrics) -> None:
        """Add an evaluation."""
        self._add(self._evals, metrics.data, metrics)

    def close(self) -> None:
        """Close the files. A second call has no effect."""
        self._metrics.close()
        self._evals.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._online is not None:
            self._online.close()
            self._online = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, file: TextIO, group: str, metrics: StepMetrics | EvalMetrics) -> None:
        values, step = _values(metrics), metrics.step
        # NaN is not valid JSON, but a diverged run must still leave a readable file.
        file.write(json.dumps(finite(values), allow_nan=False) + "\n")
        file.flush()
        scalars = {f"{group}/{k}": float(v) for k, v in values.items() if k not in _NO_SCALARS and v is not None}
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        if self._online is not None:
            self._online.log({name: value for name, value in scalars.items() if math.isfinite(value)}, step)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file; empty if it is missing. An incomplete last line is skipped.

    Raises:
        UserError: A complete line is not a JSON object with a step.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    # The part after the last newline is incomplete, even if it is valid JSON.
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            values = parse_json(line)
            found.append({**values, "step": int(values["step"])})
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(f"{path}, line {number}: not a JSON object with a step\nfix: move the file away") from error
    return found


def _open_lines(path: Path, first_step: int) -> TextIO:
    """Open a metrics file for appending, after removing the lines of `first_step` and later."""
    if path.exists():
        kept = [values for values in read_lines(path) if values["step"] < first_step]
        with replacing(path) as partial:
            partial.write_text("".join(json.dumps(values) + "\n" for values in kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _values(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    """Return a line's values. Those of `_NOT_ALWAYS` are left out where unknown."""
    values = {"step": metrics.step, **dataclasses.asdict(metrics)}  # the step first
    values |= {f"grad_norm_{kind}": norm for kind, norm in values.pop("grad_norms", {}).items()}
    return {key: value for key, value in values.items() if value is not None or not key.startswith(_NOT_ALWAYS)}


def _open_events(folder: Path, first_step: int) -> Any:
    """Return a TensorBoard writer; if the package is missing, print a note and return None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("TensorBoard events are left out: the package tensorboard is not installed", file=sys.stderr)  # noqa: T201
        return None
    # purge_step: TensorBoard drops earlier events from this step on.
    return SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)


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
    names = list(dict.fromkeys(line.get("data", HELD_OUT) for line in evals))
    for number, name in enumerate(names):
        mine = [line for line in evals if line.get("data", HELD_OUT) == name]
        points = [line["step"] for line in mine], [line["bits_per_byte"] for line in mine]
        color, label = _EVALUATED[number % len(_EVALUATED)], "held-out text" if name == HELD_OUT else name
        axes.plot(*points, color=color, marker="o", markersize=5, linewidth=1.2, label=label)
        title += f", {'held-out' if name == HELD_OUT else name} {points[1][-1]:.3f}" if number < _TITLED else ""
    axes.set_ylabel("loss (bits per byte)")
    ratio = _nats_per_token(steps)
    if ratio is not None:
        right = axes.secondary_yaxis("right", functions=(lambda bits: bits * ratio, lambda nats: nats / ratio))
        right.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    # Outside: it would hide the held-out loss of a short run, which is above the training loss at the last step.
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    axes.set_title(f"{title}\nbits per byte", fontsize=10)


def _nats_per_token(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the ratio of nats per token to bits per byte if it is constant over steps, as with byte tokens."""
    ratios = [line["loss"] / line["bits_per_byte"] for line in steps if line["bits_per_byte"] and line.get("loss")]
    if not ratios or max(ratios) > 1.01 * min(ratios):
        return None
    return float(ratios[-1])


def require_wandb() -> None:
    """Raise UserError unless the package wandb is installed, before ranks start."""
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--wandb needs the package wandb, which is not installed\nfix: pip install wandb, or leave --wandb out"
        )


class Wandb:
    """A Weights & Biases run. A resumed training run continues it.

    Args:
        project: Name of the project.
        folder: The run folder. Its name is the id of the W&B run; the package writes its own files there.
        config: All fields of the configuration, for the page of the run.
        entity: Team or user; None: the user's own.
        name: Name of the W&B run; None: that of the folder.
        tags: Tags of the W&B run.
    """

    def __init__(
        self,
        project: str,
        folder: Path,
        config: Mapping[str, Any],
        *,
        entity: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        wandb: Any = importlib.import_module("wandb")
        own = folder.resolve().name
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=name or own,
            id=own,
            tags=list(tags),
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log finite numbers by name, for example `train/loss`, at a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()
