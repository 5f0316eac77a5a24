"""Runs BMTrain's own test files on the host runtime: `bmburst bench bmtrain-tests CLONE`.

CLONE is a clone of https://github.com/OpenBMB/BMTrain at the tag v1.0.1. Each file runs with `bmburst launch` in a copy
of the clone's folder `tests`, on the number of ranks in its `test_all.py`, without GPUs.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.report import markdown_table, recorded
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.amounts import GIB
from bmburst.errors import UserError

_ROOT = Path(__file__).parents[1]
_RUNNER = "test_all.py"  # BMTrain's script, which lists most files with their ranks
_UNLISTED = {"grad_accu": 1, "inspector_hidden": 4, "store": 4}  # files that it does not list
_ENDED = 124  # status of a file that was ended after --timeout, as in timeout(1)
PASSED, FAILED, LATE, SKIPPED = "passes", "fails", "not done", "not run"
# Bytes that files with large models need. In "training", each of 4 ranks has 0.55 billion parameters and their moments.
_MEMORY = {"training": 40 * GIB}
# Reasons for files that fail on any machine, found by reading the tests and BMTrain 1.0.1.
KNOWN = {
    "grad_accu": "BMTrain 1.0.1 has no `CheckpointBlockContext`, on GPUs neither",
    "store": "BMTrain 1.0.1 has no `allgather_object`, on GPUs neither",
    "optim_state": "BMTrain 1.0.1 gives `torch.optim.Adam.state_dict` an argument that it does not take, on GPUs too",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one test file."""

    name: str  # name of the file, without "test_" and ".py"
    ranks: int
    result: str  # `PASSED`, `FAILED`, `LATE` or `SKIPPED`
    seconds: float
    why: str = ""  # why it did not pass; empty if it passed


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("clone", type=Path, help="clone of BMTrain")
    parser.add_argument("--only", nargs="+", metavar="NAME", help='files to run, such as "optim" (default: all)')
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="time limit of a file in seconds (default: 1800)"
    )


def _measure(options: argparse.Namespace) -> Measured:
    """Run the files of a clone; see `RowBenchmark`."""
    files = find_files(options.clone, options.only)
    outcomes = (run_file(options.clone, name, ranks, options.timeout) for name, ranks in files.items())
    return {}, (asdict(outcome) for outcome in outcomes)


def find_files(clone: Path, only: Sequence[str] | None = None) -> dict[str, int]:
    """Return the number of ranks of each test file of a clone, by name in alphabetical order.

    Without `only`, these are all files.

    Raises:
        UserError: The folder is not a clone of BMTrain, or a file does not exist.
    """
    runner = clone / "tests" / _RUNNER
    if not runner.is_file():
        raise UserError(
            f"{clone} is not a clone of BMTrain: tests/{_RUNNER} is missing\n"
            "fix: git clone --branch v1.0.1 https://github.com/OpenBMB/BMTrain"
        )
    named = {name: int(ranks) for name, ranks in re.findall(r'\("(\w+)", (\d+)\)', runner.read_text())}
    names = sorted(path.stem.removeprefix("test_") for path in runner.parent.glob("test_*.py") if path.name != _RUNNER)
    unknown = sorted({*(only or ())} - {*names})
    if unknown:
        raise UserError(f"BMTrain has no test {', '.join(unknown)}\nallowed: {' '.join(names)}\nfix: name one of these")
    return {name: (named | _UNLISTED).get(name, 1) for name in names if not only or name in only}


def run_file(clone: Path, name: str, ranks: int, timeout: float, memory: Mapping[str, int] = _MEMORY) -> Outcome:
    """Run one test file on the host runtime.

    It is ended after `timeout` seconds; `memory` are the bytes that files need on all ranks.
    """
    needed = memory.get(name, 0)
    if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        why = f"its models need about {needed // GIB} GiB on {ranks} ranks of one host"
        return Outcome(name=name, ranks=ranks, result=SKIPPED, seconds=0, why=why)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory(prefix="bmtrain-tests-") as scratch:
        folder = shutil.copytree(clone / "tests", Path(scratch) / "tests")
        command = [sys.executable, "-m", "bmburst", "launch", "--nproc", str(ranks), "--", f"test_{name}.py"]
        log = Path(scratch) / "log"
        started = time.perf_counter()
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # the launcher ends its ranks
                process.wait(60)
                status = _ENDED
        seconds = time.perf_counter() - started
        return judge(name, ranks, status, seconds, log.read_text())


def judge(name: str, ranks: int, status: int, seconds: float, output: str) -> Outcome:
    """Return the outcome of a finished file.

    `output` is standard output and standard error.
    """
    if status == 0:
        return Outcome(name=name, ranks=ranks, result=PASSED, seconds=seconds)
    if status == _ENDED:
        why = f"was ended after {seconds:.0f} seconds: its tensors are of a size for GPUs"
        return Outcome(name=name, ranks=ranks, result=LATE, seconds=seconds, why=why)
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*$", output, re.M)
    last = errors[-1] if errors else (output.strip().splitlines() or ["nothing was printed"])[-1]
    shown = re.sub(r" \(/\S+\)", "", last).replace("|", "\\|")[:160]
    why = f"{KNOWN[name]}: `{shown}`" if name in KNOWN else f"`{shown}`"
    return Outcome(name=name, ranks=ranks, result=FAILED, seconds=seconds, why=why)


def table(found: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    outcomes, machine = [Outcome(**row) for row in found["rows"]], found["machine"]
    count = {result: sum(o.result == result for o in outcomes) for result in (PASSED, FAILED, LATE, SKIPPED)}
    lines = [
        recorded(machine),
        "",
        f"{len(outcomes)} files of BMTrain 1.0.1, unmodified: {count[PASSED]} pass, {count[FAILED]} fail, "
        f"{count[LATE]} were not done in time, {count[SKIPPED]} need more memory than this host has.",
        "",
    ]
    cells = ((f"`test_{o.name}.py`", o.ranks, o.result, f"{o.seconds:.0f}", o.why) for o in outcomes)
    return "\n".join([*lines, *markdown_table(["file", "ranks", "result", "seconds", "why"], cells)])


BENCHMARKS = (
    RowBenchmark(
        name="bmtrain-tests", about=__doc__, configure=_configure, measure=_measure, table=table,
        line=lambda row: f"{row['name']}: {row['result']} {row['why']}",
    ),
)  # fmt: skip
