"""Results as pictures: ratio and TFLOP/s over sequence length, or over batch size, a picture a head setup and mask."""

from collections.abc import Sequence
from pathlib import Path

from bmburst.amounts import short
from bmburst.bench.cells import ONE_GPU, Cell
from bmburst.bench.drawing import blank, finish, save, styles_of
from bmburst.bench.results import OK, Results, Row
from bmburst.bench.table import DIRECTIONS, by_method, columns, comparisons

SUITES = ("sequence", "batch", "block", "documents", "window")


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
    figure = blank(13, 8)
    axes = figure.subplots(2, 2, sharex=True)
    heads = columns(suite, rows)
    styles = styles_of(list(by_method(suite, rows)))
    for across, (direction, name) in enumerate(DIRECTIONS.items()):
        upper, lower = axes[0][across], axes[1][across]
        ratios = [1.0]
        for method, found in by_method(suite, rows).items():
            points = [(heads.index(n), row[direction]) for n, row in sorted(found.items()) if row["status"] == OK]
            if not points:
                continue
            places = [place for place, _ in points]
            lower.plot(places, [part["tflops"] for _, part in points], label=method, **styles[method])
            if method != ONE_GPU:
                upper.plot(places, [part["ratio"] for _, part in points], **styles[method])
                ratios += [part["ratio"] for _, part in points]
        finish(upper, f"{name}: ratio to one GPU's kernel")
        upper.set_ylim(max(0.0, min(ratios) - 0.05), max(ratios) + 0.05)  # what differs is near 1
        upper.axhline(1, color="black", linewidth=0.8)
        finish(lower, f"{name}: TFLOP/s a GPU")
        lower.set_xticks(range(len(heads)), [short(n) for n in heads])
        lower.set_xlabel("sequences at once" if suite == "batch" else "tokens of the whole sequence")
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.suptitle(title, fontsize=12)
    return save(figure, _path(suite, rows[0][0], stem))


def _path(suite: str, cell: Cell, stem: Path) -> Path:
    where = f"{cell.ranks}" + ("" if cell.device == "cuda" else cell.device)
    tokens = f"-{short(cell.tokens)}" if suite == "batch" else ""
    mask = "" if cell.mask == suite else f"-{cell.mask}"
    return stem.with_name(f"{stem.name}-{suite}{tokens}-{cell.head_setup}{mask}-{where}.png")
