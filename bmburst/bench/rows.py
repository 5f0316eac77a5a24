"""A benchmark's file: what ran where, and a row for every cell that was tried. One process writes at a time."""

import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from bmburst.config import read_json
from bmburst.errors import UserError

OK, REFUSED, FAILED = "ok", "refused", "failed"
Row = dict[str, Any]


class AnyCell(Protocol):
    """What the machinery of a benchmark needs to know of a measurement."""

    @property
    def suite(self) -> str:
        """What kind of measurement it is."""
        ...

    @property
    def method(self) -> str:
        """What is measured."""
        ...

    @property
    def ranks(self) -> int:
        """Ranks that take part: the first of the run."""
        ...

    @property
    def key(self) -> str:
        """Its name with where it ran."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them."""
        ...


C = TypeVar("C", bound=AnyCell)


def place(ranks: int, device: str, dtype: str) -> str:
    """Return where a cell runs, as the end of its key: `@8` on 8 GPUs, `@2-cpu-float32` on 2 CPU ranks in fp32."""
    return f"@{ranks}" + ("" if device == "cuda" else f"-{device}") + ("" if dtype == "bfloat16" else f"-{dtype}")


@dataclass(slots=True)
class ResultFile(ABC, Generic[C]):
    """Rows by cell key, in the order in which they were first tried, and the runs that made them.

    A benchmark subclasses it for its kind of cell.

    Attributes:
        runs: What is known of each run: versions, hardware, date, command line.
        rows: By key. `status` is "ok"; "refused", for what cannot run and why; or "failed", and how.
        running: Key of the cell that is being measured, so that a lost run says where.
    """

    FORMAT: ClassVar[str]

    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    running: str | None = None

    @staticmethod
    @abstractmethod
    def make_cell(values: dict[str, Any]) -> C:
        """Return the cell that `to_dict` made these fields of."""

    @abstractmethod
    def estimate(self, cell: C) -> float:
        """Return about how many seconds a cell will take; 0 where nothing is known."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file holds; nothing where there is none.

        Raises:
            UserError: It is another kind of file.
        """
        if not path.exists():
            return cls()
        try:
            content = read_json(path)
            found = content.get("format")
            if found != cls.FORMAT:
                raise ValueError("it has no format" if found is None else f"its format is {found}, not {cls.FORMAT}")
            results = cls(runs=content["runs"], rows=content["rows"], running=content["running"])
            results.require_rows()
            return results
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"--output {path} is no file of this benchmark: {reason}\nfix: another file, which will be made"
            ) from None

    def require_rows(self) -> None:
        """Refuse what is read from a file and is not as `put` and a run's header make it.

        Raises:
            ValueError: Something is of another type.
        """
        if not isinstance(self.runs, list) or not all(isinstance(run, dict) for run in self.runs):
            raise ValueError("its runs are no list of objects")
        if not isinstance(self.rows, dict) or not isinstance(self.running, str | None):
            raise ValueError("its rows are no object")
        for key, row in self.rows.items():
            is_whole = isinstance(row, dict) and isinstance(row.get("cell"), dict)
            if not is_whole or row.get("status") not in (OK, REFUSED, FAILED) or type(row.get("run")) is not int:
                raise ValueError(f"row {key} is none")
            self.make_cell(row["cell"])

    def write(self, path: Path) -> None:
        """Replace the file at once: it is whole at any moment."""
        content = {"format": self.FORMAT, "running": self.running, "runs": self.runs, "rows": self.rows}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    def put(self, cell: C, row: Row) -> None:
        """Keep a row under its cell's key, with the number of the run that is now."""
        self.rows[cell.key] = {"cell": cell.to_dict(), "run": len(self.runs) - 1, **row}

    def is_done(self, cell: C, *, again: bool) -> bool:
        """Return whether a cell needs no run now: it was tried in this run, or measured earlier and not `again`."""
        row = self.rows.get(cell.key)
        if row is None:
            return False
        return row["run"] == len(self.runs) - 1 or (row["status"] == OK and not again)

    def cell_rows(self, suite: str) -> list[tuple[C, Row]]:
        """Return the rows of a suite with their cells."""
        return [(self.make_cell(row["cell"]), row) for row in self.rows.values() if row["cell"]["suite"] == suite]
