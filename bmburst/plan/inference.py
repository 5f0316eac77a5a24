"""Memory of inference, by formula: weights, KV cache and what prefill holds of a chunk. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from bmburst.blocks.config import LlamaConfig
from bmburst.schedule.cache_split import CacheSplit

WIDE = 4  # bytes of fp32: log-sum-exp, logits, partial results
MLP_TOKENS = 16384
"""Tokens of a rank whose MLP is computed at once in prefill."""
TOKENS_OF_RANK = 65536
"""Tokens of a chunk that a rank computes, by default."""
_RESERVE = 0.04  # of the device: memory of torch, of libraries and of fragments


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceMemory:
    """Bytes that one rank needs to generate text.

    Attributes:
        config: The model.
        split: How the ranks share the cache.
        itemsize: Bytes of a number of weights and cache.
        chunk_tokens: Tokens of a chunk over all ranks, at most.
    """

    config: LlamaConfig
    split: CacheSplit
    itemsize: int
    chunk_tokens: int

    @property
    def weights(self) -> int:
        """Bytes of the weights, which every rank holds whole."""
        return self.config.num_parameters * self.itemsize

    def cache(self, sequences: int, length: int) -> int:
        """Return the bytes of the cache of so many sequences, each with room for `length` tokens."""
        config = self.config
        return self.split.nbytes(config.num_layers, sequences, length, config.head_dim, self.itemsize)

    def prefill(self, tokens: int) -> int:
        """Return the bytes that live at once while `tokens` tokens are computed, at most a chunk of them.

        Two streams and a norm; q, k, v before and after rotary embedding, exchanged, and the output likewise; gate, up
        and their product of the tokens of an MLP.
        """
        config, ranks = self.config, self.split.ranks
        rows = -(-min(tokens, self.chunk_tokens) // ranks)
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        moved = 2 * (query + 2 * kv) + 3 * query if ranks > 1 else (query + 2 * kv) + 2 * query
        stream = 4 * config.hidden_size * self.itemsize
        attention = moved * self.itemsize + 2 * config.num_heads * WIDE
        mlp = min(rows, MLP_TOKENS) * 3 * config.intermediate_size * self.itemsize
        return rows * (stream + attention) + mlp

    def decode(self, sequences: int) -> int:
        """Return the bytes of a step of decoding: logits over the vocabulary, several times, and sampling."""
        return sequences * self.config.vocab_size * WIDE * 8

    def total(self, sequences: int, length: int, *, with_weights: bool = True) -> int:
        """Return the bytes for so many sequences of `length` tokens, prompt and answer."""
        least = self.weights if with_weights else 0
        working = max(self.prefill(sequences * length), self.decode(sequences))
        return least + self.cache(sequences, length) + working

    def longest(self, available: float, sequences: int = 1, *, with_weights: bool = True) -> int:
        """Return the longest length for so many sequences that fits `available` bytes; 0 if none does."""
        return _largest(lambda length: self.total(sequences, length, with_weights=with_weights) <= available)


def usable(free: float, device: float) -> float:
    """Return the bytes of a device's free memory that inference plans with.

    Args:
        free: Bytes that are free.
        device: Bytes of the device, of which a part is kept in reserve.
    """
    return max(0.0, free - _RESERVE * device)


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, where all smaller ones do; 0 if 1 does not."""
    step = 1
    while fits(step) and step < 1 << 40:
        step *= 2
    low, high = step // 2, step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
