"""Dropout whose mask is a function of keys of token and feature: `Dropout`.

An element is dropped if a hash of its row's key and its column's key is below a threshold (MurmurHash3's 32-bit
finalizer, A. Appleby). So every rank, chunk of tokens and recompute that computes the element drops it or keeps it
alike, and no mask or generator state is stored.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_AT_ONCE = 1 << 22
"""Elements whose mask is computed at once; bounds the temporary tensors."""
_FIRST, _SECOND = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)  # as signed 32-bit integers
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio: consecutive numbers get distant keys
_LOW = (1 << 31) - 1


@dataclass(frozen=True, eq=False, slots=True)
class Dropout:
    """Dropout of `[tokens, features]` in training.

    Attributes:
        rate: Probability that an element is dropped, in [0, 1).
        rows: Keys of the tokens, int32 `[tokens]`; see `keys`.
        columns: Keys of the features, int32 `[features]`; see `keys`.
    """

    rate: float
    rows: Tensor
    columns: Tensor

    def at(self, rows: slice) -> "Dropout":
        """Return the dropout of some of the tokens."""
        return replace(self, rows=self.rows[rows])

    def of_columns(self, columns: slice) -> "Dropout":
        """Return the dropout of some of the features."""
        return replace(self, columns=self.columns[columns])

    def chunks(self) -> Iterator[slice]:
        """Yield runs of tokens that are computed at once."""
        size = max(1, _AT_ONCE // len(self.columns))
        return (slice(at, at + size) for at in range(0, len(self.rows), size))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a copy of `[tokens, features]` with elements dropped, and the others divided by 1 - rate."""
        hashed = self.rows[:, None] ^ self.columns
        hashed ^= (hashed >> 16) & 0xFFFF  # >> extends the sign
        hashed *= _FIRST
        hashed ^= (hashed >> 13) & 0x7FFFF
        hashed *= _SECOND
        hashed ^= (hashed >> 16) & 0xFFFF
        threshold = round(self.rate * 2**32) - 2**31
        return x.masked_fill(hashed < threshold, 0).mul_(1 / (1 - self.rate))


def keys(numbers: Tensor, seed: str) -> Tensor:
    """Return int32 keys of int64 numbers (SplitMix64's finalizer, G. Steele et al.); different for each seed.

    Args:
        numbers: Any shape; below 2^62.
        seed: Any text.
    """
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big", signed=True)
    mixed = (numbers + 1) * _SPREAD + start
    mixed ^= (mixed >> 30) & ((1 << 34) - 1)
    mixed *= 0xBF58476D1CE4E5B9 - (1 << 64)
    mixed ^= (mixed >> 27) & ((1 << 37) - 1)
    mixed *= 0x94D049BB133111EB - (1 << 64)
    mixed ^= (mixed >> 31) & ((1 << 33) - 1)
    return (mixed & _LOW).to(torch.int32) ^ ((mixed >> 32).to(torch.int32) << 1)
