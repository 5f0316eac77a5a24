"""The sharded KV cache of one rank, attention to the cached tokens, and decoding: one token per sequence and step.

The cache is allocated once; prefill and decoding fill it. In prefill, queries are passed from token group to token
group together with their partial outputs, which are merged by their log-sum-exp; keys and values are not sent (pass-Q
of arXiv:2411.01783).

Decoding by heads: a rank computes queries, keys and values of its heads and attends to their whole cache. With token
groups, the ranks of a head group compute the same queries, attend to their own tokens, all-gather the partial results
and merge them by their log-sum-exp. Output projection, MLP and head are split over all ranks, so that each weight is
read by one rank, and their results are summed (Megatron-LM, arXiv:1909.08053) or, for the head, gathered. Sums over
ranks are bitwise equal on all ranks, so that all ranks choose the same tokens.

A step reads lengths on the device and never waits for the host, so that it can be captured in CUDA graphs.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from bmburst.attention.call import AttentionCall
from bmburst.attention.local import local_forward
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.rope import angle_tables, rotary_frequencies
from bmburst.checkpoint.derived import EMBEDDING, HEAD
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.transports import AddUp
from bmburst.errors import UserError
from bmburst.inference.replay import Phases, gathered, result_of, summed
from bmburst.inference.weights import NORM, LayerWeights, ModelWeights
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.mask import Mask
from bmburst.schedule.tiles import Span, Tile, make_tiles
from bmburst_ops.decode import append_rotated, decode_attention, merge_decode
from bmburst_ops.flash import Partial
from bmburst_ops.gemv import gated, project, project_rows
from bmburst_ops.merge import accumulation_dtype, merge_partials_
from bmburst_ops.rms_norm import rms_norm, stream_norm


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

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write this rank's part of the first tokens of the first sequence.

        Args:
            layer: Index of the layer.
            keys: `[1, tokens, KV heads, head_dim]`, those of all ranks.
            values: As keys.
        """
        split = self.split
        tokens = slice(split.token_group, None, split.token_groups)
        heads = slice(split.head_group * split.own_kv_heads, (split.head_group + 1) * split.own_kv_heads)
        rows = Span(0, split.tokens(keys.shape[1]))
        targets = self.rows(layer, 0, rows, Span(0, split.own_kv_heads))
        for target, source in zip(targets, (keys, values), strict=True):
            target.copy_(source[:, tokens, heads])

    def copy_from(self, other: "KVCache", sequence: int, tokens: int) -> None:
        """Copy the first tokens of the first sequence of another cache to the start of a sequence of this one.

        Args:
            other: A cache with the same split.
            sequence: The sequence of this cache.
            tokens: Number of tokens, over all ranks.
        """
        rows = self.split.tokens(tokens)
        self._memory[:, :, sequence, :rows].copy_(other._memory[:, :, 0, :rows])

    def advance(self, sequence: int, tokens: int) -> None:
        """Add the tokens that prefill has written to a sequence's length."""
        self.lengths[sequence] += tokens
        self.device_lengths[sequence] += tokens

    def cut(self, sequence: int, tokens: int) -> None:
        """Set a sequence's length to fewer tokens; the rows behind them are free again."""
        self.lengths[sequence] = tokens
        self.device_lengths[sequence] = tokens

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


def striped_tiles(split: CacheSplit, queries: Span, length: int, source: int, mask: Mask) -> tuple[Tile, ...]:
    """Return the attention tiles between the queries of a token group and the cached keys of this rank's token group.

    Args:
        split: How tokens are distributed over token groups.
        queries: Positions of the queries of all groups.
        length: Only keys below this position are used.
        source: Token group of the queries.
        mask: The mask of the whole sequence.
    """
    groups = split.token_groups
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
        values: As keys, with their own head dim.
        tiles: For each token group, the tiles of its queries with this rank's cached tokens.
        into: Attention of `q` to the new tokens; overwritten by attention to all tokens.
    """
    visiting = q.contiguous()
    out = torch.zeros(into.out.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
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


@dataclass(frozen=True, eq=False, slots=True)
class LayerSlice:
    """Views of a block's weights that one rank uses for decoding.

    Attributes:
        whole: Weights of the block; its norms are used whole.
        qkv: Rows of queries, keys and values of the rank's head group in `whole.qkv`.
        out: This rank's columns of the output projection.
        features: The same columns, relative to the head group.
        gate_up: This rank's rows of gate and up in `whole.gate_up`.
        down: This rank's columns of the down projection.
    """

    whole: LayerWeights
    qkv: tuple[slice, slice, slice]
    out: Tensor
    features: slice
    gate_up: tuple[slice, slice]
    down: Tensor

    @classmethod
    def of(cls, layer: LayerWeights, config: LlamaConfig, split: CacheSplit) -> "LayerSlice":
        """Return a rank's slice of a block."""
        dim, group = config.head_dim, split.head_group
        query, kv = split.own_heads * dim, split.own_kv_heads * dim
        first = config.num_heads * dim
        starts = (group * query, first + group * kv, first + config.num_kv_heads * dim + group * kv)
        q, k, v = (slice(start, start + width) for start, width in zip(starts, (query, kv, kv), strict=True))
        groups, place = split.token_groups, split.token_group
        mine = slice(query * place // groups, query * (place + 1) // groups)
        columns = slice(group * query + mine.start, group * query + mine.stop)
        inner, size = split.share(config.intermediate_size).slice, config.intermediate_size
        gate_up = (inner, slice(size + inner.start, size + inner.stop))
        return cls(layer, (q, k, v), layer.out[:, columns], mine, gate_up, layer.down[:, inner])

    def heads(self, normed: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head group's q, k and v of `[..., hidden]`: `[..., heads, head_dim]` each."""
        products = project_rows(normed, self.whole.qkv, self.qkv, self.whole.qkv_bias)
        q, k, v = (each.unflatten(-1, (-1, config.head_dim)) for each in products)
        if self.whole.q_norm is not None and self.whole.k_norm is not None:
            q, k = rms_norm(q, self.whole.q_norm, config.norm_eps), rms_norm(k, self.whole.k_norm, config.norm_eps)
        return q, k, v


class Decoder:
    """Appends one token to each sequence of a cache and computes the next logits. Every rank makes the same calls.

    Args:
        weights: The model.
        comm: The ranks that share the cache.
        cache: The cache; each sequence has at least one token.
        add_up: Sums small tensors over the ranks; see `bmburst.comm.transports.small_sums`.
    """

    def __init__(self, weights: ModelWeights, comm: CheckedCommunicator, cache: KVCache, add_up: AddUp) -> None:
        self._weights, self._comm, self._cache, self._split = weights, comm, cache, cache.split
        self._config = weights.config
        self._slices = {i: self._slice_of(i) for i in range(self._config.num_layers)} if weights.is_resident else {}
        scaling = self._config.rope_scaling
        self._is_dynamic = scaling is not None and scaling.kind == "dynamic"
        shape = cache.sequences, self._config.head_dim // 2
        self._frequencies = torch.empty(shape, dtype=torch.float64, device=weights.device)  # as `angle_tables` computes
        self.may_capture = True
        """Whether steps may be captured in CUDA graphs."""
        self._set_frequencies()
        self._add_up = add_up

    @property
    def is_capturable(self) -> bool:
        """Whether `compute` can be captured in CUDA graphs: no part of it may depend on the host."""
        return self.may_capture and self._weights.is_resident and self._weights.device.type == "cuda"

    def step(self, tokens: Tensor, whole: int | None = None) -> Tensor:
        """Append a token to each sequence and return the logits of the next token, on every rank.

        Args:
            tokens: `[sequences]` int64 on the device.
            whole: See `before_step`.

        Returns:
            `[sequences, vocab_size]`, fp32 or wider.
        """
        self.before_step(whole)
        logits = result_of(self.compute(tokens))
        self.after_step()
        return logits

    def before_step(self, whole: int | None = None) -> None:
        """Host part before a step: check for room; with dynamic scaling, update the frequencies for the new lengths.

        Args:
            whole: Tokens of the whole text, if more of them are known. Default: the cached ones and the new one.
        """
        for sequence in range(self._cache.sequences):
            self._cache.require_room(sequence, 1)
        if self._is_dynamic:
            self._set_frequencies(whole)

    def after_step(self) -> None:
        """Host part after a step: add the appended tokens to the host's lengths."""
        self._cache.lengths = [length + 1 for length in self._cache.lengths]

    def compute(self, tokens: Tensor) -> Phases:
        """Device part of a step; see `step`."""
        config, cache, split, weights = self._config, self._cache, self._split, self._weights
        positions = cache.device_lengths
        cos, sin = angle_tables(self._frequencies, self._factor, positions, weights.dtype)
        place = _Place.of(positions, split, config.sliding_window)
        stream = embedding(tokens, weights.table(EMBEDDING))
        if config.embedding_scale != 1:
            stream = stream * config.embedding_scale
        eps, factor, added = config.norm_eps, config.residual_scale, None
        for index in range(config.num_layers):
            layer = self._slices.get(index) or self._slice_of(index)
            stream, normed = stream_norm(stream, added, layer.whole.input_norm, eps, factor=factor)
            attended = yield from self._attention(index, layer, normed, cos, sin, place)
            stream, normed = stream_norm(stream, attended, layer.whole.mlp_norm, eps, factor=factor)
            inner = gated(normed, layer.whole.gate_up, *layer.gate_up)
            added = yield from self._added_up(project(inner, layer.down))
        stream = torch.add(stream, added, alpha=factor) if added is not None else stream
        positions += 1
        logits = yield from self.logits(stream)
        return logits

    def logits(self, hidden: Tensor) -> Phases:
        """Compute logits `[sequences, vocab_size]`, fp32 or wider, of hidden states before the last norm."""
        config, split = self._config, self._split
        scale = self._weights.table(NORM)
        if config.logit_scale != 1:
            scale = scale.to(accumulation_dtype(scale.dtype)) * config.logit_scale
        normed, head = rms_norm(hidden, scale, config.norm_eps), self._weights.table(HEAD)
        if split.ranks == 1:
            return project(normed, head).to(accumulation_dtype(normed.dtype))
        most = -(-config.vocab_size // split.ranks)  # equal sizes for the all-gather
        mine = project(normed, head[split.rank * most : (split.rank + 1) * most])
        parts = yield from gathered(self._comm, pad(mine, (0, most - mine.shape[1])))
        return parts.transpose(0, 1).flatten(1)[:, : config.vocab_size].to(accumulation_dtype(normed.dtype))

    def _attention(
        self, index: int, layer: LayerSlice, normed: Tensor, cos: Tensor, sin: Tensor, place: "_Place"
    ) -> Phases:
        config, split = self._config, self._split
        q, k, v = layer.heads(normed, config)
        keys, values = self._cache.layer(index)
        q = append_rotated(q, k, v, cos, sin, keys, values, place.row)
        out, lse = decode_attention(
            q,
            keys,
            values,
            place.stops,
            starts=place.starts,
            scale=config.head_dim**-0.5,
            out_dtype=None if split.token_groups == 1 else accumulation_dtype(q.dtype),
        )
        if split.token_groups > 1:
            merged = yield from self._merged(out, lse)
            out = merged.to(q.dtype)
        added = yield from self._added_up(project(out.flatten(1)[:, layer.features], layer.out))
        return added

    def _added_up(self, tensor: Tensor) -> Phases:
        """Sum a tensor over the ranks, with equal bits on all of them."""
        total = self._add_up(tensor)
        if total is None:
            total = yield from summed(self._comm, tensor)
        return total

    def _merged(self, out: Tensor, lse: Tensor) -> Phases:
        """Merge the partial results of the ranks of this head group, in the same order on each of them."""
        split = self._split
        parts = yield from gathered(self._comm, torch.cat((out, lse[..., None]), -1))
        mine = parts[split.head_group :: split.head_groups]
        merged, _ = merge_decode(mine[..., :-1], mine[..., -1])
        return merged

    def _slice_of(self, index: int) -> LayerSlice:
        return LayerSlice.of(self._weights.layer(index), self._config, self._split)

    def _set_frequencies(self, whole: int | None = None) -> None:
        lengths = [whole or length + 1 for length in self._cache.lengths] if self._is_dynamic else [None]
        found = [rotary_frequencies(self._config, length) for length in lengths]
        self._factor = found[0][1]
        self._frequencies.copy_(torch.stack([frequencies for frequencies, _ in found]))


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """Cache rows of the new tokens on this rank, and the range of rows they attend to; all `[sequences]`.

    Attributes:
        row: Row of the new token. A rank that does not own the token writes it too: its next token overwrites the row.
        starts: First row attended to, int32; None: 0.
        stops: One past the last row, int32.
    """

    row: Tensor
    starts: Tensor | None
    stops: Tensor

    @classmethod
    def of(cls, positions: Tensor, split: CacheSplit, window: int | None) -> "_Place":
        def before(position: Tensor) -> Tensor:
            """Count this rank's tokens before a position: `CacheSplit.tokens` on the device."""
            groups = split.token_groups
            if groups == 1:
                return position
            return (position - split.token_group + groups - 1).div(groups, rounding_mode="floor")

        starts = None if window is None else before((positions + 1 - window).clamp(min=0)).int()
        return cls(before(positions), starts, before(positions + 1).int())
