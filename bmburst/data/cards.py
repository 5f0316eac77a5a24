"""Reads which files belong together in the card of a data set's folder, README.md, as the Hugging Face hub has it."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bmburst.errors import UserError

_MOST = 1 << 20  # characters of a card that are read


def require_one_configuration(root: Path, names: Iterable[str]) -> None:
    """Raise UserError if the files to read from a data set's folder are those of several configurations.

    A configuration is a data set of its own: another language, other versions of the same rows, or the others together.

    Args:
        root: The folder.
        names: Paths of the files below it.
    """
    card = root / "README.md"
    if not card.is_file():
        return
    read = list(names)
    found: dict[frozenset[str], str] = {}
    for name, patterns in _configurations(card):
        if files := frozenset(file for file in read if any(fnmatchcase(file, pattern) for pattern in patterns)):
            found.setdefault(files, name)
    if len(found) > 1:
        files = next(iter(found))
        folders = {Path(file).parent for file in files}
        shared = {Path(file).parent for file in frozenset().union(*found) - files}
        one = min(files) if len(folders) > 1 or folders & shared else folders.pop().as_posix()
        raise UserError(
            f"folder {root} has several configurations of a data set, by its README.md: {', '.join(found.values())}\n"
            f"allowed: the files of one, such as {root / one}\n"
            "fix: give its folder or file; several, also all, as sources of a YAML file: docs/data.md, Mixtures"
        )


def _configurations(card: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each configuration of a card, and the patterns of its files; nothing if it has none."""
    import yaml

    try:
        begin, told, _ = card.read_text("utf-8")[:_MOST].split("---", 2)
        values = yaml.safe_load(told)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return  # not a card of a data set
    listed = values.get("configs") if isinstance(values, dict) and not begin.strip() else None
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and isinstance(each.get("config_name"), str):
            below = f"{each['data_dir'].strip('/')}/" if isinstance(each.get("data_dir"), str) else ""
            patterns = list(_texts(each.get("data_files", "*")))
            yield each["config_name"], [below + pattern.removeprefix("./") for pattern in patterns]


def _texts(value: Any) -> Iterator[str]:
    """Yield the patterns of `data_files`: a text, a list, or objects with a split and a path."""
    if isinstance(value, str):
        yield value
    for each in value if isinstance(value, list) else ():
        yield from _texts(each.get("path") if isinstance(each, dict) else each)
