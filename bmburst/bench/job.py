"""What the ranks of a benchmark are told, as a file: plain data, no torch."""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self

from bmburst.bench.cells import Cell
from bmburst.bench.results import Results
from bmburst.bench.rows import C, ResultFile

RUNTIMES = ("torch", "bmtrain")
JOB_FILE = "job.json"
LAST_WORDS = "reason"  # file in which a rank that ends the run says why


@dataclass(frozen=True, kw_only=True)
class AnyJob(ABC, Generic[C]):
    """One start of the ranks, of whatever benchmark.

    Attributes:
        cells: What to measure, in this order.
        output: The file of results, which has the header of this run.
        deadline: When to stop, in seconds since the epoch; 0: never.
        again: Whether cells that were measured in earlier runs are measured again.
        repeats: What is measured of a cell: pairs of calls for each direction, or steps.
        cell_seconds: About how long that may take.
        kernel: The kernel under test.
        runtime: "torch" or "bmtrain": what starts the ranks.
        trace: Folder for timelines, or "".
    """

    PROGRAM: ClassVar[str]
    """Module that a rank runs."""

    cells: tuple[C, ...]
    output: str
    deadline: float = 0.0
    again: bool = False
    repeats: int = 9
    cell_seconds: float = 10.0
    kernel: str = "auto"
    runtime: str = "torch"
    trace: str = ""

    @staticmethod
    @abstractmethod
    def results() -> type[ResultFile[C]]:
        """Return the kind of file that `output` is."""

    def write(self, folder: Path) -> None:
        """Write it where `read` finds it."""
        (folder / JOB_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what `write` left in a folder."""
        values: dict[str, Any] = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        return cls(**{**values, "cells": tuple(map(cls.results().make_cell, values["cells"]))})


@dataclass(frozen=True, kw_only=True)
class Job(AnyJob[Cell]):
    """One start of the ranks of the attention benchmark.

    Attributes:
        deterministic: Whether ours must repeat bit for bit.
    """

    PROGRAM: ClassVar[str] = "bmburst.bench.rank"

    deterministic: bool = False

    @staticmethod
    def results() -> type[Results]:
        """See `AnyJob.results`."""
        return Results
