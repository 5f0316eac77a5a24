"""Files of Git LFS: a clone that was made without it has a few lines of text in place of each large file."""

from pathlib import Path

from bmburst.errors import UserError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_MOST = 1024  # bytes of a pointer, by Git LFS's specification


def require_content(path: Path) -> None:
    """Raise UserError unless a file is not the pointer that Git has in its place.

    Args:
        path: The file. One that cannot be read is left to its reader.
    """
    try:
        is_pointer = path.stat().st_size < _MOST and path.read_bytes().startswith(_BEGINNING)
    except OSError:
        return
    if is_pointer:
        raise UserError(
            f"{path} holds only the name of its content, as after a git clone without Git LFS\n"
            f"fix: git lfs install && git lfs pull, in the folder {path.parent}; or download the file again"
        )
