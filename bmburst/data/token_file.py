"""Reads and writes token files: the token ids of a corpus in one memory-mapped file.

Layout, little-endian:

    64 bytes   magic (16), position of the JSON header (uint64), its length (uint64), zeros
    tokens     uint16 or uint32, document after document, an end-of-document id after each; zeros up to 8 bytes
    offsets    int64 [documents + 1]: where each document's tokens begin, and the end of the last
    bytes      int64 [documents + 1]: the bytes of UTF-8 text before each document, and in all
    keys       uint64 [documents]: a hash of each document's text
    loss mask  versions 2 and 3: a bit a token, bit i % 8 of byte i // 8: whether the token is an answer; zeros up to 8
               bytes
    JSON       counts, types, the tokenizer, a fingerprint of tokens and documents; CRC-32 of the tokens with their
               zeros, of the tables, of the loss mask, and last of the JSON itself

Version 1 holds text, on all of which there is loss; its earliest files have no checksums and are read without.
Version 2 holds records (`bmburst.data.records`): documents are as the tokenizer wrote them, without an id after each,
and bytes count the text of answers alone. Version 3 holds preference pairs: documents 2 i and 2 i + 1 are the chosen
and the rejected answer of pair i, each with its prompt, and have one key. A bmburst that knows only earlier versions
refuses a later one by its number.
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
VERSION, MASKED_VERSION, PAIRED_VERSION = 1, 2, 3
_VERSIONS = VERSION, MASKED_VERSION, PAIRED_VERSION
CACHED = "corpus-"
"""Prefix of the names of token files in the cache of `open_corpus`, which makes missing ones again."""
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
        eos_id: The id after every document of text.
        max_id: The largest id in the file.
        text_bytes: Bytes of UTF-8 text in all documents.
        fingerprint: Equal for two files only if they hold the same tokens in the same documents.
        tokens: uint16 or uint32 `[tokens]`, a memory map: a slice reads only itself.
        document_offsets: int64 `[documents + 1]`, a memory map: document d is tokens[offsets[d]:offsets[d + 1]], its
            end-of-document id included.
        byte_offsets: int64 `[documents + 1]`, a memory map: bytes of text before document d.
        document_keys: uint64 `[documents]`, a memory map: equal for documents of equal text.
        loss_mask: uint8 `[ceil(tokens / 8)]`, a memory map: a bit for each token that is an answer; None in a file of
            text, where there is loss on all tokens.
        pairs: Whether documents are preference pairs, two by two.
        mask_checksum: Of the loss mask; None without one.
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
    loss_mask: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    mask_checksum: str | None = field(default=None, repr=False)
    pairs: bool = False

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
            tables_at = PREAMBLE.size + aligned_size(tokens * np.dtype(dtype).itemsize)
            mask_at = tables_at + 8 * (3 * documents + 2)
            mask_bytes = -(-tokens // 8) if header["version"] != VERSION else 0
            pairs = header["version"] == PAIRED_VERSION
            if (
                dtype not in DTYPES
                or tokens < 1
                or documents < 1 + pairs
                or documents % (1 + pairs)
                or mask_at + aligned_size(mask_bytes) != header_at
            ):
                raise _damaged(path, "its header does not describe it")
            checksums = header.get("checksums", {})
            if checksums and text_of(file_checksum(path, tables_at, mask_at)) != checksums["tables"]:
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
                loss_mask=table("uint8", mask_at, mask_bytes) if mask_bytes else None,
                mask_checksum=str(checksums["mask"]) if mask_bytes else None,
                pairs=pairs,
            )
        except UserError:
            raise
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {error.strerror or error}") from error
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise _damaged(path, f"its header does not describe it ({error})") from error

    def verify(self, beat: Callable[[], object] | None = None) -> None:
        """Compare the tokens and the loss mask with their checksums, which reads all of them.

        Args:
            beat: Called now and then while it reads.

        Raises:
            UserError: They differ, or cannot be read.
        """
        if self.checksum is None:
            return
        try:
            end = PREAMBLE.size + aligned_size(self.tokens.nbytes)
            found = text_of(file_checksum(self.path, PREAMBLE.size, end, beat))
            mask = self.mask_checksum
            if self.loss_mask is not None:
                begin = end + 8 * (3 * self.document_count + 2)
                mask = text_of(file_checksum(self.path, begin, begin + aligned_size(len(self.loss_mask)), beat))
        except OSError as error:
            raise _damaged(self.path, f"it cannot be read: {error.strerror or error}") from error
        if found != self.checksum:
            raise _damaged(self.path, f"the checksum of its tokens is {found}, and {self.checksum} was written")
        if mask != self.mask_checksum:
            raise _damaged(self.path, f"the checksum of its loss mask is {mask}, and {self.mask_checksum} was written")

    @property
    def token_count(self) -> int:
        """Tokens in the file, end-of-document ids included."""
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        """Documents in the file."""
        return len(self.document_keys)

    def answers_in(self, places: range) -> npt.NDArray[np.bool_]:
        """Return for some tokens whether there is loss on them, bool `[len(places)]`; only these are read.

        Args:
            places: Of the file, ascending.
        """
        if self.loss_mask is None or not places:
            return np.ones(len(places), bool)
        if places.step == 1:
            first = places.start // 8
            bits = np.unpackbits(self.loss_mask[first : -(-places.stop // 8)], bitorder="little")
            return bits[places.start - 8 * first : places.stop - 8 * first].astype(bool)
        at = np.arange(places.start, places.stop, places.step)
        picked: npt.NDArray[np.uint8] = self.loss_mask[at >> 3] >> (at & 7).astype(np.uint8) & 1
        return picked.astype(bool)

    def bytes_between(self, start: int, stop: int) -> int:
        """Return how many bytes of text the tokens [start, stop) stand for; with a loss mask, those of answers.

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
        if self.loss_mask is not None:
            answers = self.answers_in(range(begin, end))
            return before + size * int(answers[: position - begin].sum()) // max(int(answers.sum()), 1)
        return before + size * min(position - begin, text_tokens) // max(text_tokens, 1)


def aligned_size(size: int) -> int:
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
    version = header.get("version") if isinstance(header, dict) else None
    seal, is_known = is_sealed(text), isinstance(version, int) and version in _VERSIONS
    if seal is False or (seal is None and is_known and (version != VERSION or not _KEYS.issuperset(header))):
        raise _damaged(path, "its header does not have its checksum")
    if not is_known:
        raise UserError(
            f"token file '{path}' has an unknown format version\nallowed: {', '.join(map(str, _VERSIONS))}\n"
            f"{_how_to_make(path)}"
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
        return f"fix: rm {shlex.quote(str(path))}; the next run makes it again from its text"
    return f"fix: make it again: bmburst data --input TEXT --output {path}"
