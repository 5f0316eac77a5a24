"""Layers of a KV cache that is split over ranks by tokens, and layers that keep recurrent states beside it."""

from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from bmburst.attention.call import AttentionCall
from bmburst.errors import UserError
from bmburst.inference.cache import merge_earlier, striped_tiles
from bmburst.inference.relayout import Relayout
from bmburst.integrations.transformers_attention import Near, NotSplit
from bmburst.mesh import Mesh
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.tiles import Span
from bmburst_ops.decode import decode_attention, merge_decode
from bmburst_ops.flash import Partial
from bmburst_ops.merge import accumulation_dtype

_ROOM = 64
"""Least number of a rank's tokens by which the memory grows."""


class Relay(NamedTuple):
    """The way of a prefill's tokens to the layout of the cache, for attention, and back."""

    layout: str
    there: Relayout
    back: Relayout


class SplitLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: this rank's tokens, `[batch, capacity, kv_heads, head_dim]`, each of its own width.

    Args:
        mesh: The ranks; its sequence group shares the cache.
        split: Defines the tokens that this rank caches.
    """

    is_sliding = False

    def __init__(self, mesh: Mesh, split: CacheSplit) -> None:
        super().__init__()
        self._mesh, self.split, self.length = mesh, split, 0
        self.prefilling: int | None = None
        """Number of tokens of the split prompt in prefill; None while all ranks get the same tokens."""
        self.relay: Relay | None = None
        """Set in a prefill whose tokens are not split as the cache is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitLayer":
        """Copy the tokens, and share the ranks: a model that passes through layers again makes copies of its cache."""
        memo[id(self)] = found = copy(self)
        for name, each in vars(self).items():
            if name != "_mesh":
                setattr(found, name, deepcopy(each, memo))
        return found

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `CacheLayerMixin`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(len(key_states), 0, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_empty(len(value_states), 0, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens, `[batch, kv_heads, tokens, head_dim]`; return the arguments of the attention function."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.relay is not None:
            key_states, value_states = (self.relay.there.move(states, 2) for states in (key_states, value_states))
        self._store(keys=key_states, values=value_states)
        if self.begins and self.relay is None:
            return key_states, value_states
        keys: Any = key_states[:] if self.prefilling is not None else self.keys[:]
        keys.split_layer = self  # read by the attention function
        return keys, value_states if self.prefilling is not None else self.values

    def _store(self, **states: Tensor) -> None:
        """Append this rank's tokens of `[batch, heads, tokens, width]` to the memory of each name."""
        split, there = self.split, self.split.tokens(self.length)
        new = next(iter(states.values())).shape[2] if self.prefilling is None else self.prefilling
        own = split.tokens(self.length + new) - there
        first = 0 if self.prefilling is not None else (split.token_group - self.length) % split.token_groups
        step = 1 if self.prefilling is not None else split.token_groups
        for name, each in states.items():
            mine = each[:, :, first::step][:, :, :own].transpose(1, 2)
            memory = self._with_room(getattr(self, name), there, own)
            memory[:, there : there + own] = mine
            setattr(self, name, memory)
        self.length += new

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tokens."""
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def begins(self) -> bool:
        """Whether the split tokens that were stored last are the first ones."""
        return self.prefilling is not None and self.length == self.prefilling

    def attend(
        self,
        query: Tensor,
        values: Tensor,
        scale: float,
        near: Near,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return attention of the newest tokens over the cached tokens of all ranks. All ranks pass the same queries.

        Args:
            query: `[batch, heads, tokens, head_dim]`.
            values: What `update` returned. A model that passes something else computes with values after it caches
                them.
            scale: Factor on the scores.
            near: The tokens that each query sees.
            softcap: Softcap of the scores, or None; already checked.
            sink: See `burst_attention`.

        Returns:
            `[batch, tokens, heads, value_dim]`.

        Raises:
            NotSplit: `values` is something else.
        """
        if values is not self.values:
            raise NotSplit("the values are not those that the split cache returned\nfix: another model")
        split, new = self.split, query.shape[2]
        wide = accumulation_dtype(query.dtype)
        outs = []
        for position in range(self.length - new, self.length):
            one = query[:, :, position - self.length + new]
            stop = torch.full((len(one),), split.tokens(position + 1), dtype=torch.int32, device=one.device)
            start = split.tokens(near.first(position))
            out, lse = decode_attention(
                one,
                self.keys,
                self.values,
                stop,
                starts=torch.full_like(stop, start),
                scale=scale,
                softcap=softcap,
                out_dtype=wide,
            )
            outs.append(torch.cat((out, lse[..., None].to(wide)), -1))
        partial = torch.stack(outs, 1)
        shape, partial = partial.shape[:2], partial.flatten(0, 1)  # each token of each sequence is a row of the merge
        out, lse = partial[..., :-1], partial[..., -1]
        if split.token_groups > 1:
            (parts,) = self._mesh.sequence.all_gather(partial).wait()
            out, lse = merge_decode(parts[..., :-1], parts[..., -1])
        if sink is not None:  # the share of the keys in the softmax
            out = out * torch.sigmoid(lse - sink.to(lse.dtype))[..., None]
        found: Tensor = out.unflatten(0, shape).to(query.dtype).contiguous()  # Afmoe views it
        return found

    def merge_earlier(self, call: AttentionCall, q: Tensor, near: Near, into: Partial) -> None:
        """Merge attention of a split turn to all earlier turns into `into`; see `bmburst.inference.cache`.

        Args:
            call: The attention call of the turn.
            q: This rank's queries of the turn, `[batch, local_tokens, heads, head_dim]`.
            near: The tokens that each query sees.
            into: Attention within the turn; overwritten.
        """
        self.merge(call, q, self.cached_before(self.keys), self.cached_before(self.values), near, into)

    def cached_before(self, memory: Tensor) -> Tensor:
        """Return this rank's tokens of all earlier turns in `keys` or `values`, in a prefill."""
        assert self.prefilling is not None
        return memory[:, : self.split.tokens(self.length - self.prefilling)]

    def merge(self, call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor, near: Near, into: Partial) -> None:
        """Merge attention to the given keys and values of all earlier turns; see `merge_earlier`."""
        assert self.prefilling is not None
        split, start = self.split, self.length - self.prefilling
        span = Span(start, start + q.shape[1] * split.token_groups)
        mask = near.mask(span.stop)
        tiles = [striped_tiles(split, span, start, source, mask) for source in range(split.token_groups)]
        merge_earlier(call, split.token_group, q, keys, values, tiles, into)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin`."""
        return (query_length if self.prefilling is not None else self.length + query_length), 0

    def get_seq_length(self) -> int:
        """Return the number of cached tokens of a sequence, over all ranks."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: memory grows."""
        return -1

    def crop(self, max_length: int) -> None:
        """Drop the tokens from `max_length` on; later tokens overwrite them."""
        self.length = min(self.length, max_length)

    def reset(self) -> None:
        """Drop all tokens and free their memory."""
        if self.is_initialized:
            self.length, self.keys, self.values = 0, self.keys[:, :0].clone(), self.values[:, :0].clone()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # noqa: ARG002
        """Refuse beam search."""
        raise no_beams()

    def _with_room(self, memory: Tensor, there: int, own: int) -> Tensor:
        if memory.shape[1] >= max(1, there + own):
            return memory
        grown = memory.new_empty(len(memory), there + own + max(_ROOM, there // 8), *memory.shape[2:])
        grown[:, :there] = memory[:, :there]
        return grown


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The states of one recurrent layer after the last token, the same on every rank."""

    def crop(self, max_length: int) -> None:
        """Do nothing: `SplitCache.crop` refuses to go back."""


class StateAndSplitLayer(LinearAttentionLayer, SplitLayer):  # type: ignore[misc]
    """The cache of a layer that has both recurrence and attention."""

    is_compileable = False

    def __init__(self, mesh: Mesh, split: CacheSplit) -> None:
        SplitLayer.__init__(self, mesh, split)
        LinearAttentionLayer.__init__(self)

    def lazy_initialization(self, *states: Tensor, **of_recurrence: Any) -> None:
        """See `SplitLayer` for two tensors, and `LinearAttentionLayer` for named ones."""
        if states:
            SplitLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **of_recurrence)

    crop, reorder_cache = SplitLayer.crop, SplitLayer.reorder_cache

    def reset(self) -> None:
        """Drop all tokens, and set the states to zero."""
        SplitLayer.reset(self)
        LinearAttentionLayer.reset(self)


def no_beams() -> UserError:
    """Return the error of a beam search."""
    return UserError("a split cache holds one sequence a prompt\nfix: num_beams=1 and num_return_sequences=1")
