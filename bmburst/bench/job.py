"""What the ranks of a benchmark are told, as a file: plain data, no torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bmburst.bench.cells import Cell

RUNTIMES = ("torch", "bmtrain")
JOB_FILE = "job.json"
LAST_WORDS = "reason"  # file in which a rank that ends the run says why


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One start of the ranks.

    Attributes:
        cells: What to measure, in this order.
        output: The file of results, which has the header of this run.
        deadline: When to stop, in seconds since the epoch; 0: never.
        again: Whether cells that were measured in earlier runs are measured again.
        repeats: Pairs of calls for each direction of a cell.
        cell_seconds: About how long the pairs of one direction may take.
        kernel: The kernel under test.
        deterministic: Whether ours must repeat bit for bit.
        runtime: "torch" or "bmtrain": what starts the ranks.
        trace: Folder for timelines, or "".
    """

    cells: tuple[Cell, ...]
    output: str
    deadline: float = 0.0
    again: bool = False
    repeats: int = 9
    cell_seconds: float = 10.0
    kernel: str = "auto"
    deterministic: bool = False
    runtime: str = "torch"
    trace: str = ""

    def write(self, folder: Path) -> None:
        """Write it where `read` finds it."""
        (folder / JOB_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """Return what `write` left in a folder."""
        values = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        return cls(**{**values, "cells": tuple(Cell(**cell) for cell in values["cells"])})
