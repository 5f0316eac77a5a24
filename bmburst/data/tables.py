"""Reads rows of Parquet files and of folders that the package datasets wrote, through pyarrow or datasets."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bmburst.config import parse_json
from bmburst.data.sources import SourceFile
from bmburst.errors import UserError, first_line

_ROWS = 1024  # rows of a Parquet file in memory at a time


def parquet_rows(file: SourceFile, on_read: Callable[[int], object], most: int = _ROWS) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file, each with its name "file:row".

    Args:
        file: The file.
        on_read: Called with a share of the file's bytes for each group of rows.
        most: Rows in memory at a time.

    Raises:
        UserError: The package pyarrow is not installed, or cannot read the file.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"'{file.name}' is a Parquet file, and importing the package pyarrow failed\n"
            "fix: pip install 'bmburst[data]', or save the rows as JSONL"
        ) from error
    number, size = 0, file.path.stat().st_size
    try:
        with parquet.ParquetFile(file.path) as opened:
            total = max(opened.metadata.num_rows, 1)
            for batch in opened.iter_batches(batch_size=most):
                for row in _values(batch):
                    number += 1
                    yield f"{file.name}:{number}", row
                on_read(size * batch.num_rows // total)
    except (OSError, ValueError) as error:  # pyarrow's errors are one of both
        raise UserError(
            f"cannot read Parquet file '{file.name}': {first_line(error)}\nfix: write it again, or save it as JSONL"
        ) from error


def dataset_rows(folder: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a data set, each with its name; if there are several splits, those of "train".

    Raises:
        UserError: Neither datasets nor pyarrow is installed, the folder cannot be read, or there is no split "train".
    """
    for number, row in enumerate(_dataset(folder), 1):
        yield f"{folder.name}:{number}", row


def _dataset(folder: SourceFile) -> Iterator[Any]:
    try:
        from datasets import load_from_disk
    except ImportError:
        return _arrow_rows(folder)
    try:
        rows = load_from_disk(str(folder.path))  # memory-mapped
    except Exception as error:  # errors of Arrow, JSON or the package
        raise _unreadable(folder, error) from error
    if isinstance(rows, dict):
        rows = rows[_train(folder, list(rows))]
    return (row for table in rows.with_format("arrow").iter(_ROWS) for row in _values(table))


def _arrow_rows(folder: SourceFile) -> Iterator[Any]:
    """Yield the rows of a folder of `save_to_disk` without the package datasets: its files are streams of Arrow."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"'{folder.name}' is a data set of the package datasets, and importing datasets and pyarrow failed\n"
            "fix: pip install 'bmburst[data]', or save the rows as JSONL: dataset.to_json('rows.jsonl')"
        ) from error
    try:
        root, splits = folder.path, folder.path / "dataset_dict.json"
        if splits.is_file():
            root = root / _train(folder, json.loads(splits.read_text("utf-8"))["splits"])
        state = json.loads((root / "state.json").read_text("utf-8"))
        for each in state["_data_files"]:
            with pyarrow.memory_map(str(root / each["filename"])) as source:
                for batch in pyarrow.ipc.open_stream(source):
                    for row in _values(batch):
                        yield {key: row[key] for key in state.get("_columns") or row}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, error) from error


def _train(folder: SourceFile, splits: list[str]) -> str:
    if "train" not in splits:
        first: Path = folder.path / next(iter(splits), "train")
        raise UserError(
            f"data set '{folder.name}' has no split 'train'\nallowed: {', '.join(splits)}\n"
            f"fix: give one of them by its folder: {first}"
        )
    return "train"


def _unreadable(folder: SourceFile, error: Exception) -> UserError:
    return UserError(
        f"cannot read data set '{folder.name}': {first_line(error)}\nfix: write it again with save_to_disk"
    )


def _values(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table or batch of Arrow, without keys of null.

    Arrow gives each object of a column all keys that any of them has. The type Json of the package datasets keeps an
    object as JSON text, whose nulls are its own.
    """
    kinds = {field.name: field.type for field in table.schema if _has_json(field.type)}
    for row in table.to_pylist():
        found = {key: value for key, value in row.items() if value is not None}
        yield {
            key: _json_in(value, kinds[key]) if key in kinds else _without_nulls(value) for key, value in found.items()
        }


def _has_json(kind: Any) -> bool:
    """Return whether values of an Arrow type are JSON text, or objects and lists that hold it."""
    is_map = hasattr(kind, "key_type")
    return _is_json(kind) or any(not is_map and _has_json(kind.field(index).type) for index in range(kind.num_fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _json_in(value: Any, kind: Any) -> Any:
    """Return a value with the JSON text in it read, and without keys of null elsewhere."""
    if value is None:
        return None
    if _is_json(kind):
        return parse_json(value)
    if isinstance(value, dict):
        return {key: _json_in(each, kind.field(key).type) for key, each in value.items() if each is not None}
    return [_json_in(each, kind.value_type) for each in value] if _has_json(kind) else _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
