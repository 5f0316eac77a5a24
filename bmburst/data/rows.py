"""Reads the rows of files that are not plain text: lines of JSONL, elements of a JSON array, rows of a data set."""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from bmburst.config import parse_json
from bmburst.errors import UserError, first_line

if TYPE_CHECKING:
    from bmburst.data.sources import SourceFile

_BLOCK = 1 << 20


def rows(file: "SourceFile", on_read: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    """Yield (name for messages, value) for the lines, elements or rows of a file that is not plain text.

    Args:
        file: A file of kind "jsonl", "json" or "dataset".
        on_read: Called with the number of bytes of each read; not for a data set.

    Raises:
        UserError: A line or the file is not valid JSON, or a data set cannot be read.
        OSError: A JSON or JSONL file cannot be read.
    """
    if file.kind == "dataset":
        return _dataset_rows(file)
    return _json_array(file, on_read) if file.kind == "json" else _json_lines(file, on_read)


def first_row(file: "SourceFile") -> Iterator[tuple[str, Any]]:
    """Yield what `rows` yields first, if there is a row, without reading the rest of a JSON or JSONL file.

    Raises:
        UserError: As `rows`.
        OSError: As `rows`.
    """
    found = _first_element(file) if file.kind == "json" else None
    if found is None:
        yield from islice(rows(file, lambda _: None), 1)
    else:
        yield _element(file, 1), found


def check_arrays(files: "Iterable[SourceFile]") -> None:
    """Check the JSON arrays among files, which are not checked line by line while they are read.

    Raises:
        UserError: A file is not valid JSON, or cannot be read.
    """
    for file in files:
        if file.kind == "json":
            try:
                next(_json_array(file, lambda _: None), None)
            except OSError as error:
                raise UserError(
                    f"cannot read '{file.name}': {error.strerror or error}\nfix: give a file that you may read"
                ) from error


def _first_element(file: "SourceFile") -> Any:
    """Return the first object of an array by reading only the beginning of the file; None if it is not valid."""
    decoder, text = codecs.getincrementaldecoder("utf-8-sig")(), ""
    with file.path.open("rb") as opened:
        while block := opened.read(max(_BLOCK, len(text))):  # a long element is tried a few times, not once a block
            try:
                text += decoder.decode(block)
                begin = text.index("{")
                _, end = json.JSONDecoder().raw_decode(text, begin)
                return parse_json(text[begin:end])
            except UnicodeDecodeError:
                return None
            except (ValueError, RecursionError):
                continue
    return None


def _element(file: "SourceFile", number: int) -> str:
    return f"{file.name}: element {number}"


def _json_array(file: "SourceFile", on_read: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    text = file.path.read_bytes()
    try:
        values = parse_json(text.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(
            f"'{file.name}' is not valid JSON: {_reason(error)}\nfix: write an array of JSON objects"
        ) from error
    on_read(len(text))
    for number, value in enumerate(values, 1):
        yield _element(file, number), value


def _dataset_rows(folder: "SourceFile") -> Iterator[tuple[str, Any]]:
    """Yield the rows of a data set, each with its name; if there are several splits, those of "train".

    Raises:
        UserError: The package datasets is not installed or cannot read the folder, or there is no split "train".
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise UserError(
            f"'{folder.name}' is a data set of the package datasets, and importing it failed\n"
            "fix: pip install datasets, or save the rows as JSONL: dataset.to_json('rows.jsonl')"
        ) from error
    try:
        rows = load_from_disk(str(folder.path))  # memory-mapped
    except Exception as error:  # errors of Arrow, JSON or the package
        raise UserError(
            f"cannot read data set '{folder.name}': {first_line(error)}\nfix: write it again with save_to_disk"
        ) from error
    if isinstance(rows, dict):
        if "train" not in rows:
            raise UserError(
                f"data set '{folder.name}' has no split 'train'\nallowed: {', '.join(rows)}\n"
                f"fix: give one of them by its folder: {folder.path / next(iter(rows), 'train')}"
            )
        rows = rows["train"]
    for number, row in enumerate(rows, 1):
        yield f"{folder.name}:{number}", dict(row)


def _json_lines(file: "SourceFile", on_read: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSONL file, each with its name "file:line". Empty lines are skipped.

    Raises:
        UserError: A line is not valid JSON.
    """
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            on_read(len(line))
            if not line.strip():
                continue
            name = f"{file.name}:{number}"
            try:  # an editor may have put a byte-order mark before the first line
                value = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{name}: byte {error.start} of the line is not UTF-8\nallowed: JSON in UTF-8, one object a line\n"
                    "fix: convert the file, for example with iconv -f UTF-16 -t UTF-8"
                ) from error
            except ValueError as error:
                raise UserError(
                    f"{name}: the line is not valid JSON: {_reason(error)}\nfix: write one JSON object per line"
                ) from error
            yield name, value


def _reason(error: ValueError) -> str:
    return str(error).splitlines()[0].removeprefix("is not valid JSON: ")
