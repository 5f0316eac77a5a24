"""The kinds of faults, the list of faults for a seed, and faults of disks, files and nodes."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType

from benchmarks import netns
from benchmarks.faults.inject import (
    LIMIT,
    DisturbedRun,
    FaultOutcome,
    KilledRun,
    ReportOutcome,
    StoppedRun,
    TerminatedRun,
    Workspace,
)
from benchmarks.faults.programs import Fault, Program, RunWatch, UndisturbedRun, base_of

CHECKPOINT_FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
TOKEN_CACHE, TOKEN_FILE = "token cache", "token file"
SEEN = re.compile(
    r"damag|checksum|corrupt|truncat|is missing|not of format|not JSON|no valid|of another|do(es)? not match|holds no|"
    r"not a token file|cannot be read|different",
    re.IGNORECASE,
)
"""Matches a run's messages about a damaged file."""
SingleFault = Callable[[Workspace, Fault, Path], FaultOutcome]
_LINK = netns.Shape(nodes=2, places=1, fast=1000, slow=1000)
_SLOW_MBIT = 2.0


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    title: str  # its name in records
    points: int  # number of faults of this kind in a full record
    moments: tuple[str, ...]  # when faults happen; for flips, the part of the file
    targets: tuple[str, ...]  # the processes or files that are affected


KINDS: Mapping[str, FaultKind] = MappingProxyType(
    {
        "kill": FaultKind(
            "kill -9",
            100,
            ("start", "step", "evaluation", "checkpoint", "rename"),
            ("launcher", "rank 0", "rank 1", "all"),
        ),
        "term": FaultKind(
            "SIGTERM", 12, ("start", "step", "evaluation", "checkpoint"), ("launcher", "rank 0", "rank 1")
        ),
        "stop": FaultKind("SIGSTOP of a rank", 8, ("step", "evaluation", "checkpoint", "rename"), ("rank 0", "rank 1")),
        "disk": FaultKind("full disk", 12, ("start", "step", "evaluation", "checkpoint"), ("disk",)),
        "flip": FaultKind(
            "flipped bit", 200, ("head", "tail", "anywhere"), (*CHECKPOINT_FILES, TOKEN_CACHE, TOKEN_FILE)
        ),
        "pair": FaultKind("two runs in one folder", 20, ("offset",), ("fresh", "resumed")),
        "node": FaultKind("lost and slow node", 8, ("step", "checkpoint"), ("cut 0", "cut 1", "killed 1", "slow 1")),
    }
)


def faults(seed: int, kinds: Iterable[str] = KINDS, points: int | None = None) -> tuple[Fault, ...]:
    """Return the faults of a record.

    All pairs of moment and target occur equally often, up to one. The first N faults of a kind do not depend on the
    other kinds or on the number of points.

    Without `points`, each kind has as many as in a full record.
    """
    return tuple(fault for kind in kinds for fault in _of_kind(seed, kind, points))


def _of_kind(seed: int, name: str, points: int | None) -> list[Fault]:
    kind, source = KINDS[name], random.Random(f"{seed} {name}")
    found: list[Fault] = []
    while len(found) < (kind.points if points is None else points):
        cases = list(product(kind.moments, kind.targets))
        source.shuffle(cases)
        found += [Fault(name, moment, target, source.getrandbits(32)) for moment, target in cases]
    return found[: kind.points if points is None else points]


class FullDiskRun(DisturbedRun):
    """A run whose disk becomes full, except for some kilobytes."""

    def __init__(self, bench: Workspace, place: Path, report: ReportOutcome) -> None:
        self._is_mounted = bench.disk(place)
        super().__init__(bench, place, report)

    def inject(self, fault: Fault, program: Program) -> None:
        """Fill the disk; without the permission to mount, limit the size of the files that processes write."""
        room = int(fault.draw("room") * 160) << 10  # a checkpoint has 180 KiB
        if not self._is_mounted:
            for pid in program.processes():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room // 4, room // 4))
            return
        free = os.statvfs(self.place)
        with (self.place / "ballast").open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - room))

    def undo(self, fault: Fault) -> None:  # noqa: ARG002
        """Free the disk space."""
        (self.place / "ballast").unlink(missing_ok=True)

    def limit(self, fault: Fault) -> float:  # noqa: ARG002
        """See `DisturbedRun.limit`: the rest of the run, since the space may suffice until the end."""
        return LIMIT + 5 * self.base.timing.total

    def judge(self, fault: Fault, program: Program) -> list[str]:  # noqa: ARG002
        """See `DisturbedRun.judge`: the message has a fix."""
        (status,) = program.statuses
        if status == 0 or (status in (1, 2) and "room" in program.stderr):
            return []
        return [f"status {status}: {program.last_lines}"]


def flip(bench: Workspace, fault: Fault, place: Path) -> FaultOutcome:
    """Flip a bit in a file of a copy of a finished run, and resume the copy."""
    has_older = fault.draw("older") < 0.2
    run = bench.copy_of_base(place, (6, 9) if has_older else (9,))
    (cache,) = (place / "tokens").glob("*.tokens")
    if fault.target == TOKEN_FILE:  # change the configuration to that of a run that reads a token file
        path = cache.rename(place / "text.tokens")
        settled = json.loads((run / "config.json").read_text())
        settled["data"]["source"] = str(path)
        (run / "config.json").write_text(json.dumps(settled))
    else:
        path = cache if fault.target == TOKEN_CACHE else run / "checkpoints/step-000009" / fault.target
    whole = path.read_bytes()
    bit = flipped_bit(fault, len(whole))
    path.write_bytes(with_flipped(whole, bit))
    program = bench.program(([], bench.words(run, fresh=False)))
    left = program.end(LIMIT + 5 * bench.base().timing.total)
    (status,) = program.statuses
    is_made_anew = fault.target == TOKEN_CACHE and path.is_file() and path.read_bytes() == whole
    is_seen = status != 0 or is_made_anew or SEEN.search(program.stderr) is not None
    problems = ["traceback: " + program.last_lines] if "Traceback" in program.stderr else []
    if is_seen and status not in (0, 2):
        problems.append(f"status {status}: {program.last_lines}")
    if is_seen and status != 0 and has_older and fault.target in CHECKPOINT_FILES:
        problems.append(f"no fall back to the older checkpoint: {program.last_lines}")
    difference = bench.base().difference(run, complete=True) if status == 0 else ""
    outcome = FaultOutcome(
        fault,
        time.monotonic() - program.started,
        left,
        differs=bool(difference),
        unseen=not is_seen,
        problems=(*problems, *([difference] if difference else [])),
        left=f"bit {bit} of {8 * len(whole)}{', an older checkpoint is there' * has_older}: {program.last_lines}",
    )
    bench.finished(program)
    shutil.rmtree(place)
    return outcome


def flipped_bit(fault: Fault, size: int) -> int:
    """Return the bit of a file of `size` bytes that a fault flips: in the first or last 64 bytes, or anywhere."""
    first, count = {"head": (0, min(64, size)), "tail": (max(0, size - 64), min(64, size))}.get(fault.moment, (0, size))
    return 8 * first + int(fault.draw("bit") * 8 * count)


def with_flipped(content: bytes, bit: int) -> bytes:
    """Return bytes with one bit flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def pair(bench: Workspace, fault: Fault, place: Path) -> FaultOutcome:
    """Start two runs in one folder: with two seeds, or both resuming the same checkpoint."""
    is_fresh = fault.target == "fresh"
    bases = [bench.base(0), bench.base(1 if is_fresh else 0)]
    run = place / "run"
    if is_fresh:
        place.mkdir()
    else:
        bench.copy_of_base(place, (3, 6))
    seeds = [0, 1] if fault.draw("order") < 0.5 else [1, 0]
    both = []
    for seed in seeds:
        both.append(bench.program(([], bench.words(run, fresh=is_fresh, seed=seed))))
        if len(both) == 1:
            time.sleep(fault.draw("offset") * 1.2 * bases[0].timing.total)
    left = sum(program.end(LIMIT + 5 * bases[0].timing.total) for program in both)
    seconds = time.monotonic() - both[0].started
    statuses = [program.statuses[0] for program in both]
    problems = [f"traceback: {program.last_lines}" for program in both if "Traceback" in program.stderr]
    text = f"statuses {statuses}: {' // '.join(program.last_lines for program in both)}"
    won = [bases[seed] for seed, status in zip(seeds, statuses, strict=True) if status == 0]
    if not set(statuses) <= {0, 2} or not won or (is_fresh and len(won) != 1):
        problems.append(text)
    differences = [base.difference(run, complete=True) for base in won[:1]]
    if is_fresh and len(won) == 1:
        asked, settled = (json.loads((at / "config.json").read_text()) for at in (won[0].folder, run))
        changed = [key for key in asked if key not in ("output", "keep_checkpoints") and asked[key] != settled.get(key)]
        differences += [f"trained with another's {', '.join(changed)}"] if changed else []
    differences = list(filter(None, differences))
    for program in both:
        bench.finished(program)
    shutil.rmtree(place)
    return FaultOutcome(fault, seconds, left, differs=bool(differences), problems=(*problems, *differences), left=text)


class TwoNodeRun(DisturbedRun):
    """A run on two nodes (network namespaces) of one rank each: cut links, killed nodes, slow links."""

    def __init__(self, bench: Workspace, place: Path, report: ReportOutcome, network: netns.Network) -> None:
        super().__init__(bench, place, report)
        self._network = network
        self._patience = max(10, round(3 * bench.base().timing.start))
        self._base = self._undisturbed()

    @property
    def base(self) -> UndisturbedRun:
        """An undisturbed run on this network."""
        return self._base

    def _undisturbed(self) -> UndisturbedRun:
        watch = RunWatch(self.run)
        program = self.start(fresh=True)
        timing = watch.measure(program)
        self.bench.require_success(program)
        self.bench.say(f"undisturbed run on two nodes: {timing.total:.1f} s")
        folder = self.place.with_name(f"{self.place.name}-base")
        return base_of(self.run.rename(folder), timing)

    def start(self, *, fresh: bool) -> Program:
        """Start torchrun on each node."""
        words = ["-m", "bmburst", *self.bench.words(self.run, fresh=fresh)]
        meet = ["--nproc-per-node=1", "--nnodes=2", f"--master-addr={self._network.address(0)}", "--master-port=29500"]
        named = ["env", f"GLOO_SOCKET_IFNAME={netns.DEVICE}"]
        hang = f"--hang-timeout={self._patience}"
        return self.bench.program(
            *(
                ([*self._network.within(n), *named], ["torchrun", *meet, f"--node-rank={n}", *words, hang])
                for n in range(2)
            )
        )

    def inject(self, fault: Fault, program: Program) -> None:
        """Cut, kill or slow down a node."""
        what, node = fault.target.split()
        if what == "cut":
            self._network.set_link(int(node), up=False)
        elif what == "slow":
            self._network.set_rate(int(node), _SLOW_MBIT)
        else:
            launcher = program.launchers[int(node)].pid
            for pid in (launcher, *program.of_target(f"rank {node}")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def undo(self, fault: Fault) -> None:
        """Restore the link."""
        _, node = fault.target.split()
        self._network.set_link(int(node), up=True)
        self._network.set_rate(int(node), _LINK.slow)

    def limit(self, fault: Fault) -> float:
        """See `DisturbedRun.limit`: a lost node is detected within a minute, or by the hang timeout."""
        return 2 * LIMIT + self._patience if fault.target != "slow 1" else 4 * LIMIT

    def judge(self, fault: Fault, program: Program) -> list[str]:
        """See `DisturbedRun.judge`: a slow node changes nothing; a lost node ends the other one with a message."""
        statuses = program.statuses
        if fault.target == "slow 1":
            return [] if statuses == [0, 0] else [f"statuses {statuses}: {program.last_lines}"]
        if statuses == [0, 0] or (0 not in statuses and "bmburst: " in program.stderr):
            return []
        return [f"statuses {statuses}: {program.last_lines}"]


@contextlib.contextmanager
def nodes(bench: Workspace, place: Path, report: ReportOutcome) -> Iterator[TwoNodeRun]:
    """Create the network of two nodes and the run on it."""
    with netns.network(_LINK) as network:
        yield TwoNodeRun(bench, place, report, network)


CHAINS: dict[str, type[DisturbedRun]] = {
    "kill": KilledRun,
    "term": TerminatedRun,
    "stop": StoppedRun,
    "disk": FullDiskRun,
}
SINGLE: dict[str, SingleFault] = {"flip": flip, "pair": pair}
