"""The attention and mask functions for transformers' registry, which compute attention over the split sequence.

A model of transformers makes one mask per kind of layer from its `attention_mask` (`transformers.masking_utils`), and
each layer passes its mask to the attention function. Here a `SequenceMask` takes this path instead of a tensor. It
reaches every layer through gradient checkpointing, FSDP2 and DDP. Code that uses it as a tensor fails.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property
from inspect import getclosurevars
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.api import attend
from bmburst.attention.call import decide
from bmburst.attention.function import beside_sink
from bmburst.attention.graphs import outside_of_graphs
from bmburst.attention.latents import attend_latents
from bmburst.attention.options import AttentionOptions, MaskOption, require_softcap
from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError
from bmburst.integrations.releases import require_release
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Causal, Mask, SlidingWindow, causal_mask
from bmburst.schedule.tree import Tree
from bmburst_ops.autocast import as_autocast_casts
from bmburst_ops.flash import Partial

require_release()  # this module is imported first
NAME = "bmburst"

_NOT_ASKED = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
    }
)
"""Arguments that models pass to attention and that do not change its result."""


_SPLIT_CACHE = 'on one rank, model.set_attn_implementation("sdpa") and model.generate'
_ELSEWHERE = "train this model with another attn_implementation"


class Near(NamedTuple):
    """Which tokens of its document a token sees, besides itself: none of them later.

    Attributes:
        window: The last tokens, including the token itself; None: all.
        chunk: The tokens of the same chunk of the document; chunks have this many tokens. None: all.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """Return the first position of its document that the token at `position` sees."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def mask(self, length: int) -> Mask:
        """Return the mask of a document of `length` tokens."""
        if self.chunk is not None:
            return Documents((self.chunk,) * -(-length // self.chunk))
        return causal_mask(self.window)


ALL = Near()


class _NoTensor(UserError, AttributeError):
    """A mask is used as a tensor. It is also an AttributeError, for code that tests whether an attribute exists."""


class NotSplit(UserError):
    """Attention is called neither with a part of a split batch nor with what a split cache has returned."""


class SequenceMask:
    """The description of a split batch for attention, passed to a model as its `attention_mask`.

    It is not a dataclass, because FSDP2 searches dataclasses for tensors and rebuilds them.

    Args:
        comm: Communicator of the ranks that share each sequence.
        options: Options of attention except the mask.
        shape: Number of samples and local tokens.
        length: Number of tokens of a sequence without padding.
        documents: One for all samples, one per sample, or empty.
        start: Number of tokens of earlier turns, which a split cache holds.
        mask: Mask of one kind of layer; None until the model makes it with `layer_mask`.
        near: The tokens that these layers see, of this and of earlier turns.
        query_scale: Factor on the queries of these layers, `[samples or 1, local_tokens, 1, 1]`, or None.
        before: Tokens of padding before each sample that its positions count, `[samples, 1]`, or None.
    """

    ndim = 4  # as a complete mask: models modify 2-dimensional masks

    def __init__(
        self,
        *,
        comm: CheckedCommunicator,
        options: AttentionOptions,
        shape: tuple[int, int],
        length: int,
        documents: tuple[Documents | Tree, ...] = (),
        start: int = 0,
        mask: MaskOption | None = None,
        near: Near = ALL,
        query_scale: Tensor | None = None,
        before: Tensor | None = None,
    ) -> None:
        batch, tokens = shape
        self.near, self.query_scale, self.start, self.before = near, query_scale, start, before
        self.shape = (batch, 1, tokens, tokens)  # models read the number of keys from the last dimension
        self.comm, self.options, self.length, self.documents, self.mask = comm, options, length, documents, mask

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes of a tensor: a model that uses them would modify the mask or compute with it."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoTensor(str(_cannot(f"a model that computes with its mask (mask.{name})", _ELSEWHERE)))

    def __getitem__(self, places: object) -> Any:
        """Return the mask, if all of it is asked for; else see `__getattr__`."""
        if isinstance(places, tuple) and all(place in (slice(None), slice(0, None)) for place in places):
            return self
        raise _cannot("a model that computes with its mask (mask[...])", _ELSEWHERE)

    def seen(self, near: Near = ALL) -> "SequenceMask":
        """Return the mask of layers that see the nearest tokens of their document.

        Raises:
            UserError: These are fewer than a document has, and layout or tree are exact with all of them only.
        """
        in_chunk = None if near.chunk is None else near.chunk - self.start % near.chunk
        sees = min(each for each in (near.window, in_chunk, self.longest) if each is not None)
        if sees < self.longest:
            self._require_windows(sees)
        documents = self.documents
        if near.chunk is not None and in_chunk is not None and in_chunk < self.longest:  # a chunk is a document
            documents = tuple(
                _in_chunks(part, near.chunk, in_chunk) for part in documents or (Documents((self.length,)),)
            )
        last = Causal() if near.window is None or near.window >= self.longest else SlidingWindow(near.window)
        masks = tuple(_joined(last, part) for part in documents) or (last,)
        return self._but(mask=masks[0] if len(masks) == 1 else masks, near=near, query_scale=None)

    def behind(self, start: int) -> "SequenceMask":
        """Return the mask of a turn behind `start` tokens in a split cache."""
        return self._but(start=start, mask=None, near=ALL, query_scale=None)

    def scaled(self, query_scale: Tensor) -> "SequenceMask":
        """Return the mask of layers whose queries are multiplied by a factor before attention."""
        return self._but(query_scale=query_scale)

    def laid_out(self, layout: str) -> "SequenceMask":
        """Return the mask of the same layers in another layout, for queries, keys and values in that layout."""
        return self._but(options=replace(self.options, layout=layout))

    def places(self) -> Tensor:
        """Return the place of each local token in its document, int64 `[samples or 1, local_tokens]`.

        The first is 0, or `start` in a turn behind others.

        Raises:
            UserError: The batch is a tree, or its layout depends on a mask.
        """
        self._require_windows(1)
        layout = make_layout(self.options.layout, self.comm.size, self.shape[-1])
        runs = layout.runs(self.comm.rank)
        tokens = np.concatenate([run.start + run.stride * np.arange(run.tokens) for run in runs])
        edges = [np.asarray((*part.starts, part.length)) for part in self.documents] or [np.zeros(1, np.int64)]
        starts = [each[np.searchsorted(each, tokens, side="right") - 1] for each in edges]
        return torch.from_numpy(tokens - np.stack(starts) + self.start).to(self.comm.device)

    def _but(self, **changed: Any) -> "SequenceMask":
        found = copy(self)
        vars(found).update(changed)
        return found

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        layer: Any = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output, `[batch, local_tokens, heads, value_dim]`.

        Args:
            q: `[batch, local_tokens, heads, head_dim]`.
            k: `[batch, local_tokens, kv_heads, head_dim]`.
            v: `[batch, local_tokens, kv_heads, value_dim]`.
            scale: See `burst_attention`.
            softcap: See `burst_attention`.
            sink: See `burst_attention`.
            layer: A `SplitLayer` with the tokens of earlier turns; None: there are none.
            weight: See `attend_latents`; k and v are then latents and rotary keys. None: keys and values.
        """
        if self.query_scale is not None:
            q = (q * self.query_scale).to(q.dtype)
        options = self._options(scale, softcap)
        if weight is not None:
            assert sink is None and layer is None
            return attend_latents(q, k, v, weight, self._length, self.comm, options)
        if layer is None:
            return attend(q, k, v, self._length, self.comm, options, sink=sink)[0]
        part = Partial(*attend(q, k, v, self._length, self.comm, options))
        window = self.near.window
        if window is not None:  # the mask of a turn shorter than the window is causal; earlier tokens need it
            options = replace(options, mask=SlidingWindow(window))
        layer.merge_earlier(decide(self.comm, q, k, v, self._length, options), q, self.near, part)
        return part.out if sink is None else beside_sink(part, sink).out

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or of the longest row of a tree."""
        ends = [
            stop - offset
            for mask in self.documents
            for stop, offset in zip((*mask.starts[1:], mask.length), mask.position_offsets, strict=True)
        ]
        return max(ends, default=self.length)

    def _require_windows(self, window: int) -> None:
        """Refuse layers with windows where they would not be exact."""
        tree = next((mask for mask in self.documents if isinstance(mask, Tree)), None)
        if tree is not None:
            raise _cannot(
                f"a layer with a window of {window} tokens on a tree with rows of {self.longest}",
                "the rows one by one, or a model without windows (sliding_window=None in its config)",
            )
        if self.options.layout == "balanced":
            raise _cannot(
                f"layout 'balanced', which is made for one mask, for a layer with a window of {window} tokens",
                "SplitSequences(mesh, layout='zigzag')",
            )

    @property
    def _length(self) -> int | None:
        has_own = isinstance(self.mask, tuple) or (isinstance(self.mask, Mask) and self.mask.length is not None)
        return None if has_own else self.length  # documents include their length

    def _options(self, scale: float | None, softcap: float | None) -> AttentionOptions:
        assert self.mask is not None
        return replace(self.options, mask=self.mask, scale=scale, softcap=softcap)


class CachedMask:
    """The mask of a call with a split KV cache: all cached tokens, or the last ones.

    Args:
        given: The attention_mask of the call.
        mask_function: The mask of the layers, as composed by transformers.
    """

    def __init__(self, given: object, mask_function: Callable[..., Any]) -> None:
        self.given, self._mask_function = given, mask_function
        if isinstance(given, Tensor) and not given.is_cuda and not bool((given == 1).all()):
            raise _without_part("padding", "attention_mask", ", in GRPO TRL's own method for log-probabilities")

    def __getitem__(self, places: object) -> "CachedMask":
        """Refuse what models ask for whose last layers compute some of the tokens alone."""
        raise _cannot("layers that compute only the last tokens, over a split cache", _SPLIT_CACHE)

    @cached_property
    def near(self) -> Near:
        """Which tokens of the text a token sees."""
        return _near(self._mask_function)


@outside_of_graphs  # documents are computed with NumPy, which a graph would take for tensors
def layer_mask(
    *, mask_function: Callable[..., Any], attention_mask: object = None, q_length: int, kv_length: int, **_: object
) -> "SequenceMask | CachedMask":
    """Return the mask of one kind of layer; a mask function for transformers.

    Args:
        mask_function: The mask of the layers, as composed by transformers.
        attention_mask: The attention_mask argument of the model.
        q_length: Number of local tokens.
        kv_length: Number of local tokens; any other number means a KV cache.

    Raises:
        UserError: The model is not called with a split batch, it has a KV cache, or the mask is neither causal nor a
            causal sliding window.
    """
    if not isinstance(attention_mask, SequenceMask):
        if not _is(mask_function, "or_masks"):
            _near(mask_function)  # refuses what is not causal
        return CachedMask(attention_mask, mask_function)
    if not q_length == kv_length == attention_mask.shape[-1]:
        raise UserError(
            f"{NAME} attention has no KV cache, but there are {q_length} queries and {kv_length} keys a rank\n"
            "fix: pass use_cache=False; to generate: bmburst.integrations.transformers_cache.generate"
        )
    if _is(mask_function, "or_masks"):  # depends on the tokens of a rank
        # Models take the kinds of layers from a set, whose order differs between processes.
        return attention_mask.comm.decided(
            lambda: (attention_mask.seen(_near(mask_function)), "mask of a kind of layers")
        )
    return attention_mask.seen(_near(mask_function))


@outside_of_graphs  # a single graph break, instead of one at each branch
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Return attention's output for this rank's tokens; an attention function for transformers.

    Args:
        module: The model's attention module; its `is_causal` is used if the argument is None.
        query: `[batch, heads, local_tokens, head_dim]`.
        key: `[batch, kv_heads, local_tokens, head_dim]`.
        value: `[batch, kv_heads, local_tokens, value_dim]`.
        attention_mask: The result of `layer_mask`.
        dropout: Must be 0.
        scaling: Factor on the scores; default `head_dim ** -0.5`.
        sliding_window: Must be the mask's, if given.
        is_causal: Must be true.
        softcap: Softcap of the scores; see `burst_attention`.
        asked: Further arguments of the model: `s_aux`, the attention sinks `[heads]`. Others are refused, unless they
            do not change the result.

    Returns:
        `[batch, local_tokens, heads, value_dim]`, and no attention weights.

    Raises:
        UserError: The model needs a feature that is not supported, or is not called with a split batch.
    """
    require_softcap(softcap)
    layer, sink = getattr(key, "split_layer", None), asked.pop("s_aux", None)
    weight = getattr(key, "expanded_by", None)  # key and value are then latents and rotary keys
    if layer is not None and isinstance(attention_mask, CachedMask):
        if dropout:
            raise _cannot(f"dropout of {dropout:g} in attention", "model.eval()")
        require_known_arguments({name: each for name, each in asked.items() if name != "use_cache"})
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return layer.attend(query, value, scale, attention_mask.near, softcap, sink), None
    if isinstance(attention_mask, CachedMask):
        attention_mask = attention_mask.given
    if not isinstance(attention_mask, SequenceMask):
        raise _not_split(attention_mask)
    _require_exact(attention_mask, dropout, sliding_window, asked)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise _cannot("attention that is not causal", _ELSEWHERE)
    query, key, value = as_autocast_casts((query, key, value))  # norms and rotary embeddings return fp32
    weight = None if weight is None else as_autocast_casts((weight,))[0]
    relay = None if layer is None else layer.relay
    if relay is not None:  # keys and values have been moved to the layout of the cache
        query, attention_mask = relay.there.move(query, 2), attention_mask.laid_out(relay.layout)
    inputs = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    earlier = None if layer is None or layer.begins else layer
    out = attention_mask.attend(*inputs, scaling, softcap, sink, earlier, weight)
    if relay is not None:
        out = relay.back.move(out, 1)
    return out.contiguous(), None


def _require_exact(mask: SequenceMask, dropout: float, sliding_window: int | None, asked: dict[str, object]) -> None:
    if mask.mask is None:
        raise _cannot("a model that makes its masks itself", "use a model whose masks are create_causal_mask's")
    if dropout:
        raise _cannot(f"dropout of {dropout:g} in attention", "set it to 0 in the model's config (attention_dropout)")
    if sliding_window is not None and sliding_window < mask.longest and not _has_window(mask.mask, sliding_window):
        raise _cannot(
            f"sliding_window={sliding_window} with a mask of {mask.mask}", "set sliding_window of the config to None"
        )
    if asked.get("use_cache"):
        raise _cannot(
            "a KV cache of transformers",
            "pass use_cache=False; to generate: bmburst.integrations.transformers_cache.generate",
            "use_cache=True",
        )
    require_known_arguments(asked)


def require_known_arguments(asked: dict[str, Any]) -> None:
    """Raise UserError for an unknown argument of a model's call, neither None nor False: it may change a layer."""
    other = [
        name for name, value in asked.items() if name not in _NOT_ASKED and value is not None and value is not False
    ]
    if other:
        raise _cannot(other[0], f"leave it out of the call, or {_ELSEWHERE}")


def _near(function: Callable[..., Any]) -> Near:
    """Return which tokens a mask function of transformers lets a token see.

    transformers composes functions of indices from closures. Only causal masks, sliding windows and chunks are
    recognized, and with them blocks of other media if there are none.
    """
    from transformers.masking_utils import causal_mask_function

    if function is causal_mask_function:
        return ALL
    inside = getclosurevars(function).nonlocals
    if _is(function, "or_masks"):
        blocks = [part for part in inside["mask_functions"] if _is(part, "blockwise_overlay")]
        others = [part for part in inside["mask_functions"] if part not in blocks]
        if len(others) == 1 and all(bool((_inside(part, "block_sequence_ids") < 0).all()) for part in blocks):
            return _near(others[0])
    if _is(function, "and_masks"):
        others = [part for part in inside["mask_functions"] if part is not causal_mask_function]
        if any(_is(part, "packed_sequence_mask_function") for part in others):
            raise _without_part("documents", "position_ids")
        if len(others) == 1 and len(inside["mask_functions"]) == 2:
            if _is(others[0], "sliding_window_overlay"):
                # 0 means no window: Qwen2-MoE without windows still makes a mask with window 0, which no layer uses.
                return Near(window=int(_inside(others[0], "sliding_window")) or None)
            if _is(others[0], "chunked_overlay"):
                return Near(chunk=int(_inside(others[0], "chunk_size")))
    name = function.__qualname__.split(".")[0]
    is_of_encoder = name == "bidirectional_mask_function"
    raise _cannot(
        f"a mask that is neither causal nor a causal window ({name})",
        f"{_ELSEWHERE}, or a BART as bmburst.blocks.seq2seq" if is_of_encoder else _ELSEWHERE,
    )


def _without_part(what: str, argument: str, more: str = "") -> UserError:
    fix = f"to train: SplitSequences(mesh).part(input_ids, {argument}=...){more}; to generate: prompts of one length"
    return _cannot(f"{what} without a part of a split batch", f"{fix} at a time")


def _inside(function: Callable[..., Any], name: str) -> Any:
    """Return a value that a function of transformers has in its closure."""
    return getclosurevars(function).nonlocals[name]


def _is(function: Callable[..., Any], maker: str) -> bool:
    return function.__module__ == "transformers.masking_utils" and function.__qualname__.startswith(
        f"{maker}.<locals>."
    )


def _joined(last: Mask, documents: Documents | Tree) -> Mask:
    return documents if isinstance(last, Causal) else last & documents


def _in_chunks(documents: Documents | Tree, chunk: int, first: int) -> Documents:
    """Return documents cut behind their `first` tokens, and then every `chunk` tokens."""
    assert isinstance(documents, Documents)
    cuts = ((0, *range(first, n, chunk), n) for n in documents.lengths)
    return Documents(tuple(stop - start for edges in cuts for start, stop in pairwise(edges)))


def _has_window(mask: MaskOption, window: int) -> bool:
    one = mask[0] if isinstance(mask, tuple) else mask
    return SlidingWindow(window) in (one, *getattr(one, "masks", ()))


def _not_split(got: object) -> UserError:
    what = "no attention_mask" if got is None else f"a {type(got).__name__}"
    return NotSplit(
        f"{NAME} attention needs a part of a split batch as attention_mask, got {what}\n"
        "fix: to train: SplitSequences(mesh).part(input_ids, attention_mask=..., position_ids=...).loss(model)\n"
        "to generate: bmburst.integrations.transformers_cache.generate; "
        'for a whole sequence: model.set_attn_implementation("sdpa")'
    )


def _cannot(what: str, fix: str, got: str = "") -> UserError:
    return UserError(f"{NAME} attention cannot do {what} exactly{f', got {got}' if got else ''}\nfix: {fix}")
