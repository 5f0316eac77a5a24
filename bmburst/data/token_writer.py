"""Write a token file: documents stream through, and the file appears whole or not at all."""

import hashlib
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from bmburst.checkpoint.checksum import sealed, text_of
from bmburst.data.sources import Document
from bmburst.data.token_file import MAGIC, PREAMBLE, VERSION, TokenFile, padded
from bmburst.data.tokenizer import Tokenizer
from bmburst.errors import UserError
from bmburst.outputs import FULL, amount, free_bytes, replacing

# Text that is tokenized at a time: enough to keep every core busy, little enough to forget about.
BATCH_CHARACTERS = 4 << 20
_COLUMNS = 3  # of the table of documents: end of its tokens, end of its bytes, key
_ROWS_AT_A_TIME = 1 << 16


def write_token_file(path: str | Path, documents: Iterable[Document], tokenizer: Tokenizer) -> TokenFile:
    """Tokenize documents into a token file and open it.

    Memory stays bounded: by a few MiB of text and, for JSONL, by its longest line. A document without text is left
    out. Until the last byte is on disk the file has another name in the same directory, so any number of processes
    may write the same file at once and a reader sees the old one or a new one.

    Raises:
        UserError: There is no text, or the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"'{path}' is a directory\nname the file to write in it")
    if path.exists() and not path.is_file():  # the finished file takes the place of what is there
        raise UserError(f"'{path}' is a device or a pipe\nname a file of its own")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path, durable=True) as partial,
            tempfile.TemporaryFile(dir=path.parent) as rows,
            partial.open("xb") as file,
        ):
            _Writer(file, rows, tokenizer).write(documents)
    except OSError as error:
        fix = "name a folder that you may write in"
        if error.errno in FULL:
            fix = f"make room, or name a folder with more of it: {amount(free_bytes(path))} are free here"
        raise UserError(
            f"cannot write token file '{path}': {error.strerror or error}\n"
            f"{fix}: --output, for bmburst train --data.cache"
        ) from error
    return TokenFile.open(path)


class _Writer:
    """What is known so far of the file that is being written."""

    def __init__(self, file: IO[bytes], rows: IO[bytes], tokenizer: Tokenizer) -> None:
        self._file, self._rows, self._tokenizer = file, rows, tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = self._documents = self._bytes = 0
        self._max_id = 0
        self._checksums = {"tokens": 0, "tables": 0}

    def write(self, documents: Iterable[Document]) -> None:
        self._file.write(bytes(PREAMBLE.size))
        for batch in _batches(documents):
            encoded = self._tokenizer.encode_batch([text for text, _ in batch])
            for ids, (text, key) in zip(encoded, batch, strict=True):
                self._bytes += len(text.encode("utf-8", "replace"))
                self._append(ids)
                if key is not None:
                    self._append(np.array([self._tokenizer.eos_id], np.int64))
                    self._end_document(key)
        if not self._documents:
            raise UserError("the corpus is empty: no document has any text\nname files that do")
        self._finish()

    def _append(self, ids: npt.NDArray[np.int64]) -> None:
        if not len(ids):
            return
        if ids.min() < 0 or ids.max() >= self._tokenizer.vocab_size:
            raise UserError(
                f"tokenizer '{self._tokenizer.name}' gave an id outside 0..{self._tokenizer.vocab_size - 1}: "
                f"{ids.min()}..{ids.max()}"
            )
        self._max_id = max(self._max_id, int(ids.max()))
        data = ids.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._put("tokens", data)
        self._tokens += len(ids)

    def _put(self, part: str, data: bytes) -> None:
        self._checksums[part] = zlib.crc32(data, self._checksums[part])
        self._file.write(data)

    def _end_document(self, key: int) -> None:
        row = np.array([self._tokens, self._bytes], "<i8").tobytes() + key.to_bytes(8, "little")
        self._digest.update(row)
        self._rows.write(row)
        self._documents += 1

    def _finish(self) -> None:
        """Write the tables, the JSON header, and last where it is."""
        used = self._tokens * self._dtype.itemsize
        self._put("tokens", bytes(padded(used) - used))
        for column in range(_COLUMNS):
            if column < 2:  # offsets and bytes begin at zero, keys do not
                self._put("tables", bytes(8))
            for rows in self._table():
                self._put("tables", np.ascontiguousarray(rows[:, column]).tobytes())
        header_at = self._file.tell()
        header = sealed(json.dumps(self._header())).encode()
        self._file.write(header)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, header_at, len(header)))

    def _table(self) -> Iterator[npt.NDArray[np.uint64]]:
        self._rows.seek(0)
        while block := self._rows.read(8 * _COLUMNS * _ROWS_AT_A_TIME):
            yield np.frombuffer(block, "<u8").reshape(-1, _COLUMNS)

    def _header(self) -> dict[str, Any]:
        tokenizer = self._tokenizer
        self._digest.update(f"{self._dtype.name} {tokenizer.identity}".encode())
        return {
            "version": VERSION,
            "dtype": self._dtype.name,
            "tokens": self._tokens,
            "documents": self._documents,
            "text_bytes": self._bytes,
            "max_id": self._max_id,
            "fingerprint": self._digest.hexdigest(),
            "tokenizer": {
                "name": tokenizer.name,
                "identity": tokenizer.identity,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
            },
            "checksums": {part: text_of(found) for part, found in self._checksums.items()},
        }


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[str, int | None]]]:
    """Yield lists of (piece of text, key of the document if the piece is its last), a few MiB at a time."""
    batch: list[tuple[str, int | None]] = []
    size = 0
    for document in documents:
        digest = hashlib.blake2b(digest_size=8)
        last: str | None = None
        for piece in filter(None, document.pieces):
            if last is not None:
                batch.append((last, None))
            digest.update(piece.encode("utf-8", "replace"))
            last = piece
            size += len(piece)
            if size >= BATCH_CHARACTERS and batch:
                yield batch
                batch, size = [], len(piece)
        if last is not None:
            batch.append((last, int.from_bytes(digest.digest(), "little")))
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
