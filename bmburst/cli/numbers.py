"""Options that are several numbers: `N,...`."""

from collections.abc import Callable

from bmburst.amounts import tokens, whole
from bmburst.errors import UserError


def numbers(option: str, text: str, read: Callable[[str], int] = whole) -> tuple[int, ...]:
    """Return the numbers of `N,...`.

    Args:
        option: What they were given by.
        text: As given.
        read: Returns the number of a word, or raises ValueError: `whole`, or `tokens`.

    Raises:
        UserError: It is something else, or one is less than 1.
    """
    try:
        found = tuple(read(word) for word in text.split(","))
    except ValueError:
        example = "64K,131072" if read is tokens else "2,4"
        raise UserError(f"{option} {text}\nallowed: whole numbers with commas between, for example {example}") from None
    if min(found) < 1:
        raise UserError(f"{option} {text}\nallowed: 1 and more")
    return found
