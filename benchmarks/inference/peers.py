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

from benchmarks.attention import Cell
from benchmarks.attention.method import Setting
from benchmarks.attention.peers import RingLi
from benchmarks.engine.machine import RankGroup
from benchmarks.inference import CAUSAL, RING_LI, TENSOR_V1, InferenceCell
from bmburst.blocks.rope import rotary_tables
from bmburst.inference.cache import KVCache, LayerSlice
from bmburst.inference.weights import EMBEDDING, ResidentWeights
from bmburst.plan.inference import MLP_TOKENS
from bmburst.schedule.cache_split import CacheSplit
from bmburst_ops import flash
from bmburst_ops.gated_mlp import gated_mlp
from bmburst_ops.rms_norm import stream_norm
from bmburst_ops.rotary import apply_rotary


class _Replicated:
    """Megatron's first tensor parallelism (arXiv:1909.08053): every rank has all tokens, parts are added up."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def cut(self, tokens: int) -> slice:
        """Return which tokens of a chunk this rank has between the matrices."""
        return slice(0, tokens)

    def attended(self, tokens: int) -> slice:
        """Return which tokens of a chunk this rank has in attention."""
        return slice(0, tokens)

    def gather(self, x: Tensor) -> Tensor:
        """Return what goes into a block's matrices, of what is between them."""
        return x

    def add_up(self, x: Tensor) -> Tensor:
        """Return what is between the matrices, of what comes out of a block's."""
        return self._group.all_reduce(x)

    def last(self, stream: Tensor) -> Tensor:
        """Return the last token's state, `[batch, hidden_size]`, on all ranks."""
        return stream[:, -1]


class _Sharded(_Replicated):
    """Its sequence parallelism (arXiv:2205.05198): own tokens between the matrices, in place of an all-reduce."""

    def cut(self, tokens: int) -> slice:
        """See `_Replicated`."""
        each = tokens // self._group.size
        return slice(self._group.rank * each, (self._group.rank + 1) * each)

    def gather(self, x: Tensor) -> Tensor:
        """See `_Replicated`."""
        return self._group.all_gather(x).movedim(0, 1).flatten(1, 2)

    def add_up(self, x: Tensor) -> Tensor:
        """See `_Replicated`."""
        return self._group.reduce_scatter(x.unflatten(1, (self._group.size, -1)).movedim(1, 0).contiguous())

    def last(self, stream: Tensor) -> Tensor:
        """See `_Replicated`."""
        is_mine = self._group.rank == self._group.size - 1
        return self._group.all_reduce(stream[:, -1] * is_mine)


class _Split(_Sharded):
    """A split sequence: own tokens everywhere, whole weights."""

    def attended(self, tokens: int) -> slice:
        """See `_Replicated`."""
        return self.cut(tokens)

    def gather(self, x: Tensor) -> Tensor:
        """See `_Replicated`."""
        return x

    def add_up(self, x: Tensor) -> Tensor:
        """See `_Replicated`."""
        return x


class PeerPrefill:
    """Prefill of prompts of one length by tensor parallelism or ring self-attention; called as `Prefill`.

    Args:
        cell: What is measured.
        weights: The model; tensor parallelism reads slices of them.
        setting: Ranks and kernel.
        split: How the ranks share the cache.
    """

    def __init__(self, cell: InferenceCell, weights: ResidentWeights, setting: Setting, split: CacheSplit) -> None:
        self._cell, self._weights, self._setting = cell, weights, setting
        config, is_ring = weights.config, cell.method == RING_LI
        whole = CacheSplit.choose("heads", 1, 0, config.num_heads, config.num_kv_heads)
        self._slices = [
            LayerSlice.of(weights.layer(i), config, whole if is_ring else split) for i in range(config.num_layers)
        ]
        ways = _Split if is_ring else _Replicated if cell.method == TENSOR_V1 else _Sharded
        self._way: _Replicated = ways(setting.group)
        self._ring = RingLi().bind(_attention_cell(cell), setting) if is_ring else None
        self._pattern = flash.CAUSAL if cell.mask == CAUSAL else flash.FULL

    def __call__(
        self,
        cache: KVCache,
        turns: Mapping[int, Sequence[int]],
        chunk_tokens: int,
        on_tokens: Callable[[int], object] = lambda _: None,
    ) -> Tensor:
        """See `Prefill`; all prompts are of one length, which the ranks divide, and nothing is cached."""
        ids = torch.tensor([list(tokens) for tokens in turns.values()], device=self._weights.device)
        ranks, (batch, length) = self._setting.group.size, ids.shape
        step = max(1, chunk_tokens // batch // ranks) * ranks
        if self._ring is not None or self._cell.mask != CAUSAL:
            step = length
        last = ids.new_empty(0)
        for start in range(0, length, step):
            chunk = ids[:, start : start + step]
            last = self._way.last(self._chunk(cache, chunk, start))
            for sequence in turns:
                cache.advance(sequence, chunk.shape[1])
            on_tokens(chunk.numel())
        return last

    def _chunk(self, cache: KVCache, ids: Tensor, start: int) -> Tensor:
        """Return the stream of this rank's tokens of a chunk behind the last block."""
        weights, config, way, tokens = self._weights, self._weights.config, self._way, ids.shape[1]
        positions = torch.arange(start, start + tokens, device=ids.device)[way.attended(tokens)]
        cos, sin = rotary_tables(config, positions.expand(len(ids), -1), None, weights.dtype)
        stream = embedding(ids[:, way.cut(tokens)], weights.table(EMBEDDING)) * config.embedding_scale
        added, factor = None, config.residual_scale
        for index, layer in enumerate(self._slices):
            stream, normed = stream_norm(stream, added, layer.whole.input_norm, config.norm_eps, factor=factor)
            mixed = self._attention(cache, index, layer, way.gather(normed), cos, sin, start)
            added = way.add_up(linear(mixed.flatten(-2), layer.out))
            del mixed
            stream, normed = stream_norm(stream, added, layer.whole.mlp_norm, config.norm_eps, factor=factor)
            del added
            gate, up = layer.gate_up if len(layer.gate_up) == 2 else layer.gate_up[0].chunk(2)
            added = way.add_up(gated_mlp(way.gather(normed), gate, up, layer.down, chunk=MLP_TOKENS))
            del normed
        assert added is not None
        return torch.add(stream, added, alpha=factor)

    def _attention(
        self, cache: KVCache, index: int, layer: LayerSlice, x: Tensor, cos: Tensor, sin: Tensor, start: int
    ) -> Tensor:
        config = self._weights.config
        q, k, v = layer.projected(x, config)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        # A rank's rows of a cache by tokens are in any order: it has a share of them, by count.
        rows = slice(start, start + k.shape[1])
        keys, values = cache.layer(index)
        keys[:, rows].copy_(k)
        values[:, rows].copy_(v)
        if self._ring is not None:
            return self._ring(q, k, v)
        seen = slice(0, rows.stop)
        out, _ = self._setting.kernel.forward(q, keys[:, seen], values[:, seen], self._pattern, config.head_dim**-0.5)
        return out


def _attention_cell(cell: InferenceCell) -> Cell:
    config = cell.config
    return Cell(
        suite="sequence",
        method=cell.method,
        ranks=cell.ranks,
        device=cell.device,
        tokens=cell.tokens,
        batch=cell.batch,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=cell.dtype,
        mask=cell.mask,
    )


class _Clock:
    """A streamer of transformers' `generate`: notes when each token is on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, and then a token of each sequence."""
        self.times.append(time.perf_counter())
        self.tokens.append(value)

    def end(self) -> None:
        """Do nothing: the last token is here."""


class Transformers:
    """A model of transformers over the same weights, which generates with its own cache.

    Args:
        weights: The model.

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
        with weights.device:  # its tables are no weights
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self._model: Any = model.eval()
        self._device = weights.device

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[float], Tensor]:
        """Return the seconds from the start to each token, and the tokens, `[batch, new_tokens]`."""
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
