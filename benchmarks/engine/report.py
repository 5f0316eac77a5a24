"""Tables and pictures that compare methods over a number, such as tokens, for all kinds of benchmarks."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.engine.kinds import OK, ONE_GPU, BaseCell, C, Results, Row
from bmburst.amounts import short
from bmburst.outputs import blank_picture, save_picture

Rows = list[tuple[C, Row]]
"""Cells and their rows."""


def row_line(results: Results[C], cell: C) -> str:
    """Return a cell's row in one line, printed when the cell is done."""
    row = results.rows[cell.key]
    text = results.kind.describe(cell, row) if row["status"] == OK else reason_of(row)
    return f"{cell.key}: {text}"


def reason_of(row: Row) -> str:
    """Return the status and the reason of a row without a measurement."""
    return f"{row['status']}: {row['reason']}"


def markdown(results: Results[Any]) -> str:
    """Return all tables, followed by the reasons of failed cells and the headers of the runs."""
    notes: dict[str, int] = {}
    lines = results.kind.tables(results, notes)
    return "\n".join([*lines, *_what_did_not_run(notes), *_run_lines(results)]) + "\n"


def groups(
    rows: Iterable[tuple[C, Row]], key: Callable[[C], tuple[Any, ...]], title: Callable[[C], str]
) -> Iterator[tuple[str, Rows[C]]]:
    """Group rows into settings in which methods can be compared; yield a title and rows for each."""
    found: dict[tuple[Any, ...], Rows[C]] = {}
    for cell, row in rows:
        found.setdefault(key(cell), []).append((cell, row))
    for own in found.values():
        yield title(own[0][0]), own


def columns_of(rows: Rows[C], column: Callable[[C], int]) -> list[int]:
    """Return the columns of a table: the different values of `column`, for example lengths, in ascending order."""
    return sorted({column(cell) for cell, _ in rows})


def by_method(rows: Rows[C], column: Callable[[C], int]) -> dict[str, dict[int, Row]]:
    """Return each method's rows by column. Methods are in the order of the file."""
    found: dict[str, dict[int, Row]] = {}
    for cell, row in rows:
        found.setdefault(cell.method, {})[column(cell)] = row
    return found


def rank_kind(cell: BaseCell) -> str:
    """Return "GPU" or "CPU rank"."""
    return "GPU" if cell.device == "cuda" else "CPU rank"


def ranks_name(cell: BaseCell) -> str:
    """Return the ranks of a cell as text, for example `2 GPUs`."""
    return f"{cell.ranks} {rank_kind(cell)}{'s' if cell.ranks > 1 else ''}"


def of_whom(cell: BaseCell) -> str:
    """Return the name of the cell's method for titles: "bmburst" for ours."""
    return "bmburst" if cell.method == "ours" else cell.method


def spread_name(ranks: int, chosen: dict[str, Any]) -> str:
    """Return the name of a strategy: the size of groups that exchange heads, and the strategy between the groups.

    `chosen` is the row's "strategy": "heads", "outer" and "travellers".
    """
    parts = [f"heads x{chosen['heads']}"] if chosen["heads"] > 1 else []
    outside = chosen["outer"] if chosen["outer"] == "gather" else f"{chosen['outer']} ({chosen['travellers']} backward)"
    return " + ".join([*parts, *([outside] if ranks > chosen["heads"] else [])]) or "alone"


def known(value: float | None, form: str = ".1f") -> str:
    """Return a formatted number, or a question mark for None."""
    return "?" if value is None else format(value, form)


def note(row: Row, notes: dict[str, int]) -> str:
    """Return the reference to the note with the reason of a row without a measurement; add the note if it is new."""
    return f"- [{notes.setdefault(reason_of(row), len(notes) + 1)}]"


def markdown_table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table in Markdown: the heads of its columns, and the cells of each row."""
    heads = [*columns]
    return [_line(heads), "|" + "---|" * len(heads), *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def grid(
    head: str, rows: Rows[C], column: Callable[[C], int], show: Callable[[Row], str], notes: dict[str, int]
) -> list[str]:
    """Return a table of methods over columns.

    `head` stands above the methods: the meaning of the values. A missing row leaves its place empty. `notes` numbers
    the reasons why rows have no measurement; those in this table are added.
    """
    columns = columns_of(rows, column)
    lines = []
    for method, found in by_method(rows, column).items():
        own = [found.get(n) for n in columns]
        texts = ("" if row is None else show(row) if row["status"] == OK else note(row, notes) for row in own)
        lines.append([method, *texts])
    return [*markdown_table([head, *map(short, columns)], lines), ""]


def _what_did_not_run(notes: Mapping[str, int]) -> list[str]:
    """Return the section with the notes of the tables."""
    if not notes:
        return []
    return ["## What did not run", "", *(f"{number}. {reason}" for reason, number in notes.items()), ""]


def _run_lines(results: Results[Any]) -> list[str]:
    """Return the section with the machine, versions and command of each run."""
    used = sorted({row["run"] for row in results.rows.values()})
    lines = ["## Runs", ""]
    for number in used:
        run = results.runs[number]
        lines.append(f"- {run['date']}, {run['ranks']} x {run['device']}, {versions(run)}: `{run['command']}`")
    return [*lines, ""]


def versions(run: Mapping[str, Any]) -> str:
    """Return the software versions in a header of `benchmarks.engine.machine.describe_run`, as text."""
    names = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
    stack = {name: run[name] for name in names if run.get(name)} | run["packages"]
    software = [f"bmburst {run['bmburst']} ({run['commit'] or 'unknown'})"]
    return ", ".join(software + [f"{name} {version}" for name, version in stack.items()])


def recorded(run: Mapping[str, Any]) -> str:
    """Return the line of a record that says when, where and by which command it was made."""
    return f"{run['date']}, {run['device']}: {versions(run)}. Recorded by `{run['command']}`."


_ONE_GPU_STYLE = {"color": "#000000", "linestyle": "--", "marker": ""}
_OURS = ("#b2182b", "#d6604d", "#f4a582", "#e08214", "#8c510a", "#bf812d", "#c51b7d", "#de77ae", "#762a83", "#9970ab")
_PEERS = ("#2166ac", "#4393c3", "#1b7837", "#5aae61", "#35978f", "#01665e", "#636363", "#969696")
_NAMES = MappingProxyType({"ours": "ours (bmburst)", "heads": "heads (bmburst)", ONE_GPU: "one GPU alone"})
_MARKERS = "os^vDPX*<>"
WIDTH, HEIGHT = 4.8, 4.4  # inches: small enough to be readable on a phone
_LETTERS = 54  # characters per line of a title, at this width


def panel(path: Path, title: str, setting: str, fill: Callable[[Any], None]) -> Path:
    """Draw a picture with one panel, and with a legend below it if lines have labels, and return its path.

    `setting` is the subtitle; `fill` draws into the axes.
    """
    figure = blank_picture(WIDTH, HEIGHT)
    axes = figure.subplots()
    fill(axes)
    set_title(figure, title, setting)
    axes.margins(x=0.05)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    save_picture(figure, path)
    return path


def set_title(figure: Any, title: str, setting: str) -> None:
    """Set title and subtitle of a figure of width `WIDTH`, wrapped to fit."""
    capitalized = title[:1].upper() + title[1:]
    lines = [line for text in (capitalized, setting) for line in textwrap.wrap(text, _LETTERS)]
    figure.suptitle("\n".join(lines), fontsize=10)


def plot_methods(axes: Any, rows: Rows[C], column: Callable[[C], int], value: Callable[[Row], float | None]) -> None:
    """Draw a line for each method over equally spaced columns."""
    columns, found = columns_of(rows, column), by_method(rows, column)
    styles = _styles_of(list(found))
    for method, own in found.items():
        values = [(columns.index(n), value(row)) for n, row in sorted(own.items()) if row["status"] == OK]
        points = [(place, y) for place, y in values if y is not None]
        axes.plot(
            *(zip(*points, strict=True) if points else ((), ())), label=_NAMES.get(method, method), **styles[method]
        )
    axes.set_xticks(range(len(columns)), [short(n) for n in columns])


class Panel(NamedTuple):
    """A quantity that is drawn for each method over the columns of a comparison."""

    suffix: str  # of the picture's name
    label: str  # of the y axis
    value: Callable[[Row], float | None]  # of a row
    is_logarithmic: bool = False  # whether the y axis is; otherwise it starts at 0
    bound: str = ""  # key of its lower bound in `bounds` of a row; "" for none


def draw_panels(
    title: str, rows: Rows[C], panels: Iterable[Panel], column: Callable[[C], int], start: Path, axis: str
) -> Iterator[Path]:
    """Draw a picture of each panel and yield its path: `start`, a hyphen and its suffix. `axis` labels the columns."""
    for each in panels:

        def fill(axes: Any, each: Panel = each) -> None:
            plot_methods(axes, rows, column, each.value)
            _draw_bound(axes, rows, column, each.bound)
            if each.is_logarithmic:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set_ylabel(each.label)
            axes.set_xlabel(axis)

        yield panel(start.with_name(f"{start.name}-{each.suffix}.png"), each.label, title, fill)


def _draw_bound(axes: Any, rows: Rows[C], column: Callable[[C], int], what: str) -> None:
    columns = columns_of(rows, column)
    of_rows = ((columns.index(column(cell)), row.get("bounds", {}).get(what)) for cell, row in rows)
    if least := {place: bound for place, bound in of_rows if bound is not None}:
        axes.plot(*zip(*sorted(least.items()), strict=True), label="bound", color="#000000", linestyle="--")


def is_measured(rows: Rows[C]) -> bool:
    """Return whether any of the rows has a measurement."""
    return any(row["status"] == OK for _, row in rows)


def _styles_of(methods: list[str]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's options by method: warm colours for ours, cold ones for peers.

    Markers distinguish methods with the same colour.
    """
    styles: dict[str, dict[str, Any]] = {}
    counts = {True: 0, False: 0}
    for method in methods:
        is_ours = method.startswith("ours")
        palette, number = (_OURS if is_ours else _PEERS), counts[is_ours]
        if method == ONE_GPU:
            styles[method] = dict(_ONE_GPU_STYLE)
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
