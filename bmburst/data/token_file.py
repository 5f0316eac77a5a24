"""Reads and writes token files: the token ids of a corpus in one memory-mapped file.

Layout, little-endian:

    64 bytes   magic (16), position of the JSON header (uint64), its length (uint64), zeros
    tokens     uint16 or uint32, document after document, an end-of-document id after each; zeros up to 8 bytes
    offsets    int64 [documents + 1]: where each document's tokens begin, and the end of the last
    bytes      int64 [documents + 1]: the bytes of UTF-8 text before each document, and in all
    keys       uint64 [documents]: a hash of each document's text
    JSON       counts, types, the tokenizer, a fingerprint of tokens and documents; CRC-32 of the tokens with their
               zeros, of the tables, and last of the JSON itself

Files of earlier versions have no checksums and are read without.
"""

import hashlib
import json
import shlex
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from bmburst.checkpoint.checksum import file_checksum, is_sealed, sealed, text_of
from bmburst.config import parse_json
from bmburst.data.sources import Document
from bmburst.data.tokenizer import Tokenizer
from bmburst.errors import UserError
from bmburst.outputs import FULL, amount, free_bytes, replacing

MAGIC = b"bmburst tokens\n\0"
VERSION = 1
CACHED = "corpus-"
"""Prefix of the names of token files in the cache of `open_corpus`, which makes missing ones again."""
PREAMBLE = struct.Struct("<16sQQ32x")
_KEYS = frozenset(  # before there were checksums
    {"version", "dtype", "tokens", "documents", "text_bytes", "max_id", "fingerprint", "tokenizer"}
)
_LARGEST = 2**62
DTYPES = ("uint16", "uint32")
_MOST_HEADER = 1 << 20  # bytes
BATCH_CHARACTERS = 4 << 20  # tokenized at a time: enough to keep every core busy, and little memory
_COLUMNS = 3  # of the table of documents: end of its tokens, end of its bytes, key
_ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """An open token file.

    Attributes:
        path: Where it is.
        tokenizer_name: What `load_tokenizer` takes to get its tokenizer again.
        tokenizer_identity: That tokenizer's `identity`.
        vocab_size: That tokenizer's number of ids.
        eos_id: The id after every document.
        max_id: The largest id in the file.
        text_bytes: Bytes of UTF-8 text in all documents.
        fingerprint: Equal for two files only if they hold the same tokens in the same documents.
        tokens: uint16 or uint32 `[tokens]`, a memory map: a slice reads only itself.
        document_offsets: int64 `[documents + 1]`, a memory map: document d is tokens[offsets[d]:offsets[d + 1]], its
            end-of-document id included.
        byte_offsets: int64 `[documents + 1]`, a memory map: bytes of text before document d.
        document_keys: uint64 `[documents]`, a memory map: equal for documents of equal text.
        checksum: Of the tokens, as `bmburst.checkpoint.checksum.text_of` has it; None in files of earlier versions.
    """

    path: Path
    tokenizer_name: str
    tokenizer_identity: str
    vocab_size: int
    eos_id: int
    max_id: int
    text_bytes: int
    fingerprint: str
    tokens: npt.NDArray[np.unsignedinteger]
    document_offsets: npt.NDArray[np.int64]
    byte_offsets: npt.NDArray[np.int64]
    document_keys: npt.NDArray[np.uint64]
    checksum: str | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Map a token file. Its header and its tables are compared with their checksums, its tokens are not: `verify`.

        Raises:
            UserError: It is missing, was not written by this package, is not all there or is damaged.
        """
        path = Path(path)
        header, header_at = _read_header(path)
        try:
            dtype, tokens, documents = header["dtype"], _count(header["tokens"]), _count(header["documents"])
            tables_at = PREAMBLE.size + padded(tokens * np.dtype(dtype).itemsize)
            if dtype not in DTYPES or tokens < 1 or documents < 1 or tables_at + 8 * (3 * documents + 2) != header_at:
                raise _damaged(path, "its header does not describe it")
            checksums = header.get("checksums", {})
            if checksums and text_of(file_checksum(path, tables_at, header_at)) != checksums["tables"]:
                raise _damaged(path, "its tables do not have their checksum")

            def table(kind: str, at: int, count: int) -> Any:
                return np.memmap(path, np.dtype(kind).newbyteorder("<"), mode="r", offset=at, shape=(count,))

            return cls(
                path=path,
                tokenizer_name=str(header["tokenizer"]["name"]),
                tokenizer_identity=str(header["tokenizer"]["identity"]),
                vocab_size=_count(header["tokenizer"]["vocab_size"]),
                eos_id=_count(header["tokenizer"]["eos_id"]),
                max_id=_count(header["max_id"]),
                text_bytes=_count(header["text_bytes"]),
                fingerprint=str(header["fingerprint"]),
                tokens=table(dtype, PREAMBLE.size, tokens),
                document_offsets=table("int64", tables_at, documents + 1),
                byte_offsets=table("int64", tables_at + 8 * (documents + 1), documents + 1),
                document_keys=table("uint64", tables_at + 8 * (2 * documents + 2), documents),
                checksum=str(checksums["tokens"]) if checksums else None,
            )
        except UserError:
            raise
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {error.strerror or error}") from error
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise _damaged(path, f"its header does not describe it ({error})") from error

    def verify(self, beat: Callable[[], object] | None = None) -> None:
        """Compare the tokens with their checksum, which reads all of them.

        Args:
            beat: Called now and then while it reads.

        Raises:
            UserError: They differ, or cannot be read.
        """
        if self.checksum is None:
            return
        try:
            end = PREAMBLE.size + padded(self.tokens.nbytes)
            found = text_of(file_checksum(self.path, PREAMBLE.size, end, beat))
        except OSError as error:
            raise _damaged(self.path, f"it cannot be read: {error.strerror or error}") from error
        if found != self.checksum:
            raise _damaged(self.path, f"the checksum of its tokens is {found}, and {self.checksum} was written")

    @property
    def token_count(self) -> int:
        """Tokens in the file, end-of-document ids included."""
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        """Documents in the file."""
        return len(self.document_keys)

    def bytes_between(self, start: int, stop: int) -> int:
        """Return how many bytes of text the tokens [start, stop) stand for.

        Exact wherever `start` and `stop` are ends of documents, and everywhere for the byte tokenizer. Inside a
        document of any other tokenizer, bytes are taken to be spread evenly over its tokens; the parts of a document
        always add up to the whole. End-of-document ids stand for no text.
        """
        return self._bytes_before(stop) - self._bytes_before(start)

    def require_vocab(self, vocab_size: int) -> None:
        """Refuse a model whose embedding has no row for some id in the file.

        Raises:
            UserError: `vocab_size` is not larger than the largest id.
        """
        if self.max_id >= vocab_size:
            raise UserError(
                f"'{self.path}' has token id {self.max_id}, but the model's vocab_size is {vocab_size}\n"
                f"allowed: at least {self.vocab_size}, as its tokenizer '{self.tokenizer_name}' has\n"
                f"fix: --model.vocab_size {self.vocab_size}, or tokenize the text with the model's tokenizer"
            )

    def _bytes_before(self, position: int) -> int:
        document = int(np.searchsorted(self.document_offsets, position, side="right")) - 1
        before = int(self.byte_offsets[document])
        if document == self.document_count:
            return before
        begin, end = int(self.document_offsets[document]), int(self.document_offsets[document + 1])
        size, text_tokens = int(self.byte_offsets[document + 1]) - before, end - begin - 1
        return before + size * min(position - begin, text_tokens) // max(text_tokens, 1)


def padded(size: int) -> int:
    """Return `size` bytes rounded up to 8, so that the tables after the tokens are aligned."""
    return -(-size // 8) * 8


def is_token_file(path: Path) -> bool:
    """Return whether a file begins as a token file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON header and where it begins, having checked that the file is as long as it says."""
    try:
        with path.open("rb") as file:
            preamble = file.read(PREAMBLE.size)
            if preamble[: len(MAGIC)] != MAGIC:
                raise UserError(f"'{path}' is not a token file of bmburst\n{_how_to_make(path)}")
            size = file.seek(0, 2)
            if len(preamble) < PREAMBLE.size:
                raise _damaged(path, f"it ends after {size} bytes")
            _, at, length = PREAMBLE.unpack(preamble)
            if any(preamble[-32:]):
                raise _damaged(path, "its first 64 bytes are not as they were written")
            if size != at + length:
                raise _damaged(path, f"it should have {at + length} bytes and has {size}")
            file.seek(at)
            if length > _MOST_HEADER:
                raise _damaged(path, f"its header has {length} bytes")
            text = file.read(length)
            header = parse_json(text)
    except OSError as error:
        raise UserError(f"cannot open token file '{path}': {error.strerror or error}\n{_how_to_make(path)}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    seal, is_known = is_sealed(text), isinstance(header, dict) and header.get("version") == VERSION
    if seal is False or (seal is None and is_known and not _KEYS.issuperset(header)):
        raise _damaged(path, "its header does not have its checksum")
    if not is_known:
        raise UserError(f"token file '{path}' has an unknown format version\nallowed: {VERSION}\n{_how_to_make(path)}")
    return header, int(at)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r:.40} is no number of tokens, documents or bytes")
    return value


def _damaged(path: Path, how: str) -> UserError:
    return UserError(f"token file '{path}' is damaged: {how}\n{_how_to_make(path)}")


def _how_to_make(path: Path) -> str:
    if path.name.startswith(CACHED):
        return f"fix: rm {shlex.quote(str(path))}; the next run makes it again from its text"
    return f"fix: make it again: bmburst data --input TEXT --output {path}"


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
        raise UserError(f"'{path}' is a directory\nfix: give the path of the file to write")
    if path.exists() and not path.is_file():  # the finished file takes the place of what is there
        raise UserError(f"'{path}' is a device or a pipe\nfix: give the path of a new file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path, durable=True) as partial,
            tempfile.TemporaryFile(dir=path.parent) as rows,
            partial.open("xb") as file,
        ):
            _Writer(file, rows, tokenizer).write(documents)
    except OSError as error:
        fix = "give a folder where you have write permission"
        if error.errno in FULL:
            fix = f"free disk space, {amount(free_bytes(path))} are left, or give a folder on another disk"
        raise UserError(
            f"cannot write token file '{path}': {error.strerror or error}\n"
            f"fix: {fix}: --output, in bmburst train --data.cache"
        ) from error
    return TokenFile.open(path)


class _Writer:
    """Writes one token file, and keeps its counts, digest and checksums meanwhile."""

    def __init__(self, file: IO[bytes], rows: IO[bytes], tokenizer: Tokenizer) -> None:
        self._file, self._rows, self._tokenizer = file, rows, tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = self._documents = self._bytes = self._max_id = 0
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
            raise UserError("the corpus is empty: no document has any text\nfix: give files with text")
        self._finish()

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
            self._rows.seek(0)
            while block := self._rows.read(8 * _COLUMNS * _ROWS_AT_A_TIME):
                rows = np.frombuffer(block, "<u8").reshape(-1, _COLUMNS)
                self._put("tables", np.ascontiguousarray(rows[:, column]).tobytes())
        header_at = self._file.tell()
        header = sealed(json.dumps(self._header())).encode()
        self._file.write(header)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, header_at, len(header)))

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
