"""Exceptions for bad input and for runs that must end: one clear message in place of a traceback."""

import difflib
from collections.abc import Iterable

_MOST_LINES, _MOST_CHARACTERS = 3, 1000  # of a message; of one of its lines


class UserError(ValueError):
    """What the user gave cannot work.

    The message is at most three lines: the value, what is allowed, and what to do. The command line prints it
    as it stands and exits with status 2. A value in it may be anything: what cannot be printed is escaped, and what
    would make more or endless lines is cut.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_printable(text))


def _printable(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS and text.count("\n") < _MOST_LINES and text.replace("\n", "").isprintable():
        return text
    lines = text.split("\n")
    rest = len(lines) - _MOST_LINES  # line ends inside of a value, which stands in the first line
    lines = [" ".join(lines[: rest + 1]), *lines[rest + 1 :]] if rest > 0 else lines
    return "\n".join(_shortened("".join(map(_escaped, line))) for line in lines)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _shortened(line: str) -> str:
    half = _MOST_CHARACTERS // 2 - 3
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


class RunError(Exception):
    """A run cannot go on, though nothing that was given is wrong: the command line shows the text alone, status 1.

    Args:
        text: What happened, and what to do.
        on_all_ranks: Whether every rank raises it.
    """

    def __init__(self, text: str, *, on_all_ranks: bool = True) -> None:
        super().__init__(text)
        self.on_all_ranks = on_all_ranks


def needs_bmtrain(name: str) -> UserError:
    """Return the error for a name that was imported before BMTrain could be.

    What BMTrain itself then advises, `pip install nvidia-nccl-cu11`, breaks torch.
    """
    return UserError(
        f"{name} needs BMTrain, and importing it failed\n"
        "fix: start the script with bmburst launch -- SCRIPT, or call bmburst.start() before this import"
    )


def unknown(kind: str, value: object, known: Iterable[str]) -> UserError:
    """Return the error for a name that is none of the known ones, with the nearest of them.

    Args:
        kind: What the name names, for example "layout".
        value: What was given.
        known: Every name that would have worked.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return UserError(f"unknown {kind} '{value}'{hint}\nknown: {', '.join(names)}")


def require_known(kind: str, value: object, known: Iterable[str]) -> None:
    """Raise `unknown` unless `value` is one of the known names; it may be of any type.

    Raises:
        UserError: See above.
    """
    names = tuple(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(kind, value, names)
