"""Cleans up after a launcher that was killed: ends every process that its ranks started, and removes its folder.

It is started as `python guard.py FOLDER` with a pipe as standard input. Only the launcher holds the other end open, so
the end of input means that the launcher has ended. Ranks end with their launcher by themselves (PR_SET_PDEATHSIG). The
guard ends their children (data loaders, compilers) and removes the run's folder. It imports only the standard library,
so that it starts in milliseconds and takes little memory.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if there is no such process.

    Linux reuses a process id when its process and its process group are gone, so an id may belong to another program.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def rank_pids(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that have started, by local rank. Each leads a process group.

    An id that another process has by now is left out. A rank that has ended is included: its children may still run.
    """
    found = {}
    for path in folder.glob("pid.*"):
        pid, _, started = path.read_text().partition(" ")
        if pid.isdigit() and start_time(int(pid)) in ("", started):
            found[int(path.suffix[1:])] = int(pid)
    return dict(sorted(found.items()))


def kill_groups(folder: Path) -> None:
    """Kill the process group of every rank: the rank and the children that stayed in it."""
    for pid in rank_pids(folder).values():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Wait until the launcher ends, then clean up after it."""
    folder = Path(sys.argv[1])
    sys.stdin.buffer.read()
    if folder.is_dir():  # a launcher that ended by itself has removed it
        kill_groups(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
