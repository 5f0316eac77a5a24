"""Chunked prefill: computes prompts in chunks of bounded memory and writes their keys and values to the KV cache.

The tokens of a chunk are sharded over the ranks. Each rank has whole weights, so that only attention communicates. A
whole prompt, a chunk of it and a further turn are the same operation: append new tokens to cached ones.

- Cache by heads: an all-to-all exchanges queries, keys and values of the new tokens from tokens to heads (Ulysses), and
  each rank computes its heads over the whole cache. Traffic does not depend on the length of the cache.
- Cache by tokens: the new tokens attend to each other as in training (a ring), and to the cache by passing queries from
  rank to rank. Partial outputs are passed with the queries and merged by their log-sum-exp; cached keys and values
  are never sent (pass-Q of arXiv:2411.01783).

Prompts of different lengths are packed as documents. A short prompt runs as a CUDA graph.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference.cache import KVCache
from bmburst.inference.chunks import Chunk, ChunkStep, make_chunks
from bmburst.inference.short_prompts import ShortPrompts
from bmburst.inference.weights import ModelWeights
from bmburst.schedule.mask import Full, Mask


class Prefill:
    """Computes new tokens of sequences and fills their KV cache. Every rank calls it with the same tokens.

    Args:
        weights: The model.
        comm: The ranks that share a sequence.
        kernel: See `burst_attention`.
        is_causal: Whether attention is causal. Full attention supports only one prompt, in one chunk.
    """

    def __init__(
        self, weights: ModelWeights, comm: CheckedCommunicator, kernel: str = "auto", *, is_causal: bool = True
    ) -> None:
        self._weights, self._comm, self._kernel = weights, comm, kernel
        self._is_causal = is_causal
        self._config = weights.config

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
        if len(plan) == 1 and self._short is not None:
            ((sequence, begin, tokens),) = plan
            if begin == 0 and tokens <= min(chunk_tokens, self._short.most):
                last = self._short(cache, sequence, ids[sequence])
                on_tokens(tokens)
                return last
        config = self._config
        last = torch.zeros(len(turns), config.hidden_size, dtype=self._weights.dtype, device=self._weights.device)
        for chunk in make_chunks(plan, chunk_tokens, cache.split.token_groups):
            step = ChunkStep(self._weights, self._comm, self._kernel, cache, chunk, self._mask_of(chunk))
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

    @cached_property
    def _short(self) -> ShortPrompts | None:
        return ShortPrompts.on_gpus(self._weights, self._comm, self._kernel) if self._is_causal else None

    def _mask_of(self, chunk: Chunk) -> Mask:
        if self._is_causal:
            return chunk.mask(self._config.sliding_window)
        assert len(chunk.pieces) == 1 and chunk.is_fresh and chunk.pieces[0].is_last  # one chunk has all keys
        return Full()
