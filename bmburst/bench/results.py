"""The file of results: what ran where, and a row for every cell that was tried. One process writes at a time."""

import json
import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmburst.bench.cells import Cell
from bmburst.bench.work import forward_flops
from bmburst.errors import UserError

FORMAT = "bmburst attention benchmark 1"
OK, REFUSED, FAILED = "ok", "refused", "failed"
_PLAIN = ("sequence", "batch")  # suites whose cells take the same time for the same work
Row = dict[str, Any]


@dataclass(slots=True)
class Results:
    """Rows by cell key, in the order in which they were first tried, and the runs that made them.

    Attributes:
        runs: What is known of each run: versions, hardware, date, command line.
        rows: By key. `status` is "ok"; "refused", for what cannot run and why; or "failed", and how.
        running: Key of the cell that is being measured, so that a lost run says where.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    running: str | None = None

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Return what a file holds; nothing where there is none.

        Raises:
            UserError: It is another kind of file.
        """
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise KeyError(content["format"])
            return cls(runs=content["runs"], rows=content["rows"], running=content["running"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--output {path} is no file of this benchmark: {error}\nfix: another file, which will be made"
            ) from None

    def write(self, path: Path) -> None:
        """Replace the file at once: it is whole at any moment."""
        content = {"format": FORMAT, "running": self.running, "runs": self.runs, "rows": self.rows}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    def put(self, cell: Cell, row: Row) -> None:
        """Keep a row under its cell's key, with the number of the run that is now."""
        self.rows[cell.key] = {"cell": cell.to_dict(), "run": len(self.runs) - 1, **row}

    def is_done(self, cell: Cell, *, again: bool) -> bool:
        """Return whether a cell needs no run now: it was tried in this run, or measured earlier and not `again`."""
        row = self.rows.get(cell.key)
        if row is None:
            return False
        return row["run"] == len(self.runs) - 1 or (row["status"] == OK and not again)

    def cell_rows(self, suite: str) -> list[tuple[Cell, Row]]:
        """Return the rows of a suite with their cells."""
        return [(Cell(**row["cell"]), row) for row in self.rows.values() if row["cell"]["suite"] == suite]

    def estimate(self, cell: Cell) -> float:
        """Return about how many seconds a cell will take: the median of those nearest in work, scaled by it.

        Only cells of the same kind of run are looked at; 0 where there is none. The first to use a kernel took longer.
        """
        known = [
            (other, float(row["seconds"]))
            for suite in (_PLAIN if cell.suite in _PLAIN else (cell.suite,))
            for other, row in self.cell_rows(suite)
            if row["status"] == OK and (other.ranks, other.device) == (cell.ranks, cell.device)
        ]
        if not known:
            return 0.0
        work = forward_flops(cell)
        nearest = min((forward_flops(other) for other, _ in known), key=lambda flops: abs(math.log(flops / work)))
        seconds = statistics.median(seconds for other, seconds in known if forward_flops(other) == nearest)
        return seconds * max(0.5, work / nearest)
