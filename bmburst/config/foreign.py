"""Keys of other programs' files: each is read, or has no effect here, or is refused by name. No torch.

A reader declares the keys that it understands as a mapping of `Key`, and `require_keys` refuses all others. So a key
that a new version of the other program adds is refused until somebody has read what it does.
docs/settings.md shows the mappings.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bmburst.config.fields import shown
from bmburst.errors import UserError


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is understood.

    Attributes:
        does: What is done with it, for the documentation.
        only: Allowed values; None: any value, or the reader checks it.
    """

    does: str
    only: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        return self.does if self.only is None else f"{self.does}; only {', '.join(map(json.dumps, self.only))}"


def keys(names: Iterable[str], does: str, *only: Any) -> dict[str, Key]:
    """Return the same `Key` for several names; without `only`, any value is allowed."""
    return dict.fromkeys(names, Key(does, only or None))


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Return what is done with each name, from the names, separated by spaces, by what is done with them."""
    return {name: does for does, each in names.items() for name in each.split()}


def require_keys(values: Mapping[str, Any], known: Mapping[str, Key], what: str, fix: str) -> None:
    """Raise UserError unless every key is known and has an allowed value.

    Args:
        values: The object in a file.
        known: The keys that are understood.
        what: What the object describes, for messages: "a llama model".
        fix: What the user can do instead, for messages.
    """
    for key, value in values.items():
        entry = known.get(key)
        if entry is None:
            raise UserError(
                f"{key} {shown(value)} of {what} is not known here: it may change what the model computes\n"
                f"fix: remove the key if it has no effect; else {fix}"
            )
        if entry.only is not None and not any(value == allowed for allowed in entry.only):
            allowed = ", ".join(map(json.dumps, entry.only))
            raise UserError(f"{key} {shown(value)} of {what} is not supported\nallowed: {allowed}\nfix: {fix}")
