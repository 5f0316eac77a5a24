"""Checksums: of files by threads, of parts put together, and of JSON that carries its own."""

import json
import os
import random
import zlib

import pytest

from bmburst import checksum


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 5), (7, 13), (100, 70_001)])
def test_checksums_of_parts_make_that_of_the_whole(first, second):
    a, b = os.urandom(first), os.urandom(second)
    assert checksum.joined(zlib.crc32(a), zlib.crc32(b), second) == zlib.crc32(a + b)


def test_a_file_by_threads(tmp_path):
    small = {"block": 1000, "read": 300}
    data = os.urandom(12_347)
    (tmp_path / "x").write_bytes(data)
    beats = []
    assert checksum.file_checksum(tmp_path / "x", beat=lambda: beats.append(1), **small) == zlib.crc32(data)
    assert len(beats) == 13
    assert checksum.file_checksum(tmp_path / "x", 100, 5001, **small) == zlib.crc32(data[100:5001])
    with pytest.raises(OSError, match="it ends after 12347 bytes"):
        checksum.file_checksum(tmp_path / "x", 0, 13_000, **small)
    (tmp_path / "empty").touch()
    assert checksum.file_checksum(tmp_path / "empty") == 0


def test_json_that_carries_its_checksum():
    values = {"step": 3, "data": {"x": [1, 2]}}
    data = checksum.with_checksum(json.dumps(values, indent=2)).encode()
    assert checksum.verify_own_checksum(data)
    assert json.loads(data).items() >= values.items()
    assert checksum.verify_own_checksum(json.dumps(values).encode()) is None
    flips = random.Random(1)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << flips.randrange(8)
        assert not checksum.verify_own_checksum(bytes(flipped))
    assert not checksum.verify_own_checksum(data + b" ")
