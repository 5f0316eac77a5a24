"""Data pipeline: tokenizes text, packs it into sequences, and distributes batches over the data ranks.

This module opens a corpus as a token file: it tokenizes and caches text if needed, and filters records by length.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from bmburst.amounts import bytes_text
from bmburst.data.chat import ANSWERS_VERSION, RecordEncoder
from bmburst.data.documents import have_fields, read_documents
from bmburst.data.record import Reading
from bmburst.data.records import DEFAULT, hold_groups, hold_messages, hold_records, read_records
from bmburst.data.sources import STANDARD_LIBRARY, SourceFile, find_sources
from bmburst.data.token_file import CACHED, PAIRED_VERSION, VERSION, TokenFile, is_token_file
from bmburst.data.token_writer import Masked, write_masked_file, write_token_file
from bmburst.data.tokenizer import ByteTokenizer, PromptTokenizer, load_tokenizer
from bmburst.errors import UserError
from bmburst.outputs import require_folder
from bmburst.record_format import RecordFormat

_LONG = 4 << 20  # bytes of text that take a second or more


class Text(NamedTuple):
    """Text to tokenize, with its tokenizer."""

    tokenizer: PromptTokenizer
    files: Sequence[SourceFile]
    encoder: RecordEncoder | None = None
    """Encoder of records; None if the files are text."""
    form: RecordFormat = DEFAULT
    """Names of the fields, columns and roles of lines and records."""


def find_corpus(
    source: str | Path | Sequence[str | Path],
    tokenizer: str | None,
    *,
    form: RecordFormat = DEFAULT,
    chat_template: Path | None = None,
    on_skip: Callable[[str], object] = lambda _: None,
) -> TokenFile | Text:
    """Return the token file of a source, or its text or records if it still must be tokenized.

    The arguments are those of `open_corpus`.

    Raises:
        UserError: There is no text or no such tokenizer, or a token file was made with another tokenizer.
    """
    if isinstance(source, str | Path):
        if (file := find_token_file(source, tokenizer)) is not None:
            return file
        source = [source]
    files = find_sources(source, on_skip)
    found = load_tokenizer(ByteTokenizer.name if tokenizer is None else tokenizer)
    form = form.record_format
    encoder = RecordEncoder(found, chat_template, form.learned_roles) if hold_records(files, form) else None
    return Text(found, files, encoder, form)


def are_records(source: str | Path, form: RecordFormat) -> bool:
    """Return whether a source contains records or is a token file of records; False if it cannot be read."""
    return _is_told(source, lambda file: file.loss_mask is not None, lambda files: hold_records(files, form))


def have_groups(source: str | Path, form: RecordFormat) -> bool:
    """Return whether records of a source have several answers to a prompt; False if it cannot be read."""
    return _is_told(source, lambda file: file.groups, lambda files: hold_groups(files, form))


def _is_told(
    source: str | Path, by_tokens: Callable[[TokenFile], bool], by_files: Callable[[Sequence[SourceFile]], bool]
) -> bool:
    """Return what a token file or the first lines of files say; False for the standard library and on errors."""
    if source == STANDARD_LIBRARY:
        return False
    try:
        return by_tokens(TokenFile.open(source)) if is_token_file(Path(source)) else by_files(find_sources([source]))
    except (OSError, UserError):
        return False


def unused_names(found: TokenFile | Text, form: RecordFormat) -> bool:
    """Return whether names of fields, columns or roles are given that these data cannot have.

    Text has no records, and plain text, texts in an array and token files have no field of text. Whether records have
    the names is seen when they are read.
    """
    if isinstance(found, TokenFile):
        return form.names_text or not form.is_default
    if found.encoder is not None:
        return False
    return not form.is_default or (form.names_text and not have_fields(found.files))


def require_messages(name: str | Path, found: Iterable[tuple[TokenFile | Text, RecordFormat]]) -> None:
    """Check that settings for messages have an effect in one of several sources, if all of them hold records.

    Args:
        name: Name of the data, for the message.
        found: The sources, each with its names of fields and roles.

    Raises:
        UserError: Roles or names of fields of messages are given, and no source has messages.
    """
    given: dict[str, None] = {}
    for text, form in found:
        if isinstance(text, TokenFile) or text.encoder is None or hold_messages(text.files, form):
            return
        given |= dict.fromkeys(form.of_messages)
    if given:
        names = ", ".join(given)
        raise UserError(
            f"data {name}: no record has messages, and {names} is for messages\n"
            "allowed: records of messages, or of a prompt and a completion as lists of messages\n"
            f"fix: leave {names} out, or write messages"
        )


def find_token_file(source: str | Path, tokenizer: str | None) -> TokenFile | None:
    """Open a source that is a token file, with `tokenizer` as its tokenizer's name; None if it is not a token file.

    The arguments are those of `open_corpus`.

    Raises:
        UserError: There is no such tokenizer, or the file was made with another one.
    """
    if source == STANDARD_LIBRARY or not is_token_file(Path(source)):
        return None
    file = TokenFile.open(source)
    if tokenizer is None or tokenizer == file.tokenizer_name:
        return file
    given = load_tokenizer(tokenizer)
    if given.identity != file.tokenizer_identity:
        raise UserError(
            f"'{file.path}' was made with tokenizer '{file.tokenizer_name}', not '{given.name}'\n"
            f"fix: make it again: bmburst data --tokenizer {given.name}; or give the tokenizer it was made with: "
            f"--tokenizer {file.tokenizer_name}, in bmburst train --data.tokenizer {file.tokenizer_name}"
        )
    return replace(file, tokenizer_name=tokenizer)


def open_corpus(
    source: str | Path | Sequence[str | Path],
    tokenizer: str | None,
    cache_dir: str | Path,
    *,
    form: RecordFormat = DEFAULT,
    chat_template: Path | None = None,
    progress: bool = False,
    on_skip: Callable[[str], object] = lambda _: None,
) -> TokenFile:
    """Return the corpus as a token file; tokenize it first unless the cache contains it.

    Several ranks may call it at once: each then writes the same file under a temporary name and renames it. To tokenize
    only once, let one rank call it first.

    Args:
        source: A token file, a text or JSONL file, a directory, a list of these (without token files), or "stdlib" for
            the source files of the running Python's standard library.
        tokenizer: Argument of `load_tokenizer`; None: that of the token file, or bytes for text.
        cache_dir: Folder of tokenized text. A cached file is used if the paths, sizes and modification times of the
            text, and the tokenizer, are the same.
        form: Names of the fields, columns and roles of lines of JSONL and records, and the roles that are learned.
        chat_template: For records, a file whose chat template replaces that of the tokenizer.
        progress: Whether to show a progress bar on stderr while tokenizing.
        on_skip: Called with a line about the files of a directory that are left out because of their suffix, and while
            tokenizing with a line about each file that is not text.

    Returns:
        The token file. Its tokenizer name is the one given here, because the tokenizer's path may have changed since
        the file was written.

    Raises:
        UserError: There is no text, it cannot be read, or a token file was made with another tokenizer.
    """
    found = find_corpus(source, tokenizer, form=form, chat_template=chat_template, on_skip=on_skip)
    if isinstance(found, TokenFile):
        return found
    cached = _cached(cache_dir, found)
    if cached.exists():
        return replace(TokenFile.open(cached), tokenizer_name=found.tokenizer.name)
    return tokenize(found, cached, progress=progress, on_skip=on_skip)


def require_cache(option: str, cache_dir: Path, text: Text) -> None:
    """Raise UserError unless a cache has the tokens of a text, or `open_corpus` can write them there.

    Args:
        option: Name of the option that sets the cache, for the error message.
        cache_dir: As in `open_corpus`.
        text: The text.
    """
    if not has_tokens(cache_dir, text):
        require_folder(option, cache_dir)


def has_tokens(cache_dir: Path, text: Text) -> bool:
    """Return whether a cache has the tokens of a text; the arguments are those of `require_cache`."""
    return _cached(cache_dir, text).exists()


def tokenize(
    text: Text,
    output: Path,
    *,
    progress: bool = False,
    on_skip: Callable[[str], object] = lambda _: None,
    keep: Callable[[Masked], bool] = lambda _: True,
) -> TokenFile:
    """Write the documents of a text, or records, to the token file `output` and open it.

    Args:
        text: The text or the records.
        output: The file.
        progress: As in `open_corpus`.
        on_skip: As in `open_corpus`.
        keep: Returns whether to write a record.

    Raises:
        UserError: There is no text, or a file cannot be read or written.
    """
    reading = Reading()
    with _bar(sum(file.path.stat().st_size for file in text.files), shown=progress) as on_read:
        if text.encoder is not None:
            encoded = read_records(
                text.files, form=text.form, on_read=on_read, check=text.encoder.encode, reading=reading
            )
            return write_masked_file(output, filter(keep, encoded), text.tokenizer, reading.notes)
        documents = read_documents(
            text.files,
            text_field=text.form.text_field,
            on_read=on_read,
            on_skip=on_skip,
            on_columns=reading.columns.update,
        )
        return write_token_file(output, documents, text.tokenizer, reading.notes)


def samples_of(text: Text) -> Iterator[tuple[str, Masked | str]]:
    """Yield each document or record of a text: its name, and its text or ids and answers; errors as `tokenize`."""
    if text.encoder is None:
        for document in read_documents(text.files, text_field=text.form.text_field):
            yield document.name, "".join(islice(document.pieces, 1))
        return
    encoder = text.encoder
    yield from read_records(text.files, form=text.form, check=lambda record: (record.name, encoder.encode(record)))


def _cached(cache_dir: str | Path, text: Text) -> Path:
    """Return the cache path of a text's tokens: a hash of the tokenizer and of paths, sizes and times of its files."""
    texts = []
    for file in text.files:
        parts = sorted(file.path.rglob("*")) if file.kind == "dataset" else [file.path]
        for path in parts:
            status = path.stat()
            texts.append([str(path.resolve()), file.kind, status.st_size, status.st_mtime_ns])
    masked = []
    if text.encoder is not None:
        masked = [PAIRED_VERSION, ANSWERS_VERSION, text.encoder.identity]
        masked += [repr(text.form)] if text.form.renames else []
    key = json.dumps([VERSION, text.tokenizer.identity, text.form.text_field, texts, *masked])
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return Path(cache_dir) / f"{CACHED}{digest[:24]}.tokens"


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a progress bar; yields a function to call with the number of bytes of each read."""
    from tqdm import tqdm

    if shown and total >= _LONG and not sys.stderr.isatty():  # tqdm shows nothing there
        sys.stderr.write(f"tokenizing {bytes_text(total)} of text, once\n")
    with tqdm(total=total, desc="tokenizing", unit="B", unit_scale=True, disable=None if shown else True) as bar:
        yield bar.update
