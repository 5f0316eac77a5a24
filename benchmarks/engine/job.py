"""A job: starts the ranks of a benchmark, runs its cells on each, and restarts the ranks if a cell terminated them.

Rank 0 writes the rows. Ranks coordinate over a gloo group of their own, which still works after a cell has failed.
"""

import json
import os
import re
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, cast

import torch
import torch.distributed as dist

from benchmarks.engine.kinds import FAILED, OK, REFUSED, BaseCell, C, Kind, Results, Row, load_kind
from benchmarks.engine.machine import Gauge, start_ranks
from benchmarks.engine.report import row_line
from bmburst.attention.api import empty_cache
from bmburst.errors import UserError, one_line
from bmburst.launch import watchdog
from bmburst.launch.launcher import LaunchSpec, launch
from bmburst.launch.start import start
from bmburst_ops.errors import KernelError

Start = Callable[[LaunchSpec, list[str]], int]
REASON_FILE = "reason"  # contains the reason if a rank ended the run
_JOB_FILE = "job.json"
_BAD_INPUT = 2  # exit status after invalid input, which was already reported
_LOST = 3  # exit status of a rank whose GPU accepts no more work
_SIGNALS = 128  # first exit status after a signal
_PATIENCE = 20.0  # seconds that a failed rank waits for the others to finish the cell
_RUN, _SKIP, _STOP = "run", "skip", "stop"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of the ranks."""

    kind: str  # name of the kind of benchmark
    ranks: int  # ranks on this machine
    cells: tuple[BaseCell, ...]  # the cells to measure, in this order
    output: str  # the file of results, with the header of this run
    deadline: float = 0.0  # when to stop, in seconds since the epoch; 0: never
    again: bool = False  # whether cells that were measured in earlier runs are measured again
    repeats: int = 9  # number of measurements per cell: pairs of calls for each direction, or steps
    cell_seconds: float = 10.0  # about how long these may take
    kernel: str = "auto"  # the kernel under test
    runtime: str = "torch"  # runtime of the ranks, one of `RUNTIMES`
    tensor: int = 1  # tensor parallel degree under BMTrain, which has one degree per process
    trace: str = ""  # folder for timelines, or ""
    options: Mapping[str, Any] = field(default_factory=dict)  # further options for the ranks, specific to the kind

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


def run_job(job: Job, *, header: dict[str, Any] | None, cell_timeout: float, starter: Start | None = None) -> int:
    """Measure the job's cells into its file and return an exit status: 0 even if cells failed, which rows record.

    Args:
        job: The job.
        header: Header of this run; None continues the run of an earlier job.
        cell_timeout: Seconds without progress after which a cell is abandoned; 0: never.
        starter: Runs a command on ranks and returns the exit status; None: `launch`.

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
        status, reason = _start(job, cell_timeout, starter or launch)
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
            return status  # no cell was tried: the ranks cannot start
    return 0


def _start(job: Job, cell_timeout: float, starter: Start) -> tuple[int, str]:
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
        status = starter(spec, ["-m", "bmburst.cli.machine", str(clone), name])
        reason = Path(name) / REASON_FILE
        return status, reason.read_text(encoding="utf-8") if reason.exists() else ""


def _is_left(results: Results[Any], job: Job) -> bool:
    in_time = not job.deadline or time.time() < job.deadline
    return in_time and results.left(job.cells, again=job.again) > 0


def run_rank(folder: Path) -> None:
    """Run one rank of the job in a folder, from its start to its end."""
    job = Job.read(folder)
    device = _begin(folder, runtime=job.runtime, tensor=job.tensor)
    run: type[RankRun[Any]] = resolve_name(load_kind(job.kind).rank_run)  # after the start: it may import bmtrain
    run(job, device, folder).run()
    dist.destroy_process_group()  # skipped after a failure, when it would wait for stuck ranks


def _begin(folder: Path, *, runtime: str, tensor: int) -> torch.device:
    """Start torch.distributed, and BMTrain if requested, and return this rank's device."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {}
    if runtime == "bmtrain":
        start(seed=0, tensor=tensor)
        # A separate rendezvous: BMTrain uses the launcher's store.
        options |= {"init_method": (folder / "meeting").as_uri(), "rank": rank, "world_size": world}
    return start_ranks(**options)


class RankRun(ABC, Generic[C]):
    """One rank's part of the job. A subclass per kind of benchmark defines how to measure a cell."""

    def __init__(self, job: Job, device: torch.device, folder: Path) -> None:
        self.job, self.device, self.folder = job, device, folder
        self.cells = cast(tuple[C, ...], job.cells)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo")
        self.prepare()
        dist.all_reduce(torch.zeros(1, device=device))
        self.gauge = Gauge.begin(device)
        self.results = job.results()  # only rank 0 writes

    def prepare(self) -> None:
        """Create objects that all cells share, for example communicators. All ranks call it."""

    def takes_part(self, cell: C) -> bool:
        """Return whether this rank belongs to the ranks of a cell."""
        return self.rank < cell.ranks

    @abstractmethod
    def refusal(self, cell: C) -> str | None:
        """Return why the cell cannot run, as far as this is known before it starts, or None."""

    @abstractmethod
    def measure(self, cell: C) -> Row:
        """Measure a cell and return its row, without the status."""

    def run(self) -> None:
        """Measure the cells; rank 0 writes the file after each."""
        for cell in self.cells:
            decision = self._from_first(self._decide(cell) if self.rank == 0 else None)
            if decision == _STOP:
                break
            if decision == _SKIP:
                continue
            watchdog.beat()
            self._try(cell)

    def _from_first(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks. All ranks must call it."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def from_all(self, value: Any) -> list[Any]:
        """Return the values of all ranks. All ranks must call it."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def _decide(self, cell: C) -> str:
        if self.results.is_done(cell, again=self.job.again):
            return _SKIP
        if self.job.deadline and time.time() + self.results.kind.estimate(self.results, cell) > self.job.deadline:
            # A cheaper later cell may still fit, if any time is left.
            return _SKIP if time.time() < self.job.deadline else _STOP
        self.results.running = cell.key
        self.results.write(Path(self.job.output))
        return _RUN

    def _try(self, cell: C) -> None:
        begun = time.perf_counter()
        empty_cache()  # buffers that attention kept from the last cell must not count
        self.gauge.clear()
        takes_part = self.takes_part(cell)
        reason = next((r for r in self.from_all(self.refusal(cell) if takes_part else None) if r), None)
        if reason is not None:
            self._keep(cell, {"status": REFUSED, "reason": reason})
            return
        row = self._row(cell) if takes_part else {"status": OK}
        self._meet(cell, row)
        rows = self.from_all(row)
        broken = any(self.from_all(self._is_broken() if row["status"] == FAILED else False))
        self._keep(cell, _joined(rows[: cell.ranks]) | {"seconds": time.perf_counter() - begun})
        if broken:
            sys.exit(_LOST)

    def _row(self, cell: C) -> Row:
        try:
            return {"status": OK, **self.measure(cell)}
        except (UserError, KernelError, ImportError) as error:
            return {"status": REFUSED, "reason": one_line(error)}
        except torch.OutOfMemoryError as error:
            asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
            return {"status": FAILED, "reason": "out of memory" + (f" for {asked.group(1)} more" if asked else "")}
        except Exception as error:  # foreign code may raise anything; later cells still run
            return {"status": FAILED, "reason": f"{type(error).__name__}: {one_line(error)}"}

    def _meet(self, cell: C, row: Row) -> None:
        """Announce that this rank has finished the cell. If it failed, wait for the others.

        Ranks of one host signal by files, because a collective cannot time out on only one rank.

        Raises:
            RuntimeError: The others did not finish in time: they wait for this rank, and must be restarted.
        """
        signs = [self.folder / f"through.{self.cells.index(cell)}.{rank}" for rank in range(self.world)]
        signs[self.rank].touch()
        if row["status"] == OK:
            return
        begun = time.monotonic()
        while not all(sign.exists() for sign in signs):
            if time.monotonic() - begun > _PATIENCE:
                (self.folder / REASON_FILE).write_text(row["reason"], encoding="utf-8")
                raise RuntimeError(f"rank {self.rank}: {row['reason']}; the other ranks wait for it")
            time.sleep(0.02)

    def _is_broken(self) -> bool:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return True
        return False

    def _keep(self, cell: C, row: Row) -> None:
        if self.rank == 0:
            self.results.running = None
            self.results.put(cell, row)
            self.results.write(Path(self.job.output))
            print(row_line(self.results, cell), flush=True)


def _joined(rows: list[Row]) -> Row:
    """Return the row of the first failed rank, else of the first rank, with the largest memory of all ranks."""
    bad = next((row for status in (FAILED, REFUSED) for row in rows if row["status"] == status), None)
    if bad is not None:
        return bad
    peaks = [row["peak_memory_gib"] for row in rows if row.get("peak_memory_gib") is not None]
    return rows[0] | ({"peak_memory_gib": max(peaks)} if peaks else {})
