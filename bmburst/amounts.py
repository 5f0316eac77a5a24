"""Parses and formats numbers and text of users: 64K tokens, lists of numbers, arrays, printable names."""

import hashlib
import math
import operator
import os
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bmburst.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

GIB = 2**30
"""Bytes."""
MOST = 10**15
"""Largest number of steps, tokens, ranks or bytes that a user may give."""
TOKENS_TOO = "also as 64K for 65536"
"""The suffixes that `tokens` accepts, for help and messages."""
GIB_TOO = "also as 128G, 512M or 1T"
"""The suffixes that `gibibytes` accepts."""
_HOME = re.compile(r"(?:^|(?<=[=,]))~(?=/)")
_UNBROKEN = "\N{NO-BREAK SPACE}"
_UNITS = (("M", 1 << 20), ("K", 1 << 10))


def short(number: int, *, commas: bool = False) -> str:
    """Return 65536 as "64K" and 1048576 as "1M". Other numbers are written in digits, optionally with commas."""
    for unit, size in _UNITS:
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}" if commas else str(number)


def enumerated(head: str, parts: Iterable[str], columns: int) -> str:
    """Return "head: first part, second part" in lines shorter than `columns`. No line breaks inside a part."""
    text = f"{head}: {', '.join(part.replace(' ', _UNBROKEN) for part in parts)}"
    lines = textwrap.wrap(text, columns - 1, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).replace(_UNBROKEN, " ")


def tokens(text: str) -> int:
    """Parse a number of tokens: 65536 for 64K or 64k, 1048576 for 1M, 7 for 7; ValueError for other text."""
    for unit, size in _UNITS:
        if text.upper().endswith(unit):
            return whole(str(int(text[:-1]) * size))
    return whole(text)


def gibibytes(text: str) -> float:
    """Return the GiB of a text: 128 for 128G, 128GiB and 128, 0.5 for 512M, 1024 for 1T; ValueError for others."""
    amount = text.strip().upper().removesuffix("IB").removesuffix("B")
    for unit, size in (("T", 1024.0), ("G", 1.0), ("M", 1 / 1024)):
        if amount.endswith(unit):
            return float(amount[:-1]) * size
    return float(amount)


def bytes_text(nbytes: float) -> str:
    """Return an amount of memory or disk space: "1.42 GiB", "465.0 MiB", "12.0 KiB", "7 bytes"."""
    if nbytes >= GIB:
        return f"{gib(nbytes)} GiB"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def gib(nbytes: float) -> str:
    """Return bytes in GiB, as in a column of a table: "4.58", and from 10 GiB on "76.7"."""
    digits = 2 if round(nbytes / GIB, 2) < 10 else 1
    return f"{nbytes / GIB:.{digits}f}"


def whole(text: str) -> int:
    """Parse a whole number of at most `MOST`, so that a float holds it exactly; ValueError for other text."""
    number = int(text)
    if abs(number) > MOST:
        raise ValueError(f"more than {MOST:,}")
    return number


def why_not_text(text: str, *, is_name: bool = True) -> str | None:
    """Return why a text from the command line cannot be stored and printed, or None if it can.

    Args:
        text: The text.
        is_name: Whether it is a name or a path, which must not contain control characters.
    """
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Cs":
            return "is not UTF-8"
        if is_name and kind in ("Cc", "Zl", "Zp"):
            return "holds a control character"
    return None


def at_home(text: str) -> str:
    """Return a path, or NAME=PATH, with the user's folder for a leading `~/`.

    A shell replaces it only at the beginning of a word, and files have no shell: a run folder named `~` would be made.
    """
    return _HOME.sub(lambda _: os.path.expanduser("~"), text)


def numbers(option: str, text: str, read: Callable[[str], int] = whole) -> tuple[int, ...]:
    """Parse the value `N,...` of an option.

    Args:
        option: The option, for messages.
        text: Its value.
        read: Parses one number or raises ValueError: `whole` or `tokens`.

    Raises:
        UserError: A word is not a number, or a number is less than 1.
    """
    try:
        found = tuple(read(word) for word in text.split(","))
    except ValueError:
        example = "64K,131072" if read is tokens else "2,4"
        raise UserError(
            f"{option} {text}\nallowed: whole numbers separated by commas\nfix: {option} {example}"
        ) from None
    if min(found) < 1:
        raise UserError(f"{option} {text}\nallowed: each at least 1\nfix: leave out numbers below 1")
    return found


def digest(array: "NDArray[Any]") -> str:
    """Return a short hash of an array."""
    return hashlib.blake2b(array.tobytes(), digest_size=6).hexdigest()


def array_of(what: str, values: Any) -> "NDArray[Any]":
    """Return a NumPy array of lists, arrays or a tensor on any device; UserError for what makes none."""
    import numpy as np  # only here: the command line's help starts without numpy

    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (ValueError, TypeError, RuntimeError):  # RuntimeError: a meta tensor, a conjugate
        raise UserError(
            f"{what} must be an array of numbers, got {short_text(values)}\nfix: pass a list, a NumPy array or a tensor"
        ) from None


def whole_numbers(what: str, values: Any) -> list[Any]:
    """Return the whole numbers of a sequence, array, tensor or single number; UserError for another value."""
    array = array_of(what, values)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(
            f"{what} must be a list of whole numbers, got {short_text(values)}\n"
            "fix: pass a list of int, or a 1-D int tensor"
        )
    found: list[Any] = array.reshape(-1).tolist()
    return found


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, also inside containers, since JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def short_text(values: Any) -> str:
    """Return values as text on one line of at most 100 characters."""
    text = " ".join(repr(values).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def as_whole(value: object) -> int | None:
    """Return a whole number of any type, also of NumPy or torch, as an int; None for a bool and any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # it raises then
    except TypeError:
        return None


def require_function(what: str, value: object) -> None:
    """Raise UserError unless a value can be called."""
    if not callable(value):
        raise UserError(f"{what} must be a function, got {short_text(value)}\nfix: pass one, or leave it out")


def whole_number(what: str, value: object, least: int) -> int:
    """Return the value as an int; UserError unless it is a whole number of at least `least`."""
    number = as_whole(value)
    if number is None or number < least:
        raise UserError(f"{what} must be a whole number of at least {least}, got {value!r}\nfix: pass such an int")
    return number


def require_flag(what: str, value: object) -> None:
    """Raise UserError unless a value is a bool."""
    if not isinstance(value, bool):
        raise UserError(f"{what} must be a bool, got {value!r}\nallowed: True or False\nfix: pass one of them")
