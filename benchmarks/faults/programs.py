"""Starts training runs, observes their progress by the files they write, and finds their processes."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS, EVAL_EVERY, CHECKPOINT_EVERY = 12, 4, 3
JOB = (
    *("--steps", str(STEPS), "--eval-every", str(EVAL_EVERY), "--checkpoint-every", str(CHECKPOINT_EVERY)),
    *("--nproc", "2", "--sequence-length", "48", "--batch-size", "2", "--eval-sequences", "3", "--sample-tokens", "0"),
    *("--data.held_out_fraction", "0.2", "--schedule.warmup_steps", "2", "--model.hidden_size", "16"),
    *("--model.intermediate_size", "24", "--model.num_layers", "2", "--model.num_heads", "2"),
    *("--model.num_kv_heads", "1"),
)
"""The options of the run except its text, seed and folder."""
_MARK = "BMBURST_FAULTS"  # environment variable of every process of a run; its value identifies harness and run
_COMPARED = ("step", "loss", "bits_per_byte", "lr", "grad_norm")
_POLL, _LONGEST = 0.001, 300.0  # seconds


def processes(mark: str) -> dict[int, int | None]:
    """Return the living processes whose mark has this prefix, as process id to rank; None if it has no rank."""
    wanted, found = f"{_MARK}={mark}".encode(), dict[int, int | None]()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            continue
        if not is_dead and any(word.startswith(wanted) for word in words):
            rank = [word[5:] for word in words if word.startswith(b"RANK=")]
            found[int(folder.name)] = int(rank[0]) if rank else None
    return found


def kill_all(mark: str) -> int:
    """Kill all processes whose mark has this prefix, for at most 30 seconds; return their initial number."""
    first = found = processes(mark)
    until = time.monotonic() + 30
    while found and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        found = processes(mark)
    return len(first)


class Program:
    """One start of a run: its launchers and all their processes.

    Args:
        commands: For each launcher, a command prefix and the arguments of `bmburst`, or `torchrun` and its arguments.
        place: Folder for output and temporary files of this start; it is deleted and created.
        mark: A unique name of this start.
    """

    def __init__(self, commands: Sequence[tuple[Sequence[str], Sequence[str]]], place: Path, mark: str) -> None:
        shutil.rmtree(place, ignore_errors=True)
        self.scratch = place / "scratch"
        self.scratch.mkdir(parents=True)
        self.mark, self._errors = mark, [place / f"stderr{number}" for number in range(len(commands))]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "BMBURST"))}
        environ |= {_MARK: f"{mark}/", "TMPDIR": str(self.scratch), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environ |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": f"{ROOT}:{environ.get('PYTHONPATH', '')}"}
        # If this process is killed, the kernel kills the launchers, and their ranks end with them.
        tied = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        self.started = time.monotonic()
        self.launchers = []
        for (before, words), errors in zip(commands, self._errors, strict=True):
            with errors.open("wb") as file:
                program = ["torch.distributed.run", *words[1:]] if words[0] == "torchrun" else ["bmburst", *words]
                command = [*tied, *before, sys.executable, "-m", *program]
                nothing = subprocess.DEVNULL
                begun = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=file, cwd=place, env=environ)
                self.launchers.append(begun)

    @property
    def is_running(self) -> bool:
        """Whether a launcher is alive."""
        return any(launcher.poll() is None for launcher in self.launchers)

    @property
    def statuses(self) -> list[int | None]:
        """Exit status of each launcher."""
        return [launcher.poll() for launcher in self.launchers]

    @property
    def stderr(self) -> str:
        """The standard error of launchers and ranks."""
        return "".join(file.read_text(errors="replace") for file in self._errors)

    @property
    def last_lines(self) -> str:
        """The last lines of `stderr`, joined into one line."""
        lines = [line.split("\r")[-1].strip() for line in self.stderr.splitlines()]
        return " / ".join(line for line in lines[-4:] if line)[-400:]

    def processes(self) -> dict[int, int | None]:
        """Return its living processes; see `processes`."""
        return processes(f"{self.mark}/")

    def of_target(self, target: str) -> list[int]:
        """Return the process ids of "launcher", "rank N" or "all"; empty if a rank has not started yet."""
        if target == "launcher":
            return [launcher.pid for launcher in self.launchers]
        found = self.processes()
        return [pid for pid, rank in found.items() if target in ("all", f"rank {rank}")]

    def end(self, limit: float) -> int:
        """Wait until no process is left, at most `limit` seconds; kill the rest and return their number."""
        until = time.monotonic() + limit
        while self.is_running and time.monotonic() < until:
            time.sleep(0.02)
        while self.processes() and time.monotonic() < until:
            time.sleep(0.02)
        left = kill_all(f"{self.mark}/")
        for launcher in self.launchers:
            launcher.wait()
        return left


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject."""

    kind: str  # a key of `benchmarks.faults.kinds.KINDS`
    moment: str  # one of the kind's moments
    target: str  # one of the kind's targets
    seed: int  # determines everything else, for example the delay after the moment: see `draw`

    def draw(self, what: str) -> float:
        """Return a pseudorandom number in [0, 1) from the seed and the name of a choice."""
        return random.Random(f"{self.seed} {what}").random()

    def __str__(self) -> str:
        return f"{self.kind}: {self.target} at {self.moment}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class RunTiming:
    """Seconds of the parts of an undisturbed run."""

    start: float  # from its start to its first step
    step: float  # between two steps
    evaluation: float  # from a step to the evaluation after it
    checkpoint: float  # from the creation of a checkpoint's folder to its last file
    rename: float  # from its last file to its final name
    total: float  # from its start to its end


class RunWatch:
    """Observes the progress of a run by its files; files from before its start are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.done = newest(folder)
        self._before = {path: _signature(path) for path in self._all()}

    def has_step(self, step: int) -> bool:
        """Whether a step's metrics are written."""
        return self._has_line("metrics.jsonl", step)

    def has_evaluation(self, step: int) -> bool:
        """Whether the evaluation after a step is written."""
        return self._has_line("evals.jsonl", step)

    def is_begun(self, step: int) -> bool:
        """Whether the checkpoint of a step is being written, or exists."""
        return self._is_new(self._checkpoint(step, hidden=True)) or self.is_there(step)

    def is_written(self, step: int) -> bool:
        """Whether the last file of the checkpoint is written."""
        return self._is_new(self._checkpoint(step, hidden=True) / "state.json") or self.is_there(step)

    def is_there(self, step: int) -> bool:
        """Whether the checkpoint has its final name."""
        return self._is_new(self._checkpoint(step, hidden=False))

    def due(self, moment: str, fault: Fault) -> Callable[[], bool]:
        """Return the condition of a fault's moment: the seed selects one of the remaining steps."""
        every = {"evaluation": EVAL_EVERY, "step": 1}.get(moment, CHECKPOINT_EVERY)
        coming = [step for step in range(self.done + 1, STEPS + 1) if step % every == 0 or step == STEPS]
        step = coming[int(fault.draw("step") * len(coming))]
        if moment == "rename":
            seen = self.is_written if fault.draw("side") < 0.5 else self.is_there
        else:
            seen = self.is_begun if moment == "checkpoint" else self.has_step
        return lambda: seen(step)

    def measure(self, program: Program) -> RunTiming:
        """Time the parts of an undisturbed run while it runs."""
        marks = {
            f"{name} {step}": (seen, step)
            for name, seen, every in (
                ("step", self.has_step, 1),
                ("evaluation", self.has_evaluation, EVAL_EVERY),
                ("begun", self.is_begun, CHECKPOINT_EVERY),
                ("written", self.is_written, CHECKPOINT_EVERY),
                ("there", self.is_there, CHECKPOINT_EVERY),
            )
            for step in range(every, STEPS + 1, every)
        }
        times: dict[str, float] = {}
        while program.is_running:
            for name, (seen, step) in marks.items():
                if name not in times and seen(step):
                    times[name] = time.monotonic()
            time.sleep(_POLL)

        def between(first: str, then: str, every: int) -> float:
            steps = range(every, STEPS + 1, every)
            gaps = [times[f"{then} {s}"] - times[f"{first} {s}"] for s in steps if f"{then} {s}" in times]
            return max(gaps, default=0.0)

        return RunTiming(
            start=times.get("step 1", program.started) - program.started,
            step=(times.get("step 3", 0.0) - times.get("step 1", 0.0)) / 2,
            evaluation=between("step", "evaluation", EVAL_EVERY),
            checkpoint=between("begun", "written", CHECKPOINT_EVERY),
            rename=between("written", "there", CHECKPOINT_EVERY),
            total=time.monotonic() - program.started,
        )

    def _checkpoint(self, step: int, *, hidden: bool) -> Path:
        return self._folder / "checkpoints" / f"{'.' * hidden}step-{step:06d}"

    def _all(self) -> Iterator[Path]:
        for pattern in ("*.jsonl", "checkpoints/*", "checkpoints/.*", "checkpoints/.*/state.json"):
            yield from self._folder.glob(pattern)

    def _is_new(self, path: Path) -> bool:
        there = _signature(path)
        return there is not None and there != self._before.get(path)

    def _has_line(self, name: str, step: int) -> bool:
        path = self._folder / name
        if not self._is_new(path):
            return False
        lines = read_lines(path)
        return bool(lines) and lines[-1]["step"] >= step


def wait_for(condition: Callable[[], bool], program: Program) -> bool:
    """Wait for a condition; return False if the program ends or 300 seconds pass before."""
    until = time.monotonic() + _LONGEST
    while not condition():
        if not program.is_running or time.monotonic() > until:
            return condition()
        time.sleep(_POLL)
    return True


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; an empty list if it is missing."""
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return []


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def left_in(folder: Path) -> str:
    """Return a description of the checkpoints in a run folder, without step numbers."""
    names = []
    for path in sorted(folder.glob("checkpoints/.*")):
        written = len(list(path.iterdir()))
        names.append("an old one half removed" if path.suffix == ".old" else f"{written} files of an unnamed one")
    return f"{len(list(folder.glob('checkpoints/step-*')))} whole" + "".join(f", {name}" for name in names)


@dataclass(frozen=True, slots=True)
class UndisturbedRun:
    """An undisturbed run to compare with."""

    folder: Path  # its run folder, beside the folder `tokens`
    timing: RunTiming
    losses: dict[int, tuple[float, ...]]  # for each step the metrics of `_COMPARED`
    evaluations: list[dict[str, Any]]  # lines of evals.jsonl
    digests: dict[str, str]  # SHA-256 of each tensor file of its last checkpoint

    def difference(self, folder: Path, *, complete: bool) -> str:
        """Return the first difference between another run and this one, or an empty string."""
        losses = _losses(folder)
        for step, values in losses.items():
            if values != self.losses.get(step):
                return f"step {step}: {values} instead of {self.losses.get(step)}"
        evaluations = read_lines(folder / "evals.jsonl")
        for line in evaluations:
            if line not in self.evaluations:
                return f"evaluation: {line}"
        if not complete:
            return ""
        if list(losses) != list(self.losses) or evaluations != self.evaluations:
            return f"steps {list(losses)}, evaluations {[line['step'] for line in evaluations]}"
        digests = _digests(folder)
        changed = [name for name in self.digests if digests.get(name) != self.digests[name]]
        return f"last checkpoint: {', '.join(changed)}" if changed else ""


def base_of(folder: Path, timing: RunTiming) -> UndisturbedRun:
    """Return a finished run as an `UndisturbedRun`."""
    return UndisturbedRun(folder, timing, _losses(folder), read_lines(folder / "evals.jsonl"), _digests(folder))


def write_training_text(path: Path) -> Path:
    """Write the training text."""
    path.write_text("".join(f"line {i}: the quick brown fox, {i * i} times.\n" for i in range(400)))
    return path


def _losses(folder: Path) -> dict[int, tuple[float, ...]]:
    return {line["step"]: tuple(line[key] for key in _COMPARED) for line in read_lines(folder / "metrics.jsonl")}


def _digests(folder: Path) -> dict[str, str]:
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.glob("*.safetensors"))}


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
