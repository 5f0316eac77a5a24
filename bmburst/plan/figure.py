"""The comparison as a picture: where each way's step goes, and its memory against the GPU's."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bmburst.amounts import GIB, short
from bmburst.errors import UserError
from bmburst.outputs import save_picture
from bmburst.plan.search import Prediction
from bmburst.plan.table import PARTS

_COLOURS = {
    "attention": "#2166ac",
    "matmul": "#4393c3",
    "elementwise": "#92c5de",
    "recompute": "#d9d9d9",
    "attention_communication": "#b2182b",
    "zero": "#d6604d",
    "tensor": "#f4a582",
    "offload": "#762a83",
    "optimizer": "#8c510a",
    "host": "#636363",
}
_FITS, _DOES_NOT = "#4393c3", "#d6604d"


def draw(shown: Sequence[Prediction], path: Path) -> None:
    """Draw ways, the best on top.

    Args:
        shown: What to draw, the best first.
        path: PNG file to write.

    Raises:
        UserError: The file cannot be written.
    """
    # Figure without pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    task = shown[0].candidate.task
    figure = Figure(figsize=(15, 2.2 + 0.42 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _times(left, shown)
    _memory(right, shown)
    left.set_yticks(range(len(shown)), [each.candidate.name for each in shown], fontsize=8)
    left.invert_yaxis()
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    hardware, tokens = shown[0].hardware.name, short(task.sequence, commas=True)
    figure.suptitle(f"{task.preset}, {tokens} tokens x {task.batch}, {task.gpus} x {hardware}: predicted")
    _save(figure, path)


def _times(axes: Any, shown: Sequence[Prediction]) -> None:
    starts = [0.0] * len(shown)
    for part, colour in _COLOURS.items():
        widths = [asdict(each.time)[part] for each in shown]
        if any(widths):
            axes.barh(range(len(shown)), widths, left=starts, color=colour, label=PARTS[part])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, each in enumerate(shown):
        axes.text(each.seconds, row, f" {each.utilisation:.1%}", va="center", fontsize=8)
    axes.set_xlabel("seconds of a step; behind the bar, MFU")
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)


def _memory(axes: Any, shown: Sequence[Prediction]) -> None:
    colours = [_FITS if each.memory.fits else _DOES_NOT for each in shown]
    axes.barh(range(len(shown)), [each.memory.total / GIB for each in shown], color=colours)
    axes.axvline(shown[0].memory.capacity / GIB, color="black", linewidth=1.2)
    axes.set_xlabel("GiB at the peak; line: what a GPU has")
    axes.grid(axis="x", alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    try:
        save_picture(figure, path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror}") from None
