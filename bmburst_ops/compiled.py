"""C functions that are compiled at their first use, for the processor at hand, where there is a C compiler."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FLAGS = ("-march=native", "-fno-math-errno", "-shared", "-fPIC")


def find_compiler() -> str | None:
    """Return the path of the C compiler that CC names, else of cc or gcc; None where there is none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def compiled(source: Path, flags: Sequence[str]) -> ctypes.CDLL | None:
    """Compile a C file, in a fraction of a second, and load it. Callers keep the result.

    Args:
        source: The file.
        flags: Of the compiler, beside those of every library here.

    Returns:
        The library; None where there is no compiler, it fails, or no folder for temporary files can be written to.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        # A folder of this process: others cannot change what it runs. NFS keeps the file of a loaded library in it.
        with tempfile.TemporaryDirectory(prefix="bmburst-", ignore_cleanup_errors=True) as folder:
            library = Path(folder) / f"{source.stem}.so"
            command = [compiler, *_FLAGS, *flags, str(source), "-o", str(library), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None
