"""Refusals of single-device operations."""

import difflib
from collections.abc import Sequence


class KernelError(ValueError):
    """A kernel was asked for by name and cannot run on these inputs or this machine; the message says why."""


def unknown_kernel(name: str, known: Sequence[str]) -> KernelError:
    """Return the refusal of a kernel's name, with the nearest of the known ones."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return KernelError(f"unknown kernel '{name}'{hint}\nknown: {', '.join(known)}\nfix: give one of the known names")
