"""Short prompts on GPUs as CUDA graphs: launching their kernels takes the host longer than running them the GPU.

The tokens of a prompt are divided over the ranks of a node. In each layer, an all-gather gives every rank the keys and
values of all tokens, so that it computes attention of its own queries. Each layer is a graph between two all-gathers.
Ranks on several nodes compute a whole prompt each, and so do all ranks if a prompt has few tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.local import local_forward
from bmburst.blocks.rope import rotary_tables
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import gather_objects
from bmburst.comm.groups import single_rank_group
from bmburst.comm.transports import find_nodes
from bmburst.inference.cache import KVCache
from bmburst.inference.layers import hidden_states
from bmburst.inference.replay import Phases, Replay
from bmburst.inference.weights import ModelWeights
from bmburst.plan.inference import SHORT_STEP, ShortPromptLimits, dividing_ranks
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.layout import Zigzag, real_positions
from bmburst.schedule.mask import causal_mask
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.tiles import make_tiles
from bmburst_ops.flash import Kernel, select_kernel


class ShortPrompts:
    """Prefill of one new sequence, for lengths at which a GPU would wait for its host.

    Prompts are padded; causal attention does not see what follows a token. For each padded length, graphs fill a cache
    of their own, which is copied to that of the sequence. So the hidden states of a prompt have the same bits at each
    call, whether it is called, captured or replayed.

    Args:
        weights: The model, on one device. Its rotary embedding does not depend on the length of the prompt.
        comm: The ranks that divide a prompt.
        kernel: See `burst_attention`.
        most: Most tokens of a prompt, a multiple of `SHORT_STEP * comm.size`.
        repeat: Returns what does the work of a padded length again and again.
    """

    def __init__(
        self,
        weights: ModelWeights,
        comm: CheckedCommunicator,
        kernel: str,
        most: int,
        repeat: Callable[[Callable[[], Phases]], Callable[[], Tensor]],
    ) -> None:
        self._weights, self._comm, self._kernel = weights, comm, kernel
        self.most, self._repeat = most, repeat
        self._memory: _Memory | None = None
        self._prompts: dict[int, tuple[_PaddedPrompt, Callable[[], Tensor]]] = {}

    @classmethod
    def on_gpus(cls, weights: ModelWeights, comm: CheckedCommunicator, kernel: str) -> "ShortPrompts | None":
        """Return the short prompts of a model; None if no prompt runs as a graph. Every rank of the group must call."""
        if comm.device.type != "cuda":
            return None
        group = comm if comm.size == 1 or find_nodes(comm).count == 1 else single_rank_group(comm)
        device = torch.cuda.get_device_properties(weights.device).total_memory
        limits = ShortPromptLimits.of(weights.config, weights.dtype.itemsize, device, group.size)
        most = limits.most if weights.is_resident and _kernel_of(weights, kernel).recordable else 0
        if comm.size > 1:  # other prompts are divided in another way, so all ranks must decide alike
            most = min(gather_objects(comm.inner, most))
        if not most:
            return None
        repeat = partial(Replay, pool=torch.cuda.graph_pool_handle(), temporary=limits.temporary)
        return cls(weights, group, kernel, most, repeat)

    def __call__(self, cache: KVCache, sequence: int, ids: np.ndarray) -> Tensor:
        """Fill an empty sequence of a cache and return the hidden state of the last token, `[1, hidden_size]`."""
        ranks = dividing_ranks(len(ids), self._comm.size)
        step = SHORT_STEP * ranks
        padded = -(-len(ids) // step) * step
        if self._memory is None:
            self._memory = _Memory.of(self._weights, cache.split, self.most, self._comm.size)
        assert self._memory.cache.split == cache.split, "all caches of an engine have its split"
        if padded not in self._prompts:
            comm = self._comm if ranks == self._comm.size else single_rank_group(self._comm)
            kernel = _kernel_of(self._weights, self._kernel)
            made = _PaddedPrompt(self._weights, comm, kernel, self._memory, padded)
            self._prompts[padded] = made, self._repeat(made.work)
        prompt, run = self._prompts[padded]
        prompt.set(ids)
        hidden = prompt.last(run())
        cache.copy_from(self._memory.cache, sequence, len(ids))
        cache.advance(sequence, len(ids))
        return hidden


@dataclass(frozen=True, eq=False, slots=True)
class _Memory:
    """Memory that the graphs of all lengths share.

    Attributes:
        cache: The cache that they fill.
        own: Keys and values of this rank's tokens, for an all-gather: `[1, tokens, 2 * KV heads, head_dim]`.
        whole: Those of all tokens.
    """

    cache: KVCache
    own: Tensor
    whole: Tensor

    @classmethod
    def of(cls, weights: ModelWeights, split: CacheSplit, most: int, ranks: int) -> "_Memory":
        config, dtype, device = weights.config, weights.dtype, weights.device
        shape = 2 * config.num_kv_heads, config.head_dim
        with torch.inference_mode(False):  # the caller may be in inference mode, later ones may not be
            own, whole = (
                torch.empty(1, tokens if ranks > 1 else 0, *shape, dtype=dtype, device=device)
                for tokens in (most // ranks, most)
            )
            return cls(KVCache(config, split, 1, most, dtype, device), own, whole)


class _PaddedPrompt:
    """Prefill of prompts that are padded to one length."""

    def __init__(
        self,
        weights: ModelWeights,
        comm: CheckedCommunicator,
        kernel: Kernel,
        memory: _Memory,
        padded: int,
    ) -> None:
        config, device = weights.config, weights.device
        self._weights, self._comm, self._cache, self._padded = weights, comm, memory.cache, padded
        layout, mask = Zigzag(comm.size, padded // comm.size), causal_mask(config.sliding_window)
        places = [real_positions(layout, rank, padded) for rank in range(comm.size)]
        self._positions = places[comm.rank]
        self._tiles = make_tiles(mask, padded, self._positions, np.arange(padded))
        self._call = AttentionCall(
            comm=comm,
            kernel=kernel,
            layout=layout,
            length=padded,
            mask=mask,
            scale=config.head_dim**-0.5,
            strategy=Strategy(1, "gather", "kv"),
            deterministic=False,
        )
        self._own, self._whole = memory.own[:, : layout.tokens], memory.whole[:, :padded]
        with torch.inference_mode(False):  # as for the memory
            self._ids = torch.zeros(1, layout.tokens, dtype=torch.int64, device=device)
            self._last = torch.zeros(1, dtype=torch.int64, device=device)
            positions = torch.from_numpy(self._positions).to(device)[None]
            self._angles = rotary_tables(config, positions, None, weights.dtype)
            self._order = torch.from_numpy(np.argsort(np.concatenate(places))).to(device)
        self._has_last = False

    def set(self, ids: np.ndarray) -> None:
        """Set the prompt."""
        self._ids.copy_(torch.from_numpy(np.pad(ids, (0, self._padded - len(ids)))[self._positions]))
        self._has_last = len(ids) - 1 in self._positions
        self._last.fill_(int(np.searchsorted(self._positions, len(ids) - 1)) if self._has_last else 0)

    def work(self) -> Phases:
        """Fill the cache and return the hidden state of the last token, `[1, hidden_size]`, if this rank has it."""
        hidden = yield from hidden_states(self._weights, self._ids, *self._angles, self._attend)
        return hidden[0].index_select(0, self._last)

    def last(self, hidden: Tensor) -> Tensor:
        """Return the result of `work` of the rank that has the last token, in a new tensor, on every rank."""
        if self._comm.size == 1:
            return hidden.clone()
        (total,) = self._comm.all_reduce(hidden if self._has_last else torch.zeros_like(hidden)).wait()
        return total

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Phases:
        if self._comm.size > 1:
            torch.cat((k, v), 2, out=self._own)
            yield self._exchange
            k, v = self._whole.chunk(2, 2)
        self._cache.write(index, k, v)
        return local_forward(self._call, q, k, v, tiles=self._tiles).out

    def _exchange(self) -> None:
        """Write the keys and values of all tokens to `_whole`, in their order."""
        (parts,) = self._comm.all_gather(self._own[0]).wait()
        torch.index_select(parts.flatten(0, 1), 0, self._order, out=self._whole[0])


def _kernel_of(weights: ModelWeights, name: str) -> Kernel:
    config = weights.config
    q, k = (
        torch.empty(1, SHORT_STEP, heads, config.head_dim, dtype=weights.dtype, device=weights.device)
        for heads in (config.num_heads, config.num_kv_heads)
    )
    return select_kernel(name, q, k, False, causal_mask(config.sliding_window).needs)
