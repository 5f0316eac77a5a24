"""Reads documents from text files, and rows from JSONL and JSON files and data sets: `find_sources` finds the files."""

import codecs
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bmburst.config import parse_json
from bmburst.data.messages import short
from bmburst.data.sources import PIECE_BYTES, SourceFile, unreadable
from bmburst.data.streams import opened
from bmburst.data.tables import dataset_rows, parquet_rows
from bmburst.errors import UserError, first_line
from bmburst.record_format import COLUMNS

KINDS = (
    '{"messages": [...]}, {"conversations": [...]}, {"prompt": "...", "completion": "..."}, '
    '{"prompt": "...", "completions": ["...", "..."]}, '
    '{"instruction": "...", "output": "..."} or {"text": "..."}'
)
SHAPES = (
    'an array of objects, an array of texts, {"data": [...]} or {"train": [...]} with such an array, one object, or '
    "objects one after another"
)
"""Shapes of a file that ends in .json."""
_SPLITS = ("data", "train")  # keys of an object that holds the rows: the field of datasets, and its first split
_ARRAY = re.compile(r"\s*\[\s*(?=\{)")
_WORD = re.compile(r"[^ \t\r\n]")
_SHOWN = 5  # bad lines that a message names
_CONVERT = "convert it: iconv -f ENCODING -t UTF-8, where ENCODING is what it was written in, such as UTF-16 or GB18030"
_FROM_ARROW = "give the folder that save_to_disk wrote, or write Parquet: datasets.Dataset.from_file(...).to_parquet"
# How files begin that must be converted first: what they are, and how to convert them.
_PACKED = {
    rb"%PDF-": ("a PDF", "pdftotext FILE, which writes a .txt"),
    rb"PK\x03\x04": ("a zip archive", "unzip it"),
    rb'\x04"M\x18': ("compressed with lz4", "unlz4 it"),
    rb"ARROW1|\xff{4}": ("an Arrow file", _FROM_ARROW),
    rb".{257}ustar": ("a tar archive", "tar --extract --file FILE"),
}
_BEGINNING = 512  # bytes that the patterns are looked for in


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text, in pieces of about 1 MiB that end at line ends, so that a large file is never in memory as a whole."""

    name: str
    pieces: Iterable[str]


def read_documents(
    files: Iterable[SourceFile],
    *,
    text_field: str = "text",
    on_read: Callable[[int], object] = lambda _: None,
    on_skip: Callable[[str], object] = lambda _: None,
    on_columns: Callable[[Iterable[str]], object] = lambda _: None,
) -> Iterator[Document]:
    """Yield the documents of `files` in order. Consume a document's pieces before requesting the next document.

    Args:
        files: From `find_sources`.
        text_field: Key of the text in a line of JSONL.
        on_read: Called with the number of bytes of each read.
        on_skip: Called with a line about each skipped file.
        on_columns: Called with the keys of each line of JSONL that are not the text.

    Raises:
        UserError: A named file cannot be read or is not text, or a line of JSONL is malformed.
    """
    for file in files:
        try:
            if file.kind != "text":
                may_be_text = file.kind == "json"
                yield from _texts(text_field, rows(file, on_read), on_columns, may_be_text=may_be_text)
            elif problem := _why_not_text(file.path):
                raise _not_text(file, problem)
            else:
                yield Document(name=file.name, pieces=_text_pieces(file.path, on_read))
        except OSError as error:
            if file.named:
                raise unreadable(file.name, error) from error
            on_skip(f"{file.name}: {error.strerror or error}")
        except UserError as error:
            if file.named or file.kind != "text":
                raise
            on_read(file.path.stat().st_size)
            on_skip(first_line(error))


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
                next(_texts(text_field, first_row(file), may_be_text=file.kind == "json"), None)
            elif problem := _why_not_text(file.path, most=PIECE_BYTES):
                raise _not_text(file, problem)
        except OSError as error:
            if file.named:
                raise unreadable(file.name, error) from error


def rows(file: SourceFile, on_read: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    """Yield (name for messages, value) for the lines, elements or rows of a file that is not plain text.

    The value of a line that is not valid JSON is its UserError, so that the lines after it can be read too.

    Args:
        file: A file of kind "jsonl", "json", "parquet" or "dataset".
        on_read: Called with the number of bytes of each read; not for a data set.

    Raises:
        UserError: The file is not valid JSON of a known shape, or a data set cannot be read.
        OSError: A JSON or JSONL file cannot be read.
    """
    if file.kind == "dataset":
        return dataset_rows(file)
    if file.kind == "parquet":
        return parquet_rows(file, on_read)
    return _json_values(file, on_read) if file.kind == "json" else _json_lines(file, on_read)


def with_others(
    error: UserError, rest: Iterable[tuple[str, Any]], check: Callable[[str, Any], object], most: int = 1_000_000
) -> UserError:
    """Return the error of a line with the names of the bad lines after it, so that all can be corrected at once.

    Args:
        error: The error; a SetupError is returned as it is.
        rest: The lines after it, from `rows`.
        check: Raises a UserError for a bad line, given its name and its value.
        most: Number of lines to check at most; then the message says "at least".
    """
    if isinstance(error, SetupError):
        return error
    names, checked = [], 0
    for name, value in islice(rest, most):
        checked += 1
        try:
            check(name, value)
        except UserError:
            names.append(name)
    if not names:
        return error
    first, *fix = str(error).split("\n")
    lines = "at least " * (checked == most)
    lines += "1 further line is" if len(names) == 1 else f"{len(names):,} further lines are"
    shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    return UserError("\n".join([f"{first}; {lines} malformed: {shown}", *fix]))


class SetupError(UserError):
    """The tokenizer or its chat template is missing or wrong, so that every line would be refused."""


def first_row(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield what `rows` yields first, if there is a row, without reading the rest of a JSON or JSONL file.

    A file that cannot be read has none, unless the user named it: `read_documents` skips and reports it.

    Raises:
        UserError: As `rows`, or the named file cannot be read.
    """
    try:
        found = _first_element(file) if file.kind == "json" else None
        if found is None:
            few = parquet_rows(file, lambda _: None, 1) if file.kind == "parquet" else rows(file, lambda _: None)
            yield from islice(few, 1)
        else:
            yield _element(file, 1), found
    except OSError as error:
        if file.named:
            raise unreadable(file.name, error) from error


def have_fields(files: Iterable[SourceFile]) -> bool:
    """Return whether a file has rows with fields, by its first row: plain text has none, nor an array of texts.

    Raises:
        UserError: As `first_row`.
    """
    return any(not isinstance(row, str) for file in files if file.kind != "text" for _, row in first_row(file))


def check_arrays(files: Iterable[SourceFile]) -> None:
    """Check the JSON arrays among files, which are not checked line by line while they are read.

    Raises:
        UserError: A file is not valid JSON, or cannot be read.
    """
    for file in files:
        if file.kind == "json":
            try:
                next(_json_values(file, lambda _: None), None)
            except OSError as error:
                raise unreadable(file.name, error) from error


def _not_text(file: SourceFile, problem: str) -> UserError:
    with opened(file.path) as source:
        begin = source.read(_BEGINNING)
    for pattern, (kind, fix) in _PACKED.items():
        if re.match(pattern, begin, re.DOTALL):
            return UserError(
                f"'{file.name}' is {kind}\nallowed: text files, JSONL files, directories of them\nfix: {fix}"
            )
    return UserError(
        f"'{file.name}' is not a text file: {problem}\n"
        "allowed: UTF-8 text; a token file only in bmburst train and bmburst eval\n"
        f"fix: {_CONVERT}; or leave it out"
    )


def _why_not_text(path: Path, most: float = math.inf) -> str | None:
    """Return why a file is not UTF-8 text, or None. Checks it before use, so that no document is cut by a bad end.

    Args:
        path: The file.
        most: Number of bytes to check, rounded up to blocks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(path) as file:
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
    with opened(path, on_read) as file:
        while block := file.read(PIECE_BYTES):
            cut = held.rfind("\n") + 1
            if cut or len(held) >= 2 * PIECE_BYTES:
                cut = cut or len(held)
                yield held[:cut]
                held = held[cut:]
            held += decoder.decode(block)
    if held:
        yield held


def _texts(
    text_field: str,
    values: Iterable[tuple[str, Any]],
    on_columns: Callable[[Iterable[str]], object] = lambda _: None,
    *,
    may_be_text: bool,
) -> Iterator[Document]:
    def text_of(name: str, value: Any) -> str:
        return value if may_be_text and isinstance(value, str) else _text(text_field, name, value)

    lines = iter(values)
    for name, value in lines:
        try:
            text = text_of(name, value)
        except UserError as error:
            raise with_others(error, lines, text_of) from error
        if isinstance(value, dict):
            on_columns(key for key in value if key != text_field)
        # "\ud800" is valid JSON, but an unpaired surrogate, which UTF-8 cannot encode.
        yield Document(name=name, pieces=[text.encode("utf-8", "replace").decode("utf-8")])


_TOGETHER = (("prompt", "completion"), ("completion", "prompt"), ("instruction", "output"), ("output", "instruction"))
"""Columns, each with another one without which it makes no record."""


def column_meant(row: Iterable[str]) -> str:
    """Return, for a message, the column that a row of no known kind most likely misspells, or lacks; "" if none."""
    keys = list(row)
    for key in (key for key in keys if key not in COLUMNS):
        if near := difflib.get_close_matches(key, COLUMNS, n=1, cutoff=0.8):
            return f"; did you mean '{near[0]}'?"
    lacks = ((one, other) for one, other in _TOGETHER if one in keys and other not in keys)
    return next((f"; beside '{one}', '{other}' is missing" for one, other in lacks), "")


def _text(text_field: str, name: str, value: Any) -> str:
    if isinstance(value, UserError):  # the line is not valid JSON
        raise value
    if not isinstance(value, dict):
        is_talk = isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)
        example = '{"messages": [...]}' if is_talk else f'{{"{text_field}": "..."}}'
        raise UserError(
            f"{name}: the line is not a JSON object: {short(value)}\n"
            f"allowed: for example {example}\nfix: write one JSON object per line"
        )
    if text_field not in value and "input_ids" in value:
        raise UserError(
            f"{name}: the line has token ids (input_ids), and no text\nallowed: {KINDS}\n"
            "fix: give the text of which they were made; or the text of the ids: tokenizer.decode(input_ids)"
        )
    if text_field not in value:
        raise UserError(
            f"{name}: no field '{text_field}', or null in a table; the line has "
            f"{', '.join(map(repr, list(value)[:10])) or 'none'}{column_meant(value)}\n"
            f"allowed: {KINDS}\n"
            "fix: remove a row without text; of text, name its field: --text-field NAME, in bmburst train "
            "--data.text_field; of messages, --messages-field NAME; of other records, --columns "
            "instruction=question,output=answer"
        )
    text = value[text_field]
    if not isinstance(text, str):
        raise UserError(
            f"{name}: field '{text_field}' must be a string, got {short(text)}\n"
            "fix: name another field: --text-field NAME, in bmburst train --data.text_field NAME"
        )
    return text


def _json_lines(file: SourceFile, on_read: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSONL file, each with its name "file:line". Empty lines are skipped; see `rows`."""
    with opened(file.path, on_read) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield (name := f"{file.name}:{number}"), _line(name, line, is_first=number == 1)


def _line(name: str, line: bytes, *, is_first: bool) -> Any:
    try:  # an editor may have put a byte-order mark before the first line
        return parse_json(line.decode("utf-8-sig" if is_first else "utf-8").rstrip())
    except UnicodeDecodeError as error:
        return UserError(
            f"{name}: byte {error.start} of the line is not UTF-8\nallowed: JSON in UTF-8, one object a line\n"
            f"fix: {_CONVERT}"
        )
    except ValueError as error:
        return UserError(f"{name}: the line is not valid JSON: {_reason(error)}\nfix: write one JSON object per line")


def _json_values(file: SourceFile, on_read: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file that ends in .json, of one of `SHAPES`, each with its name."""
    with opened(file.path, on_read) as source:
        data = source.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_json(file, f"byte {error.start} is not UTF-8") from error
    try:
        values = parse_json(text)
    except ValueError as error:
        if not getattr(error, "msg", "").endswith("Extra data"):
            raise _not_json(file, _reason(error)) from error
        yield from _json_objects(file, text)
        return
    if isinstance(values, dict) and (found := [key for key in _SPLITS if isinstance(values.get(key), list)]):
        if len(found) > 1:
            raise UserError(
                f"'{file.name}' has both {' and '.join(found)}\nallowed: {SHAPES}\nfix: keep one of them in the file"
            )
        values = values[found[0]]
    elif isinstance(values, dict):
        yield f"{file.name}:1", values
        return
    if not isinstance(values, list):
        raise UserError(
            f"'{file.name}' is a JSON file of {short(values)}\nallowed: {SHAPES}\n"
            "fix: write one of these; of text, name the file .txt"
        )
    for number, value in enumerate(values, 1):
        yield _element(file, number), value


def _json_objects(file: SourceFile, text: str) -> Iterator[tuple[str, Any]]:
    """Yield objects that follow one another, over several lines each, with the line where each begins."""
    decoder, line, end = json.JSONDecoder(), 1, 0
    while found := _WORD.search(text, end):
        begin = found.start()
        line += text.count("\n", end, begin)
        try:
            _, end = decoder.raw_decode(text, begin)
            value = parse_json(text[begin:end])
        except (ValueError, RecursionError) as error:
            raise _not_json(file, f"after line {line}, {error}") from error
        yield f"{file.name}:{line}", value
        line += text.count("\n", begin, end)


def _not_json(file: SourceFile, reason: str) -> UserError:
    return UserError(
        f"'{file.name}' is not valid JSON: {reason}\nallowed: {SHAPES}\n"
        "fix: write one of these; of text, name the file .txt"
    )


def _first_element(file: SourceFile) -> Any:
    """Return the first object of an array of objects by reading only the beginning of the file; else None."""
    decoder, text = codecs.getincrementaldecoder("utf-8-sig")(), ""
    with opened(file.path) as source:
        # Each read is as long as all before it: a long element is tried a few times, not once a block.
        while block := source.read(max(PIECE_BYTES, len(text))):
            try:
                text += decoder.decode(block)
                if (begin := _ARRAY.match(text)) is None:
                    return None
                _, end = json.JSONDecoder().raw_decode(text, begin.end())
                return parse_json(text[begin.end() : end])
            except UnicodeDecodeError:
                return None
            except (ValueError, RecursionError):
                continue
    return None


def _element(file: SourceFile, number: int) -> str:
    return f"{file.name}: element {number}"


def _reason(error: ValueError) -> str:
    return first_line(error).removeprefix("is not valid JSON: ")
