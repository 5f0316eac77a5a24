"""Reads rows of Parquet files and of folders that the package datasets wrote, through pyarrow or datasets."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file.name}:{number}", without_nulls(row)
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
        yield f"{folder.name}:{number}", without_nulls(dict(row))


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
    return iter(rows)


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
                    for row in batch.to_pylist():
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


def without_nulls(value: Any) -> Any:
    """Return a row without keys of null: Arrow gives each object of a column all keys that any of them has."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
