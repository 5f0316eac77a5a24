"""Results as pictures: ratio and TFLOP/s over sequence length, or over batch size, a picture a head setup and mask."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmburst.bench.cells import ONE_GPU, Cell
from bmburst.bench.results import OK, Results, Row
from bmburst.bench.table import DIRECTIONS, by_method, columns, comparisons, short

SUITES = ("sequence", "batch", "block", "documents", "window")
_ALONE = {"color": "#000000", "linestyle": "--", "marker": ""}
_OURS = ("#b2182b", "#d6604d", "#f4a582", "#e08214", "#8c510a", "#bf812d", "#c51b7d", "#de77ae", "#762a83", "#9970ab")
_PEERS = ("#2166ac", "#4393c3", "#1b7837", "#5aae61", "#35978f", "#01665e", "#636363", "#969696")
_MARKERS = "os^vDPX*<>"


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw every comparison that has a measured cell, and return the pictures' paths.

    Args:
        results: What was measured.
        stem: Path whose name the pictures' names begin with.
    """
    paths = []
    for suite in SUITES:
        for title, rows in comparisons(results, suite):
            if any(row["status"] == OK for _, row in rows):
                paths.append(_picture(suite, title, rows, stem))
    return paths


def _picture(suite: str, title: str, rows: Sequence[tuple[Cell, Row]], stem: Path) -> Path:
    # Figure without pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    heads = columns(suite, rows)
    styles = _styles(list(by_method(suite, rows)))
    for across, (direction, name) in enumerate(DIRECTIONS.items()):
        upper, lower = axes[0][across], axes[1][across]
        for method, found in by_method(suite, rows).items():
            points = [(heads.index(n), row[direction]) for n, row in sorted(found.items()) if row["status"] == OK]
            if not points:
                continue
            places = [place for place, _ in points]
            lower.plot(places, [part["tflops"] for _, part in points], label=method, **styles[method])
            if method != ONE_GPU:
                upper.plot(places, [part["ratio"] for _, part in points], **styles[method])
        _finish(upper, f"{name}: ratio to one GPU's kernel")
        upper.axhline(1, color="black", linewidth=0.8)
        _finish(lower, f"{name}: TFLOP/s a GPU")
        lower.set_xticks(range(len(heads)), [short(n) for n in heads])
        lower.set_xlabel("sequences at once" if suite == "batch" else "tokens of the whole sequence")
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.suptitle(title, fontsize=12)
    return _save(figure, _path(suite, rows[0][0], stem))


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.05)
    axes.grid(alpha=0.3)


def _styles(methods: list[str]) -> dict[str, dict[str, Any]]:
    """Warm colours for ours, cold ones for the peers; a marker tells those of one colour apart."""
    styles: dict[str, dict[str, Any]] = {}
    counts = {True: 0, False: 0}
    for method in methods:
        is_ours = method.startswith("ours")
        palette, number = (_OURS if is_ours else _PEERS), counts[is_ours]
        if method == ONE_GPU:
            styles[method] = dict(_ALONE)
            continue
        counts[is_ours] += 1
        styles[method] = {
            "color": palette[number % len(palette)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "linewidth": 2.6 if method == "ours" else 1.3,
            "linestyle": "-" if number < len(palette) else ":",
            "markersize": 5,
            "zorder": 3 if method == "ours" else 2,
        }
    return styles


def _path(suite: str, cell: Cell, stem: Path) -> Path:
    where = f"{cell.ranks}" + ("" if cell.device == "cuda" else cell.device)
    tokens = f"-{short(cell.tokens)}" if suite == "batch" else ""
    mask = "" if cell.mask == suite else f"-{cell.mask}"
    return stem.with_name(f"{stem.name}-{suite}{tokens}-{cell.head_setup}{mask}-{where}.png")


def _save(figure: Any, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    return path
