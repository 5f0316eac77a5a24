"""Cleans up after a launcher that was killed: ends every process that its ranks started, and removes its folder.

Started as `python guard.py FOLDER` with a pipe as standard input that the launcher alone holds open; its end means
that the launcher has ended, however. Ranks die with their launcher by themselves (PR_SET_PDEATHSIG); this ends their
children (data loaders, compilers) and removes the run's folder. Imports nothing but the standard library, so that it
starts in milliseconds and holds little memory.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty when there is none.

    A process id is given again once its process and its process group are gone, so an id alone may name a stranger.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def rank_pids(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that have started, by local rank; each leads a process group.

    Left out are ids that a stranger bears by now. A rank that has ended is in, for the sake of its children.
    """
    found = {}
    for path in folder.glob("pid.*"):
        pid, _, started = path.read_text().partition(" ")
        if pid.isdigit() and start_time(int(pid)) in ("", started):
            found[int(path.suffix[1:])] = int(pid)
    return dict(sorted(found.items()))


def kill_groups(folder: Path) -> None:
    """Kill every rank and whatever it started that stayed in its process group."""
    for pid in rank_pids(folder).values():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of the group
            os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Wait for the launcher's end, then clear up after it."""
    folder = Path(sys.argv[1])
    sys.stdin.buffer.read()
    if folder.is_dir():  # a launcher that ended by itself has removed it
        kill_groups(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
