"""Chunks of prompts: pieces of sequences that are packed, and their forward pass on one rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall, StrategyRequest, head_shapes
from bmburst.attention.heads import executor_of, spread_forward
from bmburst.attention.local import local_forward
from bmburst.blocks.rope import rotary_tables
from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference.cache import KVCache, merge_earlier, striped_tiles
from bmburst.inference.layers import hidden_states
from bmburst.inference.replay import Phases, once, result_of
from bmburst.inference.weights import ModelWeights
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import Contiguous, Layout, Striped, StripedGroups, real_positions
from bmburst.schedule.mask import Mask, causal_mask
from bmburst.schedule.tiles import Span, Tile
from bmburst_ops.flash import Partial, select_kernel


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
                sequence=sequence, start=cached + done, tokens=tokens, total=cached + new, offset=offset, padded=padded
            )
            pieces.append(piece)
            offset, done = offset + padded, done + tokens
            if offset == most:
                yield Chunk(tuple(pieces))
                pieces, offset = [], 0
    if pieces:
        yield Chunk(tuple(pieces))


class ChunkStep:
    """The forward pass of one chunk on this rank."""

    def __init__(
        self, weights: ModelWeights, comm: CheckedCommunicator, kernel: str, cache: KVCache, chunk: Chunk, mask: Mask
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

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Phases:
            return once(partial(self._attention, index, q, k, v))

        return result_of(hidden_states(self._weights, local, cos, sin, attend))

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

    def _attention(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._call is None:
            self._call = self._decide(q, k, v)
        return spread_forward(self._call, q, k, v, partial(self._attend, index)).out

    def _decide(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        mask, (name, degree) = self._mask, self._split.strategy
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
