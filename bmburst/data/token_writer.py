"""Writes token files: tokenizes documents, and computes counts, fingerprint and checksums on the way."""

import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from bmburst.checksum import text_of, with_checksum
from bmburst.data.documents import Document
from bmburst.data.token_file import (
    MAGIC,
    MASKED_VERSION,
    PAIRED_VERSION,
    PREAMBLE,
    RECORDS_VERSION,
    VERSION,
    WEIGHTED_PAIRS_VERSION,
    TokenFile,
    aligned_size,
)
from bmburst.data.tokenizer import Tokenizer
from bmburst.errors import UserError
from bmburst.outputs import replacing, write_fix

BATCH_CHARACTERS = 4 << 20
_COLUMNS = 3  # columns of the table of documents: end of its tokens, end of its bytes, key; then its weight
_ROWS_AT_A_TIME = 1 << 16
_BLOCK = 1 << 20
Notes = Callable[[], Mapping[str, Any]]
_NO_NOTES: Notes = dict


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """A tokenized document with its loss mask.

    Attributes:
        ids: int64 `[tokens]`, at least one.
        answers: bool `[tokens]`: whether a token is part of an answer and has a loss.
        answer_bytes: Bytes of UTF-8 text in the answers.
        key: 64-bit hash, equal for documents of equal text.
        documents: For a record of several documents, the number of tokens and of answer bytes of each; they follow one
            another in `ids`. Empty for one document.
        is_pair: Whether the documents are the chosen and the rejected answer of a preference pair.
        weight: Factor of the losses of its tokens, above 0.
    """

    ids: npt.NDArray[np.int64]
    answers: npt.NDArray[np.bool_]
    answer_bytes: int
    key: int
    documents: tuple[tuple[int, int], ...] = ()
    is_pair: bool = False
    weight: float = 1.0


def write_token_file(
    path: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    notes: Notes = _NO_NOTES,
    *,
    batch: int = BATCH_CHARACTERS,
) -> TokenFile:
    """Tokenize documents into a token file and open it.

    Memory is bounded by a few MiB of text and, for JSONL, by the longest line. Documents without text are left out.
    The file is written under a temporary name in the same directory and then renamed, so several processes may write
    the same file at once, and a reader sees either the old or a new complete file.

    Args:
        path: The file.
        documents: The documents.
        tokenizer: The tokenizer.
        notes: Called after the last document: what the file says about the data, for `TokenFile.notes`.
        batch: Characters that are tokenized at a time: keeps every core busy and needs little memory.

    Raises:
        UserError: There is no text, or the file cannot be written.
    """
    return _write(path, tokenizer, lambda writer: writer.write(documents, batch), notes, masked=False)


def write_masked_file(
    path: str | Path, documents: Iterable[Masked], tokenizer: Tokenizer, notes: Notes = _NO_NOTES
) -> TokenFile:
    """Write tokenized documents with their loss masks to a token file, as `write_token_file` does, and open it.

    Raises:
        UserError: There is no document, or the file cannot be written.
        ValueError: Some of the documents are pairs and some are not.
    """
    return _write(path, tokenizer, lambda writer: writer.write_masked(documents), notes, masked=True)


def _write(
    path: str | Path, tokenizer: Tokenizer, fill: "Callable[[_Writer], object]", notes: Notes, *, masked: bool
) -> TokenFile:
    path = Path(path)
    if path.is_dir():
        raise UserError(f"'{path}' is a directory\nfix: give the path of the file to write")
    if path.exists() and not path.is_file():  # renaming the finished file would replace the device
        raise UserError(f"'{path}' is a device or a pipe\nfix: give the path of a new file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path, durable=True) as partial,
            tempfile.TemporaryFile(dir=path.parent) as rows,
            tempfile.TemporaryFile(dir=path.parent) as mask,
            partial.open("xb") as file,
        ):
            fill(_Writer(file, rows, tokenizer, mask if masked else None, notes))
    except OSError as error:
        fix = write_fix(error, path, "give a folder where you have write permission")
        raise UserError(
            f"cannot write token file '{path}': {error.strerror or error}\n"
            f"fix: {fix}: --output, in bmburst train --data.cache"
        ) from error
    return TokenFile.open(path)


class _Writer:
    """Writes one token file, and computes its counts, digest and checksums on the way."""

    def __init__(
        self, file: IO[bytes], rows: IO[bytes], tokenizer: Tokenizer, mask: IO[bytes] | None, notes: Notes
    ) -> None:
        self._file, self._rows, self._tokenizer, self._mask, self._notes = file, rows, tokenizer, mask, notes
        self._bits = np.empty(0, bool)  # the last bits of the mask, fewer than 8, not yet written
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = self._documents = self._bytes = self._max_id = 0
        self._pairs = self._weighted = False
        self._continues = bytearray()  # whether each document continues the record of the one before it
        self._checksums = {"tokens": 0, "tables": 0} | ({} if mask is None else {"mask": 0})

    def write(self, documents: Iterable[Document], characters: int) -> None:
        self._file.write(bytes(PREAMBLE.size))
        for batch in _batches(documents, characters):
            encoded = self._tokenizer.encode_batch([text for text, _ in batch])
            for ids, (text, key) in zip(encoded, batch, strict=True):
                self._bytes += len(text.encode("utf-8", "replace"))
                self._append(ids)
                if key is not None:
                    self._append(np.array([self._tokenizer.eos_id], np.int64))
                    self._end_document(key)
        if not self._documents:
            raise UserError("the corpus is empty: no document has any text\nfix: give files with text")
        self._finish()

    def write_masked(self, documents: Iterable[Masked]) -> None:
        assert self._mask is not None
        self._file.write(bytes(PREAMBLE.size))
        for document in documents:
            if self._documents and self._pairs != document.is_pair:
                raise ValueError("some documents are pairs and some are not")
            self._pairs = document.is_pair
            at = 0
            for tokens, size in document.documents or ((len(document.ids), document.answer_bytes),):
                self._continues.append(at > 0)
                own = slice(at, at + tokens)
                self._put_masked(document.ids[own], document.answers[own], size, document.key, document.weight)
                at += tokens
        if not self._documents:
            raise UserError("the data are empty: no record is left\nfix: give files with records")
        if self._has_groups:
            self._bits = np.append(self._bits, np.frombuffer(self._continues, bool))
        self._put_bits(self._bits)
        self._finish()

    @property
    def _has_groups(self) -> bool:
        return not self._pairs and any(self._continues)

    def _put_masked(
        self,
        ids: npt.NDArray[np.int64],
        answers: npt.NDArray[np.bool_],
        answer_bytes: int,
        key: int,
        weight: float,
    ) -> None:
        self._append(ids)
        bits = np.append(self._bits, answers)
        whole = len(bits) // 8 * 8
        self._put_bits(bits[:whole])
        self._bits = bits[whole:]
        self._bytes += answer_bytes
        self._end_document(key, weight)

    def _put_bits(self, bits: npt.NDArray[np.bool_]) -> None:
        assert self._mask is not None
        data = np.packbits(bits, bitorder="little").tobytes()
        self._digest.update(data)
        self._mask.write(data)

    def _append(self, ids: npt.NDArray[np.int64]) -> None:
        if not len(ids):
            return
        if ids.min() < 0 or ids.max() >= self._tokenizer.vocab_size:
            raise UserError(
                f"tokenizer '{self._tokenizer.name}' returned ids from {ids.min()} to {ids.max()}\n"
                f"allowed: 0 to {self._tokenizer.vocab_size - 1}, as its vocab_size is {self._tokenizer.vocab_size}\n"
                "fix: correct the tokenizer's vocab_size, or use another tokenizer"
            )
        self._max_id = max(self._max_id, int(ids.max()))
        data = ids.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._put("tokens", data)
        self._tokens += len(ids)

    def _put(self, part: str, data: bytes) -> None:
        self._checksums[part] = zlib.crc32(data, self._checksums[part])
        self._file.write(data)

    def _end_document(self, key: int, weight: float = 1.0) -> None:
        row = np.array([self._tokens, self._bytes], "<i8").tobytes() + key.to_bytes(8, "little")
        factor = np.array(weight, "<f8").tobytes()
        self._weighted |= weight != 1
        self._digest.update(row if weight == 1 else row + factor)
        self._rows.write(row + factor)
        self._documents += 1

    def _finish(self) -> None:
        """Write the tables, the JSON header, and last the preamble, which contains the header's offset."""
        used = self._tokens * self._dtype.itemsize
        self._put("tokens", bytes(aligned_size(used) - used))
        for column in range(_COLUMNS):
            if column < 2:  # offsets and bytes begin at zero, keys do not
                self._put("tables", bytes(8))
            self._put_column("tables", column)
        if self._mask is not None:
            size = self._mask.tell()
            self._mask.seek(0)
            while block := self._mask.read(_BLOCK):
                self._put("mask", block)
            self._put("mask", bytes(aligned_size(size) - size))
            if self._weighted:
                self._put_column("mask", _COLUMNS)
        header_at = self._file.tell()
        header = with_checksum(json.dumps(self._header())).encode()
        self._file.write(header)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, header_at, len(header)))

    def _put_column(self, part: str, column: int) -> None:
        self._rows.seek(0)
        width = _COLUMNS + 1
        while block := self._rows.read(8 * width * _ROWS_AT_A_TIME):
            rows = np.frombuffer(block, "<u8").reshape(-1, width)
            self._put(part, np.ascontiguousarray(rows[:, column]).tobytes())

    def _version(self) -> int:
        if self._mask is None:
            return VERSION
        if self._pairs:
            return WEIGHTED_PAIRS_VERSION if self._weighted else PAIRED_VERSION
        return RECORDS_VERSION if self._has_groups or self._weighted else MASKED_VERSION

    def _header(self) -> dict[str, Any]:
        tokenizer, version = self._tokenizer, self._version()
        self._digest.update(f"{self._dtype.name} {tokenizer.identity}".encode())
        return {
            "version": version,
            **({"groups": self._has_groups, "weights": self._weighted} if version == RECORDS_VERSION else {}),
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
            **({"notes": notes} if (notes := dict(self._notes())) else {}),
        }


def _batches(documents: Iterable[Document], characters: int) -> Iterator[list[tuple[str, int | None]]]:
    """Yield lists of (piece of text, key of the document if the piece is its last one), of so many characters."""
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
            if size >= characters and batch:
                yield batch
                batch, size = [], len(piece)
        if last is not None:
            batch.append((last, int.from_bytes(digest.digest(), "little")))
            if size >= characters:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
