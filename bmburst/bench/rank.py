"""What a rank of the benchmark does: every cell of its job, one after the other, rows by the first rank.

It is run as `python -m bmburst.bench.rank FOLDER`, where FOLDER holds the job. Ranks agree over gloo, beside what is
measured, so that they still can when a cell has failed.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bmburst.bench.accuracy import measure_accuracy
from bmburst.bench.cells import Cell, accuracy_ranks
from bmburst.bench.job import LAST_WORDS, Job
from bmburst.bench.memory import Gauge
from bmburst.bench.methods import LocalKernel, Method, Setting, all_methods
from bmburst.bench.party import Party
from bmburst.bench.patterns import pattern_of
from bmburst.bench.results import FAILED, OK, REFUSED, Results, Row
from bmburst.bench.speed import Effort, measure_speed, memory_refusal
from bmburst.bench.table import one_line
from bmburst.errors import UserError
from bmburst.runtime import watchdog
from bmburst_ops.errors import KernelError

_LOST = 3  # exit status of a rank whose GPU takes no more work
_PATIENCE = 20.0  # seconds that a rank that failed gives the others to be through too
_RUN, _SKIP, _STOP = "run", "skip", "stop"


def main(argv: list[str]) -> None:
    """Run one rank.

    Args:
        argv: The job's folder.
    """
    folder = Path(argv[0])
    job = Job.read(folder)
    device = _start(job, folder)
    _Bench(job, device, folder).run()
    dist.destroy_process_group()  # not after a failure: it would wait for ranks that are stuck


def _start(job: Job, folder: Path) -> torch.device:
    """Start torch.distributed, beside BMTrain where it is asked for, and return this rank's device."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    options: dict[str, Any] = {"device_id": device} if on_gpu else {}
    if job.runtime == "bmtrain":
        from bmburst.runtime import start

        start(seed=0)
        # A meeting place of its own: the launcher's store is BMTrain's.
        options |= {"init_method": (folder / "meeting").as_uri(), "rank": rank, "world_size": world}
    dist.init_process_group(backend, **options)
    return device


class _Bench:
    """One rank's part of the job."""

    def __init__(self, job: Job, device: torch.device, folder: Path) -> None:
        self.job, self.device, self.folder = job, device, folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo")
        self.kernel = LocalKernel(job.kernel)
        self.methods = all_methods(device.type)
        self.parties = {size: self._party(size) for size in accuracy_ranks(self.world)}
        dist.all_reduce(torch.zeros(1, device=device))
        self.gauge = Gauge.begin(device)
        self.output = Path(job.output)
        self.results = Results.read(self.output) if self.rank == 0 else Results()

    def run(self) -> None:
        """Measure the cells; the first rank writes the file after each."""
        for cell in self.job.cells:
            decision = self._from_first(self._decide(cell) if self.rank == 0 else None)
            if decision == _STOP:
                break
            if decision == _SKIP:
                continue
            watchdog.beat()
            self._try(cell)

    def _decide(self, cell: Cell) -> str:
        if self.results.is_done(cell, again=self.job.again):
            return _SKIP
        if self.job.deadline and time.time() + self.results.estimate(cell) > self.job.deadline:
            # A cheaper cell further on may still fit, if there is any time at all.
            return _SKIP if time.time() < self.job.deadline else _STOP
        self.results.running = cell.key
        self.results.write(self.output)
        return _RUN

    def _try(self, cell: Cell) -> None:
        begun = time.perf_counter()
        self.gauge.clear()
        method, party = self.methods[cell.method], self.parties[cell.ranks]
        refusals = self._from_all(None if party is None else self._refusal(method, cell))
        reason = next((r for r in refusals if r), None)
        if reason is not None:
            self._keep(cell, {"status": REFUSED, "reason": reason})
            return
        row = {"status": OK} if party is None else self._measure(method, cell, party)
        self._meet(cell, row)
        rows = self._from_all(row)
        broken = any(self._from_all(self._is_broken() if row["status"] == FAILED else False))
        self._keep(cell, _joined(rows[: cell.ranks]) | {"seconds": time.perf_counter() - begun})
        if broken:
            sys.exit(_LOST)

    def _meet(self, cell: Cell, row: Row) -> None:
        """Say that this rank is through with the cell, and if it failed make sure that the others are.

        By files, for ranks of one host: no collective gives up early on one rank alone.

        Raises:
            RuntimeError: This rank failed and the others wait for it inside the cell: the run must end and begin anew.
        """
        signs = [self.folder / f"through.{self.job.cells.index(cell)}.{rank}" for rank in range(self.world)]
        signs[self.rank].touch()
        if row["status"] == OK:
            return
        begun = time.monotonic()
        while not all(sign.exists() for sign in signs):
            if time.monotonic() - begun > _PATIENCE:
                (self.folder / LAST_WORDS).write_text(row["reason"], encoding="utf-8")
                raise RuntimeError(f"rank {self.rank}: {row['reason']}; the other ranks wait for it")
            time.sleep(0.02)

    def _refusal(self, method: Method, cell: Cell) -> str | None:
        return method.refusal(cell) or memory_refusal(method, cell, self.gauge)

    def _measure(self, method: Method, cell: Cell, party: Party) -> Row:
        setting = Setting(
            party=party, kernel=self.kernel, kernel_name=self.job.kernel, deterministic=self.job.deterministic
        )
        try:
            if cell.suite == "accuracy":
                found = measure_accuracy(method, cell, setting)
            else:
                found = measure_speed(method, cell, setting, self.gauge, self._effort())
        except (UserError, KernelError, ImportError) as error:
            return {"status": REFUSED, "reason": _words(error)}
        except torch.OutOfMemoryError:
            return {"status": FAILED, "reason": "out of memory"}
        except Exception as error:  # a method of others may fail in any way, and the next cell is none of its business
            return {"status": FAILED, "reason": f"{type(error).__name__}: {_words(error)}"}
        return {"status": OK, "layout": method.layout(cell), "kernel": self._kernel_name(cell), **found}

    def _effort(self) -> Effort:
        trace = Path(self.job.trace) if self.job.trace else None
        return Effort(repeats=self.job.repeats, seconds=self.job.cell_seconds, trace=trace)

    def _kernel_name(self, cell: Cell) -> str:
        dtype: torch.dtype = getattr(torch, cell.dtype)
        q, k = (torch.empty(1, 1, h, cell.head_dim, dtype=dtype, device=self.device) for h in (1, 1))
        return self.kernel.name(q, k, pattern_of(cell.mask, cell.tokens))

    def _is_broken(self) -> bool:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return True
        return False

    def _keep(self, cell: Cell, row: Row) -> None:
        if self.rank == 0:
            self.results.running = None
            self.results.put(cell, row)
            self.results.write(self.output)
            print(one_line(cell, self.results.rows[cell.key]), flush=True)  # noqa: T201  # progress, for the user

    def _party(self, size: int) -> Party | None:
        """Return the party of the first `size` ranks; None where this rank is not in it. All ranks call it."""
        group = dist.group.WORLD if size == self.world else dist.new_group(list(range(size)))
        if self.rank >= size:
            return None
        assert group is not None  # this rank is in it
        return Party(group=group, rank=self.rank, size=size, device=self.device, is_world=size == self.world)

    def _from_first(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def _from_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values


def _joined(rows: list[Row]) -> Row:
    """Return the first rank's row, or that of the first rank that failed; memory is that of the rank with most."""
    bad = next((row for status in (FAILED, REFUSED) for row in rows if row["status"] == status), None)
    if bad is not None:
        return bad
    peaks = [row["peak_memory_gib"] for row in rows if row.get("peak_memory_gib") is not None]
    return rows[0] | ({"peak_memory_gib": max(peaks)} if peaks else {})


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    main(sys.argv[1:])
