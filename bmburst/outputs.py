"""Checks and writes output files: permissions, disk space, locks on run folders, atomic replacement."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bmburst.errors import UserError

PICTURE = MappingProxyType({"Software": "bmburst, https://matplotlib.org"})
"""Metadata of every picture, by which `is_picture` knows it."""
_PNG, _HEAD = b"\x89PNG\r\n\x1a\n", 1024
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system answers where there is no room: in the file system, a quota, or under a limit."""
LOCK_FILE, TRAINING_LOCK = ".lock", ".training.lock"
"""Files of a run folder: the first is held by what started the run, the second by the rank that writes."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # of network file systems
_PATIENCE = 1.0  # seconds for a holder to say who it is


def require_own(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse to replace a file that bmburst did not write. An empty one may be anybody's.

    Args:
        option: What it was given by.
        path: The file, which need not be there.
        what: What the command writes there, with its article, for example "a token file".
        is_own: Returns whether a file is such a one; it need not catch an OSError or a ValueError.

    Raises:
        UserError: Another file is there.
    """
    try:
        if not path.is_file() or not path.stat().st_size or is_own(path):
            return
    except (OSError, ValueError):
        pass
    raise UserError(f"{option} {path}: this file exists and is not {what}\nfix: give the name of a new file")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Write a file or a folder whole or not at all: readers see the old one or the new one, never a part.

    Args:
        path: The file to make or replace, or the folder to make, which may be there and empty.
        durable: Whether the file's bytes are on the disk before it takes its name.

    Yields:
        The path to write to, in the same folder. It takes the name of `path` if the block ends without an error, and
        is removed otherwise.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        if durable:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as a PNG that `is_picture` knows, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=110, metadata=dict(PICTURE))


def is_picture(path: Path) -> bool:
    """Return whether a file is a picture that bmburst drew."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.startswith(_PNG) and PICTURE["Software"].encode() in head


def require_file(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Check that a file can be written and replaces nothing but its like; one that is not there is not left behind.

    Args:
        option: See `require_own`, as all.
        path: The file.
        what: What is written there.
        is_own: Returns whether a file is such a one.

    Raises:
        UserError: It cannot, or another file is there.
    """
    try:
        if not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: there is no such folder\nfix: create it, or give another file")
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open it may wait, or mean something
        require_own(option, path, what, is_own)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot be written: {error.strerror}\n"
            "fix: give a file in a folder where you have write permission"
        ) from None


def require_folder(option: str, path: Path) -> None:
    """Check that files can be written in a folder; one that is not there could be made, and is not.

    Args:
        option: What it was given by.
        path: The folder.

    Raises:
        UserError: They cannot.
    """
    try:
        tempfile.TemporaryFile(dir=_existing(path)).close()
    except OSError as error:
        raise UserError(
            f"{option} {path}: no file can be written there: {error.strerror}\n"
            "fix: give a folder where you have write permission"
        ) from None


def amount(nbytes: float) -> str:
    """Return bytes as people read them, for example "1.4 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def free_bytes(path: Path) -> int:
    """Return what can still be written at a path, which need not be there yet."""
    return shutil.disk_usage(_existing(path)).free


def require_space(needs: Mapping[str, tuple[Path, int]], fix: str) -> None:
    """Check that everything that will be written has room; what lies on one file system is added up.

    Args:
        needs: What is written, in words, with its place and its bytes.
        fix: What to do where there is too little room.

    Raises:
        UserError: It has not.
    """
    devices: dict[int, list[str]] = {}
    for what, (path, nbytes) in needs.items():
        if nbytes:
            devices.setdefault(os.stat(_existing(path)).st_dev, []).append(what)
    for whats in devices.values():
        needed, free = sum(needs[what][1] for what in whats), free_bytes(needs[whats[0]][0])
        if needed > free:
            parts = " and ".join(f"{what} {amount(needs[what][1])}" for what in whats)
            raise UserError(
                f"{needs[whats[0]][0]}: the run writes {amount(needed)} ({parts}), but only {amount(free)} are free\n"
                f"fix: free {amount(needed - free)} more, or give {fix}"
            )


@contextlib.contextmanager
def held(folder: Path, lock: str = LOCK_FILE, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from a run folder until the block ends, or this process does, however it ends.

    The lock is `flock` on a file in the folder, which says who holds it and goes with the block. On a file system that
    does not lock, the file itself is the lock: one left by a process of this host that is gone does not count.

    Args:
        folder: The folder, which is there.
        lock: Which of its locks.
        patience: Seconds to wait for one who holds it.

    Raises:
        UserError: Another process holds it; the message says which, where and since when.
        OSError: The lock cannot be written.
    """
    path, give_up = folder / lock, time.monotonic() + patience
    while (descriptor := _take(path)) is None:
        if time.monotonic() >= give_up:
            raise UserError(
                f"{folder}: another run is using this folder: {_holder(path)}\n"
                "fix: wait for it to end, stop it, or give another --output"
            )
        time.sleep(0.05)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)
        yield
    finally:
        if _is_at(descriptor, path):
            path.unlink()  # while it is held: nobody else takes this file for a lock of his own
        os.close(descriptor)


def _take(path: Path) -> int | None:
    """Return the descriptor of a lock file that is now this process's, or None where another has it."""
    while True:
        is_new = True
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            is_new = False
            try:
                descriptor = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if is_new and error.errno in _NO_LOCKS:
                return descriptor
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            if not _removed_stale(path):
                return None
            continue
        os.close(descriptor)  # its holder removed it after it was opened


def _removed_stale(path: Path) -> bool:
    """Remove a lock file whose process is gone, where the file itself is the lock; return whether it was."""
    found = _read(path)
    with contextlib.suppress(FileNotFoundError):
        if found and not _is_gone(found):
            return False
        if not found and time.time() - path.stat().st_mtime < _PATIENCE:
            return False  # made a moment ago: its holder is about to write who he is
        path.unlink()
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _myself() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> str | None:
    """Return when a process of this host began, in the kernel's ticks; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _is_gone(holder: Mapping[str, object]) -> bool:
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return _started(pid) != holder.get("started")


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _holder(path: Path) -> str:
    """Return who holds a lock, in words; it may be about to write that."""
    give_up = time.monotonic() + _PATIENCE
    while (not (found := _read(path)) or _is_gone(found)) and time.monotonic() < give_up:
        time.sleep(0.02)
    if not found:
        return "it does not say which"
    return f"process {found.get('pid')} on host {found.get('host')}, since {found.get('since')}"


def _existing(path: Path) -> Path:
    whole = path.absolute()
    return next(folder for folder in (whole, *whole.parents) if folder.exists() or folder.is_symlink())
