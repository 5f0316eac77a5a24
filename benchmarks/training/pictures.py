"""Pictures of the training benchmark: one panel each."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.kind import OK, Results, Row
from benchmarks.engine.report import (
    Rows,
    is_measured,
    of_whom,
    panel,
    plot_methods,
    ranks_name,
    scale_heights,
)
from benchmarks.training.cells import ZERO, TrainCell
from benchmarks.training.report import (
    MEDIAN_STEPS,
    curve_name,
    model_of,
    over_ranks,
    over_tokens,
    reference_of,
    running_median,
    trained,
)
from bmburst.amounts import short

Panel = tuple[str, str, Callable[[Row], float | None]]
"""The end of a picture's name, what is drawn, and its value."""
_OVER_TOKENS: Sequence[Panel] = (
    ("seconds", "seconds a step", lambda row: row["milliseconds"]["median"] / 1e3),
    ("ratio", "step over the bound", lambda row: row["ratio"]),
    ("speed", "tokens/s a GPU", lambda row: row["tokens_per_second"]),
    ("memory", "peak GiB a GPU", lambda row: row["peak_memory_gib"]),
)
_OVER_RANKS: Sequence[Panel] = (
    ("total", "tokens/s of all GPUs", lambda row: row["tokens_per_second"] * row["cell"]["ranks"]),
    ("speed", "tokens/s a GPU", lambda row: row["tokens_per_second"]),
    ("memory", "peak GiB a GPU", lambda row: row["peak_memory_gib"]),
)
_LOGARITHMIC = "seconds"


def draw(results: Results[TrainCell], stem: Path) -> list[Path]:
    """Draw every comparison that has a measured cell, and return the pictures' paths.

    Args:
        results: What was measured.
        stem: Path whose name the pictures' names begin with.
    """
    paths: list[Path] = []
    for title, rows in over_tokens(results):
        if is_measured(rows):
            paths += _panels(title, rows, _OVER_TOKENS, lambda cell: cell.tokens, _path(stem, rows, "tokens"))
    for title, rows in over_ranks(results):
        if is_measured(rows):
            paths += _panels(title, rows, _OVER_RANKS, lambda cell: cell.ranks, _path(stem, rows, "gpus"))
    for suite in ("loss", "curve"):
        for title, rows in trained(results, suite):
            if is_measured(rows):
                paths += _draw_curves(title, rows, _path(stem, rows, suite))
    return paths


def timeline_title(cell: TrainCell) -> tuple[str, str]:
    """Return what the timeline of a cell shows, and the setting."""
    return (
        f"Timeline of a training step by {of_whom(cell)}",
        f"{model_of(cell)}, {short(cell.tokens)} tokens, {ranks_name(cell)}",
    )


def _panels(
    title: str, rows: Rows[TrainCell], panels: Sequence[Panel], column: Callable[[TrainCell], int], start: Path
) -> Iterator[Path]:
    for end, name, value in panels:

        def fill(axes: Any, end: str = end, name: str = name, value: Callable[[Row], float | None] = value) -> None:
            plot_methods(axes, rows, column, value)
            scale_heights(axes, logarithmic=end == _LOGARITHMIC)
            axes.set_ylabel(name)
            axes.set_xlabel("tokens of the sequence" if panels is _OVER_TOKENS else "GPUs")

        yield panel(start.with_name(f"{start.name}-{end}.png"), name, title, fill)


def _draw_curves(title: str, rows: Rows[TrainCell], start: Path) -> Iterator[Path]:
    """Draw losses over steps and, where there is one rank's curve, how far the others are from it."""
    measured = [(cell, row) for cell, row in rows if row["status"] == OK]
    reference = reference_of(rows)
    others = [] if reference is None else [(cell, row) for cell, row in measured if cell.ranks > 1]

    def losses(axes: Any) -> None:
        for cell, row in measured:
            steps = range(1, len(row["losses"]) + 1)
            (line,) = axes.plot(steps, running_median(row["losses"]), label=curve_name(cell), linewidth=1.8)
            axes.plot(steps, row["losses"], color=line.get_color(), linewidth=0.8, alpha=0.4)
        axes.set_xlabel("step")
        axes.set_ylabel("nats a token")

    def differences(axes: Any) -> None:
        assert reference is not None
        for cell, row in others:
            away = [abs(a - b) / b for a, b in zip(row["losses"], reference["losses"], strict=False)]
            axes.plot(range(1, len(away) + 1), away, label=curve_name(cell), linewidth=1.3)
        axes.set_xlabel("step")
        axes.set_ylabel("relative difference")
        axes.set_yscale("log")

    says = f"Loss of each step (thin) and the median of {MEDIAN_STEPS} steps"
    yield panel(start.with_name(f"{start.name}.png"), says, title, losses)
    if others:
        away = start.with_name(f"{start.name}-difference.png")
        yield panel(away, "Difference of the loss from one rank's", title, differences)


def _path(stem: Path, rows: Rows[TrainCell], what: str) -> Path:
    cell = rows[0][0]
    device = "" if cell.device == "cuda" else cell.device
    where = {"tokens": f"-{cell.ranks}{device}", "gpus": f"-{short(cell.tokens)}{device}"}.get(what, device)
    dtype = "" if cell.dtype == "bfloat16" else f"-{cell.dtype}"
    recompute = (f"-{cell.recompute}" if cell.recompute else "") + ("" if cell.zero == ZERO else f"-zero{cell.zero}")
    return stem.with_name(f"{stem.name}-{what}-{cell.model_name}{where}{dtype}{recompute}")
