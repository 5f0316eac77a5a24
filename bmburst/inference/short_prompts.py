"""Short prompts on GPUs as CUDA graphs: launching their kernels takes the host longer than running them the GPU.

Over several ranks, each has all weights and computes the whole prompt alone. Dividing the prompt would save less time
of the GPU than the exchange of heads takes the host.
"""

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import gather_objects
from bmburst.comm.groups import single_rank_group
from bmburst.inference.cache import KVCache
from bmburst.inference.chunks import ChunkStep, make_chunks
from bmburst.inference.replay import Replay
from bmburst.inference.weights import ModelWeights
from bmburst.plan.inference import SHORT_STEP, ShortPromptLimits
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.mask import causal_mask
from bmburst_ops.flash import select_kernel

Work = Callable[[], Tensor]


class ShortPrompts:
    """Prefill of one new sequence, for lengths at which a GPU would wait for its host.

    Prompts are padded; causal attention does not see what follows a token. For each padded length a graph fills a cache
    of its own with all heads. This rank's heads and tokens are copied from it to the cache of the sequence. So the
    hidden states of a prompt have the same bits at each call, whether it is called, captured or replayed.

    Args:
        weights: The model, on one device. Its rotary embedding does not depend on the length of the prompt.
        alone: The group of this rank alone.
        kernel: See `burst_attention`.
        most: Most tokens of a prompt, a multiple of `SHORT_STEP`.
        replay: Returns what runs the work of a padded length again and again.
    """

    def __init__(
        self,
        weights: ModelWeights,
        alone: CheckedCommunicator,
        kernel: str,
        most: int,
        replay: Callable[[Work], Work],
    ) -> None:
        self._weights, self._alone, self._kernel = weights, alone, kernel
        self.most, self._replay = most, replay
        self._mask = causal_mask(weights.config.sliding_window)
        self._prompts: dict[int, _PaddedPrompt] = {}

    @classmethod
    def on_gpus(cls, weights: ModelWeights, comm: CheckedCommunicator, kernel: str) -> "ShortPrompts | None":
        """Return the short prompts of a model; None if no prompt runs as a graph. Every rank of the group must call."""
        if comm.device.type != "cuda":
            return None
        device = torch.cuda.get_device_properties(weights.device).total_memory
        limits = ShortPromptLimits.of(weights.config, weights.dtype.itemsize, device)
        most = limits.most if _can_capture(weights, kernel) else 0
        if comm.size > 1:  # other prompts are divided, so all ranks must decide alike
            most = min(gather_objects(comm.inner, most))
        if not most:
            return None
        replay = partial(Replay, pool=torch.cuda.graph_pool_handle(), temporary=limits.temporary)
        return cls(weights, single_rank_group(comm), kernel, most, replay)

    def __call__(self, cache: KVCache, sequence: int, ids: np.ndarray) -> Tensor:
        """Fill an empty sequence of a cache and return the hidden state of the last token, `[1, hidden_size]`."""
        padded = -(-len(ids) // SHORT_STEP) * SHORT_STEP
        if padded not in self._prompts:
            (chunk,) = make_chunks([(0, 0, padded)], padded, 1)
            step = ChunkStep(self._weights, self._alone, self._kernel, self._own_cache, chunk, self._mask)
            self._prompts[padded] = _PaddedPrompt(step, padded, self._replay)
        hidden = self._prompts[padded](ids)
        cache.copy_from(self._own_cache, sequence, len(ids))
        cache.advance(sequence, len(ids))
        return hidden

    @cached_property
    def _own_cache(self) -> KVCache:
        weights = self._weights
        with torch.inference_mode(False):  # the caller may be in inference mode, later ones may not be
            split = CacheSplit.choose("auto", 1, 0, weights.config.num_heads, weights.config.num_kv_heads)
            return KVCache(weights.config, split, 1, self.most, weights.dtype, weights.device)


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


def _can_capture(weights: ModelWeights, kernel: str) -> bool:
    config = weights.config
    q, k = (
        torch.empty(1, SHORT_STEP, heads, config.head_dim, dtype=weights.dtype, device=weights.device)
        for heads in (config.num_heads, config.num_kv_heads)
    )
    needs = causal_mask(config.sliding_window).needs
    return weights.is_resident and select_kernel(kernel, q, k, False, needs).recordable
