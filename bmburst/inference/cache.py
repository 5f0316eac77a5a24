"""The KV cache of one rank: memory that is taken once, filled by prefill and by decoding."""

import copy

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.tiles import Span


class KVCache:
    """Keys and values of some sequences, this rank's heads and tokens of them.

    Memory is `[layers, 2, sequences, capacity, own KV heads, head_dim]`. Rows beyond a sequence's length hold anything.

    Args:
        config: The model's configuration.
        split: Which heads and tokens this rank keeps.
        sequences: How many sequences.
        length: Tokens that each has room for, over all ranks.
        dtype: Of keys and values.
        device: Where they are.

    Attributes:
        lengths: Tokens of each sequence so far, over all ranks, as the host knows them.
        device_lengths: The same, `[sequences]` int64 on the device, which decoding reads and advances.
    """

    def __init__(
        self,
        config: LlamaConfig,
        split: CacheSplit,
        sequences: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.split, self.length = split, length
        shape = (config.num_layers, 2, sequences, split.capacity(length), split.own_kv_heads, config.head_dim)
        self._memory = torch.empty(shape, dtype=dtype, device=device)
        self.lengths = [0] * sequences
        self.device_lengths = torch.zeros(sequences, dtype=torch.int64, device=device)

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of this rank."""
        return self._memory.nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, `[sequences, capacity, own KV heads, head_dim]`."""
        keys, values = self._memory[layer]
        return keys, values

    def rows(self, layer: int, sequence: int, tokens: Span, kv_heads: Span) -> tuple[Tensor, Tensor]:
        """Return keys and values of some of this rank's tokens and heads of a sequence, `[1, tokens, heads, head_dim]`.

        Args:
            layer: The layer.
            sequence: The sequence.
            tokens: Rows of this rank's memory.
            kv_heads: Of this rank's KV heads.
        """
        keys, values = self._memory[layer, :, sequence, tokens.slice, kv_heads.slice].unsqueeze(1)
        return keys, values

    def advance(self, sequence: int, tokens: int) -> None:
        """Count tokens that prefill has written for a sequence."""
        self.lengths[sequence] += tokens
        self.device_lengths[sequence] += tokens

    def require_room(self, sequence: int, tokens: int) -> None:
        """Check that a sequence has room for more tokens.

        Raises:
            UserError: It has not.
        """
        there = self.lengths[sequence]
        if there + tokens > self.length:
            raise UserError(
                f"{tokens:,} more tokens do not fit: the session has room for {self.length:,}, {there:,} are taken\n"
                f"allowed: at most {self.length - there:,} more\nfix: a session with a larger max_tokens"
            )

    def copied(self, sequence: int, copies: int) -> "KVCache":
        """Return a cache of `copies` sequences, each with the tokens of one of this cache, in memory of its own."""
        other = copy.copy(self)
        other._memory = self._memory[:, :, sequence : sequence + 1].repeat(1, 1, copies, 1, 1, 1)
        other.lengths = [self.lengths[sequence]] * copies
        other.device_lengths = self.device_lengths[sequence : sequence + 1].repeat(copies)
        return other
