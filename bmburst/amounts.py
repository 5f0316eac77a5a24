"""Amounts and words as people read and write them."""

import unicodedata

GIB = 2**30
"""Bytes."""
MOST = 10**15
"""No number of steps, tokens, ranks or bytes that a user gives is larger."""
TOKENS_TOO = "also as 64K for 65536"
"""What `tokens` reads beside digits, for help and messages."""
_UNITS = (("M", 1 << 20), ("K", 1 << 10))


def short(number: int, *, commas: bool = False) -> str:
    """Return 65536 as 64K and 1048576 as 1M; what is no multiple of 1024 as it is, or with `commas`."""
    for unit, size in _UNITS:
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}" if commas else str(number)


def tokens(text: str) -> int:
    """Return 65536 for 64K or 64k and 1048576 for 1M, and the number itself for its digits.

    Raises:
        ValueError: It is no whole number.
    """
    for unit, size in _UNITS:
        if text.upper().endswith(unit):
            return whole(str(int(text[:-1]) * size))
    return whole(text)


def whole(text: str) -> int:
    """Return a whole number of at most `MOST`, which floats hold exactly.

    Raises:
        ValueError: It is none, or larger.
    """
    number = int(text)
    if abs(number) > MOST:
        raise ValueError(f"more than {MOST:,}")
    return number


def why_not_text(text: str) -> str | None:
    """Return why a name or a path cannot be kept, printed and passed on, None where it can."""
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Cs":
            return "is not UTF-8"
        if kind in ("Cc", "Zl", "Zp"):
            return "holds a control character"
    return None
