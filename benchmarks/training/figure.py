"""Training results as pictures: time and memory over lengths, over GPUs, and losses over steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.figure import blank, finish, finish_figure, is_measured, plot_methods, save
from benchmarks.engine.results import OK, Results, Row
from benchmarks.engine.table import Rows
from benchmarks.training.cells import TrainCell
from benchmarks.training.table import (
    MEDIAN_STEPS,
    curve_name,
    over_ranks,
    over_tokens,
    reference_of,
    running_median,
    trained,
)
from bmburst.amounts import short

Panel = tuple[str, Callable[[Row], float | None]]
_OVER_TOKENS: Sequence[Panel] = (
    ("seconds a step", lambda row: row["milliseconds"]["median"] / 1e3),
    ("step over the bound", lambda row: row["ratio"]),
    ("tokens/s a GPU", lambda row: row["tokens_per_second"]),
    ("peak GiB a GPU", lambda row: row["peak_memory_gib"]),
)
_OVER_RANKS: Sequence[Panel] = (
    ("tokens/s of all GPUs", lambda row: row["tokens_per_second"] * row["cell"]["ranks"]),
    ("tokens/s a GPU", lambda row: row["tokens_per_second"]),
    ("peak GiB a GPU", lambda row: row["peak_memory_gib"]),
)
_LOGARITHMIC = "seconds a step"


def draw(results: Results[TrainCell], stem: Path) -> list[Path]:
    """Draw every comparison that has a measured cell, and return the pictures' paths.

    Args:
        results: What was measured.
        stem: Path whose name the pictures' names begin with.
    """
    paths = []
    for title, rows in over_tokens(results):
        if is_measured(rows):
            paths.append(_panels(title, rows, _OVER_TOKENS, lambda cell: cell.tokens, _path(stem, rows, "tokens")))
    for title, rows in over_ranks(results):
        if is_measured(rows):
            paths.append(_panels(title, rows, _OVER_RANKS, lambda cell: cell.ranks, _path(stem, rows, "gpus")))
    for suite in ("loss", "curve"):
        for title, rows in trained(results, suite):
            if is_measured(rows):
                paths.append(_curves(title, rows, _path(stem, rows, suite)))
    return paths


def _panels(
    title: str, rows: Rows[TrainCell], panels: Sequence[Panel], column: Callable[[TrainCell], int], path: Path
) -> Path:
    figure = blank(4.5 * len(panels), 5)
    all_axes = figure.subplots(1, len(panels))
    for axes, (name, value) in zip(all_axes, panels, strict=True):
        plot_methods(axes, rows, column, value)
        finish(axes, name, logarithmic=name == _LOGARITHMIC)
    finish_figure(figure, title, all_axes[0])
    return save(figure, path)


def _curves(title: str, rows: Rows[TrainCell], path: Path) -> Path:
    """Draw losses over steps and, where there is one rank's curve, how far the others are from it."""
    measured = [(cell, row) for cell, row in rows if row["status"] == OK]
    reference = reference_of(rows)
    others = [] if reference is None else [(cell, row) for cell, row in measured if cell.ranks > 1]
    figure = blank(13 if others else 8, 5)
    left, *right = figure.subplots(1, 2, squeeze=False)[0] if others else [figure.subplots()]
    for cell, row in measured:
        steps = range(1, len(row["losses"]) + 1)
        (line,) = left.plot(steps, running_median(row["losses"]), label=curve_name(cell), linewidth=1.8)
        left.plot(steps, row["losses"], color=line.get_color(), linewidth=0.8, alpha=0.4)
    _finish_curves(left, f"loss, nats a token, and the median of {MEDIAN_STEPS} steps")
    for axes in right:
        for cell, row in others:
            assert reference is not None
            away = [abs(a - b) / b for a, b in zip(row["losses"], reference["losses"], strict=False)]
            axes.plot(range(1, len(away) + 1), away, label=curve_name(cell), linewidth=1.3)
        _finish_curves(axes, "difference from one rank's, relative")
        axes.set_yscale("log")
    figure.suptitle(title, fontsize=12)
    return save(figure, path)


def _finish_curves(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _path(stem: Path, rows: Rows[TrainCell], what: str) -> Path:
    cell = rows[0][0]
    device = "" if cell.device == "cuda" else cell.device
    where = {"tokens": f"-{cell.ranks}{device}", "gpus": f"-{short(cell.tokens)}{device}"}.get(what, device)
    dtype = "" if cell.dtype == "bfloat16" else f"-{cell.dtype}"
    recompute = f"-{cell.recompute}" if cell.recompute else ""
    return stem.with_name(f"{stem.name}-{what}-{cell.model_name}{where}{dtype}{recompute}.png")
