"""Injects faults into small training runs and writes a record: `python -m benchmarks.faults --output FILE.md`.

Faults are kill -9, SIGTERM, SIGSTOP, a full disk, flipped bits, two runs in one folder, and lost or slow nodes. Each
run is then resumed and compared with an undisturbed run. The faults depend only on `--seed`, `--kinds` and `--points`;
`--list` prints them. The record and its JSON file are written after each outcome; `--resume` continues with the missing
ones. Requires Linux. As root, the full disk is a small tmpfs (else a limit on the size of files), and nodes are network
namespaces (else faults of nodes are skipped, with a note in the record). Exit status: 0 if all outcomes are good, 1 if
not, 2 for invalid options.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any

from benchmarks import netns
from benchmarks.faults.inject import DisturbedRun, FaultOutcome, Workspace
from benchmarks.faults.kinds import CHAINS, KINDS, SINGLE, SingleFault, faults, nodes
from benchmarks.faults.programs import Fault
from bmburst.outputs import replacing

_CLONE_NEWNS = 0x00020000  # linux/sched.h


class OutcomeLog:
    """Collects outcomes and writes them to the record and its JSON file.

    Without an `output`, nothing is written.
    """

    def __init__(self, facts: dict[str, Any], planned: Sequence[Fault], output: Path | None) -> None:
        self.outcomes: list[FaultOutcome] = []
        self.facts, self._planned, self._output = facts, planned, output
        self._began, self._minutes, self._lock = time.monotonic(), float(facts["minutes"]), Lock()

    def add(self, outcome: FaultOutcome) -> None:
        """Add an outcome, print it, and write both files."""
        with self._lock:
            self.outcomes.append(outcome)
            state = "good" if outcome.is_good else f"WRONG {'differs ' * outcome.differs}{'unseen ' * outcome.unseen}"
            shown = "; ".join((*outcome.problems, *([f"{outcome.survivors} survive"] if outcome.survivors else [])))
            self.say(f"{outcome.fault}: {outcome.seconds:.1f} s, {state} {shown}")
            self.write()

    def note(self, line: str) -> None:
        """Add a note to the record, for example on skipped faults."""
        with self._lock:
            self.say(line)
            self.facts["notes"] = [*self.facts["notes"], line]

    def say(self, line: str) -> None:
        """Print a line with the minutes since the start."""
        print(f"[{(time.monotonic() - self._began) / 60:5.1f} min] {line}", flush=True)

    def write(self) -> None:
        """Write the record and the JSON file, each atomically."""
        if self._output is None:
            return
        self.facts["minutes"] = self._minutes + (time.monotonic() - self._began) / 60
        data = {"facts": self.facts, "outcomes": [asdict(outcome) for outcome in self.outcomes]}
        for path, text in (
            (self._output.with_suffix(".json"), json.dumps(data, indent=1) + "\n"),
            (self._output, record(self.facts, self._planned, self.outcomes)),
        ):
            with replacing(path) as partial:
                partial.write_text(text)

    def go_on(self) -> list[Fault]:
        """Read outcomes of the planned faults at this commit from the JSON file, and return the remaining faults."""
        path = None if self._output is None else self._output.with_suffix(".json")
        if path is not None and path.is_file():
            data = json.loads(path.read_text())
            if data["facts"]["commit"] == self.facts["commit"]:
                known = map(outcome_of, data["outcomes"])
                self.outcomes = [outcome for outcome in known if outcome.fault in set(self._planned)]
                self.facts["notes"], self._minutes = data["facts"]["notes"], data["facts"]["minutes"]
        done = {outcome.fault for outcome in self.outcomes}
        return [fault for fault in self._planned if fault not in done]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parser().parse_args(arguments)
    kinds = args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        print(f"--kinds {args.kinds}: unknown {', '.join(unknown)}\nallowed: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    planned = faults(args.seed, kinds, args.points)
    if args.list:
        print("\n".join(map(str, planned)))
        return 0
    from benchmarks.engine.machine import describe_run

    command = ["python", "-m", "benchmarks.faults", *(sys.argv[1:] if arguments is None else arguments)]
    facts = describe_run(command, "cpu", 2) | {"cores": os.cpu_count(), "minutes": 0.0, "notes": []}
    output = args.output or _default_output(facts["device"])
    output.parent.mkdir(parents=True, exist_ok=True)
    log = OutcomeLog(facts, planned, output)
    left = log.go_on() if args.resume else list(planned)
    signal.signal(signal.SIGTERM, _leave)
    if not _own_mounts():
        log.say("without a private mount namespace, mounts remain if this process is killed by SIGKILL")
    folder = Path(tempfile.mkdtemp(prefix="bmburst-faults-", dir=args.scratch))
    try:
        with Workspace(folder, log.say) as bench:
            inject_faults(bench, left, log, jobs=args.jobs, seconds=60 * args.minutes)
    except KeyboardInterrupt:
        log.say("interrupted; --resume continues")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        log.write()
    print(table(planned, log.outcomes))
    print(output)
    return int(not all(outcome.is_good for outcome in log.outcomes) or len(log.outcomes) < len(planned))


def inject_faults(bench: Workspace, planned: Sequence[Fault], log: OutcomeLog, *, jobs: int, seconds: float) -> None:
    """Inject faults, `jobs` at a time, until all are done or the time is over.

    Faults of a kind in `CHAINS` disturb the same run one after another; there is one such run per job.

    Raises:
        RuntimeError: An undisturbed run failed.
    """
    until = time.monotonic() + seconds
    of_kind = {kind: [fault for fault in planned if fault.kind == kind] for kind in KINDS}
    if planned:
        bench.base()
    if of_kind["pair"]:
        bench.base(1)
    tasks: list[Callable[[], None]] = []
    for kind, make in CHAINS.items():
        for job in range(min(jobs, len(of_kind[kind]))):
            place = bench.folder / f"{kind}{job}"
            tasks.append(partial(_chain_at, make, bench, place, of_kind[kind][job::jobs], log, until))
    for kind, single in SINGLE.items():
        for number, fault in enumerate(of_kind[kind]):
            tasks.append(partial(_single, single, bench, bench.folder / f"{kind}{number}", fault, log, until))
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            bench.end()
            raise
    if of_kind["node"] and time.monotonic() < until:
        if (problem := netns.refusal()) is not None:
            log.note(f"Lost and slow nodes are skipped: {problem}.")
            return
        with nodes(bench, bench.folder / "nodes", log.add) as chain:
            _chain(chain, of_kind["node"], until)


def _chain_at(
    make: type[DisturbedRun], bench: Workspace, place: Path, planned: Sequence[Fault], log: OutcomeLog, until: float
) -> None:
    _chain(make(bench, place, log.add), planned, until)


def _chain(chain: DisturbedRun, planned: Sequence[Fault], until: float) -> None:
    for fault in planned:
        if time.monotonic() < until:
            chain.point(fault)
    chain.finish()


def _single(single: SingleFault, bench: Workspace, place: Path, fault: Fault, log: OutcomeLog, until: float) -> None:
    if time.monotonic() < until:
        outcome = single(bench, fault, place)
        if not bench.is_over:  # otherwise the workspace killed the run
            log.add(outcome)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    counts = ", ".join(f"{name} {kind.points}" for name, kind in KINDS.items())
    parser.add_argument("--points", type=int, metavar="N", help=f"faults of each kind; default: {counts}")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help=f"default: {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0, help="determines the faults; default 0")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no fault after this time; default 600")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default 2")
    parser.add_argument("--output", type=Path, help="the record; default benchmarks/results/faults_<machine>.md")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files; default: the system's")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes in the JSON file beside the record")
    parser.add_argument("--list", action="store_true", help="print the faults and do nothing")
    return parser


def _default_output(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return Path(__file__).parents[1] / "results" / f"faults_{name}.md"


def _own_mounts() -> bool:
    """Make mounts private to this process, so that the kernel removes them when it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: mounts do not propagate to the parent namespace
    return bool(libc.mount(b"none", b"/", None, private, None) == 0)


def _leave(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def outcome_of(values: Mapping[str, Any]) -> FaultOutcome:
    """Return an outcome from its JSON object."""
    fault, problems = Fault(**values["fault"]), tuple(values["problems"])
    return FaultOutcome(**{**values, "fault": fault, "problems": problems})


def table(planned: Sequence[Fault], outcomes: Sequence[FaultOutcome]) -> str:
    """Return the results as a Markdown table with one row per kind."""
    lines = [
        "| fault | points | tried | survivors | runs that differ | flips unseen | other problems | longest end (s) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(fault.kind for fault in planned):
        those = [outcome for outcome in outcomes if outcome.fault.kind == name]
        cells = [
            KINDS[name].title,
            sum(fault.kind == name for fault in planned),
            len(those),
            sum(outcome.survivors for outcome in those),
            sum(outcome.differs for outcome in those),
            sum(outcome.unseen for outcome in those) if name == "flip" else "",
            sum(bool(outcome.problems) for outcome in those),
            f"{max((outcome.seconds for outcome in those), default=0.0):.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def record(facts: Mapping[str, Any], planned: Sequence[Fault], outcomes: Sequence[FaultOutcome]) -> str:
    """Return the whole record in Markdown.

    `facts` are those of `benchmarks.engine.machine.describe_run`, with `cores`, `minutes` and `notes`.
    """
    software = f"Python {facts['python']}, torch {facts['torch']}, bmburst {facts['bmburst']}"
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    notes = [f"- {note}" for note in facts["notes"]]
    lines = [
        "# Faults",
        "",
        f"{facts['date']}, {facts['device']} ({facts['cores']} cores), commit {facts['commit']}; {software}. "
        f"{facts['minutes']:.0f} minutes.",
        "",
        "```",
        f"$ {facts['command']}",
        "```",
        "",
        _READING,
        "",
        *([*notes, ""] if notes else []),
        table(planned, outcomes),
        "",
        "## Where kill -9 fell",
        "",
        *_spread(outcomes),
        "",
        "## What was not as it should be",
        "",
        *([f"- {_errors(outcome)}" for outcome in bad] or ["Nothing."]),
    ]
    return "\n".join(lines) + "\n"


_READING = """A run of 12 steps on 2 ranks of the host runtime, with an evaluation every 4 steps and a checkpoint
every 3, is disturbed, goes on with `--resume` (or begins again where it had no checkpoint), is disturbed again and so
on until it is complete. Its losses, bits per byte, learning rates, gradient norms and evaluations are compared with
those of an undisturbed run after every fault, and the files of its last checkpoint at its end: every bit is the same or
the run differs. Survivors are processes of the run that are still there when it should have ended. The longest end is
the time from the fault until no process is left; of flips, pairs and slow nodes it is that of the whole run. A flip is
unseen when a run that reads the file again neither refuses nor says a word. Beside this file lies each point in
JSON."""


def _spread(outcomes: Sequence[FaultOutcome]) -> list[str]:
    """Return a list with the number of kills by moment and state of the checkpoint folder."""
    places: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.fault.kind == "kill":
            place = f"{outcome.fault.moment}: {outcome.left}"
            places[place] = places.get(place, 0) + 1
    return [f"- {place}: {count}" for place, count in sorted(places.items())] or ["No point."]


def _errors(outcome: FaultOutcome) -> str:
    """Return a fault and the errors of its outcome in one line."""
    wrong = [
        f"{outcome.survivors} survivors" if outcome.survivors else "",
        "differs" if outcome.differs else "",
        "unseen" if outcome.unseen else "",
        *outcome.problems,
    ]
    return f"{outcome.fault}: {'; '.join(filter(None, wrong))}"


if __name__ == "__main__":
    sys.exit(main())
