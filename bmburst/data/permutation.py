"""Random orders of training that need no memory: a permutation of a range, computed number by number."""

import hashlib
from functools import lru_cache

_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of range(size), the same for the same key.

    A Feistel network permutes the numbers of 2b bits, for the smallest such range that holds `size`; a number that
    falls outside `size` goes through it again until it is inside ("cycle walking", Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9). The range is less than four times `size`, so that takes less than four turns on
    average.

    Args:
        size: How many things there are, at least 1.
        key: What chooses the permutation; any numbers.
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size = size
        self._half_bits = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * _ROUNDS // 2).digest()
        self._keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]

    def __call__(self, index: int) -> int:
        """Return where `index` goes.

        Raises:
            IndexError: `index` is not in range(size).
        """
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is not in range({self._size})")
        while True:
            index = self._turn(index)
            if index < self._size:
                return index

    def _turn(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key << 32) & mask)
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """Return 64 well-mixed bits: SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@lru_cache(maxsize=64)
def permutation(size: int, *key: int) -> Permutation:
    """Return the permutation of a size and a key, made once."""
    return Permutation(size, *key)
