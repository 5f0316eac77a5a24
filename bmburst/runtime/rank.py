"""Prepares a rank and runs the user's program in it: `python rank.py [-m] TARGET ARGS...`.

The rank ends when its launcher ends. The watchdog is armed, the program runs as with `python [-m] TARGET ARGS...`, and
the first error of all ranks is written to a file for the launcher. This file is run by its path and imports only the
standard library, so all of this is set up milliseconds after the start of the process, before torch is imported.
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

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TEARDOWN = 10.0  # seconds that a failed rank gets to run its exit handlers; a lost peer can block them for ever
_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the program named in sys.argv; return its exit status."""
    folder = Path(os.environ["BMBURST_LAUNCH_FOLDER"])
    local_rank = int(os.environ["LOCAL_RANK"])
    try:
        die_with(int(os.environ["BMBURST_LAUNCHER_PID"]))
        _sign_in(folder, local_rank)
        _print_lines_at_once()
        watchdog = _neighbour("watchdog")
        limit = float(os.environ.get("BMBURST_HANG_TIMEOUT", "0"))
        watchdog.arm(limit, folder, local_rank, float(os.environ.get("BMBURST_START_TIMEOUT", limit)))
        watchdog.beat_with_optimizers()
        _run(sys.argv[1:])
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if status:
            _leave_error(folder, local_rank, "exit", status, "" if isinstance(exit_.code, int) else str(exit_.code))
            _limit_teardown(folder)
        else:
            _sign_off(folder, local_rank)
        return status
    except KeyboardInterrupt:
        _limit_teardown(folder)
        return _INTERRUPTED
    except BaseException as error:
        user_error = _is_user_error(error)
        text = str(error) if user_error else _own_traceback(error)
        status = 2 if user_error else 1
        _leave_error(folder, local_rank, "user" if user_error else "error", status, text)
        _limit_teardown(folder)
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


def _sign_in(folder: Path, local_rank: int) -> None:
    """Become the leader of a process group, and register this rank with launcher and guard."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    part = folder / f"part.{local_rank}"
    part.write_text(f"{os.getpid()} {started}")
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
    if os.environ.get("BMBURST_HOST_RUNTIME") == "1":
        from bmburst.runtime import host

        host.install()
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _leave_error(folder: Path, local_rank: int, kind: str, status: int, text: str) -> None:
    """Write this rank's error for the launcher, unless another rank has written one.

    The file is created atomically, because a rank may be killed while it writes.
    """
    content = {"rank": int(os.environ["RANK"]), "local_rank": local_rank, "kind": kind, "status": status, "text": text}
    part = folder / f"error.{local_rank}"
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # not the first; or the launcher has gone
        part.write_text(json.dumps(content))
        os.link(part, folder / "error")


def _limit_teardown(folder: Path) -> None:
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
    sys.exit(main())
