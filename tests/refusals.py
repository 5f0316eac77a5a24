"""Refusals are tested by their type and by key words: the value, the option, what is allowed, the fix."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bmburst import UserError

Refusal = str | BaseException | pytest.ExceptionInfo


def says(refusal: Refusal, *words: object, lines: int = 3) -> str:
    """Assert that a message holds every key word and has at most so many lines, and return it.

    A string may hold several key words: "scale | positive | 0.0". They stand anywhere in the message, in any order.
    A number is found whole: 3 is in neither 13 nor 3.5.
    """
    text = str(refusal.value if isinstance(refusal, pytest.ExceptionInfo) else refusal)
    wanted = [word for part in words for word in str(part).split(" | ")]
    missing = [word for word in wanted if not _whole(word).search(text)]
    assert not missing, f"{missing} missing in:\n{text}"
    assert len(text.splitlines()) <= lines, text
    return text


@contextmanager
def refused(*words: object, error: type[BaseException] = UserError, lines: int = 3) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error that `says` these key words."""
    with pytest.raises(error) as caught:
        yield caught
    says(caught, *words, lines=lines)


def refusal_of(call: Callable[..., object], *args: object, **options: object) -> str:
    """Return the message of a call that is refused."""
    with refused() as caught:
        call(*args, **options)
    return str(caught.value)


def refuse(call: Callable[[], object], *words: object) -> None:
    """Call what must be refused in these words."""
    says(refusal_of(call), *words)


def _whole(word: str) -> re.Pattern[str]:
    before = r"(?<!\d)(?<!\d\.)" if word[:1].isdigit() else ""
    after = r"(?!\d)(?!\.\d)" if word[-1:].isdigit() else ""
    return re.compile(before + re.escape(word) + after)
