"""CRC-32 checksums of files, computed by several threads, and JSON objects that contain their own checksum.

CRC-32 detects every change of one bit and every burst of up to 32 bits, for files of any length. It misses other damage
in one of 2**32 cases. It protects against accidents, not against intentional changes.
"""

import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_POLYNOMIAL = 0xEDB88320  # CRC-32's polynomial, with the lowest power in the highest bit, as in zlib
_ONE = 1 << 31  # the polynomial 1 in this bit order
_BLOCK, _READ = 64 << 20, 4 << 20
_THREADS = 16
_SEAL = ', "checksum": '


def file_checksum(
    path: Path,
    begin: int = 0,
    end: int | None = None,
    beat: Callable[[], object] | None = None,
    *,
    block: int = _BLOCK,
    read: int = _READ,
) -> int:
    """Return the CRC-32 of the bytes [begin, end) of a file, by default of the whole file. Several threads read it.

    Args:
        path: The file.
        begin: First byte.
        end: End of the range; None for the end of the file.
        beat: Called repeatedly while reading.
        block: Bytes per task of a thread.
        read: Bytes per read.

    Raises:
        OSError: The file cannot be read, or is shorter than `end`.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end = os.fstat(descriptor).st_size if end is None else end
        blocks = [(at, min(at + block, end)) for at in range(begin, end, block)]
        total = 0
        with ThreadPoolExecutor(max(1, min(_THREADS, len(blocks), len(os.sched_getaffinity(0))))) as threads:
            sums = threads.map(lambda span: _range_checksum(descriptor, path, read, *span), blocks)
            for (first, last), found in zip(blocks, sums, strict=True):
                total = joined(total, found, last - first)
                if beat is not None:
                    beat()
        return total
    finally:
        os.close(descriptor)


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte strings, from the CRC-32 of each and the length of the second."""
    # Appending n zero bytes multiplies the remainder by x ** 8n. Initial value and final inversion cancel out.
    return _product(_power(8 * length), first) ^ second


def text_of(checksum: int) -> str:
    """Return a checksum as text, in the format of our files."""
    return f"crc32:{checksum:08x}"


def damaged_file(folder: Path, checksums: Mapping[str, str], beat: Callable[[], object] | None) -> str | None:
    """Return a description of the first file in a folder that differs from its checksum, or None.

    Args:
        folder: Folder of the files.
        checksums: `text_of` of each file's checksum, by name.
        beat: See `file_checksum`.
    """
    for name, expected in checksums.items():
        try:
            found = text_of(file_checksum(folder / name, beat=beat))
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if found != expected:
            return f"{name} is damaged: its checksum is {found}, and {expected} was written"
    return None


def with_checksum(text: str) -> str:
    """Add a JSON object's own checksum as its last member.

    Args:
        text: The object. It has at least one member and ends with "}".
    """
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body}{_SEAL}"{text_of(zlib.crc32(body.encode()))}"}}\n'


def verify_own_checksum(data: bytes) -> bool | None:
    """Return whether the checksum of `with_checksum` in these bytes is correct; None if they have no such checksum."""
    body, found, _ = data.rpartition(_SEAL.encode())
    if not found:
        return None
    return data == body + f'{_SEAL}"{text_of(zlib.crc32(body))}"}}\n'.encode()


def _range_checksum(descriptor: int, path: Path, read: int, begin: int, end: int) -> int:
    total, at, buffer = 0, begin, bytearray(min(read, end - begin))
    view = memoryview(buffer)
    while at < end:
        count = os.preadv(descriptor, [view[: min(len(buffer), end - at)]], at)
        if not count:
            raise OSError(0, f"it ends after {at} bytes", str(path))
        total = zlib.crc32(view[:count], total)  # crc32 and preadv release the GIL
        at += count
    return total


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo CRC-32's polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _power(exponent: int) -> int:
    """Return x ** exponent modulo CRC-32's polynomial."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
