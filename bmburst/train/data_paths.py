"""Checks the paths of a run's data, and sets defaults that depend on the data. Does not import torch."""

import os
from pathlib import Path
from typing import Any

from bmburst.errors import UserError
from bmburst.train.sections import STANDARD_LIBRARY

PLACEHOLDER = "PATH/TO/"
"""Prefix of paths in recipes that the user must replace."""


def require_filled(name: str, value: object, option: str) -> None:
    """Check that a path is not a recipe's placeholder.

    Args:
        name: Name of the field.
        value: Its value.
        option: Command line option of the field.

    Raises:
        UserError: The path is a placeholder.
    """
    if str(value).startswith(PLACEHOLDER):
        raise UserError(
            f"{name} {value} is the placeholder of a recipe\nallowed: a path of your own\n"
            f"fix: add {option} to the command, or change it in the recipe"
        )


def check_sources(source: str, text_field: str) -> None:
    """Call `check_data_path` for a source, or for all sources of a mixture."""
    for each in _sources(source):
        check_data_path(each, text_field)


def check_data_path(source: str, text_field: str) -> None:
    """Check that a text source exists, is readable and starts with valid text; "stdlib" always passes.

    Args:
        source: As in `DataConfig`.
        text_field: As in `DataConfig`.

    Raises:
        UserError: The source is missing, unreadable, empty or not text, a directory without text files, or JSONL whose
            first line has no such field.
    """
    if source == STANDARD_LIBRARY:
        return
    require_filled("data.source", source, "--data FILE")
    path = Path(source)
    try:
        if not path.exists():
            raise UserError(
                f"data {source}: no such file or directory\n"
                "allowed: a text or JSONL file, a directory, a token file, or stdlib for Python's own sources\n"
                "fix: correct the path"
            )
        empty = not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
        is_readable = os.access(path, os.R_OK)
    except OSError as error:
        raise UserError(f"data {source}: cannot be read: {error.strerror}\nfix: give a file that can be read") from None
    if not is_readable:
        raise UserError(f"data {source}: no permission to read it\nfix: chmod +r, or give another file")
    if not (path.is_dir() or path.is_file()):
        raise UserError(
            f"data {source}: is a device, a pipe or a socket\n"
            "allowed: a text or JSONL file, a directory, a token file\nfix: save the text in a file"
        )
    if empty:
        raise UserError(f"data {source}: is empty\nfix: give a file or directory with text")
    # Imported here, because it imports numpy, which --help does not need.
    from bmburst.data import records
    from bmburst.data.documents import check_beginnings
    from bmburst.data.sources import find_sources
    from bmburst.data.token_file import is_token_file

    if not is_token_file(path) and not records.hold_records(files := find_sources([path]), text_field):
        check_beginnings(files, text_field=text_field)


def set_defaults_of_data(given: dict[str, Any]) -> None:
    """Set defaults that depend on the data: pack "documents" for records, and the tokenizer of `init_from`.

    With dpo.beta the default is always pack "documents", so that data without pairs are rejected for that reason and
    not for their packing. A token file of text keeps its tokenizer.
    """
    if (given.get("dpo") or {}).get("beta") is not None:
        given.setdefault("pack", "documents")
    values = given.get("data") or {}
    source, folder = values.get("source", STANDARD_LIBRARY), given.get("init_from")
    if not isinstance(source, str | Path):
        return  # the check of the fields raises
    # Imported here, because it imports numpy, which --help does not need.
    from bmburst.data.token_file import is_token_file

    try:
        sources = _sources(str(source))
        are_tokens = all(each != STANDARD_LIBRARY and is_token_file(Path(each)) for each in sources)
    except (OSError, UserError):
        return  # the check of the paths raises
    text_field = str(values.get("text_field", "text"))
    have_records = hold_records(str(source), text_field)
    if have_records:
        given.setdefault("pack", "documents")
    if folder is None or values.get("tokenizer") is not None or (are_tokens and not have_records):
        return
    from bmburst.checkpoint.files import own_tokenizer

    try:
        own = own_tokenizer(Path(folder))
    except UserError:
        return  # refused where the weights are checked
    if own is not None:
        given["data"] = {**values, "tokenizer": own}


def hold_records(source: str, text_field: str) -> bool:
    """Return whether a source, or one of a mixture, has records or is a token file of records; False if unreadable.

    Args:
        source: As in `DataConfig`.
        text_field: As in `DataConfig`.
    """
    # Imported here, because it imports numpy, which --help does not need.
    from bmburst.data import are_records

    try:
        return any(each != STANDARD_LIBRARY and are_records(each, text_field) for each in _sources(source))
    except (OSError, UserError):
        return False  # the check of the paths raises


def _sources(source: str) -> list[str]:
    """Return the sources of a mixture, or the one source itself."""
    # Imported here, because it imports numpy, which --help does not need.
    from bmburst.data.mixture import read_mixture

    found = None if source == STANDARD_LIBRARY else read_mixture(source)
    return [source] if found is None else [each.path for each in found]
