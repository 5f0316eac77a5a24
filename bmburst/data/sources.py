"""Finds the files of a data source: named files, folders, or Python's standard library; counts what is left out."""

import codecs
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bmburst.config import parse_json
from bmburst.config.git_lfs import require_content
from bmburst.data.cards import require_one_configuration
from bmburst.data.streams import PACKED_SUFFIXES, opened, plain_suffix
from bmburst.errors import UserError, fix_of_missing
from bmburst.outputs import TRAINING_LOCK

STANDARD_LIBRARY = "stdlib"
# Not the standard library: installed packages; and its tests, which are large and contain invalid files on purpose.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
PIECE_BYTES = 1 << 20
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# Suffixes of text files in a directory. A file that the user names is text, whatever its suffix.
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".go", ".java", ".js", ".rs", ".sh", ".ts"),
)
PARQUET_SUFFIX = ".parquet"
_PARQUET = b"PAR1"
_TABLES = {".csv": "read_csv", ".tsv": "read_table"}  # as pandas reads them
_AS_TEXT = "dtype=str, keep_default_na=False"  # or an answer None or NA is missing, and 1.10 is a number
# Files of a data set's folder that are no data, and the names by which the hub tells its splits.
_CARDS = ("readme", "license", "licence", "citation")
_TRAIN = ("train", "training")
_OTHER = ("test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev")
_SPLIT = re.compile(rf"(?<![^-._ /\d=])(?:{'|'.join(_TRAIN + _OTHER)})(?![^-._ /\d])")
_READ_SUFFIXES = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, PARQUET_SUFFIX)
_OTHER_PACKED = (*PACKED_SUFFIXES, ".lz4")  # in messages
_MOST_KINDS, _MOST_LETTERS, _MOST_NAMES = 8, 16, 4  # in a message: kinds of files, characters of a suffix, names


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file to read.

    Attributes:
        path: Path of the file.
        name: Its name in messages.
        kind: "text": one document; "jsonl": one document per line; "json": one of `documents.SHAPES`, one document per
            element; "parquet": a Parquet file, "dataset": a folder written by the package datasets, both one document
            per row. All but the last two may be compressed.
        named: Whether the user named this file. If it is unreadable, that is an error; an unreadable file found in a
            directory is skipped and reported.
    """

    path: Path
    name: str
    kind: Literal["text", "jsonl", "json", "parquet", "dataset"]
    named: bool


def find_sources(inputs: Sequence[str | Path], on_skip: Callable[[str], object] = lambda _: None) -> list[SourceFile]:
    """Return all files of `inputs`, in an order that depends only on names.

    Args:
        inputs: Files, directories (searched recursively, also behind links, for `TEXT_SUFFIXES`, `JSONL_SUFFIXES`, also
            compressed, and Parquet files, without hidden files and run folders), or "stdlib" for the sources of the
            running Python.
        on_skip: Called with a line about each kind of files in a directory that are not read, and about run folders.

    Raises:
        UserError: A path does not exist or is not readable, a directory contains no text, or a file is a pointer of
            Git LFS.
    """
    found: list[SourceFile] = []
    for item in inputs:
        try:
            # Only the string "stdlib" is special; Path("stdlib") and "./stdlib" are paths.
            found += _standard_library() if item == STANDARD_LIBRARY else _named(Path(item), on_skip, str(item))
        except OSError as error:
            raise unreadable(str(item), error) from error
    return found


def _files(count: int) -> str:
    return f"{count:,} file{'s' * (count > 1)}"


def unreadable(name: str, error: OSError) -> UserError:
    """Return the error for a file that cannot be opened or read."""
    fix = "give a file that you have permission to read" if error.errno else "copy or download the file again"
    return UserError(f"cannot read '{name}': {error.strerror or error}\nfix: {fix}")


def _named(path: Path, on_skip: Callable[[str], object], given: str) -> list[SourceFile]:
    if _is_dataset(path):
        return [SourceFile(path=path, name=str(path), kind="dataset", named=True)]
    if path.is_dir():
        return _directory(path, on_skip)
    if path.exists() and not path.is_file():  # files are read twice, and a pipe may never end
        raise UserError(f"'{path}' is a device or a pipe\nallowed: a file or a directory\nfix: save the text in a file")
    if path.exists():
        return [SourceFile(path=path, name=str(path), kind=_kind(path, named=True), named=True)]
    raise UserError(
        f"no file or directory '{given}'\n"
        f"allowed: text files, JSONL files, directories, or '{STANDARD_LIBRARY}' for Python's own sources\n"
        f"fix: {fix_of_missing(given)}"
    )


def _kind(path: Path, *, named: bool) -> Literal["text", "jsonl", "json", "parquet"]:
    require_content(path)
    suffix = plain_suffix(path)
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    if named and suffix in _TABLES:
        raise UserError(
            f"'{path}' is a table, whose lines would be read as plain text\n"
            "allowed: JSONL or Parquet of records; plain text with another suffix, such as .txt\n"
            f"fix: pandas.{_TABLES[suffix]}('{path.name}', {_AS_TEXT})"
            f".to_json('{path.stem}.jsonl', orient='records', lines=True)"
        )
    if suffix == PARQUET_SUFFIX or (named and _is_parquet(path)):
        return "parquet"
    if suffix != ".json" and (not named or suffix in TEXT_SUFFIXES):
        return "text"
    with opened(path) as file:
        first, more = file.readline(PIECE_BYTES).removeprefix(codecs.BOM_UTF8), file.read(PIECE_BYTES)
    is_line = _is_object(first)
    if suffix != ".json":  # a name that says nothing
        return "jsonl" if is_line else "text"
    return "jsonl" if more.strip() and is_line else "json"


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _is_dataset(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of Hugging Face's datasets."""
    return path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _directory(root: Path, on_skip: Callable[[str], object]) -> list[SourceFile]:
    others, refused, runs = Counter[str](), list[OSError](), list[Path]()
    found = []
    for path in _walk(root, on_error=refused.append, on_run=runs.append):
        if plain_suffix(path) in _READ_SUFFIXES and path.is_file():
            found.append(SourceFile(path=path, name=str(path), kind=_kind(path, named=False), named=False))
        else:
            others[_kind_of(path)] += 1
    if refused:
        others["folders that cannot be listed"] = len(refused)
    no_data = _no_data(root, found)
    left = {name for names in no_data.values() for name in names}
    found = [file for file in found if file.path.relative_to(root).as_posix() not in left]
    if not found:
        raise UserError(
            f"no text files in directory '{root}', it has {_listed(others) or 'no files'}\n"
            f"allowed: {' '.join(_READ_SUFFIXES)}, also with {' '.join(PACKED_SUFFIXES)}\n"
            "fix: give the path of the file itself where its suffix is another"
        )
    require_one_configuration(root, (file.path.relative_to(root).as_posix() for file in found if file.kind != "text"))
    for why, names in no_data.items():
        on_skip(f"{_files(len(names))} of folder {root}, {why}: {_first_of(names)}")
    if runs:
        names = sorted(run.relative_to(root).as_posix() for run in runs)
        on_skip(f"{len(names):,} run folder{'s' * (len(names) > 1)} in folder {root}: {_first_of(names)}")
    if others:
        count = _files(others.total())
        on_skip(f"{count} of folder {root}, by suffix: {_listed(others)}; to read such a file, give its own path")
    return found


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)


def _no_data(root: Path, files: Sequence[SourceFile]) -> dict[str, list[str]]:
    """Return the files of a data set's folder that are no training data, by reason: cards, and other splits.

    A folder of a data set has JSONL or Parquet files. Splits are told by the last word of a path that names one, as on
    the Hugging Face hub, or as partitions of Spark and pandas (split=test), if there is one for training.
    """
    names = {file.path.relative_to(root).as_posix(): file.kind for file in files}
    records = [name for name, kind in names.items() if kind != "text"]
    if not records:
        return {}
    found = {"no data": [name for name, kind in names.items() if kind == "text" and _is_card(name)]}
    splits = {name: words[-1] for name in records if (words := _SPLIT.findall(name.lower()))}
    if any(map(_TRAIN.__contains__, splits.values())):
        others = [name for name, word in splits.items() if word not in _TRAIN]
        found["of other splits than train, for --data.validation"] = others
    return {why: names for why, names in found.items() if names}


def _is_card(name: str) -> bool:
    return Path(name).stem.lower() in _CARDS


def _standard_library() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        SourceFile(path=path, name=path.relative_to(root).as_posix(), kind="text", named=False)
        for path in _walk(root, _NOT_LIBRARY)
        if path.suffix == ".py" and path.is_file()
    ]
    if not found:
        raise UserError(f"this Python has no library sources in '{root}'\nfix: give a text of your own: --data FILE")
    return found


def _walk(
    root: Path,
    leave_out: frozenset[str] = frozenset(),
    on_error: Callable[[OSError], object] | None = None,
    on_run: Callable[[Path], object] = lambda _: None,
) -> Iterator[Path]:
    """Yield the files under `root`, also in linked folders, sorted by relative path.

    Hidden files, caches and run folders are left out. The files of a run in its own data would be other data for the
    resumed run and for the next one.

    Args:
        root: The folder.
        leave_out: Names of folders to leave out.
        on_error: Called with the error of each folder that cannot be listed.
        on_run: Called with each run folder.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=on_error, followlinks=True):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__" and f not in leave_out]
        folders[:] = [f for f in folders if not _leads_back(root, Path(folder, f))]
        runs = [f for f in folders if Path(folder, f, TRAINING_LOCK).is_file()]
        folders[:] = [f for f in folders if f not in runs]
        for run in runs:
            on_run(Path(folder, run))
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _leads_back(root: Path, folder: Path) -> bool:
    """Return whether a folder under `root` is a link to a folder that it lies in, so that a walk would not end."""
    if not folder.is_symlink():
        return False
    above = folder.parents[: len(folder.parents) - len(root.parents)]
    return folder.resolve() in [each.resolve() for each in above]


def _listed(kinds: Counter[str]) -> str:
    """Return the counts of kinds as text, the most frequent first."""
    ordered = sorted(kinds.items(), key=lambda each: (-each[1], each[0]))
    words = [f"{count:,} {kind}" for kind, count in ordered[:_MOST_KINDS]]
    if rest := sum(count for _, count in ordered[_MOST_KINDS:]):
        words.append(f"{rest:,} of other kinds")
    return ", ".join(words)


def _kind_of(path: Path) -> str:
    if not path.is_file():
        return "broken links or devices"
    *_, before, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    suffix = before + last if last in _OTHER_PACKED else last
    if not suffix.isprintable() or len(suffix) > _MOST_LETTERS:  # the rest of a name, not a kind
        return "of other kinds"
    return suffix or "without suffix"
