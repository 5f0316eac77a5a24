"""Checks and writes output files: permissions, disk space, locks on run folders, atomic replacement."""

import contextlib
import errno
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
"""Lock files of a run folder: the process that started the run holds the first, the rank that writes the second. They
stay in the folder."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # of network file systems
_PATIENCE = 1.0  # seconds for a holder to write its name


def require_own(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Raise UserError rather than replace a file that bmburst did not write, unless it is empty.

    Args:
        option: The option that names the file, for messages.
        path: The file, which need not exist.
        what: What the command writes there, with its article, for example "a token file".
        is_own: Returns whether bmburst wrote a file; may raise OSError or ValueError.
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
    """Write a matplotlib figure atomically as a PNG that `is_picture` recognizes; OSError if that fails."""
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
    """Raise UserError unless a file can be written and replaces only a file of its kind. No file is left behind.

    The arguments are those of `require_own`.
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
    """Write a file atomically, after `require_file` has checked it; UserError if that fails."""
    with explained_write(option, path):
        if path.exists() and not path.is_file():  # a pipe or a device, which must not be replaced by a file
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")


def write_fix(error: OSError, path: Path | None, otherwise: str) -> str:
    """Return what to do about a file that cannot be written.

    Args:
        error: Why it cannot.
        path: The file, which need not exist; None: which one is not known.
        otherwise: What to do where space is not what is missing.
    """
    if error.errno == errno.EFBIG:
        return "raise the limit of a file's size (ulimit -f), or write to another file system"
    if error.errno in FULL:
        left = "" if path is None else f", {bytes_text(free_bytes(path))} are left"
        return f"free disk space{left}, or write to another disk"
    return otherwise


@contextlib.contextmanager
def explained_write(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError of writing a file, which an option names, into a UserError."""
    try:
        yield
    except OSError as error:
        fix = write_fix(error, path, "give another file")
        raise UserError(f"{option} {path}: cannot be written: {error.strerror}\nfix: {fix}") from None


def require_folder(option: str, path: Path) -> None:
    """Raise UserError unless files can be written in a folder, which need not exist and is not created.

    Args:
        option: The option that names the folder, for messages.
        path: The folder.
    """
    why = ""
    try:
        there = _existing(path)
        if there.is_symlink() and not there.exists():
            why = f"{there} is a link to {there.readlink()}, which does not exist"
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(
            f"{option} {path}: no file can be written there: {why or error.strerror}\n"
            "fix: give a folder where you have write permission"
        ) from None


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of a path, which need not exist."""
    return shutil.disk_usage(_existing(path)).free


def require_space(needs: Mapping[str, tuple[Path, int]], fix: str) -> None:
    """Raise UserError unless file systems have room for everything that will be written on them.

    Args:
        needs: Path and number of bytes of each output, by its name for messages.
        fix: The option to change if there is too little room.
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
def lock_folder(folder: Path, lock: str = LOCK_FILE, patience: float = 0.0) -> Iterator[None]:
    """Lock a run folder until the block or this process ends.

    The lock is a `filelock.FileLock`, which leaves its file behind. A second file names the holder, for the message of
    others; it is removed when the block ends.

    Args:
        folder: The folder, which exists.
        lock: Name of the lock file.
        patience: Seconds to wait for another holder.

    Raises:
        UserError: Another process holds it; the message says which, where and since when. Or the file system has no
            locks.
        OSError: The lock cannot be written.
    """
    # Imported here: the command line starts in milliseconds without it.
    import filelock

    path, holder = folder / lock, folder / f"{lock}.holder"
    try:
        taken = filelock.FileLock(path).acquire(timeout=patience, poll_interval=0.05)
    except filelock.Timeout:
        raise UserError(
            f"{folder}: another run is using this folder: {_text_of(holder)}\n"
            "fix: wait for it to end, stop it, or give another --output"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UserError(
            f"{folder}: this file system has no locks: {error.strerror}\n"
            "fix: give an --output on a file system that has, or mount it with them (flock)"
        ) from None
    with taken:
        holder.unlink(missing_ok=True)  # of a process that was killed
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder.write_text(f"process {os.getpid()} on host {socket.gethostname()}, since {since}", encoding="utf-8")
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


def _text_of(holder: Path) -> str:
    """Return who holds a lock, in words, waiting a moment for the holder to write them."""
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        with contextlib.suppress(FileNotFoundError):
            if text := holder.read_text(encoding="utf-8"):
                return text
        time.sleep(0.02)
    return "it does not say which"


def _existing(path: Path) -> Path:
    whole = path.absolute()
    return next(folder for folder in (whole, *whole.parents) if folder.exists() or folder.is_symlink())
