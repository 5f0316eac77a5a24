"""What Hugging Face's config.json says of a model's family and of its rotary scaling. Imports no torch.

The families are LLaMA, Mistral, Qwen2, Qwen3 and MiniCPM.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from bmburst.blocks.family_keys import BY_LAYER, COMMON, EVERY_LAYER, MINICPM, NO_WINDOW, ROTARY
from bmburst.config import check_fields, field
from bmburst.config.fields import shown
from bmburst.config.foreign import Key, require_keys
from bmburst.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Differences of a family from LLaMA.

    Attributes:
        architecture: Class of its causal LM in transformers.
        keys: Keys of config.json that only this family has, or reads in its own way.
        qkv_bias: Whether its query, key and value projections have biases.
        qk_norm: Whether each head of queries and keys is normalized.
        scaled: Whether embeddings, residual updates and logits have factors.
        ties: Whether head and embedding are tied by default.
        windows: Whether config.json sets a sliding window: "never", for "all" layers, or by "layer".
        rope_key: Key of the scaling method in `rope_scaling`.
        needs: Required keys. Their defaults in this family differ from those of LLaMA.
    """

    architecture: str
    keys: Mapping[str, Key]
    qkv_bias: bool = False
    qk_norm: bool = False
    scaled: bool = False
    ties: bool = False
    windows: str = "never"
    rope_key: str = "rope_type"
    needs: tuple[str, ...] = ()

    @property
    def known(self) -> Mapping[str, Key]:
        """All keys of config.json that are understood."""
        return {**COMMON, **self.keys}


ROPE_KINDS = ("linear", "dynamic", "yarn", "llama3")
_MOST_SCALE = 1e6  # upper bound of yarn's mscale, so that the ratio of two is finite
SCALES = ("scale_emb", "scale_depth", "dim_model_base")
"""Settings of MiniCPM's three factors, named as in its config.json and in `LlamaConfig`."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_OWN_DEFAULTS = ("num_key_value_heads", "max_position_embeddings")
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", keys=NO_WINDOW),
    "mistral": Family(
        architecture="MistralForCausalLM", windows="all", needs=(*_OWN_DEFAULTS, "sliding_window"), keys=EVERY_LAYER
    ),  # arXiv:2310.06825
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, windows="layer", needs=_OWN_DEFAULTS, keys=BY_LAYER
    ),  # arXiv:2407.10671
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        windows="layer",
        needs=(*_OWN_DEFAULTS, "head_dim"),
        keys=BY_LAYER,
    ),  # arXiv:2505.09388
    "minicpm": Family(
        architecture="MiniCPMForCausalLM",
        scaled=True,
        ties=True,
        rope_key="type",
        needs=(*_OWN_DEFAULTS, *SCALES),
        keys=MINICPM,
    ),  # arXiv:2404.06395; its code is published with its weights, not in transformers
}
_INSTEAD = "use it with transformers, on split sequences: docs/hugging_face.md"
_LACKING = {"gemma2": "logit softcap (attn_logit_softcapping)", "gpt_oss": "attention sinks"}
"""Rejected families, with the attention feature that bmburst's own models lack."""


def family_of(*, qkv_bias: bool, qk_norm: bool, sliding_window: int | None, scaled: bool) -> str:
    """Return the first family that has these settings; UserError if none has them."""
    for name, family in FAMILIES.items():
        windowed = sliding_window is None or family.windows != "never"
        if (family.qkv_bias, family.qk_norm, family.scaled) == (qkv_bias, qk_norm, scaled) and windowed:
            return name
    if scaled:
        raise UserError(
            f"{', '.join(SCALES)} (MiniCPM) cannot be combined with qkv_bias, qk_norm or sliding_window\n"
            "fix: a model without these three"
        )
    raise UserError("no family of Hugging Face has both qkv_bias (Qwen2) and qk_norm (Qwen3)\nfix: one of them")


def read_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the family that a config.json names.

    Raises:
        UserError: The family is unknown, a key is missing, unknown or has a value that is not supported, or layers have
            different attention types.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:  # another name in config.json would be another model
        problem = f"bmburst has no model of its own of model_type {shown(name)}"
        if isinstance(name, str) and name in _LACKING:
            problem = (
                f"a {name} model has {_LACKING[name]}, which bmburst's own models do not have; without it "
                "the model computes something else"
            )
        raise UserError(f"{problem}\nallowed: model_type {', '.join(FAMILIES)}\nfix: {_INSTEAD}")
    if how := values.get("quantization_config"):
        raise UserError(
            f"the weights of this {name} model are quantized: quantization_config {shown(how)}\n"
            "allowed: null\nfix: the model in 16 or 32 bits; --lora.base 4bit quantizes such a model while it loads it"
        )
    family = FAMILIES[name]
    require_keys(values, family.known, f"a {name} model", _INSTEAD)
    _require_architecture(values, family)
    missing = [key for key in family.needs if key not in values]
    if missing:
        raise UserError(f"config.json of a {name} model lacks {', '.join(missing)}\nfix: add the keys")
    window = _WINDOWS[family.windows](values)
    scales = {key: values[key] for key in SCALES} if family.scaled else {}
    return {
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "sliding_window": window,
        "tie_embeddings": _switch("tie_word_embeddings", values.get("tie_word_embeddings", family.ties)),
        **scales,
    }


def write_settings(
    name: str, num_layers: int, sliding_window: int | None, scales: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return the keys of config.json that are specific to a family.

    Args:
        name: Name of the family.
        num_layers: Number of blocks.
        sliding_window: Sliding window in tokens; None: full attention.
        scales: Values of `SCALES`.
    """
    family = FAMILIES[name]
    values: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    if family.scaled:
        values |= scales
    if family.windows == "all":
        values["sliding_window"] = sliding_window
    elif family.windows == "layer":
        on = sliding_window is not None
        kind = _SLIDING if on else _FULL
        values |= {"use_sliding_window": on, "sliding_window": sliding_window, "layer_types": [kind] * num_layers}
        values["max_window_layers"] = 0 if on else num_layers
    return values


def _require_architecture(values: Mapping[str, Any], family: Family) -> None:
    """Check that the weights are those of the family's causal LM: other classes attend both ways, or have no head."""
    named = values.get("architectures") or [family.architecture]
    allowed = family.architecture.lower()  # old files of LLaMA have LLaMAForCausalLM
    if not isinstance(named, list) or any(not isinstance(each, str) or each.lower() != allowed for each in named):
        raise UserError(
            f"architectures {shown(named)} of a {values['model_type']} model are not supported\n"
            f"allowed: {family.architecture}\nfix: a causal LM of the family"
        )


def _never(values: Mapping[str, Any]) -> None:
    window = values.get("sliding_window")
    if window is not None or _layers(values, _FULL) == _SLIDING:
        raise UserError(
            f"a {values['model_type']} model has no sliding window, but its sliding_window is {shown(window)} and its "
            f"layer_types {shown(values.get('layer_types'))}\nfix: set model_type 'mistral', or remove the keys"
        )


def _everywhere(values: Mapping[str, Any]) -> int | None:
    """With layer_types, a Mistral is a Ministral (transformers, `AutoConfig.from_pretrained`)."""
    window: int | None = values["sliding_window"]
    return _windowed(window) if _layers(values, _FULL if window is None else _SLIDING) == _SLIDING else None


def _switch(key: str, value: object) -> bool:
    """Return the value of a key that must be true or false."""
    if not isinstance(value, bool):
        raise UserError(f"{key} {shown(value)} does not fit\nallowed: true, false\nfix: correct it in config.json")
    return value


def _by_layer(values: Mapping[str, Any]) -> int | None:
    asked = values.get("use_sliding_window")  # null is false, as for transformers
    is_on = asked is not None and _switch("use_sliding_window", asked)
    window: int | None = values.get("sliding_window", 4096) if is_on else None
    first = values.get("max_window_layers", 28)  # transformers' defaults
    if isinstance(first, bool) or not isinstance(first, int):
        raise UserError(f"max_window_layers {shown(first)} does not fit\nallowed: a whole number\nfix: correct it")
    layers = _number_of_layers(values)
    kinds = [_SLIDING if window is not None and layer >= first else _FULL for layer in (0, layers - 1)]
    return _windowed(window) if _layers(values, *kinds) == _SLIDING else None


_WINDOWS: Mapping[str, Callable[[Mapping[str, Any]], int | None]] = {
    "never": _never,
    "all": _everywhere,
    "layer": _by_layer,
}


def _layers(values: Mapping[str, Any], *otherwise: str) -> str:
    """Return the attention type of all layers: that in layer_types, or without this key, that of `otherwise`.

    Raises:
        UserError: layer_types is not a list of a type for each layer, or there are several types or another one.
    """
    listed = values.get("layer_types")
    if listed is not None:
        layers = _number_of_layers(values)
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed) or len(listed) != layers:
            raise UserError(
                f"layer_types {shown(listed)} does not fit\n"
                f"allowed: a list of {layers} names, one for each layer\nfix: correct it"
            )
    kinds: list[str] = sorted({*(otherwise if listed is None else listed)})
    if len(kinds) > 1 or kinds[0] not in (_FULL, _SLIDING):
        raise UserError(
            f"layers of type {' and '.join(kinds)} in one model are not supported\n"
            f"allowed: {_FULL} or {_SLIDING}, one type for all\nfix: {_INSTEAD}"
        )
    return kinds[0]


def _number_of_layers(values: Mapping[str, Any]) -> int:
    layers = values.get("num_hidden_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise UserError(f"num_hidden_layers {shown(layers)} does not fit\nallowed: a whole number\nfix: correct it")
    return layers


def _windowed(window: int | None) -> int:
    if window is None:
        raise UserError("layers of type sliding_attention without a sliding_window\nfix: give its length in tokens")
    return window


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling: extends rotary positions beyond the context length of the original training.

    "linear" divides positions by the factor (arXiv:2306.15595), "dynamic" grows the base with the length (NTK),
    "yarn" interpolates per frequency (arXiv:2309.00071), "llama3" is the per-frequency rule of Llama 3.1.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = field("Scaling method.")
    factor: float = field(
        "New length divided by the length of the original training.", unit="times", minimum=1, maximum=1e6
    )
    original_max_position_embeddings: int | None = field(
        "Length of the original training; dynamic uses max_position_embeddings if this is none.",
        default=None,
        unit="tokens",
        minimum=1,
    )
    low_freq_factor: float = field(
        "llama3: wavelengths above original length / this value are divided by the factor.", default=1.0, above=0
    )
    high_freq_factor: float = field(
        "llama3: wavelengths below original length / this value are kept.", default=4.0, above=0
    )
    beta_fast: float = field("yarn: dimensions that rotate more often are kept.", default=32.0, unit="turns", above=0)
    beta_slow: float = field(
        "yarn: dimensions that rotate less often are divided by the factor.", default=1.0, unit="turns", above=0
    )
    attention_factor: float | None = field(
        "yarn: factor on cosines and sines.", default=None, default_text="0.1 ln(factor) + 1", above=0
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind in ("yarn", "llama3") and self.original_max_position_embeddings is None:
            raise UserError(
                f"rope_scaling of kind {self.kind} needs original_max_position_embeddings\n"
                "fix: give the length in tokens that the model was trained on, for example 8192"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope_scaling.high_freq_factor {self.high_freq_factor:g} is not above low_freq_factor "
                f"{self.low_freq_factor:g}\nfix: for example low_freq_factor 1 and high_freq_factor 4"
            )
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            raise UserError(
                f"rope_scaling.beta_fast {self.beta_fast:g} is not above beta_slow {self.beta_slow:g}\n"
                "fix: for example beta_fast 32 and beta_slow 1"
            )


def rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config.json, as transformers 5 reads them (`convert_rope_params_to_dict`).

    A `rope_scaling` that is not empty replaces all of `rope_parameters`, including the base. `rope_theta` and
    `partial_rotary_factor` fall back to the top-level keys. A top-level `original_max_position_embeddings` overrides
    that of the object.

    Raises:
        UserError: One of them is not an object, or the settings differ between layers.
    """
    for key in ("rope_scaling", "rope_parameters"):
        given = values.get(key)
        if given is not None and not isinstance(given, Mapping):
            raise UserError(
                f'{key} {shown(given)} is not an object\nfix: one, for example {{"rope_type": "linear", "factor": 4.0}}'
            )
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if by_layer := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise UserError(
            f"different rotary settings for types of layers ({shown(by_layer[0])}) are not supported\n"
            "fix: one object, the same for all layers"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None:
            rope[key] = values.get(key)
    if values.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return rope


def read_rope(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    """Return the scaling of rotary settings, as `rope_of`, or None; UserError if incomplete or not supported."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = sorted((*ROPE_KINDS, "default"))
    if kind not in known:  # another name would be another model
        raise UserError(f"rope_type {shown(kind)} is not supported\nallowed: {', '.join(known)}\nfix: {_INSTEAD}")
    require_keys(rope, ROTARY, "rotary settings", _INSTEAD)
    if kind == "default":
        return None
    keys = {declared.name for declared in fields(RopeScaling)} - {"kind"}
    given: dict[str, Any] = {"kind": kind, **{key: rope[key] for key in keys if rope.get(key) is not None}}
    needs = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [key for key in needs if key not in given]:
        said = ", ".join(missing)
        raise UserError(f"rope_scaling of rope_type {kind} lacks {said}\nfix: add what the model was trained with")
    if kind in ("yarn", "llama3"):
        given.setdefault("original_max_position_embeddings", max_positions)
    else:  # transformers' dynamic scaling starts at max_position_embeddings and ignores this key
        given.pop("original_max_position_embeddings", None)
    scaling = RopeScaling(**given)
    if kind != "yarn" or scaling.attention_factor is not None:
        return scaling
    scales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return scaling
    for scale in scales:
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < _MOST_SCALE:
            raise UserError(f"mscale {shown(scale)} of yarn does not fit\nfix: a number above 0")
    up, down = (_yarn_scale(scaling.factor, float(scale)) for scale in scales if scale)
    return replace(scaling, attention_factor=up / down)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return `rope_scaling` with only the keys that transformers expects for the kind: it warns about other keys."""
    if scaling is None:
        return None
    keys = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    }[scaling.kind]
    values = {key: getattr(scaling, key) for key in keys}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}
