"""Where compiled GPU kernels are kept on this machine, so that a later run finds them.

Triton and FlashAttention-4 load the files of their caches as code. So a cache must belong to this user, and no other
user may write to it.
"""

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bmburst.amounts import bytes_text
from bmburst.setup.system import Finding

_FLASH_ATTENTION_4 = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


def flash_attention_4(environ: Mapping[str, str], folder: Path | None = None) -> dict[str, str]:
    """Return the variables with which FlashAttention-4 keeps compiled kernels for later runs of this user on this node.

    The cache is a folder that belongs to this user and that no other user can write or read. If that is not possible,
    or if the environment sets one of the variables, none is returned.

    Args:
        environ: The environment.
        folder: A folder on a local disk: the package locks files, which network disks may not do. Default: the folder
            of temporary files.
    """
    if any(name in environ for name in _FLASH_ATTENTION_4):
        return {}
    own = (Path(tempfile.gettempdir()) if folder is None else folder) / f"bmburst-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        state = own.lstat()
    except OSError:
        return {}
    is_private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077
    return dict(zip(_FLASH_ATTENTION_4, ("1", str(own / "flash-attn-4")), strict=True)) if is_private else {}


def folders(environ: Mapping[str, str]) -> dict[str, Path | None]:
    """Return the folder of each cache by the name of its package; None: the package keeps no kernels."""
    home = Path(environ.get("TRITON_HOME") or Path.home())
    own = dict(environ) | flash_attention_4(environ)
    is_on, where = (own.get(name, "") for name in _FLASH_ATTENTION_4)
    return {
        "triton": Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "flash-attn-4": Path(where) if where and is_on == "1" else None,
    }


def kernel_caches(name: str, found: Mapping[str, Path | None] | None = None) -> Finding:
    """Say where compiled kernels lie, and check that this user can write there and other users cannot.

    Args:
        name: Name of the finding.
        found: Result of `folders`; by default of this process's environment.
    """
    said, fix = [], ""
    for package, folder in (folders(os.environ) if found is None else found).items():
        if folder is None:
            said.append(f"{package}: compiled again in every run")
            continue
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        state = there.stat()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if there == folder else 0
        wrong = ""
        if not os.access(there, os.W_OK):
            wrong = ", where this user cannot write"
        elif there == folder and (state.st_uid != os.getuid() or state.st_mode & 0o022):
            wrong = ", where other users can put code"
            fix = f"rm -r {folder}"
        said.append(f"{package}: {folder}{wrong or f' ({bytes_text(size)})'}")
    is_wrong = any(", where " in each for each in said)
    return Finding(name, "broken" if is_wrong else "ok", "; ".join(said), fix)
