"""Whether what a command writes can be written: asked before its work begins, which may take long."""

import tempfile
from pathlib import Path

from bmburst.errors import UserError


def require_file(option: str, path: Path) -> None:
    """Check that a file can be written; one that is not there is not left behind.

    Args:
        option: What it was given by.
        path: The file.

    Raises:
        UserError: It cannot.
    """
    try:
        if not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: there is no such folder\nfix: make it, or another file")
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open it may wait, or mean something
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
