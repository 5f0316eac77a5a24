"""Whether what a command writes can be written: asked before its work begins, which may take long."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from bmburst.errors import UserError

PICTURE = MappingProxyType({"Software": "bmburst, https://matplotlib.org"})
"""Metadata of every picture, by which `is_picture` knows it."""
_PNG, _HEAD = b"\x89PNG\r\n\x1a\n", 1024


def require_own(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse to replace a file that bmburst did not write. An empty one may be anybody's.

    Args:
        option: What it was given by.
        path: The file, which need not be there.
        what: What is written there, for example "token file".
        is_own: Returns whether a file is such a one; it need not catch an OSError or a ValueError.

    Raises:
        UserError: Another file is there.
    """
    try:
        if not path.is_file() or not path.stat().st_size or is_own(path):
            return
    except (OSError, ValueError):
        pass
    raise UserError(f"{option} {path}: is there, and no {what}\nfix: the name of a new file")


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
            raise UserError(f"{option} {path}: there is no such folder\nfix: make it, or another file")
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open it may wait, or mean something
        require_own(option, path, what, is_own)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot be written: {error.strerror}\nfix: a file in a folder that you may write in"
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
        whole = path.absolute()
        there = next(folder for folder in (whole, *whole.parents) if folder.exists() or folder.is_symlink())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(
            f"{option} {path}: no file can be written there: {error.strerror}\nfix: a folder that you may write in"
        ) from None
