"""Interrupts a run (kill, SIGTERM, SIGSTOP), resumes it, and compares it with an undisturbed run."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from benchmarks.faults import programs
from benchmarks.faults.programs import JOB, STEPS, Fault, Program, RunWatch, UndisturbedRun, base_of, wait_for
from bmburst.launch.rank import STOPPED

_DISK_MIB = 64
LIMIT = 90.0  # seconds until all processes of a killed run are gone; added to the expected time of other runs


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """The outcome of a fault."""

    fault: Fault
    seconds: float  # from the fault until no process of the run was left
    survivors: int = 0  # processes that had to be killed after the time limit
    differs: bool = False  # whether a loss, an evaluation or a final weight differs from the undisturbed run
    unseen: bool = False  # for a flip: whether the run that read the file again reported nothing
    problems: tuple[str, ...] = ()  # other errors
    left: str = ""  # what the disturbed run left or printed, for readers of the JSON file

    @property
    def is_good(self) -> bool:
        """Whether there is no error of any kind."""
        return not (self.survivors or self.differs or self.unseen or self.problems)


ReportOutcome = Callable[[FaultOutcome], None]


class Workspace:
    """A scratch folder, and the undisturbed runs that others are compared with.

    The folder is empty at first. At the end of the `with` block its mounts are removed and all runs are killed.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._text = programs.write_training_text(folder / "text.txt")
        self._count, self._lock = 0, Lock()
        self._bases: dict[int, UndisturbedRun] = {}
        self._mounts: list[Path] = []
        self.is_over = False

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for place in self._mounts:
            subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)

    def end(self) -> None:
        """Refuse to start further runs, and kill the running ones."""
        self.is_over = True
        with self._lock:  # `program` is not starting a run
            programs.kill_all(f"{self.mark}/")

    def words(self, run: Path, *, fresh: bool, seed: int = 0) -> list[str]:
        """Return the arguments of `bmburst` that start a run or resume it."""
        if not fresh:
            return ["train", "--resume", "--output", str(run)]
        return ["train", *JOB, "--data", str(self._text), "--seed", str(seed), "--output", str(run)]

    def program(self, *commands: tuple[Sequence[str], Sequence[str]]) -> Program:
        """Start a run with its own scratch folder; RuntimeError in a closed workspace."""
        with self._lock:
            if self.is_over:
                raise RuntimeError("the harness was ended")
            self._count += 1
            return Program(commands, self.folder / f"program{self._count}", f"{self.mark}/{self._count}")

    def finished(self, program: Program) -> None:
        """Remove the output and temporary files of a program."""
        shutil.rmtree(program.scratch.parent, ignore_errors=True)

    def base(self, seed: int = 0) -> UndisturbedRun:
        """Return the undisturbed run of a seed, run by the first call; RuntimeError, with its output, if it fails."""
        with self._lock:
            known = self._bases.get(seed)
        if known is not None:
            return known
        run = self.folder / f"base{seed}" / "run"
        watch = RunWatch(run)
        program = self.program(([], [*self.words(run, fresh=True, seed=seed), "--keep-checkpoints", str(STEPS)]))
        timing = watch.measure(program)
        self.require_success(program)
        self._bases[seed] = base_of(run, timing)
        self.say(f"undisturbed run of seed {seed}: {timing.total:.1f} s, first step after {timing.start:.1f} s")
        return self._bases[seed]

    def require_success(self, program: Program) -> None:
        """Wait for the end of an undisturbed run; RuntimeError, with its output, if it failed."""
        left = program.end(LIMIT)
        if any(program.statuses) or left:
            raise RuntimeError(f"the undisturbed run failed, {left} processes remain:\n{program.stderr}")
        self.finished(program)

    def copy_of_base(self, place: Path, checkpoints: Sequence[int]) -> Path:
        """Copy the undisturbed run of seed 0 and its tokens to a new folder, with some of its checkpoints."""
        run = place / "run"
        shutil.copytree(self.base().folder.parent, place)
        for path in run.glob("checkpoints/step-*"):
            if int(path.name[5:]) not in checkpoints:
                shutil.rmtree(path)
        return run

    def disk(self, place: Path) -> bool:
        """Mount a small tmpfs; return False without the permission to mount."""
        place.mkdir()
        size = f"size={_DISK_MIB}m"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "none", str(place)], capture_output=True, check=False
        )
        if done.returncode == 0:
            self._mounts.append(place)
        return done.returncode == 0


class DisturbedRun:
    """A run that is disturbed and resumed repeatedly; when complete, it is compared and started again.

    `report` receives each outcome, after the following start has shown the effect of the fault.
    """

    options: tuple[str, ...] = ()

    def __init__(self, bench: Workspace, place: Path, report: ReportOutcome) -> None:
        self.bench, self.place, self.run = bench, place, place / "run"
        place.mkdir(parents=True, exist_ok=True)
        self._report = report
        self._pending: FaultOutcome | None = None

    def start(self, *, fresh: bool) -> Program:
        """Start the run."""
        return self.bench.program(([], [*self.bench.words(self.run, fresh=fresh), *self.options]))

    @property
    def base(self) -> UndisturbedRun:
        """The undisturbed run to compare with."""
        return self.bench.base()

    def inject(self, fault: Fault, program: Program) -> None:
        """Inject the fault."""
        raise NotImplementedError

    def undo(self, fault: Fault) -> None:
        """Remove the effect of the fault before the next start."""

    def judge(self, fault: Fault, program: Program) -> list[str]:
        """Return the errors of the disturbed run, without tracebacks and checks common to all kinds."""
        raise NotImplementedError

    def limit(self, fault: Fault) -> float:  # noqa: ARG002
        """Return the seconds after a fault within which all processes must be gone."""
        return LIMIT

    def before(self, fault: Fault) -> None:
        """Prepare a start."""

    def point(self, fault: Fault) -> None:
        """Start or resume the run, and inject a fault.

        Delays are fractions of the times of the undisturbed run. If the run finishes before the fault, it is started
        again, with a shorter delay.
        """
        for share in (1.0, 0.2):
            if self._is_met(fault, share, is_last=False):
                return
        self._is_met(fault, 0.0, is_last=True)

    def _is_met(self, fault: Fault, share: float, *, is_last: bool) -> bool:
        """Inject a fault; return False if the run finished before, so that the fault must be tried again."""
        done = programs.newest(self.run)
        if done == STEPS:
            self._settle(complete=True)
        if done in (0, STEPS):
            self._wipe()
        watch = RunWatch(self.run)
        self.before(fault)
        program = self.start(fresh=not self.run.exists())
        try:
            met = self._until(fault, share, watch, program)
            since = time.monotonic()
            if met:
                self.inject(fault, program)
            left = program.end(self.limit(fault))
            seconds = time.monotonic() - since
        finally:
            programs.kill_all(f"{program.mark}/")
            self.undo(fault)
        if not met and not is_last and not any(program.statuses):
            self.bench.finished(program)
            return False
        found = programs.left_in(self.run)
        problems = [] if met else [f"over before its moment: {program.statuses}: {program.last_lines}"]
        problems += self.judge(fault, program) if met else []
        problems += ["traceback: " + program.last_lines] if "Traceback" in program.stderr else []
        if fault.target != "all" and any(program.scratch.glob("bmburst-launch-*")):
            problems.append("the launcher's folder remains")
        if newest_lost := watch.done if programs.newest(self.run) < watch.done else 0:
            problems.append(f"the checkpoint of step {newest_lost} is lost")
        self._settle(complete=False)
        self._pending = FaultOutcome(fault, seconds, left, problems=tuple(problems), left=found)
        self.bench.finished(program)
        return True

    def finish(self) -> None:
        """Resume the run to its end, and compare it."""
        if self._pending is None:
            return
        fresh = programs.newest(self.run) == 0
        if fresh:
            self._wipe()
        program = self.start(fresh=fresh)
        left = program.end(LIMIT + 5 * self.base.timing.total)
        if left or any(program.statuses):
            self._fault_of_pending(f"the run does not resume: {program.statuses}, {left} left: {program.last_lines}")
        self._settle(complete=True)
        self.bench.finished(program)

    def _until(self, fault: Fault, share: float, watch: RunWatch, program: Program) -> bool:
        """Wait for a fault's moment and `share` of its delay; return whether the run is still alive."""
        timing = self.base.timing
        if fault.moment != "start" and not wait_for(watch.due(fault.moment, fault), program):
            return False
        time.sleep(share * fault.draw("delay") * getattr(timing, fault.moment))
        return program.is_running

    def _settle(self, *, complete: bool) -> None:
        """Compare the run, and report the previous fault."""
        difference = self.base.difference(self.run, complete=complete)
        if difference:
            self._fault_of_pending(f"differs: {difference}", differs=True)
            self._wipe()
        if self._pending is not None and not self.bench.is_over:  # otherwise the workspace killed the run
            self._report(self._pending)
        self._pending = None

    def _fault_of_pending(self, problem: str, *, differs: bool = False) -> None:
        if self._pending is not None:
            problems = (*self._pending.problems, problem)
            self._pending = replace(self._pending, differs=differs or self._pending.differs, problems=problems)

    def _wipe(self) -> None:
        for path in self.place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class KilledRun(DisturbedRun):
    """A run that is killed by SIGKILL."""

    def inject(self, fault: Fault, program: Program) -> None:
        """Kill the target; wait for a rank that has not started yet."""
        _signal(program, fault.target, signal.SIGKILL)

    def judge(self, fault: Fault, program: Program) -> list[str]:
        """See `DisturbedRun.judge`: a killed launcher prints nothing; the message names a killed rank."""
        (status,) = program.statuses
        if fault.target in ("launcher", "all"):
            return [] if status in (-signal.SIGKILL, 0) else [f"status {status}: {program.last_lines}"]
        is_named = f"{fault.target} was killed by SIGKILL" in program.stderr
        return [] if (status == 1 and is_named) or status == 0 else [f"status {status}: {program.last_lines}"]


class TerminatedRun(DisturbedRun):
    """A run that receives SIGTERM."""

    def inject(self, fault: Fault, program: Program) -> None:
        """Send SIGTERM."""
        _signal(program, fault.target, signal.SIGTERM)

    def judge(self, fault: Fault, program: Program) -> list[str]:
        """See `DisturbedRun.judge`: during training the run saves a checkpoint and stops; before that it ends."""
        (status,) = program.statuses
        allowed = {0, STOPPED, 128 + signal.SIGTERM if fault.target == "launcher" else 1}
        if fault.target == "launcher" and fault.moment == "start":
            allowed.add(-signal.SIGTERM)  # its signal handler may not be installed yet
        if fault.target == "launcher" and programs.newest(self.run) == STEPS:
            allowed.add(-signal.SIGTERM)  # the run is complete, and the handler was removed
        return [] if status in allowed else [f"status {status}: {program.last_lines}"]


class StoppedRun(DisturbedRun):
    """A run in which one rank receives SIGSTOP."""

    @property
    def patience(self) -> int:
        """The hang timeout in seconds, longer than the start of the run."""
        return max(5, round(2 * self.bench.base().timing.start))

    @property
    def options(self) -> tuple[str, ...]:  # type: ignore[override]
        """The option that sets the hang timeout."""
        return ("--hang-timeout", str(self.patience))

    def inject(self, fault: Fault, program: Program) -> None:
        """Send SIGSTOP."""
        _signal(program, fault.target, signal.SIGSTOP)

    def limit(self, fault: Fault) -> float:  # noqa: ARG002
        """See `DisturbedRun.limit`: the hang timeout, and the time to end."""
        return self.patience + LIMIT

    def judge(self, fault: Fault, program: Program) -> list[str]:
        """See `DisturbedRun.judge`: the first rank in the message is the stopped one."""
        (status,) = program.statuses
        named = re.search(r"\brank \d+", program.stderr)
        if status == 0:
            return []
        if named is None or status != 1:
            return [f"status {status}: {program.last_lines}"]
        return [] if named[0] == fault.target else [f"blames {named[0]}: {_line_with(program.stderr, named[0])}"]


def _signal(program: Program, target: str, signum: signal.Signals) -> None:
    """Send a signal to the target; wait for a rank that has not started yet."""
    found: list[int] = []

    def has_started() -> bool:
        found[:] = program.of_target(target)
        return bool(found)

    wait_for(has_started, program)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _line_with(text: str, words: str) -> str:
    return next((line[:200] for line in text.splitlines() if words in line), "")
