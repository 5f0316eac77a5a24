"""Starts the ranks in a thread, and ends them when one fails or the run is stopped.

Ranks ask Linux to kill them when their parent dies (PR_SET_PDEATHSIG), and the parent is the thread that started them.
So the ranks have a thread of their own. The main thread handles signals and may end the ranks too. The thread then sees
that they have ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bmburst.launch.rank import STOPPED, guard_command, is_stopped, kill_groups, rank_pids, start_time
from bmburst.launch.spec import LaunchSpec

GRACE = 5.0  # seconds from a signal to SIGKILL: enough to close files; a rank that waits for a dead one never ends


def start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that cleans up if this one is killed. Closing its standard input ends it."""
    return subprocess.Popen(
        guard_command(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the launcher
        cwd="/",
    )


@dataclass(slots=True)
class GracefulStop:
    """Stops a run: sends each rank one signal, and kills the ranks that remain after `GRACE`.

    Args:
        folder: The run's folder, where ranks register their process ids.
        signum: The signal to send. SIGINT lets Python clean up; SIGTERM ends it.
        patient: Do not kill ranks after `GRACE`: they handle the signal and end by themselves.
    """

    folder: Path
    signum: signal.Signals
    patient: bool
    _told: set[int] = field(default_factory=set, init=False)
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = float("inf") if self.patient else time.monotonic() + GRACE
        (self.folder / "stop").touch()  # before looking for ranks: a rank that registers later finds it

    @property
    def overdue(self) -> bool:
        """Whether `GRACE` has passed; never true if `patient`."""
        return time.monotonic() > self._deadline

    def press(self, *, now: bool) -> None:
        """Send the signal to ranks that have not received it. Kill all ranks after `GRACE`, or with `now`."""
        if now or self.overdue:
            kill_groups(self.folder)
            return
        for pid in rank_pids(self.folder).values():
            if pid not in self._told:
                self._told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, self.signum)


def all_handle_signals(folder: Path) -> bool:
    """Return whether ranks are running and each of them handles the signal itself (`watchdog.handle_signals`)."""
    living = [rank for rank, pid in rank_pids(folder).items() if start_time(pid)]
    return bool(living) and all((folder / f"polite.{rank}").exists() for rank in living)


RANK_SCRIPT = Path(__file__).with_name("rank.py")
_POLL = 0.05  # seconds
_LOOK = 1.0  # seconds between two checks for stopped ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """The end of a rank that failed.

    Attributes:
        rank: Its number.
        status: Its exit status; -N when signal N ended it.
        told: Whether the launcher had told it to end, because another rank had failed.
        enforced: Whether the launcher ended it by SIGKILL.
    """

    rank: int
    status: int
    told: bool = False
    enforced: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of the agent thread.

    Attributes:
        failed: The failed ranks.
        error: The exception that kept ranks from starting.
        stopped: Ranks that were stopped (as by SIGSTOP) when a rank failed or the launcher ended the run.
        stood_still: Whether the launcher ended the run because a rank stayed stopped.
        is_to_continue: Whether a rank ended with `STOPPED`: a signal ended the run, which has saved its state.
    """

    failed: list[RankEnd] = field(default_factory=list)
    error: Exception | None = None
    stopped: list[int] = field(default_factory=list)
    stood_still: bool = False
    is_to_continue: bool = False


def rank_command(command: Sequence[str]) -> list[str]:
    """Return the command line of a rank."""
    return [sys.executable, str(RANK_SCRIPT), *command]


def start_rank(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a rank, in a session of its own: Ctrl-C in the terminal is for the launcher."""
    return subprocess.Popen(command, env=environment, start_new_session=True)


def rank_environment(spec: LaunchSpec, rank: int) -> dict[str, str]:
    """Return the environment variables of a rank, with the names that torchrun uses."""
    facts = {
        "LOCAL_RANK": rank, "RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank, "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": spec.nproc, "WORLD_SIZE": spec.nproc, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": spec.nproc,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        # The launcher serves the store: no rank opens a port of its own for it.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip
    return {name: str(fact) for name, fact in facts.items()}


class AgentThread(threading.Thread):
    """Runs the ranks until they have ended, and holds the `Outcome`.

    Args:
        spec: How many ranks, where.
        command: What each rank runs.
        environment: Environment of all ranks, without the variables that differ between ranks.
        folder: The run's folder.
    """

    def __init__(self, spec: LaunchSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        super().__init__(name="bmburst-agent", daemon=True)
        self.outcome = Outcome()
        self._spec, self._command, self._environment = spec, rank_command(command), environment
        self._folder = folder
        self._ranks: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        """Start the ranks and wait for them. Never raises."""
        try:
            self._start()
            self._wait()
        except Exception as error:  # a thread ends here: the main thread reports any error
            self.outcome.error = error
        finally:
            for process in self._ranks:
                process.kill()
                process.wait()

    def _start(self) -> None:
        for rank in range(self._spec.nproc):
            if (self._folder / "stop").exists():
                return
            own = {**self._environment, **rank_environment(self._spec, rank)}
            self._ranks.append(start_rank(self._command, own))

    def _wait(self) -> None:
        told: list[int] = []
        enforced: list[int] = []
        deadline = float("inf")
        watch = _StoppedRanks(self._spec.hang_timeout)
        while None in (statuses := [process.poll() for process in self._ranks]):
            living = [rank for rank, status in enumerate(statuses) if status is None]
            has_failed = any(status not in (None, 0, STOPPED) for status in statuses)
            if deadline == float("inf") and (has_failed or watch.overdue([self._ranks[rank].pid for rank in living])):
                self.outcome.stood_still = not has_failed
                self.outcome.stopped = [rank for rank in living if is_stopped(self._ranks[rank].pid)]
                deadline = time.monotonic() + GRACE
                told = living
                for rank in told:
                    self._ranks[rank].terminate()
            elif time.monotonic() > deadline:
                for rank in set(living) - set(enforced):
                    enforced.append(rank)
                    self._ranks[rank].kill()
            time.sleep(_POLL)
        self.outcome.is_to_continue = any(process.returncode == STOPPED for process in self._ranks)
        self.outcome.failed = [
            RankEnd(
                rank=rank,
                status=process.returncode,
                told=rank in told,
                enforced=rank in enforced and process.returncode == -signal.SIGKILL,
            )
            for rank, process in enumerate(self._ranks)
            if process.returncode not in (0, STOPPED)
        ]


class _StoppedRanks:
    """Detects a rank that stays stopped for longer than the hang timeout.

    The timer of a stopped rank does not fire. The timers of ranks that wait for it do, but all other ranks may have
    ended.

    Args:
        limit: The hang timeout in seconds; 0: no limit.
    """

    def __init__(self, limit: float) -> None:
        # The timers of waiting ranks fire first: their stacks show where they wait.
        self._limit = limit + GRACE if limit else float("inf")
        self._next_look = time.monotonic()
        self._since: dict[int, float] = {}

    def overdue(self, pids: Sequence[int]) -> bool:
        """Return whether one of the processes has been stopped for too long."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            self._since = {pid: self._since.get(pid, now) for pid in pids if is_stopped(pid)}
        return any(now - since > self._limit for since in self._since.values())
