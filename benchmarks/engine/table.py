"""Results as text: a line for a cell as it is measured, and Markdown tables of methods over a number."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.engine.results import OK, BaseCell, C, Results, Row
from bmburst.amounts import short

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


def device_name(cell: BaseCell) -> str:
    """Return what a rank of the cell is."""
    return "GPU" if cell.device == "cuda" else "CPU rank"


def ranks_name(cell: BaseCell) -> str:
    """Return where a cell runs, for example `2 GPUs`."""
    return f"{cell.ranks} {device_name(cell)}{'s' if cell.ranks > 1 else ''}"


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
    """Return the versions of a run's software, by what `benchmarks.engine.machine.describe` said of it."""
    names = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
    stack = {name: run[name] for name in names if run.get(name)} | run["packages"]
    software = [f"bmburst {run['bmburst']} ({run['commit'] or 'unknown'})"]
    return ", ".join(software + [f"{name} {version}" for name, version in stack.items()])
