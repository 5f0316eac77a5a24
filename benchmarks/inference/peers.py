"""Prefill of other methods, with the same weights: Megatron's tensor parallelism, ring self-attention, transformers.

Each is called like `bmburst.inference.prefill.Prefill`, and stores keys and values in the same KV cache. Decoding is
bmburst's; with a cache sharded by heads it equals decoding with tensor parallelism.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from benchmarks.attention.cells import cell_of
from benchmarks.attention.method import Attend, Setting
from benchmarks.attention.peers import RingLi
from benchmarks.engine.machine import RankGroup
from benchmarks.inference.cells import CAUSAL, RING_LI, TENSOR_V1, InferenceCell
from bmburst.blocks.rope import rotary_tables
from bmburst.checkpoint.derived import EMBEDDING
from bmburst.inference.cache import KVCache, LayerSlice
from bmburst.inference.weights import ResidentWeights
from bmburst.plan.inference import MLP_TOKENS
from bmburst.schedule.cache_split import CacheSplit
from bmburst_ops import flash
from bmburst_ops.gated_mlp import gated_mlp
from bmburst_ops.rms_norm import stream_norm
from bmburst_ops.rotary import apply_rotary


class _TensorParallel:
    """Megatron tensor parallelism (arXiv:1909.08053): all tokens on all ranks, an all-reduce of partial results.

    The residual stream, attention and MLP may have different tokens on a rank; subclasses define which.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def stream_tokens(self, tokens: int) -> slice:
        """Return the tokens of a chunk that this rank has in the residual stream."""
        return slice(0, tokens)

    def attention_tokens(self, tokens: int) -> slice:
        """Return the tokens of a chunk that this rank has in attention."""
        return slice(0, tokens)

    def gather(self, x: Tensor) -> Tensor:
        """Return the input of attention or MLP for a normed stream."""
        return x

    def reduce(self, x: Tensor) -> Tensor:
        """Return the tensor that is added to the stream, for this rank's output of attention or MLP."""
        return self._group.all_reduce(x)

    def last_state(self, stream: Tensor) -> Tensor:
        """Return the last token's state, `[batch, hidden_size]`, on all ranks."""
        return stream[:, -1]


class _MegatronSequenceParallel(_TensorParallel):
    """Tensor parallelism with a sharded stream (arXiv:2205.05198): an all-gather before and a reduce-scatter after."""

    def stream_tokens(self, tokens: int) -> slice:
        """See `_TensorParallel.stream_tokens`."""
        each = tokens // self._group.size
        return slice(self._group.rank * each, (self._group.rank + 1) * each)

    def gather(self, x: Tensor) -> Tensor:
        """See `_TensorParallel.gather`."""
        return self._group.all_gather(x).movedim(0, 1).flatten(1, 2)

    def reduce(self, x: Tensor) -> Tensor:
        """See `_TensorParallel.reduce`."""
        return self._group.reduce_scatter(x.unflatten(1, (self._group.size, -1)).movedim(1, 0).contiguous())

    def last_state(self, stream: Tensor) -> Tensor:
        """See `_TensorParallel.last_state`."""
        has_last = self._group.rank == self._group.size - 1
        return self._group.all_reduce(stream[:, -1] * has_last)


class _ContextParallel(_MegatronSequenceParallel):
    """A sharded sequence: each rank has its own tokens everywhere, and whole weights."""

    def attention_tokens(self, tokens: int) -> slice:
        """See `_TensorParallel.attention_tokens`."""
        return self.stream_tokens(tokens)

    def gather(self, x: Tensor) -> Tensor:
        """See `_TensorParallel.gather`."""
        return x

    def reduce(self, x: Tensor) -> Tensor:
        """See `_TensorParallel.reduce`."""
        return x


class PeerPrefill:
    """Prefill by tensor parallelism or ring self-attention, for prompts of equal length; called like `Prefill`.

    Tensor parallelism reads slices of the model's matrices.
    """

    def __init__(self, cell: InferenceCell, weights: ResidentWeights, setting: Setting, split: CacheSplit) -> None:
        self._cell, self._weights, self._setting = cell, weights, setting
        config, is_ring = weights.config, cell.method == RING_LI
        whole = CacheSplit.choose("heads", 1, 0, config.num_heads, config.num_kv_heads)
        self._slices = [
            LayerSlice.of(weights.layer(i), config, whole if is_ring else split) for i in range(config.num_layers)
        ]
        self._ring: Attend | None = None
        if is_ring:
            self._way: _TensorParallel = _ContextParallel(setting.group)
            self._ring = RingLi().bind(cell_of(cell, config, cell.tokens, cell.batch, cell.mask), setting)
        elif cell.method == TENSOR_V1:
            self._way = _TensorParallel(setting.group)
        else:
            self._way = _MegatronSequenceParallel(setting.group)
        self._pattern = flash.CAUSAL if cell.mask == CAUSAL else flash.FULL

    def __call__(
        self,
        cache: KVCache,
        turns: Mapping[int, Sequence[int]],
        chunk_tokens: int,
        on_tokens: Callable[[int], object] = lambda _: None,
    ) -> Tensor:
        """See `Prefill`. All prompts have the same length, a multiple of the ranks, and the cache is empty."""
        ids = torch.tensor([list(tokens) for tokens in turns.values()], device=self._weights.device)
        ranks, (batch, length) = self._setting.group.size, ids.shape
        step = max(1, chunk_tokens // batch // ranks) * ranks
        if self._ring is not None or self._cell.mask != CAUSAL:
            step = length
        last = ids.new_empty(0)
        for start in range(0, length, step):
            chunk = ids[:, start : start + step]
            last = self._way.last_state(self._chunk(cache, chunk, start))
            for sequence in turns:
                cache.advance(sequence, chunk.shape[1])
            on_tokens(chunk.numel())
        return last

    def _chunk(self, cache: KVCache, ids: Tensor, start: int) -> Tensor:
        """Return the stream after the last block, for this rank's tokens of a chunk."""
        weights, config, way, tokens = self._weights, self._weights.config, self._way, ids.shape[1]
        positions = torch.arange(start, start + tokens, device=ids.device)[way.attention_tokens(tokens)]
        cos, sin = rotary_tables(config, positions.expand(len(ids), -1), None, weights.dtype)
        stream = embedding(ids[:, way.stream_tokens(tokens)], weights.table(EMBEDDING)) * config.embedding_scale
        added, factor = None, config.residual_scale
        for index, layer in enumerate(self._slices):
            stream, normed = stream_norm(stream, added, layer.whole.input_norm, config.norm_eps, factor=factor)
            mixed = self._attention(cache, index, layer, way.gather(normed), cos, sin, start)
            added = way.reduce(linear(mixed.flatten(-2), layer.out))
            del mixed
            stream, normed = stream_norm(stream, added, layer.whole.mlp_norm, config.norm_eps, factor=factor)
            del added
            gate, up = (layer.whole.gate_up[rows] for rows in layer.gate_up)
            added = way.reduce(gated_mlp(way.gather(normed), gate, up, layer.down, chunk=MLP_TOKENS))
            del normed
        assert added is not None
        return torch.add(stream, added, alpha=factor)

    def _attention(
        self, cache: KVCache, index: int, layer: LayerSlice, x: Tensor, cos: Tensor, sin: Tensor, start: int
    ) -> Tensor:
        config = self._weights.config
        q, k, v = layer.heads(x, config)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        # A cache by tokens may store a rank's rows in any order; only their number is fixed.
        rows = slice(start, start + k.shape[1])
        keys, values = cache.layer(index)
        keys[:, rows].copy_(k)
        values[:, rows].copy_(v)
        if self._ring is not None:
            return self._ring(q, k, v)
        seen = slice(0, rows.stop)
        out, _ = self._setting.kernel.forward(q, keys[:, seen], values[:, seen], self._pattern, config.head_dim**-0.5)
        return out


class _Clock:
    """A streamer for transformers' `generate` that records the time at which each token is on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Record the time. The first call gets the prompt, each later one a token of each sequence."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: `put` has recorded the last token."""


class Transformers:
    """A transformers model with the same weights in memory, which generates with its own cache.

    Raises:
        ImportError: transformers is not installed.
    """

    def __init__(self, weights: ResidentWeights) -> None:
        import transformers

        settings = weights.config.to_hugging_face()
        config = transformers.AutoConfig.for_model(**settings)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=weights.dtype)
        model.load_state_dict(dict(weights.places()), strict=False, assign=True)
        if weights.config.tie_embeddings:
            model.tie_weights()
        with weights.device:  # its buffers are not among the weights, so they are still on the meta device
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self._model: Any = model.eval()
        self._device = weights.device

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[float], Tensor]:
        """Return the seconds from the start to each token, and the `[batch, new_tokens]` ids; see `Answer`."""
        import transformers

        ids, clock = torch.tensor([list(each) for each in prompts], device=self._device), _Clock()
        options = transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        begun = time.perf_counter()
        whole = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=options, streamer=clock
        )
        return [at - begun for at in clock.times[1:]], whole[:, ids.shape[1] :].cpu()
