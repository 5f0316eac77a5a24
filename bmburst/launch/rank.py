"""Prepares a rank and runs the user's program in it: `python rank.py [-m] TARGET ARGS...`; finds and ends ranks.

The rank ends when its launcher ends. The watchdog is armed, the program runs as with `python [-m] TARGET ARGS...`, and
the first error of all ranks is written to a file for the launcher. Every rank registers in the folder of the run, where
launchers find it.

`python rank.py --guard FOLDER`, with a pipe as standard input, cleans up after a launcher that was killed. Only the
launcher holds the other end open, so the end of input means that the launcher has ended. Ranks end with their launcher
by themselves (PR_SET_PDEATHSIG). The guard ends their children (data loaders, compilers) and removes the folder.

This file is run by its path and imports only the standard library, so all of this is set up milliseconds after the
start of the process, before torch is imported.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

# Variables that the launcher sets.
FOLDER = "BMBURST_LAUNCH_FOLDER"
LAUNCHER = "BMBURST_LAUNCHER_PID"
HANG_TIMEOUT = "BMBURST_HANG_TIMEOUT"
START_TIMEOUT = "BMBURST_START_TIMEOUT"
HOST_RUNTIME = "BMBURST_HOST_RUNTIME"
REQUEST = "request.json"
"""File of the launcher's folder with the request to all ranks (`bmburst.launch.handover`)."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TEARDOWN = 10.0  # seconds that a failed rank gets to run its exit handlers; a lost peer can block them for ever
_INTERRUPTED = 128 + signal.SIGINT
STOPPED = 75
"""Exit status of a run that a signal stopped and that has saved its state (EX_TEMPFAIL of sysexits.h: try again)."""
_GUARD = "--guard"


def main() -> int:
    """Run the program named in sys.argv; return its exit status."""
    folder = Path(os.environ[FOLDER])
    local_rank = int(os.environ["LOCAL_RANK"])
    try:
        die_with(int(os.environ[LAUNCHER]))
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        sign_in(folder, local_rank)
        _print_lines_at_once()
        watchdog = _neighbour("watchdog")
        limit = float(os.environ.get(HANG_TIMEOUT, "0"))
        watchdog.arm(limit, folder, local_rank, float(os.environ.get(START_TIMEOUT, limit)))
        watchdog.beat_with_optimizers()
        _run(sys.argv[1:])
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if status not in (0, STOPPED):
            _leave_error(folder, local_rank, "exit", status, "" if isinstance(exit_.code, int) else str(exit_.code))
            limit_teardown(folder)
        else:
            _sign_off(folder, local_rank)
        return status
    except KeyboardInterrupt:
        limit_teardown(folder)
        return _INTERRUPTED
    except BaseException as error:
        user_error = _is_user_error(error)
        text = str(error) if user_error else _own_traceback(error)
        status = 2 if user_error else 1
        if _leave_error(folder, local_rank, "user" if user_error else "error", status, text):
            _neighbour("last_error").record(error)
        limit_teardown(folder)
        return status
    _sign_off(folder, local_rank)
    return 0


def die_with(launcher: int) -> None:
    """Let the kernel kill this process when its launcher ends, also by kill -9.

    Raises:
        SystemExit: The launcher ended before prctl was called.
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:
        os._exit(1)


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if there is no such process.

    Linux reuses a process id when its process and its process group are gone, so an id may belong to another program.
    """
    return _stat(pid, 19)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example by SIGSTOP or a debugger."""
    return _stat(pid, 0) in ("T", "t")


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


def guard_command(folder: Path) -> list[str]:
    """Return the command that cleans up the folder of a run when its standard input ends."""
    return [sys.executable, "-I", "-S", __file__, _GUARD, str(folder)]


def _guard(folder: Path) -> None:
    """Wait until the launcher ends, then clean up after it."""
    import shutil

    sys.stdin.buffer.read()
    if folder.is_dir():  # a launcher that ended by itself has removed it
        kill_groups(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _stat(pid: int, field: int) -> str:
    """Return a field behind the name in /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field]
    except OSError:
        return ""


def sign_in(folder: Path, local_rank: int) -> None:
    """Register this rank with launcher and guard."""
    part = folder / f"part.{os.getpid()}"  # ranks of two nodes may run on one host
    part.write_text(f"{os.getpid()} {start_time(os.getpid())}")
    part.rename(folder / f"pid.{local_rank}")
    if (folder / "stop").exists():  # written before the launcher looked for ranks to stop
        raise KeyboardInterrupt


def _sign_off(folder: Path, local_rank: int) -> None:
    """Tell the launcher that this rank ends normally, so no other rank waits for it."""
    with contextlib.suppress(OSError):  # the launcher, and its folder, are gone
        (folder / f"done.{local_rank}").touch()


def _print_lines_at_once() -> None:
    """Flush output at the end of each line, also into a pipe or a file.

    `python -u` is not used: with it, print writes a line and its newline separately, and lines of ranks are mixed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _run(command: Sequence[str]) -> None:
    """Run the program with the sys.argv and sys.path that `python` would give it."""
    as_module = command[0] == "-m"
    sys.argv = list(command[1:] if as_module else command)
    target = sys.argv[0]
    if as_module:
        sys.path[0] = os.getcwd()
    else:
        sys.path[0] = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:  # bmburst is not installed: the launcher runs from its source tree
        sys.path.append(root)
    if os.environ.get(HOST_RUNTIME) == "1":
        from bmburst import host

        host.install()
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _leave_error(folder: Path, local_rank: int, kind: str, status: int, text: str) -> bool:
    """Write this rank's error for the launcher, unless another rank has written one; return whether it is written.

    The file is created atomically, because a rank may be killed while it writes.
    """
    content = {"rank": int(os.environ["RANK"]), "local_rank": local_rank, "kind": kind, "status": status, "text": text}
    part = folder / f"error.{local_rank}"
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # not the first; or the launcher has gone
        part.write_text(json.dumps(content))
        os.link(part, folder / "error")
        return True
    return False


def limit_teardown(folder: Path) -> None:
    """End this process after a limited time, even if its exit handlers wait for a rank that is gone."""
    with contextlib.suppress(OSError):  # the launcher and its folder are gone, and this process ends with them
        teardown = os.open(folder / "teardown", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        faulthandler.dump_traceback_later(_TEARDOWN, exit=True, file=teardown)


def _is_user_error(error: BaseException) -> bool:
    errors = sys.modules.get("bmburst.errors")
    return errors is not None and isinstance(error, errors.UserError)


def _own_traceback(error: BaseException) -> str:
    """Return the traceback as `python SCRIPT` would print it, without the frames of this file."""
    return "".join(traceback.format_exception(type(error), error, _from_program(error.__traceback__))).rstrip()


def _from_program(tb: TracebackType | None) -> TracebackType | None:
    first = tb
    while first is not None and first.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        first = first.tb_next
    return first


def _neighbour(name: str) -> ModuleType:
    """Load a module of this folder without importing the package, which would import torch."""
    spec = importlib.util.spec_from_file_location(f"_bmburst_{name}", Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"no {name}.py beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if sys.argv[1] == _GUARD:
        _guard(Path(sys.argv[2]))
    else:
        sys.exit(main())
