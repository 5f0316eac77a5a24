"""Exceptions for invalid input and for runs that must end: one clear message instead of a traceback."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w-]*(\.\d[\w-]*)*")  # owner/name, whose dots stand before digits
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # of two slashes, Path leaves one
OF_THE_MAKER = (
    "in the format of the model's maker: give the model in that of transformers, whose scripts, such as "
    "convert_mistral_weights_to_hf.py, write it"
)
_MOST_LINES, _MOST_CHARACTERS = 3, 1000  # of a message; of one of its lines


class UserError(ValueError):
    """An argument, option or file is invalid.

    The message has at most three lines: the value, what is allowed, and what to do. The command line prints it and
    exits with status 2. Characters of a value that cannot be printed are escaped, and long lines are shortened.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_printable(text))


def _printable(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS and text.count("\n") < _MOST_LINES and text.replace("\n", "").isprintable():
        return text
    lines = text.split("\n")
    rest = len(lines) - _MOST_LINES  # line breaks inside the value, which is in the first line
    lines = [" ".join(lines[: rest + 1]), *lines[rest + 1 :]] if rest > 0 else lines
    return "\n".join(_shortened("".join(map(_escaped, line))) for line in lines)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _shortened(line: str) -> str:
    half = _MOST_CHARACTERS // 2 - 3
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


class UnknownKey(UserError):
    """A file of settings has a key that is not known."""


class DoesNotFit(UserError):
    """Nothing that a plan may try fits into memory, although the input is valid. `bmburst plan` exits with status 1."""


class RunError(Exception):
    """A run must end although its input is valid. The command line prints the text and exits with status 1.

    Args:
        text: What happened, and what to do.
        on_all_ranks: Whether every rank raises the error.
    """

    def __init__(self, text: str, *, on_all_ranks: bool = True) -> None:
        super().__init__(text)
        self.on_all_ranks = on_all_ranks


def needs_bmtrain(name: str) -> UserError:
    """Return the error for a name whose module needs BMTrain, which cannot be imported yet.

    BMTrain's own advice in this case, `pip install nvidia-nccl-cu11`, breaks torch.
    """
    return UserError(
        f"{name} needs BMTrain, and importing it failed\n"
        "fix: start the script with bmburst launch -- SCRIPT, or call bmburst.start() before this import"
    )


def not_a_number(what: str, dtype: object) -> UserError:
    """Return the error for a model that computes NaN.

    Args:
        what: What is NaN, with its verb, for example "the loss is".
        dtype: dtype of the model.
    """
    return UserError(
        f"{what} NaN, in {dtype}\nallowed: weights that are numbers, and a dtype in which no activation overflows\n"
        "fix: check the checkpoint, or use bfloat16 or float32"
    )


def with_fix(error: UserError, fix: str) -> UserError:
    """Return the error with another fix instead of its own, which is given without "fix: "."""
    lines = [line for line in str(error).split("\n") if not line.startswith("fix: ")]
    return UserError("\n".join([*lines, f"fix: {fix}"]))


def hub_fix(path: str | Path, kind: str = "") -> str:
    """Return the end of a fix for a path without a model or data that has to do with the Hugging Face hub, else "".

    Args:
        path: A missing path, which may be a name on the hub, or a folder, which may be one of the hub's cache.
        kind: Options of `hf download`.
    """
    folder = Path(path)
    if snapshots := sorted(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime):
        return f"; of this folder of the hub's cache: {snapshots[-1].parent}"
    if saved := sorted(folder.glob("checkpoint-*/config.json"), key=lambda file: file.stat().st_mtime):
        return f"; of this folder of a Trainer: {saved[-1].parent}"
    if made := sorted(folder.glob("consolidated.*")):
        return f"; {made[0].name} is {OF_THE_MAKER}"
    if folder.is_dir() or _HUB_NAME.fullmatch(str(path)) is None or folder.parent.is_dir():
        return ""
    return f"; from the Hugging Face hub: hf download {kind}{path} --local-dir DIR"


def fix_of_missing(source: str) -> str:
    """Return what to do about data that are no path here: an address, a pattern, a name of the hub, or a mistake."""
    if _ADDRESS.match(source):
        return "download it, and give the file: addresses are not read"
    if any(sign in source for sign in "*?["):
        return "give the folder, of which all text is read: patterns of names are not expanded"
    return f"correct the path{hub_fix(source, '--repo-type dataset ')}"


def no_directory(path: Path) -> str:
    """Return why a path is no directory: a file is there, such as model.gguf, or nothing is."""
    return "it is a file, no directory" if path.is_file() else "no such directory"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return an error's text as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


_SHOWN = 16  # names that a message lists


def unknown(kind: str, value: object, known: Iterable[str], lists: str = "") -> UserError:
    """Return the error for an unknown name; the message lists the known names and suggests the nearest.

    Args:
        kind: What the name is for, for example "layout".
        value: The unknown name.
        known: The known names. If there are more than 16, the message shows the 8 most similar ones.
        lists: The command that lists all names, for messages that do not.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    shown = names if len(names) <= _SHOWN else difflib.get_close_matches(str(value), names, n=_SHOWN // 2, cutoff=0.0)
    rest = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    listed = f"; {lists} lists them" if lists and rest else ""
    return UserError(
        f"unknown {kind} '{value}'{hint}\nknown: {', '.join(shown)}{rest}\nfix: give one of the known names{listed}"
    )


def require_known(kind: str, value: object, known: Iterable[str], lists: str = "") -> None:
    """Raise `unknown`, a UserError, unless `value`, of any type, is one of the known names."""
    names = tuple(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(kind, value, names, lists)
