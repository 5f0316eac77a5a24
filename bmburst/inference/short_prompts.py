"""Short prompts on one GPU as CUDA graphs: launching their kernels takes the host longer than running them the GPU."""

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference.cache import KVCache
from bmburst.inference.chunks import ChunkStep, make_chunks
from bmburst.inference.replay import Replay
from bmburst.inference.weights import ModelWeights
from bmburst.plan.counts import block_matrices
from bmburst.plan.inference import InferenceMemory
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.mask import causal_mask
from bmburst_ops.flash import select_kernel

STEP = 128
"""Prompts are padded to a multiple of these tokens."""
_FLOPS = 9e11  # products of a layer that take an H200 about as long as its host launches the kernels of one: 1.3 ms
_MOST = 2048  # tokens: each length has a graph, which its second prompt captures
_KEPT = 0.01  # fraction of a GPU's memory that graphs may keep: a quarter of `bmburst.plan.inference.RESERVE`
_SPARE = 1.25  # of the temporary memory of a graph: the allocator rounds
Work = Callable[[], Tensor]


class ShortPrompts:
    """Prefill of one new sequence on one GPU, for lengths at which the GPU would wait for its host.

    Prompts are padded; causal attention does not see what follows a token. For each padded length a graph fills a cache
    of its own, whose tokens are copied to the cache of the sequence. So the hidden states of a prompt have the same
    bits at each call, whether it is called, captured or replayed.

    Args:
        weights: The model, on one device. Its rotary embedding does not depend on the length of the prompt.
        comm: This rank alone.
        kernel: See `burst_attention`.
        most: Most tokens of a prompt, a multiple of `STEP`.
        replay: Returns what runs the work of a padded length again and again.
    """

    def __init__(
        self,
        weights: ModelWeights,
        comm: CheckedCommunicator,
        kernel: str,
        most: int,
        replay: Callable[[Work], Work],
    ) -> None:
        self._weights, self._comm, self._kernel = weights, comm, kernel
        self.most, self._replay = most, replay
        self._mask = causal_mask(weights.config.sliding_window)
        self._prompts: dict[int, _PaddedPrompt] = {}

    @classmethod
    def on_gpu(cls, weights: ModelWeights, comm: CheckedCommunicator, kernel: str) -> "ShortPrompts | None":
        """Return the short prompts of a model on a GPU; None if no prompt runs as a graph there."""
        config, scaling, dtype = weights.config, weights.config.rope_scaling, weights.dtype
        if comm.size > 1 or not weights.is_resident or weights.device.type != "cuda":
            return None
        q, k = (
            torch.empty(1, STEP, heads, config.head_dim, dtype=dtype, device=weights.device)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        needs = causal_mask(config.sliding_window).needs
        if (scaling and scaling.kind == "dynamic") or not select_kernel(kernel, q, k, False, needs).recordable:
            return None
        memory = InferenceMemory(config=config, split=_alone(config), itemsize=dtype.itemsize, chunk_tokens=_MOST)
        most = most_tokens(memory, torch.cuda.get_device_properties(weights.device).total_memory)
        pool = torch.cuda.graph_pool_handle()
        replay = partial(Replay, pool=pool, temporary=int(_SPARE * memory.prefill(most)))
        return cls(weights, comm, kernel, most, replay) if most else None

    def __call__(self, cache: KVCache, sequence: int, ids: np.ndarray) -> Tensor:
        """Fill an empty sequence of a cache and return the hidden state of the last token, `[1, hidden_size]`."""
        padded = -(-len(ids) // STEP) * STEP
        if padded not in self._prompts:
            (chunk,) = make_chunks([(0, 0, padded)], padded, 1)
            step = ChunkStep(self._weights, self._comm, self._kernel, self._own_cache, chunk, self._mask)
            self._prompts[padded] = _PaddedPrompt(step, padded, self._replay)
        hidden = self._prompts[padded](ids)
        cache.copy_from(self._own_cache, sequence, len(ids))
        cache.advance(sequence, len(ids))
        return hidden

    @cached_property
    def _own_cache(self) -> KVCache:
        weights = self._weights
        with torch.inference_mode(False):  # the caller may be in inference mode, later ones may not be
            return KVCache(weights.config, _alone(weights.config), 1, self.most, weights.dtype, weights.device)


class _PaddedPrompt:
    """Prefill of prompts that are padded to one length."""

    def __init__(self, step: ChunkStep, padded: int, replay: Callable[[Work], Work]) -> None:
        self._step = step
        with torch.inference_mode(False):  # as for the cache
            self._inputs = step.inputs({0: np.zeros(padded, np.int64)}, {0: 0})  # the angles of all prompts are equal
            self._last = torch.zeros(1, dtype=torch.int64, device=self._inputs[0].device)
        self._run = replay(self._work)

    def __call__(self, ids: np.ndarray) -> Tensor:
        """Fill the cache of the step and return the hidden state of the last token, `[1, hidden_size]`."""
        tokens = self._inputs[0]
        tokens.copy_(torch.from_numpy(np.pad(ids, (0, tokens.shape[1] - len(ids)))))
        self._last.fill_(len(ids) - 1)
        return self._run().clone()  # the next prompt overwrites the result

    def _work(self) -> Tensor:
        return self._step.compute(*self._inputs)[0].index_select(0, self._last)


def _alone(config: LlamaConfig) -> CacheSplit:
    return CacheSplit.choose("auto", 1, 0, config.num_heads, config.num_kv_heads)


def most_tokens(memory: InferenceMemory, device_bytes: int) -> int:
    """Return the most tokens of a short prompt, a multiple of `STEP`; 0 if graphs would keep too much memory.

    Args:
        memory: The memory of the model on one rank.
        device_bytes: Bytes of the GPU's memory.
    """
    most = min(_MOST, int(_FLOPS / (2 * block_matrices(memory.config)))) // STEP * STEP
    while most and memory.cache(1, most) + _SPARE * memory.prefill(most) > _KEPT * device_bytes:
        most -= STEP
    return most
