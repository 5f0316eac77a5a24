"""The releases of transformers that the integrations work with, in one place.

`require_release` is called where `bmburst.integrations.transformers` is imported. setup.py asks for the same release.
In newer ones, functions that bmburst replaces are known by their signatures; others are refused by name.
"""

import re

from transformers import __version__

from bmburst.errors import UserError

LEAST = "5.20"
"""The oldest release. With older ones, some models failed with a traceback, and Phi-3 with "longrope" generated other
tokens than in transformers."""
READ = "transformers 5.23 or 5.24"
"""The releases whose layers and functions were read."""


def require_release(installed: str | None = None) -> None:
    """Check that transformers is new enough.

    Args:
        installed: The version; default: that of this Python.

    Raises:
        UserError: It is older than `LEAST`.
    """
    installed = __version__ if installed is None else installed
    if _numbers(installed) < _numbers(LEAST):
        raise UserError(
            f"transformers is {installed}, which cannot run on split sequences\nallowed: {LEAST} or newer\n"
            f"fix: pip install 'transformers>={LEAST}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (5, 20) of 5.20.2."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
