"""The releases of transformers that the integrations work with, in one place.

`require_release` is called where `bmburst.integrations.transformers` is imported. setup.py asks for the same release.
In newer ones, functions that bmburst replaces are known by their signatures; others are refused by name.
"""

import re

from transformers import __version__

from bmburst.errors import UserError

LEAST = "5.17"
"""The oldest release. With older ones, models with recurrent layers failed with a traceback."""
LONGROPE = "5.20"
"""The oldest release for generation with rope type "longrope". With 5.17, Phi-3 generated other tokens."""
READ = "transformers 5.23 or 5.24"
"""The releases whose layers and functions were read."""


def require_release(least: str = LEAST, what: str = "run on split sequences", installed: str = __version__) -> None:
    """Raise UserError unless transformers is new enough.

    Args:
        least: The oldest release that is.
        what: What older ones cannot do.
        installed: The version.
    """
    if _numbers(installed) < _numbers(least):
        raise UserError(
            f"transformers is {installed}, which cannot {what}\nallowed: {least} or newer\n"
            f"fix: pip install 'transformers>={least}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (5, 20) of 5.20.2."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
