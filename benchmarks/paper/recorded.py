"""Reads recorded runs for the page of the paper: a missing file or cell is said, not an error. Imports no torch."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bmburst.amounts import short

RESULTS = Path(__file__).parents[1] / "results"
PAPER, TRAIN, FIRST = "paper_2xh200_202611", "train_paper_2xh200_202611", "inference_paper_2xh200_202611"
INFERENCE, ATTENTION = "inference_2xh200_202611", "attention_2xh200_202611"
PERPLEXITY, SLOW_LINK = "perplexity_202611", "slow_link_202611"
MISSING = "not recorded yet"
Row = dict[str, Any]


class Recorded:
    """The records of a folder.

    Args:
        folder: With the JSON files.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        self._read: dict[str, Any] = {}

    def record(self, name: str) -> Any:
        """Return what a file holds, or None where there is none."""
        if name not in self._read:
            path = self._folder / f"{name}.json"
            self._read[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return self._read[name]

    def row(self, name: str, key: str) -> Row | None:
        """Return a cell's row, or None where it is not recorded."""
        found = self.record(name)
        row: Row | None = None if found is None else found["rows"].get(key)
        return row

    def measured(self, name: str, key: str) -> Row | None:
        """Return a cell's row if it has a measurement."""
        row = self.row(name, key)
        return row if row is not None and row["status"] == "ok" else None

    def has(self, name: str, keys: Iterable[str]) -> bool:
        """Return whether any of the cells is recorded."""
        return any(self.row(name, key) is not None for key in keys)

    def where(self, name: str, keys: Iterable[str] = ()) -> str:
        """Return on what, when and at which commit the cells, or all, were recorded, with a link to the record."""
        found = self.record(name)
        if found is None:
            return f"{MISSING.capitalize()}."
        runs = [found["machine"]] if "machine" in found else found["runs"]
        used = {row["run"] for key in keys if (row := self.row(name, key)) is not None}
        used = used or ({row["run"] for row in found["rows"].values()} if "machine" not in found else {0})
        said = dict.fromkeys(_machine(runs[number]) for number in sorted(used))
        return f"Record: [{name}](../benchmarks/results/{name}.md); {'; '.join(said)}."


def _machine(run: Row) -> str:
    commit = run["commit"][:7] if run.get("commit") else "commit unknown"
    return f"{run['ranks']} x {run['device']}, {run['date'][:10]}, {commit}"


def said(row: Row | None, show: Callable[[Row], str]) -> str:
    """Return what a table says of a cell: its number, why it has none, or a dash where it is not recorded."""
    if row is None:
        return "-"
    if row["status"] == "ok":
        return show(row)
    reason: str = row["reason"]
    asked = re.search(r"out of memory(?: for ([\d.]+ \w+) more)?", reason)
    if asked:
        return "out of memory" + (f", {asked[1]} more" if asked[1] else "")
    fit = re.search(r"would not fit: about (\d+ GiB)", reason)
    least = re.search(r"takes (\d+ s) at least", reason)
    return f"would not fit: {fit[1]}" if fit else f"not run: {least[1] if least else reason}"


def grid(head: str, columns: Sequence[int], lines: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return a Markdown table over lengths or batch sizes; lines without any entry are left out."""
    made = [f"| {head} | {' | '.join(short(n) for n in columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, texts in lines:
        cells = list(texts)
        if any(text != "-" for text in cells):
            made.append(f"| {name} | {' | '.join(cells)} |")
    return [*made, ""]
