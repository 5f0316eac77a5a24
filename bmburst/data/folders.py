"""Lists the files of a folder that are read as text, and counts those that are left out."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

STANDARD_LIBRARY = "stdlib"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# Suffixes of text files in a directory. A file that the user names is text, whatever its suffix.
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".go", ".java", ".js", ".rs", ".sh", ".ts"),
)
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4")  # the suffix before them says what was packed
_MOST_KINDS, _MOST_LETTERS = 8, 16  # in a message: kinds of files, characters of a suffix


def is_dataset(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of Hugging Face's datasets."""
    return path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def walk(
    root: Path, leave_out: frozenset[str] = frozenset(), on_error: Callable[[OSError], object] | None = None
) -> Iterator[Path]:
    """Yield the files under `root`, sorted by relative path, without hidden files and caches.

    Args:
        root: The folder.
        leave_out: Names of folders to leave out.
        on_error: Called with the error of each folder that cannot be listed.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=on_error):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__" and f not in leave_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_read(path: Path) -> bool:
    """Return whether a file of a folder is read as text: by its suffix."""
    return path.suffix.lower() in TEXT_SUFFIXES + JSONL_SUFFIXES and path.is_file()


def left_out(source: str | Path | Sequence[str | Path]) -> Iterator[str]:
    """Yield a line for each folder of `source` that has files which are not read; hidden files are not counted.

    Args:
        source: One source, or several, as in `find_sources`.
    """
    for each in [source] if isinstance(source, str | Path) else source:
        root = Path(each)
        if each == STANDARD_LIBRARY or not root.is_dir() or is_dataset(root) or not (kinds := _kinds(root)):
            continue
        count = sum(kinds.values())
        yield (
            f"{count:,} file{'s' * (count > 1)} of folder {root}, by suffix: {_listed(kinds)}; "
            "to read such a file, unpack it if it is compressed, and give its own path"
        )


def found_instead(root: Path) -> str:
    """Return what a folder without text has: "1 .json, 3 .png", or "no files"."""
    return _listed(_kinds(root)) or "no files"


def _listed(kinds: Counter[str]) -> str:
    """Return the counts of kinds as text, the most frequent first."""
    ordered = sorted(kinds.items(), key=lambda each: (-each[1], each[0]))
    words = [f"{count:,} {kind}" for kind, count in ordered[:_MOST_KINDS]]
    if rest := sum(count for _, count in ordered[_MOST_KINDS:]):
        words.append(f"{rest:,} of other kinds")
    return ", ".join(words)


def _kinds(root: Path) -> Counter[str]:
    unreadable: list[OSError] = []
    kinds = Counter(_kind_of(path) for path in walk(root, on_error=unreadable.append) if not is_read(path))
    return kinds + Counter({"folders that cannot be listed": len(unreadable)})


def _kind_of(path: Path) -> str:
    if not path.is_file():
        return "broken links or devices"
    *_, before, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    suffix = before + last if last in _PACKED_SUFFIXES else last
    if not suffix.isprintable() or len(suffix) > _MOST_LETTERS:  # the rest of a name, not a kind
        return "of other kinds"
    return suffix or "without suffix"
