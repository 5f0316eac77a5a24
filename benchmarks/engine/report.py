"""Markdown tables and pictures that compare methods over a number, for all kinds of benchmarks."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.engine import OK, ONE_GPU, BaseCell, C, Results, Row
from bmburst.amounts import short
from bmburst.outputs import blank_picture, save_picture

Rows = list[tuple[C, Row]]
"""Rows that are compared, with their cells."""


def row_line(results: Results[C], cell: C) -> str:
    """Return what is printed as a cell is done."""
    row = results.rows[cell.key]
    said = results.kind.describe(cell, row) if row["status"] == OK else reason_of(row)
    return f"{cell.key}: {said}"


def reason_of(row: Row) -> str:
    """Return why a row has no measurement."""
    return f"{row['status']}: {row['reason']}"


def markdown(results: Results[Any]) -> str:
    """Return all tables and, below, what could not run and where it all ran."""
    notes: dict[str, int] = {}
    lines = results.kind.tables(results, notes)
    return "\n".join([*lines, *_what_did_not_run(notes), *_run_lines(results)]) + "\n"


def groups(
    rows: Iterable[tuple[C, Row]], key: Callable[[C], tuple[Any, ...]], title: Callable[[C], str]
) -> Iterator[tuple[str, Rows[C]]]:
    """Yield a title and rows for every setting in which methods can be compared.

    Args:
        rows: Of the suite.
        key: What the cells of one setting share.
        title: Of the setting, by its first cell.
    """
    found: dict[tuple[Any, ...], Rows[C]] = {}
    for cell, row in rows:
        found.setdefault(key(cell), []).append((cell, row))
    for own in found.values():
        yield title(own[0][0]), own


def columns_of(rows: Rows[C], column: Callable[[C], int]) -> list[int]:
    """Return the lengths, batch sizes or ranks that occur, ascending."""
    return sorted({column(cell) for cell, _ in rows})


def by_method(rows: Rows[C], column: Callable[[C], int]) -> dict[str, dict[int, Row]]:
    """Return each method's rows by column, methods in the order of the file."""
    found: dict[str, dict[int, Row]] = {}
    for cell, row in rows:
        found.setdefault(cell.method, {})[column(cell)] = row
    return found


def rank_kind(cell: BaseCell) -> str:
    """Return what a rank of the cell is."""
    return "GPU" if cell.device == "cuda" else "CPU rank"


def ranks_name(cell: BaseCell) -> str:
    """Return where a cell runs, for example `2 GPUs`."""
    return f"{cell.ranks} {rank_kind(cell)}{'s' if cell.ranks > 1 else ''}"


def of_whom(cell: BaseCell) -> str:
    """Return what a title calls the cell's method."""
    return "bmburst" if cell.method == "ours" else cell.method


def spread_name(ranks: int, chosen: dict[str, Any]) -> str:
    """Return what `burst_attention` chose: heads exchanged by how many ranks, and what lies between such groups."""
    parts = [f"heads x{chosen['heads']}"] if chosen["heads"] > 1 else []
    outside = chosen["outer"] if chosen["outer"] == "gather" else f"{chosen['outer']} ({chosen['travellers']} backward)"
    return " + ".join([*parts, *([outside] if ranks > chosen["heads"] else [])]) or "alone"


def known(value: float | None, form: str = ".1f") -> str:
    """Return a number, or a question mark where there is none."""
    return "?" if value is None else format(value, form)


def note(row: Row, notes: dict[str, int]) -> str:
    """Return the mark of a row that has no measurement, and keep the reason in the notes under its number."""
    return f"- [{notes.setdefault(reason_of(row), len(notes) + 1)}]"


def grid(
    head: str, rows: Rows[C], column: Callable[[C], int], show: Callable[[Row], str], notes: dict[str, int]
) -> list[str]:
    """Return a table of methods over columns.

    Args:
        head: What the cells of the table say.
        rows: What is compared; a missing one is left empty.
        column: Returns a cell's number, by which the columns are ordered.
        show: What a measured row says.
        notes: Numbers of the reasons why rows have no measurement; reasons of this table are added.
    """
    columns = columns_of(rows, column)
    lines = [f"| {head} | {' | '.join(short(n) for n in columns)} |", f"|---|{'---|' * len(columns)}"]
    for method, found in by_method(rows, column).items():
        own = [found.get(n) for n in columns]
        texts = ["" if row is None else show(row) if row["status"] == OK else note(row, notes) for row in own]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    return [*lines, ""]


def _what_did_not_run(notes: Mapping[str, int]) -> list[str]:
    """Return the reasons that the tables point to."""
    if not notes:
        return []
    return ["## What did not run", "", *(f"{number}. {reason}" for reason, number in notes.items()), ""]


def _run_lines(results: Results[Any]) -> list[str]:
    """Return where and by which commands it all ran."""
    used = sorted({row["run"] for row in results.rows.values()})
    lines = ["## Runs", ""]
    for number in used:
        run = results.runs[number]
        lines.append(f"- {run['date']}, {run['ranks']} x {run['device']}, {versions(run)}: `{run['command']}`")
    return [*lines, ""]


def versions(run: Mapping[str, Any]) -> str:
    """Return the versions of a run's software, by what `benchmarks.engine.machine.describe_run` said of it."""
    names = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
    stack = {name: run[name] for name in names if run.get(name)} | run["packages"]
    software = [f"bmburst {run['bmburst']} ({run['commit'] or 'unknown'})"]
    return ", ".join(software + [f"{name} {version}" for name, version in stack.items()])


_ALONE = {"color": "#000000", "linestyle": "--", "marker": ""}
_OURS = ("#b2182b", "#d6604d", "#f4a582", "#e08214", "#8c510a", "#bf812d", "#c51b7d", "#de77ae", "#762a83", "#9970ab")
_PEERS = ("#2166ac", "#4393c3", "#1b7837", "#5aae61", "#35978f", "#01665e", "#636363", "#969696")
_NAMES = MappingProxyType({"ours": "ours (bmburst)", "heads": "heads (bmburst)", ONE_GPU: "one GPU alone"})
_MARKERS = "os^vDPX*<>"
WIDTH, HEIGHT = 4.8, 4.4  # inches: on the narrow screen of a phone the letters can still be read
_LETTERS = 54  # of a line of a title, in this width


def panel(path: Path, says: str, setting: str, fill: Callable[[Any], None]) -> Path:
    """Draw a picture of one panel, with a legend below it where lines have names, and return its path.

    Args:
        path: Where to.
        says: What is drawn: the first line of the title.
        setting: What it was measured with: the others.
        fill: Draws into the axes.
    """
    figure = blank_picture(WIDTH, HEIGHT)
    axes = figure.subplots()
    fill(axes)
    set_title(figure, says, setting)
    axes.margins(x=0.05)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    save_picture(figure, path)
    return path


def scale_heights(axes: Any, *, logarithmic: bool = False) -> None:
    """Let heights begin at 0, or be logarithmic."""
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def set_title(figure: Any, says: str, setting: str) -> None:
    """Give a figure of that width a title in lines that fit."""
    begun = says[:1].upper() + says[1:]
    lines = [line for text in (begun, setting) for line in textwrap.wrap(text, _LETTERS)]
    figure.suptitle("\n".join(lines), fontsize=10)


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
        axes.plot(
            *(zip(*points, strict=True) if points else ((), ())), label=_NAMES.get(method, method), **styles[method]
        )
    axes.set_xticks(range(len(columns)), [short(n) for n in columns])


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


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure and return its path."""
    save_picture(figure, path)
    return path
