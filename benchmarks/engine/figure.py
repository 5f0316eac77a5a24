"""What the benchmarks' pictures share: paper, colours of methods, axes, the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.results import OK, ONE_GPU, C, Row
from benchmarks.engine.table import Rows, by_method, columns_of
from bmburst.amounts import short
from bmburst.outputs import save_picture

_ALONE = {"color": "#000000", "linestyle": "--", "marker": ""}
_OURS = ("#b2182b", "#d6604d", "#f4a582", "#e08214", "#8c510a", "#bf812d", "#c51b7d", "#de77ae", "#762a83", "#9970ab")
_PEERS = ("#2166ac", "#4393c3", "#1b7837", "#5aae61", "#35978f", "#01665e", "#636363", "#969696")
_MARKERS = "os^vDPX*<>"


def blank(width: float, height: float) -> Any:
    """Return an empty figure of so many inches."""
    # Figure without pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(axes: Any, title: str, *, logarithmic: bool = False) -> None:
    """Give axes a title, a grid, and a y axis from 0, or a logarithmic one."""
    axes.set_title(title, fontsize=11)
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.05)
    axes.grid(alpha=0.3)


def plot_methods(axes: Any, rows: Rows[C], column: Callable[[C], int], value: Callable[[Row], float | None]) -> None:
    """Draw a line for each method over what the rows are compared by, equally far apart.

    Args:
        axes: Where.
        rows: What is compared.
        column: Returns a cell's number, by which the rows are ordered.
        value: Returns a measured row's height, or None where it has none.
    """
    columns, found = columns_of(rows, column), by_method(rows, column)
    styles = _styles_of(list(found))
    for method, own in found.items():
        values = [(columns.index(n), value(row)) for n, row in sorted(own.items()) if row["status"] == OK]
        points = [(place, y) for place, y in values if y is not None]
        axes.plot(*(zip(*points, strict=True) if points else ((), ())), label=method, **styles[method])
    axes.set_xticks(range(len(columns)), [short(n) for n in columns])


def finish_figure(figure: Any, title: str, labelled: Any) -> None:
    """Give a figure its title, and a legend of what was drawn into one of its axes."""
    handles, labels = labelled.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.suptitle(title, fontsize=12)


def is_measured(rows: Rows[C]) -> bool:
    """Return whether there is anything to draw."""
    return any(row["status"] == OK for _, row in rows)


def _styles_of(methods: list[str]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's options by method: warm colours for ours, cold ones for the peers.

    A marker tells those of one colour apart.
    """
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


def save(figure: Any, path: Path) -> Path:
    """Write a figure and return its path."""
    save_picture(figure, path)
    return path
