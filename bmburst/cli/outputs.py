"""Whether what a command writes at its end can be written: asked before its work begins, which may take long."""

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
    """Make a folder, and check that files can be written in it.

    Args:
        option: What it was given by.
        path: The folder.

    Raises:
        UserError: They cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(
            f"{option} {path}: no file can be written there: {error.strerror}\nfix: a folder that you may write in"
        ) from None
