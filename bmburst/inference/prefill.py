"""Chunked prefill: computes prompts in chunks of bounded memory and writes their keys and values to the KV cache.

The tokens of a chunk are sharded over the ranks. Each rank has whole weights, so that only attention communicates. A
whole prompt, a chunk of it and a further turn are the same operation: append new tokens to cached ones.

- Cache by heads: an all-to-all exchanges queries, keys and values of the new tokens from tokens to heads (Ulysses), and
  each rank computes its heads over the whole cache. Traffic does not depend on the length of the cache.
- Cache by tokens: the new tokens attend to each other as in training (a ring), and to the cache by passing queries from
  rank to rank. Partial outputs are passed with the queries and merged by their log-sum-exp; cached keys and values
  are never sent (pass-Q of arXiv:2411.01783).

Prompts of different lengths are packed as documents. On one GPU, a short prompt runs as a CUDA graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from bmburst.attention.call import AttentionCall, StrategyRequest, head_shapes
from bmburst.attention.heads import executor_of, spread_forward
from bmburst.attention.local import local_forward
from bmburst.blocks.rope import rotary_tables
from bmburst.checkpoint.derived import EMBEDDING
from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference.cache import KVCache, merge_earlier, striped_tiles
from bmburst.inference.replay import Replay
from bmburst.inference.weights import LayerWeights, ModelWeights
from bmburst.plan.counts import block_matrices
from bmburst.plan.inference import MLP_TOKENS
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import Contiguous, Layout, Striped, StripedGroups, real_positions
from bmburst.schedule.mask import Full, Mask, causal_mask
from bmburst.schedule.tiles import Span, Tile
from bmburst_ops.flash import Partial, select_kernel
from bmburst_ops.rms_norm import rms_norm, stream_norm
from bmburst_ops.rotary import rotate
from bmburst_ops.swiglu import swiglu


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens of one sequence in a chunk.

    Attributes:
        sequence: Index of the sequence in the cache.
        start: Position of the first token in the sequence, equal to the number of cached tokens.
        tokens: Number of tokens.
        total: Tokens of the sequence after all chunks.
        offset: Index of the first token in the chunk.
        padded: Number of tokens in the chunk, including padding.
    """

    sequence: int
    start: int
    tokens: int
    total: int
    offset: int
    padded: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence ends here."""
        return self.start + self.tokens == self.total


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces of sequences that are packed and computed together.

    Attributes:
        pieces: The pieces, in order.
        tiles: Attention tiles between pieces and the cache, computed once for all layers.
    """

    pieces: tuple[Piece, ...]
    tiles: dict[tuple[int, int, int], tuple[Tile, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def length(self) -> int:
        """Tokens of the chunk, including the padding of its pieces, without the padding of the layout."""
        return self.pieces[-1].offset + self.pieces[-1].padded

    @property
    def is_fresh(self) -> bool:
        """Whether no tokens of its sequences are cached yet."""
        return all(piece.start == 0 for piece in self.pieces)

    def mask(self, window: int | None) -> Mask:
        """Return the attention mask among the tokens of the chunk."""
        causal = causal_mask(window)
        if len(self.pieces) == 1:
            return causal
        documents = Documents(tuple(piece.padded for piece in self.pieces))
        return documents if window is None else causal & documents


def make_chunks(turns: Sequence[tuple[int, int, int]], chunk_tokens: int, token_groups: int) -> Iterator[Chunk]:
    """Yield the chunks for the new tokens of sequences.

    Args:
        turns: For each sequence its index, the number of cached tokens (a multiple of `token_groups`), and the number
            of new tokens.
        chunk_tokens: Maximum tokens of a chunk; rounded up to a multiple of `token_groups`.
        token_groups: Pieces start at multiples of it, so that each token is computed by the group that caches it.
    """
    most = max(1, -(-chunk_tokens // token_groups)) * token_groups
    pieces: list[Piece] = []
    offset = 0
    for sequence, cached, new in turns:
        done = 0
        while done < new:
            tokens = min(new - done, most - offset)
            padded = -(-tokens // token_groups) * token_groups
            piece = Piece(
                sequence=sequence,
                start=cached + done,
                tokens=tokens,
                total=cached + new,
                offset=offset,
                padded=padded,
            )
            pieces.append(piece)
            offset, done = offset + padded, done + tokens
            if offset == most:
                yield Chunk(tuple(pieces))
                pieces, offset = [], 0
    if pieces:
        yield Chunk(tuple(pieces))


class Prefill:
    """Computes new tokens of sequences and fills their KV cache. Every rank calls it with the same tokens.

    Args:
        weights: The model.
        comm: The ranks that share a sequence.
        kernel: See `burst_attention`.
        is_causal: Whether attention is causal. Full attention supports only one prompt, in one chunk.
    """

    def __init__(
        self,
        weights: ModelWeights,
        comm: CheckedCommunicator,
        kernel: str = "auto",
        *,
        is_causal: bool = True,
    ) -> None:
        self._weights, self._comm, self._kernel = weights, comm, kernel
        self._is_causal = is_causal
        self._config = weights.config
        self._short: ShortPrompts | None = None

    def __call__(
        self,
        cache: KVCache,
        turns: Mapping[int, Sequence[int]],
        chunk_tokens: int,
        on_tokens: Callable[[int], object] = lambda _: None,
    ) -> Tensor:
        """Append tokens to sequences and return the hidden state of each sequence's last token, before the last norm.

        Args:
            cache: The KV cache. It must have room for the tokens, and the cached length of each sequence must be a
                multiple of its split's token groups.
            turns: The new token ids of each sequence, by its index.
            chunk_tokens: Tokens that are computed at once, over all ranks.
            on_tokens: Called with the number of tokens of each chunk after its kernels are launched.

        Returns:
            `[len(turns), hidden_size]` in the weights' dtype, on every rank.
        """
        ids = {sequence: np.asarray(tokens, dtype=np.int64) for sequence, tokens in turns.items()}
        begins = {sequence: cache.lengths[sequence] for sequence in turns}
        plan = [(sequence, begins[sequence], len(tokens)) for sequence, tokens in ids.items()]
        rows = {sequence: row for row, sequence in enumerate(turns)}
        if (short := self._short_for(cache, plan, chunk_tokens)) is not None:
            ((sequence, tokens),) = ids.items()
            last = short(cache, sequence, tokens)
            on_tokens(len(tokens))
            return last
        config = self._config
        last = torch.zeros(len(turns), config.hidden_size, dtype=self._weights.dtype, device=self._weights.device)
        for chunk in make_chunks(plan, chunk_tokens, cache.split.token_groups):
            step = _ChunkStep(self._weights, self._comm, self._kernel, cache, chunk, self._mask_of(chunk))
            hidden = step.compute(*step.inputs(ids, begins))
            for piece in chunk.pieces:
                at = step.local_index(piece.offset + piece.tokens - 1) if piece.is_last else None
                if at is not None:
                    last[rows[piece.sequence]] = hidden[0, at]
                cache.advance(piece.sequence, piece.tokens)
            on_tokens(sum(piece.tokens for piece in chunk.pieces))
        if self._comm.size > 1:  # each row is on one rank and zero on the others
            (last,) = self._comm.all_reduce(last).wait()
        return last

    def _short_for(self, cache: KVCache, plan: Sequence[tuple[int, int, int]], most: int) -> "ShortPrompts | None":
        """Return what computes these turns if they are one short prompt of at most `most` tokens, else None."""
        weights, scaling = self._weights, self._config.rope_scaling
        if len(plan) > 1 or not self._is_causal or self._comm.size > 1:
            return None
        if not weights.is_resident or weights.device.type != "cuda" or (scaling and scaling.kind == "dynamic"):
            return None
        if self._short is None:
            self._short = ShortPrompts(weights, self._comm, self._kernel, cache.split)
        ((_, begin, tokens),) = plan
        return self._short if begin == 0 and tokens <= min(most, self._short.most) else None

    def _mask_of(self, chunk: Chunk) -> Mask:
        if self._is_causal:
            return chunk.mask(self._config.sliding_window)
        assert len(chunk.pieces) == 1 and chunk.is_fresh and chunk.pieces[0].is_last  # one chunk has all keys
        return Full()


class _ChunkStep:
    """The forward pass of one chunk on this rank."""

    def __init__(
        self,
        weights: ModelWeights,
        comm: CheckedCommunicator,
        kernel: str,
        cache: KVCache,
        chunk: Chunk,
        mask: Mask,
    ) -> None:
        self._weights, self._comm, self._kernel = weights, comm, kernel
        self._cache, self._split, self._chunk = cache, cache.split, chunk
        self._config = weights.config
        self._mask = mask
        self._call: AttentionCall | None = None

    @cached_property
    def layout(self) -> Layout:
        """The layout of the chunk: each rank computes a contiguous part of the tokens of its token group."""
        split = self._split
        tokens = -(-self._chunk.length // split.ranks)
        if split.token_groups == 1:
            return Contiguous(split.ranks, tokens)
        if split.head_groups == 1:
            return Striped(split.ranks, tokens)
        return StripedGroups(split.ranks, tokens, split.head_groups)

    def local_index(self, position: int) -> int | None:
        """Return the index of a token of the chunk among this rank's tokens; None if another rank has it."""
        for run in self.layout.runs(self._split.rank):
            index, rest = divmod(position - run.start, run.stride)
            if not rest and 0 <= index < run.tokens:
                return run.offset + index
        return None

    def inputs(self, ids: Mapping[int, np.ndarray], begins: Mapping[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's token ids `[1, tokens]`, and cosine and sine of their rotary angles."""
        device = self._weights.device
        whole = self.layout.size * self.layout.tokens
        tokens, positions = np.zeros(whole, np.int64), np.zeros(whole, np.int64)
        for piece in self._chunk.pieces:
            here = slice(piece.offset, piece.offset + piece.tokens)
            first = piece.start - begins[piece.sequence]
            tokens[here] = ids[piece.sequence][first : first + piece.tokens]
            positions[here] = np.arange(piece.start, piece.start + piece.tokens)
        mine = real_positions(self.layout, self._split.rank, whole)
        local = torch.from_numpy(tokens[mine]).to(device)[None]
        return local, *self._angles(torch.from_numpy(positions[mine]).to(device)[None], mine)

    def compute(self, local: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the hidden states of `inputs` after the last block, `[1, tokens, hidden_size]`."""
        config, weights = self._config, self._weights
        stream = torch.nn.functional.embedding(local, weights.table(EMBEDDING))
        if config.embedding_scale != 1:
            stream = stream * config.embedding_scale
        added: Tensor | None = None
        factor = config.residual_scale
        for index in range(config.num_layers):
            layer = weights.layer(index)
            stream, normed = stream_norm(stream, added, layer.input_norm, config.norm_eps, factor=factor)
            attended = self._attention(index, layer, normed, cos, sin)
            stream, normed = stream_norm(stream, attended, layer.mlp_norm, config.norm_eps, factor=factor)
            del attended
            added = _mlp(layer, normed)
            del normed
        assert added is not None
        return torch.add(stream, added, alpha=factor)

    def _angles(self, positions: Tensor, mine: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the rotary tables; with dynamic scaling they depend on the length of each sequence."""
        config, dtype = self._config, self._weights.dtype
        scaling = config.rope_scaling
        if scaling is None or scaling.kind != "dynamic":
            return rotary_tables(config, positions, None, dtype)
        edges = np.searchsorted(mine, [piece.offset for piece in self._chunk.pieces] + [self._chunk.length])
        parts = [
            rotary_tables(config, positions[:, begin:end], piece.total, dtype)
            for piece, begin, end in zip(self._chunk.pieces, edges[:-1], edges[1:], strict=True)
        ]
        parts.append(rotary_tables(config, positions[:, edges[-1] :], 1, dtype))  # padding
        cosines, sines = zip(*parts, strict=True)
        return torch.cat(cosines, 1), torch.cat(sines, 1)

    def _attention(self, index: int, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self._config
        counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
        joined = linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
        q, k, v = joined.split(counts, 2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        else:
            turned = joined[:, :, : q.shape[2] + k.shape[2]]
            rotate(turned, cos, sin, out=turned)
        if self._call is None:
            self._call = self._decide(q, k, v)
        mixed = spread_forward(self._call, q, k, v, partial(self._attend, index)).out
        return linear(mixed.flatten(-2), layer.out)

    def _decide(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        split, mask = self._split, self._mask
        name = "auto" if split.ranks == 1 else "heads" if split.token_groups == 1 else "ring"
        degree = None
        if split.token_groups > 1 and split.head_groups > 1:
            name, degree = "heads+ring", split.head_groups
        request = StrategyRequest.of(self._comm, name, "auto", degree)
        shapes = head_shapes(self.layout, q, k, v)
        call = AttentionCall(
            comm=self._comm,
            kernel=select_kernel(self._kernel, q, k, False, mask.needs),
            layout=self.layout,
            length=self._chunk.length,
            mask=mask,
            scale=self._config.head_dim**-0.5,
            strategy=request.choose(shapes, self._chunk.length, mask),
            deterministic=False,
        )
        return request.place(call, shapes)

    def _attend(
        self, index: int, call: AttentionCall, kv_heads: Span, q: Tensor, k: Tensor, v: Tensor, into: Partial
    ) -> None:
        """Write keys and values of some KV heads to the cache, and compute attention of their query heads."""
        split, cache, chunk = self._split, self._cache, self._chunk
        for piece in chunk.pieces:
            old, new = split.tokens(piece.start), split.tokens(piece.start + piece.tokens)
            here = slice(piece.offset // split.token_groups, piece.offset // split.token_groups + new - old)
            keys, values = cache.rows(index, piece.sequence, Span(old, new), kv_heads)
            keys.copy_(k[:, here])
            values.copy_(v[:, here])
        if split.token_groups == 1 and not chunk.is_fresh:
            for piece in chunk.pieces:
                self._attend_cached(index, call, kv_heads, piece, q, into)
            into.out[:, chunk.length :] = 0
            return
        executor_of(call).forward(call, q, k, v, into)
        for piece in chunk.pieces:
            if piece.start:
                self._pass_queries(index, call, kv_heads, piece, q, into)

    def _attend_cached(
        self, index: int, call: AttentionCall, kv_heads: Span, piece: Piece, q: Tensor, into: Partial
    ) -> None:
        """Compute attention of a piece's queries to all cached tokens of its sequence, including the new ones."""
        rows = slice(piece.offset, piece.offset + piece.tokens)
        keys, values = self._cache.rows(index, piece.sequence, Span(0, piece.start + piece.tokens), kv_heads)
        part = Partial(into.out[:, rows], into.lse[:, :, rows])
        local_forward(call, q[:, rows], keys, values, part, tiles=self._tiles(piece, piece.start + piece.tokens))

    def _pass_queries(
        self, index: int, call: AttentionCall, kv_heads: Span, piece: Piece, q: Tensor, into: Partial
    ) -> None:
        """Merge attention of a piece's queries to the tokens cached before; queries pass through all token groups."""
        groups = self._split.token_groups
        rows = slice(piece.offset // groups, (piece.offset + piece.padded) // groups)
        keys, values = self._cache.rows(index, piece.sequence, Span(0, self._split.tokens(piece.start)), kv_heads)
        part = Partial(into.out[:, rows], into.lse[:, :, rows])
        tiles = [self._tiles(piece, piece.start, source) for source in range(groups)]
        merge_earlier(call, self._split.token_group, q[:, rows], keys, values, tiles, part)

    def _tiles(self, piece: Piece, length: int, source: int = 0) -> tuple[Tile, ...]:
        """Return the tiles between a piece's queries of a token group and this rank's cached tokens below `length`."""
        key = piece.offset, length, source
        if key not in self._chunk.tiles:
            span, mask = Span(piece.start, piece.start + piece.padded), causal_mask(self._config.sliding_window)
            self._chunk.tiles[key] = striped_tiles(self._split, span, length, source, mask)
        return self._chunk.tiles[key]


_SHORT_STEP = 128  # tokens to whose multiples short prompts are padded
_SHORT_FLOPS = 6e11  # the products of a layer that an H200 computes while its host launches the kernels of one: 1 ms
_MOST_SHORT = 2048  # tokens: each length has a graph, which its second prompt captures


class ShortPrompts:
    """Prefill of one new sequence on one GPU, for lengths at which the GPU would wait for its host.

    Prompts are padded to a multiple of 128 tokens; causal attention does not see what follows a token. A CUDA graph for
    each of these lengths fills a cache of its own, whose tokens are copied to that of the sequence.

    Args:
        weights: The model, on the GPU. Its rotary embedding does not depend on the length of the prompt.
        comm: This rank alone.
        kernel: See `burst_attention`.
        split: The split of the caches to fill.
    """

    def __init__(self, weights: ModelWeights, comm: CheckedCommunicator, kernel: str, split: CacheSplit) -> None:
        self._weights, self._comm, self._kernel, self._split = weights, comm, kernel, split
        self._mask = causal_mask(weights.config.sliding_window)
        self.most = self._most()
        """Most tokens of a prompt; 0 if a graph cannot capture the attention kernel."""
        self._pool = torch.cuda.graph_pool_handle()
        self._prompts: dict[int, _ShortPrompt] = {}

    def _most(self) -> int:
        weights, config = self._weights, self._weights.config
        q, k = (
            torch.empty(1, _SHORT_STEP, heads, config.head_dim, dtype=weights.dtype, device=weights.device)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        if not select_kernel(self._kernel, q, k, False, self._mask.needs).recordable:
            return 0
        most = min(_MOST_SHORT, int(_SHORT_FLOPS / (2 * block_matrices(config))))
        return most // _SHORT_STEP * _SHORT_STEP

    def __call__(self, cache: KVCache, sequence: int, ids: np.ndarray) -> Tensor:
        """Fill an empty sequence of a cache and return the hidden state of the last token, `[1, hidden_size]`."""
        padded = -(-len(ids) // _SHORT_STEP) * _SHORT_STEP
        if padded not in self._prompts:
            (chunk,) = make_chunks([(0, 0, padded)], padded, 1)
            step = _ChunkStep(self._weights, self._comm, self._kernel, self._own_cache, chunk, self._mask)
            self._prompts[padded] = _ShortPrompt(step, padded, self._pool)
        hidden = self._prompts[padded](ids)
        cache.copy_from(self._own_cache, sequence, len(ids))
        cache.advance(sequence, len(ids))
        return hidden

    @cached_property
    def _own_cache(self) -> KVCache:
        weights = self._weights
        return KVCache(weights.config, self._split, 1, self.most, weights.dtype, weights.device)


class _ShortPrompt:
    """Prefill of prompts that are padded to one length."""

    def __init__(self, step: _ChunkStep, padded: int, pool: Any) -> None:
        self._step, self._padded = step, padded
        self._inputs: tuple[Tensor, ...] = ()
        self._replay = Replay(lambda: step.compute(*self._inputs), pool)

    def __call__(self, ids: np.ndarray) -> Tensor:
        """Fill the cache of the step and return the hidden state of the last token, `[1, hidden_size]`."""
        whole = np.zeros(self._padded, np.int64)
        whole[: len(ids)] = ids
        given = self._step.inputs({0: whole}, {0: 0})
        if not self._inputs:
            self._inputs = given
        self._inputs[0].copy_(given[0])  # the angles of all prompts are equal
        return self._replay()[:, len(ids) - 1].clone()  # the next prompt overwrites the result


def _mlp(layer: LayerWeights, normed: Tensor) -> Tensor:
    """Return the MLP's result for `[1, tokens, hidden_size]`, computed for `MLP_TOKENS` tokens at a time."""
    out = torch.empty_like(normed)
    for states, result in zip(normed[0].split(MLP_TOKENS), out[0].split(MLP_TOKENS), strict=True):
        inner = swiglu(*linear(states, layer.gate_up).chunk(2, -1))
        torch.mm(inner, layer.down.t(), out=result)
        del inner  # frees the activations of this chunk before the next one
    return out
