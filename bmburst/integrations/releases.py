"""The releases of transformers that the integrations work with, in one place.

`require_release` is called where `bmburst.integrations.transformers` is imported. setup.py asks for the same release.
In newer ones, functions that bmburst replaces are known by their signatures; others are refused by name.
"""

import re
from importlib import metadata

from bmburst.errors import UserError

LEAST = "5.17"
"""The oldest release. Older ones have other masks, caches and recurrent layers."""
READ = "transformers 5.23 or 5.24"
"""The releases whose layers and functions were read."""


def require_release(installed: str | None = None) -> None:
    """Check that transformers is new enough.

    Args:
        installed: The version; default: that of this Python.

    Raises:
        UserError: It is older than `LEAST`.
    """
    installed = metadata.version("transformers") if installed is None else installed
    if _numbers(installed) < _numbers(LEAST):
        raise UserError(
            f"transformers is {installed}, which cannot run on split sequences\nallowed: {LEAST} or newer\n"
            f"fix: pip install 'transformers>={LEAST}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (5, 17) of 5.17.0."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
