"""Attention layers of transformers that need more than the registry's attention function on split sequences.

- Llama 4 scales the queries of layers without rotary embedding by the place of a token, and counts places from the
  first token that it gets. A split batch knows the true places: its mask carries the factors to attention.
- Falcon chooses one of its own classes of attention by name. `attach` adds one that calls the registry's function.

Modules of `READ` call attention through the registry, though transformers does not say so.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from bmburst.integrations.transformers_attention import NAME, Near, SequenceMask, attention
from bmburst.integrations.transformers_code import (
    module_of,
    modules_of,
    one_cache_name,
    parameters,
    unchanged_modules,
)

_MARK = "splits_attention"
_LLAMA4, _FALCON = module_of("llama4"), module_of("falcon")

READ = frozenset(module_of(name) for name in ("biogpt", "falcon", "stablelm", "whisper"))
"""Modules whose attention was read: it mixes tokens in the registry's function alone, and takes `position_ids`."""

_FORWARD = {
    _LLAMA4: (
        "Llama4TextAttention",
        ("self", "hidden_states", "position_embeddings", "attention_mask", "cache", "kwargs"),
    ),
    _FALCON: (
        "FalconAttention",
        (
            *("self", "hidden_states", "alibi", "attention_mask", "position_ids", "layer_past", "use_cache"),
            *("output_attentions", "position_embeddings", "kwargs"),
        ),
    ),
}
"""The layers that `attach_attention` changes, and the parameters of their forward functions in transformers 5.23 and
5.24, see `one_cache_name`."""


def calls_registry(model: torch.nn.Module) -> bool:
    """Return whether a model's own module is in `READ`."""
    return not READ.isdisjoint(modules_of(type(model)))


def changed_attention(model: torch.nn.Module) -> str | None:
    """Return which layer of a model's module has not the parameters that were read; None: all have."""
    for path in modules_of(type(model)) & _FORWARD.keys():
        name, wanted = _FORWARD[path]
        found = parameters(getattr(sys.modules[path], name).forward)
        if one_cache_name(found) != wanted:
            return f"{path}.{name}.forward takes {', '.join(found)}"
    return None


def attach_attention(model_class: type) -> None:
    """Change the attention layers of a model's module, if it is in `_FORWARD`. Further calls have no effect."""
    for path, module in unchanged_modules(model_class, _FORWARD, _MARK):
        layer = getattr(module, _FORWARD[path][0])
        if path == _LLAMA4:
            layer.forward = _scaled_by_place(layer.forward)
            module.create_chunked_causal_mask = _chunked(module.create_chunked_causal_mask)
        else:
            module.FALCON_ATTENTION_CLASSES[NAME] = type(f"Split{layer.__name__}", (layer,), {"forward": _falcon})


def _chunked(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask function of layers with chunks, whose own looks for padding in a mask of ones and zeros."""

    @wraps(theirs)
    def masks(config: Any, inputs_embeds: Tensor, attention_mask: object, *args: Any, **kwargs: Any) -> Any:
        if isinstance(attention_mask, SequenceMask):
            return attention_mask.seen(Near(chunk=config.attention_chunk_size))
        return theirs(config, inputs_embeds, attention_mask, *args, **kwargs)

    return masks


def _scaled_by_place(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return Llama 4's forward function, which scales queries of a split batch by their true places."""
    signature = inspect.signature(theirs)

    @wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        mask = given.arguments.get("attention_mask")
        if not isinstance(mask, SequenceMask) or not self.attn_temperature_tuning or self.use_rope:
            return theirs(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            from bmburst.attention.uncompiled import uncompiled

            return uncompiled(forward, self, *args, **kwargs)
        steps = torch.floor((mask.places().float() + 1.0) / self.floor_scale)
        factors = torch.log1p(steps) * self.attn_scale + 1.0
        given.arguments["attention_mask"] = mask.scaled(factors[:, :, None, None])
        self.attn_temperature_tuning = False
        try:
            return theirs(*given.args, **given.kwargs)
        finally:
            self.attn_temperature_tuning = True

    return forward


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: None,
    attention_mask: object,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The forward function of Falcon's attention; `_problem` of a model refuses alibi."""
    del position_ids, use_cache
    query, key, value = self._split_heads(self.query_key_value(hidden_states))
    step = key.shape[2] // self.num_kv_heads  # the new architecture repeats keys and values for all heads
    query, key, value = (t.transpose(1, 2) for t in (query, key[:, :, ::step], value[:, :, ::step]))
    rotate = sys.modules[_FALCON].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, _ = attention(
        self, query, key, value, attention_mask, alibi=alibi, output_attentions=output_attentions, **asked
    )
    return self.dense(out.flatten(2)), None
