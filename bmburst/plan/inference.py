"""Memory of inference, and lower bounds of the time of prefill and of decoding a token. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError
from bmburst.plan.counts import BLOCK_NORMS, CURRENT, block_matrices, causal_pairs, table
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.hardware import Hardware

WIDE = 4  # bytes of fp32: log-sum-exp, logits, partial results
MLP_TOKENS = 16384
"""Number of a rank's tokens that an MLP computes at once in prefill."""
TOKENS_OF_RANK = 65536
"""Default number of tokens per rank in a chunk of prefill."""
RESERVE = 0.04
"""Fraction of a device that is reserved for torch, libraries and fragmentation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceMemory:
    """Bytes that one rank needs to generate text.

    Attributes:
        config: The model.
        split: How the KV cache is sharded over the ranks.
        itemsize: Bytes per element of weights and KV cache.
        chunk_tokens: Most tokens of a prefill chunk, over all ranks.
    """

    config: LlamaConfig
    split: CacheSplit
    itemsize: int
    chunk_tokens: int

    @property
    def weights(self) -> int:
        """Bytes of the weights; every rank holds all of them."""
        return self.config.num_parameters * self.itemsize

    def cache(self, sequences: int, length: int) -> int:
        """Return the bytes of the KV cache of `sequences` sequences with a capacity of `length` tokens each."""
        config = self.config
        return self.split.nbytes(config.num_layers, sequences, length, config.head_dim, self.itemsize)

    def prefill(self, tokens: int) -> int:
        """Return the bytes of activations in prefill of `tokens` tokens, at most one chunk at a time.

        These are two residual streams and a norm; q, k, v before and after rotary embedding and after the exchange, and
        likewise the output; gate, up and their product for the tokens that an MLP computes at once.
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
        """Return the bytes of activations in a step of decoding: several copies of the logits, and sampling."""
        return sequences * self.config.vocab_size * WIDE * 8

    def total(self, sequences: int, length: int, *, with_weights: bool = True) -> int:
        """Return all bytes for `sequences` sequences of `length` tokens, prompt and answer."""
        least = self.weights if with_weights else 0
        working = max(self.prefill(sequences * length), self.decode(sequences))
        return least + self.cache(sequences, length) + working

    def longest(self, available: float, sequences: int = 1, *, with_weights: bool = True) -> int:
        """Return the longest length at which `sequences` sequences fit in `available` bytes; 0 if none fits."""
        return _largest(lambda length: self.total(sequences, length, with_weights=with_weights) <= available)


def chunk_of(chunk_tokens: int | None, ranks: int, name: str = "chunk_tokens") -> int:
    """Return the tokens of a prefill chunk over all ranks.

    Args:
        chunk_tokens: The requested number; None: `TOKENS_OF_RANK` per rank.
        ranks: Number of ranks that share a prompt.
        name: Name of the option, for the message.

    Raises:
        UserError: `chunk_tokens` is below 1.
    """
    if chunk_tokens is None:
        return TOKENS_OF_RANK * ranks
    if isinstance(chunk_tokens, bool) or chunk_tokens < 1:
        raise UserError(f"{name} {chunk_tokens}\nallowed: at least 1 token\nfix: for example 65536")
    return chunk_tokens


def usable(free: float, device: float) -> float:
    """Return the bytes of a device's free memory that inference may use.

    Args:
        free: Free bytes.
        device: All bytes of the device; a fraction of them is reserved.
    """
    return max(0.0, free - RESERVE * device)


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits; 0 if 1 does not. All numbers below one that fits must fit."""
    step = 1
    while fits(step) and step < 1 << 40:
        step *= 2
    low, high = step // 2, step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


READ_RATIO = 4.8 / 3.8
"""Peak memory bandwidth divided by that of kernels that read and write (`Hardware.memory_bandwidth`), on an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceWork:
    """The least computation and memory traffic of inference, for any implementation.

    Attributes:
        config: The model.
        batch: Number of sequences.
        itemsize: Bytes per element of weights and KV cache.
        is_causal: Whether attention over the prompt has a causal mask.
    """

    config: LlamaConfig
    batch: int = 1
    itemsize: int = 2
    is_causal: bool = True

    def products(self, tokens: int) -> float:
        """Return the FLOPs of products with the weights of all blocks, for prompts of `tokens` tokens each."""
        config = self.config
        return 2.0 * config.num_layers * block_matrices(config) * self.batch * tokens

    def attention(self, tokens: int) -> float:
        """Return the FLOPs of attention in all layers, for prompts of `tokens` tokens each."""
        config = self.config
        pairs = causal_pairs([tokens], config.sliding_window) if self.is_causal else float(tokens) ** 2
        return 4.0 * pairs * config.num_heads * config.head_dim * config.num_layers * self.batch

    def elementwise(self, tokens: int) -> float:
        """Return the memory traffic of norms, stream, rotary embedding, activation and cache, for such prompts."""
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        each = (BLOCK_NORMS * CURRENT.norm_forward + CURRENT.stream_forward) * config.hidden_size
        each += CURRENT.rotary * (query + kv) + CURRENT.swiglu_forward * config.intermediate_size
        copied = 2 * 2 * kv  # keys and values, read and written
        return config.num_layers * self.batch * tokens * (each * self.itemsize / 2 + copied * self.itemsize)

    def prefill_bound(self, tokens: int, ranks: int, hardware: Hardware) -> float:
        """Return a lower bound of the seconds of prefill on `ranks` GPUs: the work at the rates of long kernels.

        The head does not count: it computes only one token of each prompt.
        """
        seconds = self.attention(tokens) / hardware.attention_forward + self.products(tokens) / hardware.matmul
        return (seconds + hardware.memory_seconds(self.elementwise(tokens))) / ranks

    def weight_bytes(self) -> float:
        """Return the bytes of weights that are read per token: blocks and head."""
        config = self.config
        return float(self.itemsize * (config.num_layers * block_matrices(config) + table(config)))

    def cache_bytes(self, length: int) -> float:
        """Return the bytes of keys and values that one token per sequence reads, with `length` tokens cached."""
        config = self.config
        seen = length if config.sliding_window is None else min(length, config.sliding_window)
        return 2.0 * config.num_layers * config.num_kv_heads * config.head_dim * seen * self.batch * self.itemsize

    def decode_bound(self, length: int, ranks: int, hardware: Hardware) -> float:
        """Return a lower bound of the seconds of one token per sequence: all reads at the peak memory bandwidth."""
        return (self.weight_bytes() + self.cache_bytes(length)) / ranks / read_bandwidth(hardware)


def read_bandwidth(hardware: Hardware) -> float:
    """Return the memory bandwidth of a GPU in bytes per second, for a kernel that only reads."""
    return READ_RATIO * hardware.memory_bandwidth
