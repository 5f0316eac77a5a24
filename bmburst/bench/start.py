"""Start the ranks of a job, and start them again for the cells that are left when one cell has taken them down."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bmburst.bench.job import LAST_WORDS, AnyJob
from bmburst.bench.rows import FAILED, C, ResultFile
from bmburst.errors import UserError
from bmburst.runtime.launch import LaunchSpec, launch

# Exit statuses: bad input was explained already, and from 128 on a signal ended the run.
_BAD_INPUT, _SIGNALS = 2, 128


def run_job(job: AnyJob[C], *, ranks: int, header: dict[str, Any] | None, cell_timeout: float) -> int:
    """Measure the job's cells into its file and return an exit status; 0 also where cells failed, for rows say so.

    Args:
        job: What to measure.
        ranks: Ranks on this machine.
        header: Of this run; None goes on with the run that an earlier job began.
        cell_timeout: Seconds after which a cell that stands still is given up; 0: never.

    Raises:
        UserError: The file cannot be written, or the ranks cannot start.
    """
    output = Path(job.output)
    results = job.results().read(output)
    if header is not None:
        results.runs.append(header)
    results.running = None
    try:
        results.write(output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}\nfix: another file") from None
    if not _is_left(results, job):
        return 0
    tried = -1
    while True:
        status, words = _start(job, ranks, cell_timeout)
        results = job.results().read(output)
        if status in (0, _BAD_INPUT) or status >= _SIGNALS:
            return status
        tried, before = _tried(results, job), tried
        lost = next((cell for cell in job.cells if cell.key == results.running), None)
        if lost is not None:
            how = f"it took the ranks down: {words or f'exit status {status}'}"
            results.running = None
            results.put(lost, {"status": FAILED, "reason": how})
            results.write(output)
            print(f"{lost.key}: {how}", file=sys.stderr, flush=True)  # noqa: T201
        elif tried == before:
            return status  # not a cell's fault
        if not _is_left(results, job):
            return 0


def _start(job: AnyJob[C], ranks: int, cell_timeout: float) -> tuple[int, str]:
    """Run the ranks; return the exit status, and why a rank ended the run if one said so."""
    with tempfile.TemporaryDirectory(prefix="bmburst-bench-") as name:
        job.write(Path(name))
        spec = LaunchSpec(
            nproc=ranks,
            hang_timeout=cell_timeout,
            start_timeout=cell_timeout or None,
            host_runtime=job.runtime == "bmtrain",
        )
        status = launch(spec, ["-m", job.PROGRAM, name])
        words = Path(name) / LAST_WORDS
        return status, words.read_text(encoding="utf-8") if words.exists() else ""


def _tried(results: ResultFile[C], job: AnyJob[C]) -> int:
    return sum(results.is_done(cell, again=True) for cell in job.cells)


def _is_left(results: ResultFile[C], job: AnyJob[C]) -> bool:
    in_time = not job.deadline or time.time() < job.deadline
    return in_time and any(not results.is_done(cell, again=job.again) for cell in job.cells)
