"""Checks the sources of a run's data.

Its top imports no numpy, which --help does not need: functions import what does.
"""

import os
from pathlib import Path

from bmburst.errors import UserError, fix_of_missing
from bmburst.record_format import RecordFormat
from bmburst.train.sections import STANDARD_LIBRARY

PLACEHOLDER = "PATH/TO/"
"""Prefix of paths in recipes that the user must replace."""


def require_filled(name: str, value: object, option: str) -> None:
    """Raise UserError unless a path is not a recipe's placeholder."""
    if str(value).startswith(PLACEHOLDER):
        raise UserError(
            f"{name} {value} is the placeholder of a recipe\nallowed: a path of your own\n"
            f"fix: add {option} to the command, or change it in the recipe"
        )


def check_sources(source: str, form: RecordFormat) -> None:
    """Call `check_data_path` for a source, or for all sources of a mixture."""
    from bmburst.data.mixture import sources_of

    for each in sources_of(source):
        check_data_path(each.path, each.form(form))


def check_data_path(source: str, form: RecordFormat) -> None:
    """Check that a text source, as in `DataConfig`, is readable and starts with valid text; "stdlib" always passes.

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
            fix = fix_of_missing(source)
            if "," in source:
                fix = "list several sources in a YAML file: docs/data.md, Mixtures"
            raise UserError(
                f"data {source}: no such file or directory\n"
                "allowed: a text or JSONL file, a directory, a token file, or stdlib for Python's own sources\n"
                f"fix: {fix}"
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
    from bmburst.data import records
    from bmburst.data.documents import check_beginnings
    from bmburst.data.sources import find_sources
    from bmburst.data.token_file import is_token_file

    if not is_token_file(path) and not records.hold_records(files := find_sources([path]), form):
        check_beginnings(files, text_field=form.text_field)
