"""Amounts as people read them."""

GIB = 2**30
"""Bytes."""


def short(number: int, *, commas: bool = False) -> str:
    """Return 65536 as 64K and 1048576 as 1M; what is no multiple of 1024 as it is, or with `commas`."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}" if commas else str(number)
