"""Starts the ranks of a benchmark, and restarts them for the remaining cells after a cell terminated them."""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.kind import FAILED, BaseCell, Kind, Results, load_kind
from bmburst.errors import UserError
from bmburst.runtime.launch import LaunchSpec, launch

REASON_FILE = "reason"  # in which a rank that ends the run writes the reason
_JOB_FILE = "job.json"
# Exit statuses: 2 after bad input, which was already reported; from 128 on after a signal.
_BAD_INPUT, _SIGNALS = 2, 128


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of the ranks.

    Attributes:
        kind: Name of the kind of benchmark.
        ranks: Ranks on this machine.
        cells: The cells to measure, in this order.
        output: The file of results, with the header of this run.
        deadline: When to stop, in seconds since the epoch; 0: never.
        again: Whether cells that were measured in earlier runs are measured again.
        repeats: Number of measurements per cell: pairs of calls for each direction, or steps.
        cell_seconds: About how long these may take.
        kernel: The kernel under test.
        runtime: Runtime of the ranks, one of `RUNTIMES`.
        tensor: Tensor parallel degree under BMTrain, which has one degree per process.
        trace: Folder for timelines, or "".
        options: Further options for the ranks, specific to the kind.
    """

    kind: str
    ranks: int
    cells: tuple[BaseCell, ...]
    output: str
    deadline: float = 0.0
    again: bool = False
    repeats: int = 9
    cell_seconds: float = 10.0
    kernel: str = "auto"
    runtime: str = "torch"
    tensor: int = 1
    trace: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trace_folder(self) -> Path | None:
        """The folder for timelines."""
        return Path(self.trace) if self.trace else None

    def results(self) -> Results[Any]:
        """Return the current contents of `output`."""
        return Results.read(load_kind(self.kind), Path(self.output))

    def write(self, folder: Path) -> None:
        """Write the job to a folder, for `read`."""
        (folder / _JOB_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """Return the job that `write` wrote to a folder."""
        values: dict[str, Any] = json.loads((folder / _JOB_FILE).read_text(encoding="utf-8"))
        kind: Kind[Any] = load_kind(values["kind"])
        return cls(**{**values, "cells": tuple(kind.cell(**cell) for cell in values["cells"])})


def run_job(job: Job, *, header: dict[str, Any] | None, cell_timeout: float) -> int:
    """Measure the job's cells into its file and return an exit status. It is 0 also if cells failed: rows record that.

    Args:
        job: The job.
        header: Header of this run; None continues the run of an earlier job.
        cell_timeout: Seconds without progress after which a cell is abandoned; 0: never.

    Raises:
        UserError: The file cannot be written, or the ranks cannot start.
    """
    output, results = Path(job.output), job.results()
    if header is not None:
        results.runs.append(header)
    results.running = None
    try:
        results.write(output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}\nfix: another file") from None
    untried = -1
    while _is_left(results, job):
        status, reason = _start(job, cell_timeout)
        results = job.results()
        if status in (0, _BAD_INPUT) or status >= _SIGNALS:
            return status
        untried, before = results.left(job.cells, again=True), untried
        lost = next((cell for cell in job.cells if cell.key == results.running), None)
        if lost is not None:
            how = f"it took the ranks down: {reason or f'exit status {status}'}"
            results.running = None
            results.put(lost, {"status": FAILED, "reason": how})
            results.write(output)
            print(f"{lost.key}: {how}", file=sys.stderr, flush=True)
        elif untried == before:
            return status  # not a cell's fault
    return 0


def _start(job: Job, cell_timeout: float) -> tuple[int, str]:
    """Run the ranks; return the exit status, and the reason if a rank ended the run and wrote one."""
    clone = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory(prefix="bmburst-bench-") as name:
        job.write(Path(name))
        spec = LaunchSpec(
            nproc=job.ranks,
            hang_timeout=cell_timeout,
            start_timeout=cell_timeout or None,
            host_runtime=job.runtime == "bmtrain",
        )
        status = launch(spec, ["-m", "bmburst.cli.bench", str(clone), name])
        reason = Path(name) / REASON_FILE
        return status, reason.read_text(encoding="utf-8") if reason.exists() else ""


def _is_left(results: Results[Any], job: Job) -> bool:
    in_time = not job.deadline or time.time() < job.deadline
    return in_time and results.left(job.cells, again=job.again) > 0
