"""Reads documents from text files, JSONL and JSON files, directories, or Python's standard library."""

import codecs
import json
import math
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bmburst.config import parse_json
from bmburst.data.folders import (
    JSONL_SUFFIXES,
    STANDARD_LIBRARY,
    TEXT_SUFFIXES,
    found_instead,
    is_dataset,
    is_read,
    walk,
)
from bmburst.data.rows import first_row, rows
from bmburst.errors import UserError

# Not the standard library: installed packages; and its tests, which are large and contain invalid files on purpose.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
PIECE_BYTES = 1 << 20
KINDS = (
    '{"messages": [...]}, {"conversations": [...]}, {"prompt": "...", "completion": "..."}, '
    '{"instruction": "...", "output": "..."} or {"text": "..."}'
)
# First bytes of files that must be converted first: what they are, and how to convert them.
_PACKED = {
    b"\x1f\x8b": ("compressed with gzip", "gunzip it"),
    b"\xfd7zXZ\0": ("compressed with xz", "unxz it"),
    b"(\xb5/\xfd": ("compressed with zstd", "unzstd it"),
    b"PK\x03\x04": ("a zip archive", "unzip it"),
    b"PAR1": ("a Parquet file", "save its rows as JSONL: datasets.load_dataset('parquet', data_files=FILE)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file to read.

    Attributes:
        path: Path of the file.
        name: Its name in messages.
        kind: "text": one document; "jsonl": one document per line; "json": an array with one document per element;
            "dataset": a folder written by the package datasets, one document per row.
        named: Whether the user named this file. If it is unreadable, that is an error; an unreadable file found in a
            directory is skipped and reported.
    """

    path: Path
    name: str
    kind: Literal["text", "jsonl", "json", "dataset"]
    named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text, in pieces of about 1 MiB that end at line ends, so that a large file is never in memory as a whole."""

    name: str
    pieces: Iterable[str]


def find_sources(inputs: Sequence[str | Path]) -> list[SourceFile]:
    """Return all files of `inputs`, in an order that depends only on names.

    Args:
        inputs: Files, directories (searched recursively for `TEXT_SUFFIXES` and `JSONL_SUFFIXES`, without hidden
            files), or "stdlib" for the sources of the running Python.

    Raises:
        UserError: A path does not exist or is not readable, or a directory contains no text.
    """
    found: list[SourceFile] = []
    for item in inputs:
        try:
            # Only the string "stdlib" is special; Path("stdlib") and "./stdlib" are paths.
            found += _standard_library() if item == STANDARD_LIBRARY else _named(Path(item))
        except OSError as error:
            raise _unreadable(str(item), error) from error
    return found


def read_documents(
    files: Iterable[SourceFile],
    *,
    text_field: str = "text",
    on_read: Callable[[int], object] = lambda _: None,
    on_skip: Callable[[str], object] = lambda _: None,
) -> Iterator[Document]:
    """Yield the documents of `files` in order. Consume a document's pieces before requesting the next document.

    Args:
        files: From `find_sources`.
        text_field: Key of the text in a line of JSONL.
        on_read: Called with the number of bytes of each read.
        on_skip: Called with a line about each skipped file.

    Raises:
        UserError: A named file cannot be read or is not text, or a line of JSONL is malformed.
    """
    for file in files:
        try:
            if file.kind != "text":
                yield from _texts(text_field, rows(file, on_read))
            elif problem := _why_not_text(file.path):
                raise _not_text(file, problem)
            else:
                yield Document(name=file.name, pieces=_text_pieces(file.path, on_read))
        except OSError as error:
            if file.named:
                raise _unreadable(file.name, error) from error
            on_skip(f"{file.name}: {error.strerror or error}")
        except UserError as error:
            if file.named or file.kind != "text":
                raise
            on_read(file.path.stat().st_size)
            on_skip(str(error).splitlines()[0])


def check_beginnings(files: Sequence[SourceFile], *, text_field: str = "text") -> None:
    """Check the beginning of the named text files and of the first JSONL file; the rest is checked while reading.

    Args:
        files: From `find_sources`.
        text_field: Key of the text in a line of JSONL.

    Raises:
        UserError: A beginning cannot be read, is not text, or its line of JSONL is malformed.
    """
    lines = [file for file in files if file.kind != "text"]
    for file in [*lines[:1], *(file for file in files if file.named and file.kind == "text")]:
        try:
            if file.kind != "text":
                next(_texts(text_field, first_row(file)), None)
            elif problem := _why_not_text(file.path, most=PIECE_BYTES):
                raise _not_text(file, problem)
        except OSError as error:
            if file.named:
                raise _unreadable(file.name, error) from error


def _not_text(file: SourceFile, problem: str) -> UserError:
    with file.path.open("rb") as opened:
        begin = opened.read(8)
    for magic, (kind, fix) in _PACKED.items():
        if begin.startswith(magic):
            return UserError(
                f"'{file.name}' is {kind}\nallowed: text files, JSONL files, directories of them\nfix: {fix}"
            )
    return UserError(
        f"'{file.name}' is not a text file: {problem}\n"
        "allowed: UTF-8 text; a token file only in bmburst train and bmburst eval\n"
        "fix: convert it to UTF-8, or leave it out"
    )


def _unreadable(name: str, error: OSError) -> UserError:
    return UserError(
        f"cannot read '{name}': {error.strerror or error}\nfix: give a file that you have permission to read"
    )


def _kind(path: Path) -> Literal["text", "jsonl", "json"]:
    if path.suffix.lower() in JSONL_SUFFIXES:
        return "jsonl"
    if path.suffix.lower() != ".json":
        return "text"
    with path.open("rb") as file:
        first, more = file.readline(PIECE_BYTES).removeprefix(codecs.BOM_UTF8), file.read(PIECE_BYTES)
    if re.match(rb"\s*\[\s*\{", first + more):
        return "json"
    return "jsonl" if more.strip() and _is_object(first) else "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _named(path: Path) -> list[SourceFile]:
    if is_dataset(path):
        return [SourceFile(path=path, name=str(path), kind="dataset", named=True)]
    if path.is_dir():
        return _directory(path)
    if path.exists() and not path.is_file():  # files are read twice, and a pipe may never end
        raise UserError(f"'{path}' is a device or a pipe\nallowed: a file or a directory\nfix: save the text in a file")
    if path.exists():
        return [SourceFile(path=path, name=str(path), kind=_kind(path), named=True)]
    raise UserError(
        f"no file or directory '{path}'\n"
        f"allowed: text files, JSONL files, directories, or '{STANDARD_LIBRARY}' for Python's own sources\n"
        "fix: correct the path"
    )


def _directory(root: Path) -> list[SourceFile]:
    found = [
        SourceFile(path=path, name=str(path), kind=_kind(path), named=False) for path in walk(root) if is_read(path)
    ]
    if not found:
        raise UserError(
            f"no text files in directory '{root}', it has {found_instead(root)}\n"
            f"allowed: {' '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}\n"
            "fix: give the path of the file itself where its suffix is another, and unpack it if it is compressed"
        )
    return found


def _standard_library() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        SourceFile(path=path, name=path.relative_to(root).as_posix(), kind="text", named=False)
        for path in walk(root, _NOT_LIBRARY)
        if path.suffix == ".py" and path.is_file()
    ]
    if not found:
        raise UserError(f"this Python has no library sources in '{root}'\nfix: give a text of your own: --data FILE")
    return found


def _why_not_text(path: Path, most: float = math.inf) -> str | None:
    """Return why a file is not UTF-8 text, or None. Checks it before use, so that no document is cut by a bad end.

    Args:
        path: The file.
        most: Number of bytes to check, rounded up to blocks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        done = 0
        while True:
            block = file.read(PIECE_BYTES)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"byte {done - waiting + error.start} is not UTF-8"
            if (at := block.find(b"\0")) >= 0:  # binary files with small numbers can be valid UTF-8
                return f"byte {done + at} is zero"
            done += len(block)
            if not block or done >= most:
                return None


def _text_pieces(path: Path, on_read: Callable[[int], object]) -> Iterator[str]:
    """Yield the text of a file in pieces, cut after a line end if possible; a file of at most one piece is not cut."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    with path.open("rb") as file:
        while block := file.read(PIECE_BYTES):
            on_read(len(block))
            cut = held.rfind("\n") + 1
            if cut or len(held) >= 2 * PIECE_BYTES:
                cut = cut or len(held)
                yield held[:cut]
                held = held[cut:]
            held += decoder.decode(block)
    if held:
        yield held


def _texts(text_field: str, values: Iterable[tuple[str, Any]]) -> Iterator[Document]:
    for name, value in values:
        if not isinstance(value, dict):
            raise UserError(
                f"{name}: the line is not a JSON object: {_short(value)}\n"
                f'allowed: for example {{"{text_field}": "..."}}\nfix: write one JSON object per line'
            )
        if text_field not in value:
            raise UserError(
                f"{name}: no field '{text_field}', the line has {', '.join(map(repr, list(value)[:10])) or 'none'}\n"
                f"allowed: {KINDS}\n"
                "fix: of text, name its field: --text-field NAME, in bmburst train --data.text_field NAME; of "
                "records to fine-tune on, rename the keys: docs/fine_tuning_data.md"
            )
        text = value[text_field]
        if not isinstance(text, str):
            raise UserError(
                f"{name}: field '{text_field}' must be a string, got {_short(text)}\n"
                "fix: name another field: --text-field NAME, in bmburst train --data.text_field NAME"
            )
        # "\ud800" is valid JSON, but an unpaired surrogate, which UTF-8 cannot encode.
        yield Document(name=name, pieces=[text.encode("utf-8", "replace").decode("utf-8")])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
