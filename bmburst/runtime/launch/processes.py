"""Ending the ranks of this node, politely and then not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bmburst.runtime.launch import guard

GRACE = 5.0  # seconds from Ctrl-C to SIGKILL: time to close files, but not for a rank that waits for a dead one


def start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that clears up should this one be killed; closing its standard input ends it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the launcher
        cwd="/",
    )


@dataclass(slots=True)
class Stop:
    """The end of a run from outside: told to each rank once, enforced when `GRACE` is over.

    Args:
        folder: The run's folder, in which ranks sign in.
        signum: What ranks are told: SIGINT lets Python clean up, SIGTERM ends it.
        patient: Ranks end in order by themselves, and may take their time.
    """

    folder: Path
    signum: signal.Signals
    patient: bool = False
    _told: set[int] = field(default_factory=set)
    _deadline: float = 0.0

    def __post_init__(self) -> None:
        self._deadline = float("inf") if self.patient else time.monotonic() + GRACE
        (self.folder / "stop").touch()  # before looking for ranks: one that signs in later finds it

    @property
    def overdue(self) -> bool:
        """Whether the ranks have had their time."""
        return time.monotonic() > self._deadline

    def press(self, *, now: bool = False) -> None:
        """Tell ranks that were not told yet; kill all when it is time or `now`."""
        if now or self.overdue:
            guard.kill_groups(self.folder)
            return
        for pid in guard.rank_pids(self.folder).values():
            if pid not in self._told:
                self._told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, self.signum)


def all_polite(folder: Path) -> bool:
    """Return whether there are ranks and every living one ends in order when it is told to (`watchdog.polite`)."""
    living = [rank for rank, pid in guard.rank_pids(folder).items() if guard.start_time(pid)]
    return bool(living) and all((folder / f"polite.{rank}").exists() for rank in living)
