"""What the benchmarks' pictures share: paper, colours of methods, axes, the file."""

import os
from pathlib import Path
from typing import Any

from bmburst.bench.cells import ONE_GPU
from bmburst.outputs import PICTURE

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


def styles_of(methods: list[str]) -> dict[str, dict[str, Any]]:
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
    """Write a figure, whole or not at all, and return its path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", dpi=110, metadata=dict(PICTURE))
    temporary.replace(path)
    return path
