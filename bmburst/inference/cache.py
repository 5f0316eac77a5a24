"""The KV cache of one rank, and attention of new tokens to the cached ones of all token groups.

Memory is taken once, and filled by prefill and by decoding. Queries travel over token groups, keys and values stay:
outputs travel along with the queries and are merged by their log-sum-exp (pass-Q of arXiv:2411.01783).
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


def striped_tiles(split: CacheSplit, queries: Span, length: int, source: int, window: int | None) -> tuple[Tile, ...]:
    """Return the work between the queries of a token group and the cached tokens of this rank's token group.

    Args:
        split: How tokens are dealt to token groups.
        queries: Positions of all groups' queries.
        length: Keys below this position count.
        source: The queries' token group.
        window: Tokens that a query sees, its own included; None: all.
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
    """Merge attention of new queries to the cached tokens of all token groups: queries visit every group.

    Args:
        call: The attention over one rank of each token group; its kernel and scale count.
        token_group: This rank's.
        q: This rank's new queries, `[batch, tokens, heads, head_dim]`, as many as every other rank's.
        keys: This rank's cached keys, `[batch, cached, kv_heads, head_dim]`.
        values: As keys.
        tiles: Of each token group the work of its queries on this rank's cached tokens.
        into: Attention of `q` to the new tokens; overwritten by that to all tokens.
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
