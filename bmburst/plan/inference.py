"""Memory of inference, by formula, and the least time of prefill and of a token. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError
from bmburst.plan.counts import BLOCK_NORMS, CURRENT, block_matrices, causal_pairs, table
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.hardware import Hardware

WIDE = 4  # bytes of fp32: log-sum-exp, logits, partial results
MLP_TOKENS = 16384
"""Tokens of a rank whose MLP is computed at once in prefill."""
TOKENS_OF_RANK = 65536
"""Tokens of a chunk that a rank computes, by default."""
RESERVE = 0.04
"""Fraction of a device that is kept for torch, libraries and fragments."""


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


def chunk_of(chunk_tokens: int | None, ranks: int, name: str = "chunk_tokens") -> int:
    """Return the tokens of a chunk over all ranks: as asked, else `TOKENS_OF_RANK` a rank.

    Args:
        chunk_tokens: What was asked for; None: the default.
        ranks: Ranks that share a prompt.
        name: What the caller calls it, for the message.

    Raises:
        UserError: It has no token.
    """
    if chunk_tokens is None:
        return TOKENS_OF_RANK * ranks
    if isinstance(chunk_tokens, bool) or chunk_tokens < 1:
        raise UserError(f"{name} {chunk_tokens}\nallowed: at least 1 token\nfix: for example 65536")
    return chunk_tokens


def usable(free: float, device: float) -> float:
    """Return the bytes of a device's free memory that inference plans with.

    Args:
        free: Bytes that are free.
        device: Bytes of the device, of which a part is kept in reserve.
    """
    return max(0.0, free - RESERVE * device)


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


READ_RATIO = 4.8 / 3.8
"""The memory's own bandwidth over that of kernels that read and write (`Hardware.memory_bandwidth`), of an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceWork:
    """What inference computes and reads at least, whatever runs it.

    Attributes:
        config: The model.
        batch: Sequences.
        itemsize: Bytes of a number of weights and cache.
        is_causal: Whether attention of the prompt has a causal mask.
    """

    config: LlamaConfig
    batch: int = 1
    itemsize: int = 2
    is_causal: bool = True

    def products(self, tokens: int) -> float:
        """Return the FLOPs of products with the weights of all blocks, for prompts of so many tokens each."""
        config = self.config
        return 2.0 * config.num_layers * block_matrices(config) * self.batch * tokens

    def attention(self, tokens: int) -> float:
        """Return the FLOPs of attention of such prompts, over all layers."""
        config = self.config
        pairs = causal_pairs([tokens], config.sliding_window) if self.is_causal else float(tokens) ** 2
        return 4.0 * pairs * config.num_heads * config.head_dim * config.num_layers * self.batch

    def elementwise(self, tokens: int) -> float:
        """Return the bytes that norms, the stream, rotary embedding, activation and the cache move for such prompts."""
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        each = (BLOCK_NORMS * CURRENT.norm_forward + CURRENT.stream_forward) * config.hidden_size
        each += CURRENT.rotary * (query + kv) + CURRENT.swiglu_forward * config.intermediate_size
        copied = 2 * 2 * kv  # keys and values, read and written
        return config.num_layers * self.batch * tokens * (each * self.itemsize / 2 + copied * self.itemsize)

    def prefill_bound(self, tokens: int, ranks: int, hardware: Hardware) -> float:
        """Return the seconds that such prompts take at least on some GPUs: their work at the rates of long kernels.

        The head, which one token of each prompt passes, does not count.
        """
        seconds = self.attention(tokens) / hardware.attention_forward + self.products(tokens) / hardware.matmul
        return (seconds + hardware.memory_seconds(self.elementwise(tokens))) / ranks

    def weight_bytes(self) -> float:
        """Return the bytes of weights that a token reads: blocks and head."""
        config = self.config
        return float(self.itemsize * (config.num_layers * block_matrices(config) + table(config)))

    def cache_bytes(self, length: int) -> float:
        """Return the bytes of keys and values that a token of each sequence reads, with `length` tokens cached."""
        config = self.config
        seen = length if config.sliding_window is None else min(length, config.sliding_window)
        return 2.0 * config.num_layers * config.num_kv_heads * config.head_dim * seen * self.batch * self.itemsize

    def decode_bound(self, length: int, ranks: int, hardware: Hardware) -> float:
        """Return the seconds that a token of each sequence takes at least: all bytes at the memory's own bandwidth."""
        return (self.weight_bytes() + self.cache_bytes(length)) / ranks / read_bandwidth(hardware)


def read_bandwidth(hardware: Hardware) -> float:
    """Return the bytes a second that a GPU's memory delivers to a kernel that only reads."""
    return READ_RATIO * hardware.memory_bandwidth
