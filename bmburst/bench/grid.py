"""Rows as Markdown tables, methods over a number, and what stands below all tables."""

from collections.abc import Callable, Mapping, Sequence

from bmburst.amounts import short
from bmburst.bench.rows import OK, C, ResultFile, Row


def grid(
    head: str,
    columns: Sequence[int],
    by_method: Mapping[str, Mapping[int, Row]],
    show: Callable[[Row], str],
    notes: dict[str, int],
) -> list[str]:
    """Return a table of methods over columns.

    Args:
        head: What the cells of the table say.
        columns: Of lengths, batch sizes, ranks, ascending.
        by_method: Rows by method and column; a missing one is left empty.
        show: What a measured row says.
        notes: Numbers of the reasons why rows have no measurement; reasons of this table are added.
    """
    lines = [f"| {head} | {' | '.join(short(n) for n in columns)} |", f"|---|{'---|' * len(columns)}"]
    for method, found in by_method.items():
        cells = []
        for column in columns:
            row = found.get(column)
            if row is None:
                cells.append("")
            elif row["status"] == OK:
                cells.append(show(row))
            else:
                number = notes.setdefault(f"{row['status']}: {row['reason']}", len(notes) + 1)
                cells.append(f"- [{number}]")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*lines, ""]


def what_did_not_run(notes: Mapping[str, int]) -> list[str]:
    """Return the reasons that the tables point to."""
    if not notes:
        return []
    return ["## What did not run", "", *(f"{number}. {reason}" for reason, number in notes.items()), ""]


def run_lines(results: ResultFile[C]) -> list[str]:
    """Return where and by which commands it all ran."""
    used = sorted({row["run"] for row in results.rows.values()})
    lines = ["## Runs", ""]
    for number in used:
        run = results.runs[number]
        stack = [
            f"{name} {run[name]}" for name in ("python", "torch", "cuda", "cudnn", "nccl", "driver") if run.get(name)
        ]
        stack += [f"{name} {version}" for name, version in run["packages"].items()]
        commit = run["commit"] or "unknown"
        lines.append(
            f"- {run['date']}, {run['ranks']} x {run['device']}, bmburst {run['bmburst']} ({commit}), "
            f"{', '.join(stack)}: `{run['command']}`"
        )
    return [*lines, ""]
