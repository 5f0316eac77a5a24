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

from bmburst.amounts import bytes_text
from bmburst.errors import UserError

PICTURE = MappingProxyType({"Software": "bmburst, https://matplotlib.org"})
"""Metadata of every picture, by which `is_picture` recognizes it."""
_DOTS = 160  # per inch: pictures are small, with large letters
_PNG, _HEAD = b"\x89PNG\r\n\x1a\n", 1024
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors for missing space: the file system is full, a quota is exceeded, or the file is too large."""
LOCK_FILE, TRAINING_LOCK = ".lock", ".training.lock"
"""Lock files of a run folder: the process that started the run holds the first, the rank that writes the second."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # of network file systems
_PATIENCE = 1.0  # seconds for a holder to write its name into the lock file


def require_own(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse to replace a file that bmburst did not write, unless it is empty.

    Args:
        option: The option that names the file, for messages.
        path: The file, which need not exist.
        what: What the command writes there, with its article, for example "a token file".
        is_own: Returns whether bmburst wrote a file; may raise OSError or ValueError.

    Raises:
        UserError: The file exists and bmburst did not write it.
    """
    try:
        if not path.is_file() or not path.stat().st_size or is_own(path):
            return
    except (OSError, ValueError):
        pass
    raise UserError(f"{option} {path}: this file exists and is not {what}\nfix: give the name of a new file")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Write a file or folder atomically: readers see the old one or the new one, never a part.

    Args:
        path: The file to create or replace, or the folder to create, which may exist if it is empty.
        durable: Whether to flush the file to the disk before it is renamed.

    Yields:
        The path to write to, in the same folder. It is renamed to `path` if the block ends without an error, and is
        removed otherwise.
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


def blank_picture(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; width and height in inches."""
    # Figure without pyplot: no global state and no search for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure atomically as a PNG that `is_picture` recognizes.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.image import imsave

    figure.set_dpi(_DOTS)
    figure.canvas.draw()  # once: `savefig` lays the figure out and draws it twice
    with replacing(path) as partial:
        imsave(partial, figure.canvas.buffer_rgba(), format="png", dpi=_DOTS, metadata=dict(PICTURE))


def is_picture(path: Path) -> bool:
    """Return whether a file is a picture that bmburst drew."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.startswith(_PNG) and PICTURE["Software"].encode() in head


def require_file(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Check that a file can be written and replaces only a file of its kind. No file is left behind.

    Args:
        option: See `require_own`.
        path: See `require_own`.
        what: See `require_own`.
        is_own: See `require_own`.

    Raises:
        UserError: The file cannot be written, or exists and bmburst did not write it.
    """
    try:
        if not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: there is no such folder\nfix: create it, or give another file")
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: opening it may block or have an effect
        require_own(option, path, what, is_own)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot be written: {error.strerror}\n"
            "fix: give a file in a folder where you have write permission"
        ) from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file atomically, after `require_file` has checked it.

    Args:
        option: The option that names the file, for messages.
        path: The file.
        text: Its text.

    Raises:
        UserError: It cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which must not be replaced by a file
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written: {error.strerror}\nfix: give another file") from None


def require_folder(option: str, path: Path) -> None:
    """Check that files can be written in a folder, which need not exist and is not created.

    Args:
        option: The option that names the folder, for messages.
        path: The folder.

    Raises:
        UserError: No file can be written there.
    """
    try:
        tempfile.TemporaryFile(dir=_existing(path)).close()
    except OSError as error:
        raise UserError(
            f"{option} {path}: no file can be written there: {error.strerror}\n"
            "fix: give a folder where you have write permission"
        ) from None


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of a path, which need not exist."""
    return shutil.disk_usage(_existing(path)).free


def require_space(needs: Mapping[str, tuple[Path, int]], fix: str) -> None:
    """Check that file systems have room for everything that will be written on them.

    Args:
        needs: Path and number of bytes of each output, by its name for messages.
        fix: The option to change if there is too little room.

    Raises:
        UserError: A file system has too little room.
    """
    devices: dict[int, list[str]] = {}
    for what, (path, nbytes) in needs.items():
        if nbytes:
            devices.setdefault(os.stat(_existing(path)).st_dev, []).append(what)
    for whats in devices.values():
        needed, free = sum(needs[what][1] for what in whats), free_bytes(needs[whats[0]][0])
        if needed > free:
            parts = " and ".join(f"{what} {bytes_text(needs[what][1])}" for what in whats)
            raise UserError(
                f"{needs[whats[0]][0]}: {bytes_text(free)} are free, but the run writes {bytes_text(needed)}: {parts}\n"
                f"fix: make room for {bytes_text(needed - free)} more, or give {fix}"
            )


@contextlib.contextmanager
def held(folder: Path, lock: str = LOCK_FILE, patience: float = 0.0) -> Iterator[None]:
    """Lock a run folder until the block or this process ends.

    The lock is `flock` on a file in the folder. The file names the holder and is removed when the block ends. On a file
    system without locks the file itself is the lock; a file left by a dead process of this host does not count.

    Args:
        folder: The folder, which exists.
        lock: Name of the lock file.
        patience: Seconds to wait for another holder.

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
            path.unlink()  # while the lock is held, so that no other process locks a removed file
        os.close(descriptor)


def _take(path: Path) -> int | None:
    """Take a lock; return the descriptor of its file, or None if another process holds it."""
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
    """Remove a lock file whose process has ended, on a file system without locks; return whether it is removed."""
    found = _read(path)
    with contextlib.suppress(FileNotFoundError):
        if found and not _is_gone(found):
            return False
        if not found and time.time() - path.stat().st_mtime < _PATIENCE:
            return False  # created a moment ago: its holder is about to write its name
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
    """Return the start time of a process of this host in the kernel's ticks, or None if there is no such process."""
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
    """Return the holder of a lock in words, waiting a moment for it to write its name."""
    give_up = time.monotonic() + _PATIENCE
    while (not (found := _read(path)) or _is_gone(found)) and time.monotonic() < give_up:
        time.sleep(0.02)
    if not found:
        return "it does not say which"
    return f"process {found.get('pid')} on host {found.get('host')}, since {found.get('since')}"


def _existing(path: Path) -> Path:
    whole = path.absolute()
    return next(folder for folder in (whole, *whole.parents) if folder.exists() or folder.is_symlink())
