"""Compiles C functions at first use for the current processor, if there is a C compiler: `compiled`."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FLAGS = ("-march=native", "-fno-math-errno", "-shared", "-fPIC")


def find_compiler() -> str | None:
    """Return the path of the C compiler: CC from the environment, else cc or gcc; None if there is none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def compiled(source: Path, flags: Sequence[str]) -> ctypes.CDLL | None:
    """Compile a C file and load it, in a fraction of a second. Results are not cached here; callers keep them.

    Args:
        source: The file.
        flags: Compiler flags, in addition to those that all libraries here have.

    Returns:
        The library; None if there is no compiler, compiling fails, or no temporary folder is writable.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        # A private folder: other users cannot change the code. NFS keeps the file of a loaded library in it.
        with tempfile.TemporaryDirectory(prefix="bmburst-", ignore_cleanup_errors=True) as folder:
            library = Path(folder) / f"{source.stem}.so"
            command = [compiler, *_FLAGS, *flags, str(source), "-o", str(library), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None
