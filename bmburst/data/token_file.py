"""The prepared corpus: one file of token ids that is mapped into memory, never read as a whole.

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

import shlex
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.checkpoint.checksum import file_checksum, is_sealed, text_of
from bmburst.config import parse_json
from bmburst.errors import UserError

MAGIC = b"bmburst tokens\n\0"
VERSION = 1
CACHED = "corpus-"
"""How the names of token files begin that `open_corpus` keeps in a cache, and makes again where they are missing."""
PREAMBLE = struct.Struct("<16sQQ32x")
_KEYS = frozenset(  # before there were checksums
    {"version", "dtype", "tokens", "documents", "text_bytes", "max_id", "fingerprint", "tokenizer"}
)
_LARGEST = 2**62
DTYPES = ("uint16", "uint32")
_MOST_HEADER = 1 << 20  # bytes


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
        end = PREAMBLE.size + padded(self.tokens.nbytes)
        try:
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
                f"'{self.path}' holds token id {self.max_id}, but the model's vocabulary is 0..{vocab_size - 1}\n"
                f"its tokenizer is '{self.tokenizer_name}': set the model's vocab_size to at least {self.vocab_size}"
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
                raise UserError(f"'{path}' is not a bmburst token file\n{_how_to_make(path)}")
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
    seal = is_sealed(text)
    if seal is False:
        raise _damaged(path, "its header does not have its checksum")
    if seal is None and isinstance(header, dict) and header.get("version") == VERSION and not _KEYS.issuperset(header):
        raise _damaged(path, "its header does not have its checksum")
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise UserError(
            f"token file '{path}' is not of format version {VERSION}, which is the one known here\n{_how_to_make(path)}"
        )
    return header, int(at)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r:.40} is no number of tokens, documents or bytes")
    return value


def _damaged(path: Path, how: str) -> UserError:
    return UserError(f"token file '{path}' is damaged: {how}\n{_how_to_make(path)}")


def _how_to_make(path: Path) -> str:
    if path.name.startswith(CACHED):
        return f"remove it: the next run makes it again from its text: rm {shlex.quote(str(path))}"
    return f"make it again: bmburst data --input TEXT --output {path}"
