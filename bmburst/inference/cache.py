"""The KV cache of one rank, and attention of new tokens to the cached tokens of all token groups.

The cache is allocated once; prefill and decoding fill it. Queries are passed from token group to token group together
with their partial outputs, which are merged by their log-sum-exp; keys and values are not sent (pass-Q of
arXiv:2411.01783).
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.local import local_forward
from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.mask import Causal, SlidingWindow
from bmburst.schedule.tiles import Span, Tile, make_tiles
from bmburst_ops.flash import Partial
from bmburst_ops.merge import accumulation_dtype, merge_partials_


class KVCache:
    """This rank's shard (heads and tokens) of the keys and values of a batch of sequences.

    Its tensor is `[layers, 2, sequences, capacity, own KV heads, head_dim]`. Rows beyond a sequence's length are
    undefined.

    Args:
        config: The model's configuration.
        split: Heads and tokens that this rank caches.
        sequences: Number of sequences.
        length: Maximum tokens per sequence, over all ranks.
        dtype: dtype of keys and values.
        device: Device of the cache.

    Attributes:
        lengths: Current tokens of each sequence, over all ranks, counted on the host.
        device_lengths: The same, `[sequences]` int64 on the device; decoding reads and increments it.
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
        """Number of sequences."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache on this rank."""
        return self._memory.nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, `[sequences, capacity, own KV heads, head_dim]`."""
        keys, values = self._memory[layer]
        return keys, values

    def rows(self, layer: int, sequence: int, tokens: Span, kv_heads: Span) -> tuple[Tensor, Tensor]:
        """Return views of keys and values of a sequence, `[1, tokens, heads, head_dim]`.

        Args:
            layer: Index of the layer.
            sequence: Index of the sequence.
            tokens: Range of this rank's rows.
            kv_heads: Range of this rank's KV heads.
        """
        keys, values = self._memory[layer, :, sequence, tokens.slice, kv_heads.slice].unsqueeze(1)
        return keys, values

    def advance(self, sequence: int, tokens: int) -> None:
        """Add the tokens that prefill has written to a sequence's length."""
        self.lengths[sequence] += tokens
        self.device_lengths[sequence] += tokens

    def require_room(self, sequence: int, tokens: int) -> None:
        """Check that a sequence has room for more tokens.

        Raises:
            UserError: There is not enough room.
        """
        there = self.lengths[sequence]
        if there + tokens > self.length:
            raise UserError(
                f"{tokens:,} more tokens do not fit: the session has room for {self.length:,}, {there:,} are taken\n"
                f"allowed: at most {self.length - there:,} more\nfix: a session with a larger max_tokens"
            )

    def copied(self, sequence: int, copies: int) -> "KVCache":
        """Return a new cache of `copies` sequences, each a copy of one sequence of this cache."""
        other = copy.copy(self)
        other._memory = self._memory[:, :, sequence : sequence + 1].repeat(1, 1, copies, 1, 1, 1)
        other.lengths = [self.lengths[sequence]] * copies
        other.device_lengths = self.device_lengths[sequence : sequence + 1].repeat(copies)
        return other


def striped_tiles(split: CacheSplit, queries: Span, length: int, source: int, window: int | None) -> tuple[Tile, ...]:
    """Return the attention tiles between the queries of a token group and the cached keys of this rank's token group.

    Args:
        split: How tokens are distributed over token groups.
        queries: Positions of the queries of all groups.
        length: Only keys below this position are used.
        source: Token group of the queries.
        window: Sliding window in tokens, including the query's own; None: causal.
    """
    groups = split.token_groups
    mask = Causal() if window is None else SlidingWindow(window)
    keys = np.arange(split.token_group, length, groups)
    return make_tiles(mask, queries.stop, np.arange(queries.start + source, queries.stop, groups), keys)


def merge_earlier(
    call: AttentionCall,
    token_group: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Sequence[Sequence[Tile]],
    into: Partial,
) -> None:
    """Merge attention of new queries to the cached tokens of all token groups: queries pass through every group.

    Args:
        call: The attention call, whose ring has one rank of each token group; its kernel and scale are used.
        token_group: Token group of this rank.
        q: This rank's new queries, `[batch, tokens, heads, head_dim]`; the same shape on all ranks.
        keys: This rank's cached keys, `[batch, cached, kv_heads, head_dim]`.
        values: As keys.
        tiles: For each token group, the tiles of its queries with this rank's cached tokens.
        into: Attention of `q` to the new tokens; overwritten by attention to all tokens.
    """
    visiting = q.contiguous()
    out = torch.zeros(visiting.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.full_like(into.lse, -torch.inf, memory_format=torch.contiguous_format)
    for hop in range(len(tiles)):
        if hop:
            visiting, out, lse = call.comm.ring(visiting, out, lse).wait()
        work = tiles[(token_group - hop) % len(tiles)]
        merge_partials_(out, lse, *local_forward(call, visiting, keys, values, tiles=work))
    out, lse = call.comm.ring(out, lse).wait()
    merged = into.lse.contiguous()
    merge_partials_(into.out, merged, out, lse)
    into.lse.copy_(merged)
