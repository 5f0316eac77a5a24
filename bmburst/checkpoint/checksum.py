"""CRC-32 checksums of files: computed while a file is written, verified by several threads, and JSON that carries one.

CRC-32 detects every change of one bit, and every burst of up to 32 bits, whatever the length of the file; of other
damage it misses one case in 2**32. It guards against accidents, not against somebody who changes a file on purpose.

    python -m bmburst.checkpoint.checksum FILE ...

prints the checksum of each file, and how fast it was computed.
"""

import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit, as zlib has it
_ONE = 1 << 31  # the polynomial 1 in that order
_BLOCK = 64 << 20  # bytes that a thread sums
_READ = 4 << 20  # bytes that it reads at a time
_THREADS = 16
_SEAL = ', "checksum": '


def file_checksum(path: Path, begin: int = 0, end: int | None = None, beat: Callable[[], object] | None = None) -> int:
    """Return the CRC-32 of the bytes [begin, end) of a file; by default of all. Several threads read it.

    Args:
        path: The file.
        begin: Where it starts.
        end: Where it ends; None for the end of the file.
        beat: Called now and then, for a file that takes long.

    Raises:
        OSError: The file cannot be read, or is shorter.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end = os.fstat(descriptor).st_size if end is None else end
        blocks = [(at, min(at + _BLOCK, end)) for at in range(begin, end, _BLOCK)]
        total = 0
        with ThreadPoolExecutor(max(1, min(_THREADS, len(blocks), len(os.sched_getaffinity(0))))) as threads:
            sums = threads.map(lambda block: _range_checksum(descriptor, path, *block), blocks)
            for (first, last), found in zip(blocks, sums, strict=True):
                total = joined(total, found, last - first)
                if beat is not None:
                    beat()
        return total
    finally:
        os.close(descriptor)


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two byte strings one after the other, from that of each and the second one's length."""
    # To append n zero bytes multiplies the remainder by x ** 8n; initial value and final inversion cancel out.
    return _product(_power(8 * length), first) ^ second


def text_of(checksum: int) -> str:
    """Return a checksum as files keep it."""
    return f"crc32:{checksum:08x}"


def damaged_file(folder: Path, checksums: Mapping[str, str], beat: Callable[[], object] | None = None) -> str | None:
    """Return what is wrong with the first file of a folder that differs from its checksum, or None.

    Args:
        folder: Where the files are.
        checksums: `text_of` the checksum of each file, by name.
        beat: As of `file_checksum`.
    """
    for name, expected in checksums.items():
        try:
            found = text_of(file_checksum(folder / name, beat=beat))
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if found != expected:
            return f"{name} is damaged: its checksum is {found}, and {expected} was written"
    return None


def sealed(text: str) -> str:
    """Return a JSON object with its own checksum as the last member.

    Args:
        text: The object, which has at least one member and ends with "}".
    """
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body}{_SEAL}"{text_of(zlib.crc32(body.encode()))}"}}\n'


def is_sealed(data: bytes) -> bool | None:
    """Return whether `sealed` made these bytes and each of them is as it was; None if they carry no seal at all."""
    body, found, _ = data.rpartition(_SEAL.encode())
    if not found:
        return None
    return data == body + f'{_SEAL}"{text_of(zlib.crc32(body))}"}}\n'.encode()


def _range_checksum(descriptor: int, path: Path, begin: int, end: int) -> int:
    total, at, buffer = 0, begin, bytearray(min(_READ, end - begin))
    view = memoryview(buffer)
    while at < end:
        count = os.preadv(descriptor, [view[: min(len(buffer), end - at)]], at)
        if not count:
            raise OSError(0, f"it ends after {at} bytes", str(path))
        total = zlib.crc32(view[:count], total)  # without the interpreter's lock, and so does preadv
        at += count
    return total


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo CRC-32's."""
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


def _main(names: list[str]) -> int:
    for name in names:
        started = time.perf_counter()
        try:
            found = file_checksum(Path(name))
        except OSError as error:
            sys.stderr.write(f"{name}: {error.strerror}\n")
            return 2
        seconds, size = time.perf_counter() - started, os.path.getsize(name)
        speed = f"({size / 1e9:.3f} GB in {seconds:.2f} s, {size / 1e9 / seconds:.2f} GB/s)"
        sys.stdout.write(f"{text_of(found)}  {name}  {speed}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
