"""Recurrent layers of transformers (linear attention, Mamba, short convolutions) on split sequences.

Models of transformers mix tokens in few functions, which are globals of their modules, with the same names in all.
`attach` wraps these functions, once for each module. A split batch reaches them in three steps:

1. The model's mask function for recurrent layers returns the `SequenceMask` that it gets as `attention_mask`. So it
   reaches every mixer through gradient checkpointing, FSDP2 and DDP.
2. The forward function of the mixer takes the mask off and opens a scope for the duration of the call. A recompute
   calls the same function.
3. In a scope, the functions compute over the ranks. Outside they are transformers' own.

Only modules of `MIXERS` are attached, and only if their functions have the signatures of `SIGNATURES`: those that were
read. docs/families.md lists the types.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.activations import ACT2FN

from bmburst.errors import UserError
from bmburst.integrations.transformers_attention import SequenceMask, require_known_arguments
from bmburst.integrations.transformers_code import (
    CACHES,
    module_of,
    modules_of,
    one_cache_name,
    parameters,
    unchanged_modules,
)
from bmburst.integrations.transformers_modules import Modules
from bmburst.integrations.transformers_states import SCOPE, Scope, opened
from bmburst.linear.api import burst_causal_conv, burst_linear_attention, burst_scan, burst_ssd

LAYER_TYPES = frozenset({"conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"})
"""Types of layers in modules of `MIXERS`, besides those of attention."""

_LAYOUTS = ("zigzag", "contiguous", "balanced")
_MARK = "reads_split_batches"
_MASKS = "create_recurrent_attention_mask"
_FUSED = frozenset({"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"})
"""Functions of several layers in one, for which transformers has another way: they return None in a scope."""


class Mixer(NamedTuple):
    """The recurrent layer of a module of transformers.

    Attributes:
        name: Its class.
        functions: The globals in which it mixes tokens.
        forward: Replaces its forward function in a scope, if it mixes tokens itself.
        scans: Its attribute with the number of recurrences in a call, whose states are stacked; None: one.
    """

    name: str
    functions: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    scans: str | None = None


def mixers(model: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a model that are in `MIXERS`."""
    return mixers_of(Modules(model))


def mixers_of(modules: Modules) -> list[nn.Module]:
    """Return the recurrent layers among modules, see `mixers`."""
    return modules.whose(lambda kind: _mixer_class(kind) is not None)


def is_read(module: nn.Module) -> bool:
    """Return whether a model's own module is in `MIXERS`, so that all its layers were read."""
    return not MIXERS.keys().isdisjoint(modules_of(type(module)))


def unread(model_class: type) -> str | None:
    """Return which function of a model's module has not the signature that was read; None: all have."""
    for path in modules_of(model_class) & MIXERS.keys():
        module, mixer = sys.modules[path], MIXERS[path]
        for name in (*mixer.functions, *(_FUSED & vars(module).keys())):
            if (found := parameters(getattr(module, name, None))) != SIGNATURES[name]:
                return f"{path}.{name} takes {', '.join(found) or 'nothing'}"
        found = parameters(getattr(module, mixer.name, nn.Module).forward)
        if one_cache_name(found) not in _FORWARD:
            return f"{path}.{mixer.name}.forward takes {', '.join(found)}"
    return None


def attach(model_class: type) -> None:
    """Wrap the functions of a model's module, if it is in `MIXERS` and as it was read. Further calls have no effect."""
    if unread(model_class) is not None:
        return
    for path, module in unchanged_modules(model_class, MIXERS, _MARK):
        mixer = MIXERS[path]
        if hasattr(module, _MASKS):
            setattr(module, _MASKS, _passing_masks(getattr(module, _MASKS)))
        for name in (*mixer.functions, *(_FUSED & vars(module).keys())):
            setattr(module, name, _over_ranks(name, getattr(module, name)))
        cls = getattr(module, mixer.name)
        cls.forward = _scoped(cls.forward, mixer)


def require_layout(modules: Modules, layout: str, *, is_tree: bool) -> None:
    """Check that the recurrent layers among the modules of a model, if it has any, can work in a layout.

    Raises:
        UserError: Neighbouring tokens are on different ranks, or the tokens are a tree.
    """
    found = mixers_of(modules)
    if found and is_tree:
        raise UserError(
            f"{type(found[0]).__name__} passes its state from token to token, but the next tokens of a tree are in "
            "several places\nfix: the rows one by one, or packed as documents"
        )
    if found and layout not in _LAYOUTS:
        raise UserError(
            f"{type(found[0]).__name__} passes its state from token to token, but layout {layout!r} puts neighbouring "
            f"tokens on different ranks\nallowed: {', '.join(_LAYOUTS)}\nfix: SplitSequences(mesh, layout='zigzag')"
        )


def number_layers(model: nn.Module) -> None:
    """Tell recurrent layers that do not know it, those of RecurrentGemma, which layer of a cache is theirs."""
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for number, layer in enumerate(layers):
            for mixer in mixers(layer):
                if not hasattr(mixer, "layer_idx"):
                    mixer.layer_idx = number  # type: ignore[assignment]


def keeps_states(model: nn.Module) -> bool:
    """Return whether a model keeps states of its recurrent layers elsewhere than in transformers' layers of a cache.

    `SplitCache` keeps them, and the model is to make no cache of its own.
    """
    return any(MIXERS[path].forward is not None for path in modules_of(type(model)) & MIXERS.keys())


def _mixer_class(cls: type) -> type | None:
    """Return the class in `MIXERS` that a class is or derives from, as FSDP2's do; None if there is none."""
    return next((base for base in cls.__mro__ if MIXERS.get(base.__module__, _NONE).name == base.__name__), None)


def _passing_masks(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask function for recurrent layers, which returns the mask of a split batch as it is."""

    @wraps(theirs)
    def masks(*args: Any, **kwargs: Any) -> Any:
        split = next((value for value in (*args, *kwargs.values()) if isinstance(value, SequenceMask)), None)
        return theirs(*args, **kwargs) if split is None else split

    return masks


def _over_ranks(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes over the ranks in a scope, and is transformers' own outside."""
    ours = _OURS.get(name)

    @wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        scope = None if torch.compiler.is_compiling() else SCOPE.get()  # a scope is never compiled
        if scope is None:
            return theirs(*args, **kwargs)
        scope.used.add(name)
        return None if ours is None else ours(scope, *args, **kwargs)

    return either


def _scoped(theirs: Callable[..., Any], mixer: Mixer) -> Callable[..., Any]:
    """Return a mixer's forward function that opens a scope for a split batch."""
    signature = inspect.signature(inspect.unwrap(theirs))

    @wraps(theirs)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_split, (*args, *kwargs.values()))):  # the rest of this function does not compile
            return theirs(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        split = given.arguments.get("attention_mask")
        name, cache = _cache_of(given)
        keeps_states = getattr(cache, "has_split_states", False)
        if not isinstance(split, SequenceMask) and keeps_states and (mixer.forward is not None or cache.of_prompt):
            split = cache.alone  # a step for which all ranks have the same tokens
        elif not isinstance(split, SequenceMask):
            return theirs(*args, **kwargs)
        if torch.compiler.is_compiling():
            from bmburst.attention.uncompiled import uncompiled

            return uncompiled(forward, *args, **kwargs)
        if cache is not None and not keeps_states:
            raise UserError(
                f"{mixer.name} on a split sequence has no cache of transformers, got {name}\nfix: pass use_cache=False"
            )
        if cache is not None:  # the scope has its states
            (given.arguments if name in given.arguments else given.arguments["kwargs"])[name] = None
            given.arguments.get("kwargs", {}).pop("use_cache", None)
        given.arguments["attention_mask"] = None
        state = None if cache is None else cache.layers[args[0].layer_idx]
        scans = 0 if mixer.scans is None else getattr(args[0], mixer.scans)
        with opened(split, state, scans) as scope:
            found = (mixer.forward or theirs)(*given.args, **given.kwargs)
        if missing := set(mixer.functions) - _FUSED - scope.used:
            raise UserError(
                f"{mixer.name} did not mix tokens in {min(missing)} of its module, so its result may be wrong\n"
                "fix: use the layer of the installed transformers, without patches or kernels of a hub"
            )
        return found

    return forward


def _is_split(value: object) -> bool:
    """Return whether an argument of a mixer is the mask of a split batch, or a cache that is split over ranks."""
    return isinstance(value, SequenceMask) or (isinstance(value, Cache) and hasattr(value, "has_split_states"))


def _cache_of(given: inspect.BoundArguments) -> tuple[str, Any]:
    """Return the name and value of the cache in the arguments of a mixer; a value of None if there is none."""
    passed = given.arguments.get("kwargs", {}) | given.arguments
    return next(((name, passed[name]) for name in CACHES if passed.get(name) is not None), ("", None))


def _conv(
    scope: Scope,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **asked: Any,
) -> Tensor:
    """`causal_conv1d_fn`: hidden is `[batch, channels, tokens]`."""
    require_known_arguments(asked)
    fused = "silu" if activation in ("silu", "swish") else None
    out = scope.convolved(burst_causal_conv(hidden.mT, weight, bias, activation=fused, **scope.of_convolution())).mT
    return out if fused or activation is None else ACT2FN[activation](out)


def _delta(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    kind: str,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **asked: Any,
) -> tuple[Any, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""
    del chunk_size  # of a kernel; the result does not depend on it
    require_known_arguments(asked | {"initial_state": initial_state, "output_final_state": output_final_state})
    options = scope.of_recurrence() | {"kind": kind, "normalize": use_qk_l2norm_in_kernel}
    return scope.scanned(burst_linear_attention(query, key, value, g, beta, **options)), None


def _ssd(
    scope: Scope,
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **asked: Any,
) -> Any:
    """`mamba2_chunk_scan`."""
    del chunk_size
    require_known_arguments(asked | {"initial_states": initial_states})
    options = scope.of_recurrence() | {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    found = scope.scanned(burst_ssd(hidden, dt, A, B, C, **options))
    return (found, None) if return_final_states else found


def _selective(
    scope: Scope,
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **asked: Any,
) -> Tensor:
    """`mamba_selective_scan`: hidden, dt and z are `[batch, channels, tokens]`, B and C `[batch, state, tokens]`."""
    del use_mambapy, use_associative_scan  # other ways to the same result
    require_known_arguments(asked | {"return_last_state": return_last_state})
    wide = torch.promote_types(hidden.dtype, torch.float32)
    step = dt.to(wide) if delta_bias is None else dt.to(wide) + delta_bias.to(wide)[:, None]
    step = (functional.softplus(step) if delta_softplus else step).mT[..., None]  # [batch, tokens, channels, 1]
    decay = (step * A.to(wide)).exp()
    added = step * B.to(wide).mT[:, :, None] * hidden.to(wide).mT[..., None]
    states = scope.scanned(burst_scan(decay, added, **scope.of_recurrence()))
    out = (states @ C.to(wide).mT[..., None])[..., 0].mT
    out = out if D is None else out + hidden * D[:, None]
    return (out if z is None else out * functional.silu(z)).to(hidden.dtype)


def _lightning(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: None = None,
    cache: None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The forward function of MiniMax' Lightning Attention, whose own loops over blocks of tokens."""
    del position_embeddings, attention_mask, cache
    require_known_arguments(asked)
    scope = SCOPE.get()
    assert scope is not None
    mixed = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
    q, k, v = mixed.split(self.head_dim, -1)
    decay = -self.slope_rate.flatten().expand(v.shape[:3])
    options = scope.of_recurrence() | {"kind": "decay", "scale": 1.0}
    found = scope.scanned(burst_linear_attention(q, k, v, decay, **options))
    out = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(found.flatten(2))
    return self.out_proj(out), None


def _griffin(
    self: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: None = None,
    use_cache: bool = False,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The forward function of RecurrentGemma's recurrent block, whose own loops over tokens."""
    del attention_mask
    del position_ids  # its reset at position 0 would miss a document behind padding
    require_known_arguments(asked | {"use_cache": use_cache})
    scope = SCOPE.get()
    assert scope is not None

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: object) -> tuple[Any, None]:
        return scope.scanned(burst_scan(recurrent_gate * ~reset, hidden_states, **scope.of_recurrence())), None

    begins = scope.begins(input_states)
    weight, bias = self.conv_1d.weight[:, 0], self.conv_1d.bias
    mixed = scope.convolved(burst_causal_conv(self.linear_x(input_states), weight, bias, **scope.of_convolution()))
    unit = next(each for each in self.rg_lru.modules() if hasattr(type(each), "_rnn_scan"))  # inside of an adapter
    unit._rnn_scan = scan
    try:
        found = self.rg_lru(mixed, (~begins).long())
    finally:
        del unit._rnn_scan
    return self.linear_out(found * self.act_fn(self.linear_y(input_states))), None


_OURS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _conv,
        "chunk_kimi_delta_attention": partial(_delta, kind="kda"),
        "mamba2_chunk_scan": _ssd,
        "mamba_selective_scan": _selective,
        "torch_chunk_gated_delta_rule": partial(_delta, kind="gated_delta"),
    }
)

SIGNATURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation", "kwargs"),
        **dict.fromkeys(
            ("chunk_kimi_delta_attention", "torch_chunk_gated_delta_rule"),
            (
                *("query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state"),
                *("use_qk_l2norm_in_kernel", "kwargs"),
            ),
        ),
        "mamba2_chunk_scan": (
            *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus"),
            *("dt_limit", "return_final_states", "kwargs"),
        ),
        "mamba_selective_scan": (
            *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"),
            *("use_mambapy", "use_associative_scan", "kwargs"),
        ),
        "mamba2_split_conv1d_scan_combined": (
            *("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size", "initial_states"),
            *("dt_limit", "return_final_states", "activation", "rmsnorm_weight", "rmsnorm_eps", "outproj_weight"),
            *("outproj_bias", "headdim", "ngroups", "norm_before_gate", "kwargs"),
        ),
        "mamba_inner_fn": (
            *("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "out_proj_weight"),
            *("out_proj_bias", "A", "B", "C", "D", "delta_bias", "delta_softplus", "b_rms_weight", "c_rms_weight"),
            *("dt_rms_weight", "b_c_dt_rms_eps", "kwargs"),
        ),
    }
)
"""The parameters of each function, as in transformers 5.23 and 5.24."""

_FORWARD = frozenset(
    {
        ("self", "hidden_states", "cache", "attention_mask", "kwargs"),
        ("self", "hidden_states", "position_embeddings", "attention_mask", "cache", "kwargs"),
        ("self", "input_states", "position_ids", "attention_mask", "use_cache", "kwargs"),
    }
)
"""The parameters of the mixers' forward functions, see `one_cache_name`."""

_GDN = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_KDA = ("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA1 = ("causal_conv1d_fn", "mamba_selective_scan")
_MAMBA2 = ("causal_conv1d_fn", "mamba2_chunk_scan")
_SHORT = ("causal_conv1d_fn",)
_NONE = Mixer("")


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        module_of("bailing_hybrid"): Mixer("BailingHybridDeltaAttention", _KDA),
        module_of("bamba"): Mixer("BambaMixer", _MAMBA2),
        module_of("falcon_h1"): Mixer("FalconH1Mixer", _MAMBA2),
        module_of("falcon_mamba"): Mixer("FalconMambaMixer", _MAMBA1),
        module_of("granitemoehybrid"): Mixer("GraniteMoeHybridMambaLayer", _MAMBA2),
        module_of("jamba"): Mixer("JambaMambaMixer", _MAMBA1),
        module_of("kimi_linear"): Mixer("KimiLinearDeltaAttention", _KDA),
        module_of("lfm2"): Mixer("Lfm2ShortConv", _SHORT),
        module_of("lfm2_moe"): Mixer("Lfm2MoeShortConv", _SHORT),
        module_of("lfm3"): Mixer("Lfm3ShortConv", _SHORT),
        module_of("mamba"): Mixer("MambaMixer", _MAMBA1),
        module_of("mamba2"): Mixer("Mamba2Mixer", _MAMBA2),
        module_of("minimax"): Mixer("MiniMaxLightningAttention", forward=_lightning),
        module_of("nemotron_h"): Mixer("NemotronHMamba2Mixer", _MAMBA2),
        module_of("olmo_hybrid"): Mixer("OlmoHybridGatedDeltaNet", _GDN),
        module_of("qwen3_5"): Mixer("Qwen3_5GatedDeltaNet", _GDN),
        module_of("qwen3_5_moe"): Mixer("Qwen3_5MoeGatedDeltaNet", _GDN),
        module_of("qwen3_next"): Mixer("Qwen3NextGatedDeltaNet", _GDN),
        module_of("recurrent_gemma"): Mixer("RecurrentGemmaRecurrentBlock", forward=_griffin),
        module_of("zamba"): Mixer("ZambaMambaMixer", _MAMBA1, scans="n_mamba_heads"),
        module_of("zamba2"): Mixer("Zamba2MambaMixer", _MAMBA2),
    }
)
"""The recurrent layer of each module of transformers that was read."""
