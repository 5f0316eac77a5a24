"""Opens files for reading: compressed ones are unpacked as a stream, piece by piece."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from bmburst.errors import UserError

PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files that are read; the suffix before them says what was packed."""
_GZIP, _BZ2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"(\xb5/\xfd"
_BROKEN = (EOFError, zlib.error, lzma.LZMAError)


class _Counted(io.RawIOBase):
    """A file that reports the number of bytes of each read, before they are unpacked."""

    def __init__(self, file: IO[bytes], on_read: Callable[[int], object]) -> None:
        super().__init__()
        self._file, self._on_read = file, on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        if block:
            self._on_read(len(block))
        return len(block)


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, without that of its compression: ".jsonl" of chats.jsonl.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED_SUFFIXES else suffix


@contextmanager
def opened(path: Path, on_read: Callable[[int], object] = lambda _: None) -> Iterator[IO[bytes]]:
    """Open a file for reading its bytes, unpacked as they are read if its first bytes are those of a compression.

    Args:
        path: The file.
        on_read: Called with the number of bytes of each read of the file.

    Raises:
        OSError: The file cannot be read, or the compressed data are damaged.
        UserError: It is compressed with zstd, and pyarrow, which unpacks it, is not installed.
    """
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        source = cast(IO[bytes], io.BufferedReader(_Counted(file, on_read), 1 << 20))
        try:
            with _unpacked(path, magic, source) as found:
                yield found
        except _BROKEN as error:
            raise OSError(f"its compressed data are damaged or cut off: {error}") from error


def _unpacked(path: Path, magic: bytes, source: IO[bytes]) -> IO[bytes]:
    if magic.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=source))
    if magic.startswith(_BZ2):
        return cast(IO[bytes], bz2.BZ2File(source))
    if magic.startswith(_XZ):
        return cast(IO[bytes], lzma.LZMAFile(source))
    if magic.startswith(_ZSTD):
        return _zstd(path, source)
    return source


def _zstd(path: Path, source: IO[bytes]) -> IO[bytes]:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"'{path}' is compressed with zstd, and importing the package pyarrow failed\n"
            "fix: pip install 'bmburst[data]', or unzstd it"
        ) from error
    return cast(IO[bytes], io.BufferedReader(_Counted(pyarrow.CompressedInputStream(source, "zstd"), lambda _: None)))
