"""Multi-head latent attention of transformers, which computes keys and values of all heads from latents.

In a split batch, `expand_kv` of the attention module gives the latents themselves to the attention function of
bmburst, which expands them before or after the exchange between ranks (`bmburst.attention.latents`).

In generation, transformers caches the latent of a token (`kv_lora_rank` numbers) and its rotated key, which all heads
share. `expand_kv` expands what the cache returns. `LatentLayer` splits this cache over the ranks, 576 numbers a token
in DeepSeek-V3 instead of 128 heads x 320.

A prompt and a further turn expand latents as transformers does. A decoding step expands none: keys and values are
linear in the latent, so each rank attends with queries in the space of the latents and maps the result to values
(arXiv:2405.04434, section 2.1.2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING

from bmburst.attention.call import AttentionCall
from bmburst.errors import UserError
from bmburst.integrations.transformers_attention import NAME, Near, NotSplit
from bmburst.integrations.transformers_cache_layers import Relay, SplitLayer
from bmburst.integrations.transformers_code import module_of, parameters, unchanged_modules
from bmburst_ops.flash import Partial

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keys and values `[batch, heads, tokens, width]` of latents `[batch, 1, tokens, rank]` and of their rotated keys."""

_MARK = "expands_split_latents"
_METHOD, _PARAMETERS = "expand_kv", ("self", "kv_nope", "k_rot")

READ = frozenset(
    module_of(name)
    for name in (
        *("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash"),
        *("minicpm3", "youtu"),
    )
)
"""Modules whose attention was read: it caches latents, expands what the cache returns, and only calls the registry with
the result."""


def caches_latents(config: Any) -> bool:
    """Return whether a model with this configuration caches latents in a module that was read.

    Some types, such as sarvam_mla, have no module of their own: transformers makes them of another type's classes.
    """
    text = config.get_text_config(decoder=True)
    return module_of(text.model_type) in READ or getattr(MODEL_MAPPING.get(type(text), None), "__module__", "") in READ


def attach_latents(model_class: type) -> None:
    """Let the attention of a model's module leave its latents to bmburst. Further calls have no effect."""
    for _, module in unchanged_modules(model_class, READ, _MARK):
        for layer in {each for each in vars(module).values() if isinstance(each, type) and _METHOD in vars(each)}:
            if parameters(getattr(layer, _METHOD)) == _PARAMETERS:
                setattr(layer, _METHOD, _expanding(layer, getattr(layer, _METHOD)))


def _expanding(cls: Any, theirs: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    read = cls.forward

    @wraps(theirs)
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        layer = getattr(kv_nope, "split_layer", None)
        if layer is not None:
            if not hasattr(layer, "expanded"):  # of a model whose configuration does not tell
                raise NotSplit("the split cache does not hold latents\nfix: another model")
            expanded: tuple[Tensor, Tensor] = layer.expanded(partial(theirs, self), kv_nope, k_rot)
            return expanded
        calls_ours = self.config._attn_implementation == NAME and type(self).forward is read
        if not calls_ours or torch.compiler.is_compiling() or not _is_plain(self.kv_b_proj, kv_nope):
            return theirs(self, kv_nope, k_rot)
        latents: Any = kv_nope
        latents.expanded_by = self.kv_b_proj.weight  # read by the attention function
        return latents, k_rot.to(kv_nope.dtype)

    return expand_kv


def _is_plain(layer: Any, latent: Tensor) -> bool:
    """Return whether a layer does nothing else than to multiply latents by its weight."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    is_own = type(layer) is nn.Linear and "forward" not in vars(layer) and not any(hooks)
    if not is_own or layer.bias is not None or type(layer.weight) not in (nn.Parameter, Tensor):
        return False
    return layer.weight.dtype == latent.dtype or torch.is_autocast_enabled(latent.device.type)


class LatentLayer(SplitLayer):
    """Latents and rotated keys of one layer: this rank's tokens, `[batch, capacity, 1, rank + rotated]`."""

    _is_linear = False  # not known yet

    @property
    def nbytes(self) -> int:
        """See `SplitLayer`."""
        return self.keys.nbytes

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store latents `[batch, 1, tokens, rank]` and rotated keys of new tokens; return the inputs of `expand_kv`."""
        rank, joined = key_states.shape[-1], torch.cat((key_states, value_states), -1)
        if not self.is_initialized:
            self.lazy_initialization(joined, key_states)
        if self.relay is not None:
            joined = self.relay.there.move(joined, 2)
        self._store(keys=joined)
        self.values = self.keys[..., :rank]
        if self.begins and self.relay is None:
            return key_states, value_states
        latents: Any = joined[..., :rank]
        latents.split_layer = self  # read by `expand_kv`
        return latents, joined[..., rank:]

    def expanded(self, expand: Expand, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention function gets for the new tokens, given the model's `expand_kv` and its inputs."""
        decodes = self.prefilling is None
        keys, values = (self.keys[:], self.values) if decodes else expand(latents, rotated)
        found: Any = keys
        found.split_layer = _Expanded(self, expand)  # read by the attention function
        return found, values

    def matrices(self, expand: Expand) -> tuple[Tensor, Tensor]:
        """Return the matrices from latent and rotated key to a head's key, and from latent to a head's value.

        `[heads, rank + rotated, head_dim]` and `[heads, rank, value_dim]`. Keys and values are linear in both, so these
        are the keys and values of unit vectors.

        Raises:
            UserError: They are not linear.
        """
        units = torch.eye(self.keys.shape[-1], dtype=self.keys.dtype, device=self.keys.device)[None, None]
        rank = self.values.shape[-1]
        keys, values = expand(units[..., :rank], units[..., rank:])
        if not self._is_linear:
            _require_linear(expand, rank, units, keys, values[..., :rank, :])
            self._is_linear = True
        return keys[0], values[0, :, :rank]

    def earlier(self, expand: Expand) -> tuple[Tensor, Tensor]:
        """Return keys and values of this rank's tokens of all earlier turns, `[batch, tokens, heads, head_dim]`."""
        latents, rank = self.cached_before(self.keys).transpose(1, 2), self.values.shape[-1]
        keys, values = expand(latents[..., :rank], latents[..., rank:])
        return keys.transpose(1, 2), values.transpose(1, 2)


def _require_linear(expand: Expand, rank: int, units: Tensor, *matrices: Tensor) -> None:
    """Check that keys and values of two vectors, one of them zero, are the vectors times the matrices.

    Raises:
        UserError: They are not: a bias, an adapter or a hook of `kv_b_proj` adds to them, or is not linear.
    """
    width = units.shape[-1]
    vector = torch.linspace(-2, 2, width, dtype=units.dtype, device=units.device)  # latents are normalized
    pair = torch.stack((torch.zeros_like(vector), vector))[None, None]
    found = expand(pair[..., :rank], pair[..., rank:])
    near = 1e-3 if units.dtype.itemsize > 2 else 0.1
    for each, matrix in zip(found, matrices, strict=True):
        wanted = pair[..., : matrix.shape[-2]] @ matrix
        if bool(each[..., 0, :].any()) or not (each - wanted).norm() <= near * wanted.norm():
            raise UserError(
                "keys and values are not linear in latents, but decoding multiplies queries by kv_b_proj, which has a "
                "bias, or an adapter or hook that is not linear\n"
                "fix: leave kv_b_proj out of the adapter's target_modules, or model.generate on one rank"
            )


@dataclass(frozen=True, eq=False)
class _Expanded:
    """A `LatentLayer` in one step of its model; for the attention function, as a `SplitLayer`."""

    layer: LatentLayer
    expand: Expand

    @property
    def relay(self) -> Relay | None:
        """See `SplitLayer`."""
        return self.layer.relay

    @property
    def begins(self) -> bool:
        """See `SplitLayer`."""
        return self.layer.begins

    def attend(self, query: Tensor, values: Tensor, scale: float, *of_scores: Any) -> Tensor:
        """See `SplitLayer`."""
        to_key, to_value = self.layer.matrices(self.expand)
        out = self.layer.attend(query @ to_key.mT, values, scale, *of_scores)
        return torch.einsum("bthr,hrv->bthv", out, to_value)

    def merge_earlier(self, call: AttentionCall, q: Tensor, near: Near, into: Partial) -> None:
        """See `SplitLayer`."""
        keys, values = self.layer.earlier(self.expand)
        self.layer.merge(call, q, keys, values, near, into)
