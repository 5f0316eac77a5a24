"""Reads token files: the token ids of a corpus in one memory-mapped file (`bmburst.data.token_writer` writes them).

Layout, little-endian:

    64 bytes   magic (16), offset of the JSON header (uint64), its length (uint64), zeros
    tokens     uint16 or uint32: all documents, each followed by an end-of-document id; zeros up to a multiple of 8
               bytes
    offsets    int64 [documents + 1]: index of the first token of each document, and the number of tokens
    bytes      int64 [documents + 1]: bytes of UTF-8 text before each document, and in total
    keys       uint64 [documents]: hash of each document's text
    loss mask  versions 2 to 5: one bit per token, bit i % 8 of byte i // 8: whether the token is part of an answer;
               version 4 with groups: after these, one bit per document: whether it continues the record before it;
               zeros up to a multiple of 8 bytes
    weights    versions 4 and 5: float64 [documents]: factor of the losses of each document's tokens, or of its pair
    JSON       counts, types, the tokenizer, a fingerprint of tokens and documents; CRC-32 of the tokens with their
               zeros, of the tables, of the loss mask with the weights, and last of the JSON itself; notes on the data

Version 1 holds text, with loss on all tokens; its earliest files have no checksums and are not verified. Version 2
holds records (`bmburst.data.records`): documents have no added end-of-document id, and `bytes` counts only the text of
answers. Version 3 holds preference pairs: documents 2 i and 2 i + 1 are the chosen and the rejected answer of pair i,
each with its prompt, and have the same key. Version 4 is version 2 with weights of the records, or with groups, or with
both, as its JSON says: in a group, each of several answers to a prompt is a document with the prompt, and the documents
have the same key. Version 5 is version 3 with weights. An older bmburst rejects a later version by its number.
"""

import shlex
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.checksum import file_checksum, text_of, verify_own_checksum
from bmburst.config import parse_json
from bmburst.errors import UserError

MAGIC = b"bmburst tokens\n\0"
VERSION, MASKED_VERSION, PAIRED_VERSION, RECORDS_VERSION, WEIGHTED_PAIRS_VERSION = _VERSIONS = 1, 2, 3, 4, 5
CACHED = "corpus-"
"""Prefix of file names in the cache of `open_corpus`, which writes missing files again."""
PREAMBLE = struct.Struct("<16sQQ32x")
_KEYS = frozenset(  # keys of headers without checksums
    {"version", "dtype", "tokens", "documents", "text_bytes", "max_id", "fingerprint", "tokenizer"}
)
_LARGEST = 2**62
DTYPES = ("uint16", "uint32")
_MOST_HEADER = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """An open token file.

    Attributes:
        path: Path of the file.
        tokenizer_name: Name of its tokenizer, for `load_tokenizer`.
        tokenizer_identity: `identity` of that tokenizer.
        vocab_size: `vocab_size` of that tokenizer.
        eos_id: End-of-document id.
        max_id: The largest id in the file.
        text_bytes: Bytes of UTF-8 text in all documents; of records, only their answers.
        fingerprint: Equal for two files only if they have the same tokens in the same documents.
        tokens: uint16 or uint32 `[tokens]`, memory-mapped.
        document_offsets: int64 `[documents + 1]`, memory-mapped: document d is tokens[offsets[d]:offsets[d + 1]],
            including its end-of-document id.
        byte_offsets: int64 `[documents + 1]`, memory-mapped: bytes of text before document d.
        document_keys: uint64 `[documents]`, memory-mapped: equal for documents of equal text.
        loss_mask: uint8 `[ceil(tokens / 8)]`, memory-mapped: one bit per token, set if it is part of an answer; None in
            a file of text, where all tokens have a loss. With groups, bits of the documents follow.
        pairs: Whether documents 2 i and 2 i + 1 are a preference pair.
        groups: Whether some records have several documents, and the file holds no pairs.
        mask_checksum: Checksum of the loss mask and the weights; None without a mask.
        weights: float64 `[documents]`, memory-mapped: factor of the losses of each document's tokens; None: 1.
        notes: What was found while the text was read: "columns", the names of those without effect, "left_out", the
            number of records by reason, "echoes", the number of answers that begin with their prompt, and "names",
            those of fields and roles that no message has.
        checksum: Checksum of the tokens (`bmburst.checksum.text_of`); None in the earliest files.
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
    groups: bool = False
    weights: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    notes: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Memory-map a token file and verify the checksums of header and tables; `verify` checks the tokens.

        Raises:
            UserError: The file is missing, not a token file, incomplete or damaged.
        """
        path = Path(path)
        header, header_at = _read_header(path)
        try:
            dtype, tokens, documents = header["dtype"], _count(header["tokens"]), _count(header["documents"])
            tables_at = PREAMBLE.size + aligned_size(tokens * np.dtype(dtype).itemsize)
            mask_at = tables_at + 8 * (3 * documents + 2)
            version = header["version"]
            pairs, has_parts = version in (PAIRED_VERSION, WEIGHTED_PAIRS_VERSION), version == RECORDS_VERSION
            groups = has_parts and header["groups"] is True
            is_weighted = version == WEIGHTED_PAIRS_VERSION or (has_parts and header["weights"] is True)
            weights = documents if is_weighted else 0
            mask_bytes = -(-(tokens + groups * documents) // 8) if version != VERSION else 0
            weights_at = mask_at + aligned_size(mask_bytes)
            if (
                dtype not in DTYPES
                or tokens < 1
                or documents < 1 + pairs
                or documents % (1 + pairs)
                or weights_at + 8 * weights != header_at
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
                groups=groups,
                weights=table("float64", weights_at, weights) if weights else None,
                notes=dict(header.get("notes", {})),
            )
        except UserError:
            raise
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {error.strerror or error}") from error
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise _damaged(path, f"its header does not describe it ({error})") from error

    def verify(self, beat: Callable[[], object] | None = None) -> None:
        """Verify the checksums of the tokens and the loss mask. Reads the whole file.

        Args:
            beat: Called regularly while reading.

        Raises:
            UserError: A checksum differs, or the file cannot be read.
        """
        if self.checksum is None:
            return
        try:
            end = PREAMBLE.size + aligned_size(self.tokens.nbytes)
            found = text_of(file_checksum(self.path, PREAMBLE.size, end, beat))
            mask = self.mask_checksum
            if self.loss_mask is not None:
                begin = end + 8 * (3 * self.document_count + 2)
                size = aligned_size(len(self.loss_mask)) + (0 if self.weights is None else self.weights.nbytes)
                mask = text_of(file_checksum(self.path, begin, begin + size, beat))
        except OSError as error:
            raise _damaged(self.path, f"it cannot be read: {error.strerror or error}") from error
        if found != self.checksum:
            raise _damaged(self.path, f"the checksum of its tokens is {found}, and {self.checksum} was written")
        if mask != self.mask_checksum:
            raise _damaged(self.path, f"the checksum of its loss mask is {mask}, and {self.mask_checksum} was written")

    @property
    def token_count(self) -> int:
        """Number of tokens in the file, including end-of-document ids."""
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        """Number of documents in the file."""
        return len(self.document_keys)

    @property
    def record_starts(self) -> npt.NDArray[np.int64]:
        """Index of the first document of each record, and the number of documents, int64 `[records + 1]`."""
        count = self.document_count
        if not self.groups:
            return np.arange(0, count + 1, 1 + self.pairs)
        continues = self.answers_in(range(self.token_count, self.token_count + count))
        return np.append(np.flatnonzero(~continues), count)

    def answers_in(self, places: range) -> npt.NDArray[np.bool_]:
        """Return whether tokens have a loss, bool `[len(places)]`; only these bits are read.

        Args:
            places: Indices of tokens in the file, ascending.
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
        """Return the number of bytes of text of the tokens [start, stop); with a loss mask, only those of answers.

        Exact if `start` and `stop` are ends of documents, and always for the byte tokenizer. Inside a document of
        another tokenizer, bytes are assumed to be spread evenly over its tokens; the parts of a document always add up
        to the whole. End-of-document ids have no bytes.
        """
        return self._bytes_before(stop) - self._bytes_before(start)

    def require_vocab(self, vocab_size: int, name: str | Path | None = None) -> None:
        """Raise UserError unless a model's vocabulary contains all ids of the file.

        Args:
            vocab_size: Size of the vocabulary.
            name: Name of the data for messages, where the file is one of the cache; None: the path of the file.
        """
        if self.max_id >= vocab_size:
            raise UserError(
                f"'{name or self.path}' has token id {self.max_id}, but the model's vocab_size is {vocab_size}\n"
                f"allowed: at least {self.vocab_size}, as its tokenizer '{self.tokenizer_name}' has\n"
                "fix: the model's own tokenizer; or a larger vocabulary: for weights that exist, transformers' "
                f"resize_token_embeddings({self.vocab_size}), for a new model --model.vocab_size {self.vocab_size}"
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
    """Return whether a file starts with the magic bytes of a token file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Check the length of the file and the checksum of its header; return the JSON header and its offset."""
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
    seal, is_known = verify_own_checksum(text), isinstance(version, int) and version in _VERSIONS
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
