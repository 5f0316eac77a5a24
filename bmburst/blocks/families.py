"""Supported model families (LLaMA, Mistral, Qwen2, Qwen3, MiniCPM) in Hugging Face's config.json. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bmburst.config.fields import shown
from bmburst.errors import UserError, require_known


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Differences of a family from LLaMA.

    Attributes:
        architecture: Class of its causal LM in transformers.
        qkv_bias: Whether its query, key and value projections have biases.
        qk_norm: Whether each head of queries and keys is normalized.
        scaled: Whether embeddings, residual updates and logits have factors.
        ties: Whether head and embedding are tied by default.
        windows: Whether config.json sets a sliding window: "never", for "all" layers, or by "layer".
        rope_key: Key of the scaling method in `rope_scaling`.
        needs: Required keys. Their defaults in this family differ from those of LLaMA.
        foreign: Keys of unsupported models with the same model_type.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    scaled: bool = False
    ties: bool = False
    windows: str = "never"
    rope_key: str = "rope_type"
    needs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


SCALES = ("scale_emb", "scale_depth", "dim_model_base")
"""Settings of MiniCPM's three factors, named as in its config.json and in `LlamaConfig`."""
_ALLOWED = {int: "a whole number", list: "a list of names"}
_OWN_DEFAULTS = ("num_key_value_heads", "max_position_embeddings")
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(
        architecture="MistralForCausalLM", windows="all", needs=(*_OWN_DEFAULTS, "sliding_window")
    ),  # arXiv:2310.06825
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, windows="layer", needs=_OWN_DEFAULTS
    ),  # arXiv:2407.10671
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qk_norm=True, windows="layer", needs=(*_OWN_DEFAULTS, "head_dim")
    ),  # arXiv:2505.09388
    "minicpm": Family(
        architecture="MiniCPMForCausalLM",
        scaled=True,
        ties=True,
        rope_key="type",
        needs=(*_OWN_DEFAULTS, *SCALES),
        foreign=("num_experts", "sparse_config"),  # MiniCPM-MoE, MiniCPM4.1
    ),  # arXiv:2404.06395; its code is published with its weights, not in transformers
}


_LACKING = {"gemma2": "logit softcap (attn_logit_softcapping)", "gpt_oss": "attention sinks"}
"""Rejected families, with the attention feature that bmburst's own models lack."""


def family_of(*, qkv_bias: bool, qk_norm: bool, sliding_window: int | None, scaled: bool) -> str:
    """Return the first family that has these settings.

    Raises:
        UserError: No family has this combination.
    """
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
        UserError: The family is unknown, a key is missing, or layers have different attention types.
    """
    name = values.get("model_type")
    if isinstance(name, str) and name in _LACKING:
        raise UserError(
            f"a {name} model has {_LACKING[name]}, which bmburst's own models do not have; without it "
            "the model computes something else\n"
            f"allowed: model_type {', '.join(FAMILIES)}\nfix: train it in transformers: docs/hugging_face.md"
        )
    require_known("model_type", name, FAMILIES)
    family = FAMILIES[str(name)]
    missing = [key for key in family.needs if key not in values]
    if missing:
        raise UserError(f"config.json of a {name} model lacks {', '.join(missing)}\nfix: add the keys")
    for key in family.foreign:
        if values.get(key):
            raise UserError(f"{key} of a {name} model is not supported\nfix: a model without it")
    window = {"never": _never, "all": _everywhere, "layer": _by_layer}[family.windows](values)
    scales = {key: values[key] for key in SCALES} if family.scaled else {}
    return {
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "sliding_window": window,
        "tie_embeddings": values.get("tie_word_embeddings", family.ties),
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
        kind = "sliding_attention" if on else "full_attention"
        values |= {"use_sliding_window": on, "sliding_window": sliding_window, "layer_types": [kind] * num_layers}
        values["max_window_layers"] = 0 if on else num_layers
    return values


def _never(values: Mapping[str, Any]) -> None:
    if values.get("sliding_window") is not None:
        raise UserError(
            f"a {values['model_type']} model has no sliding_window\nfix: set model_type 'mistral', or remove the key"
        )


def _everywhere(values: Mapping[str, Any]) -> int | None:
    window: int | None = values["sliding_window"]
    return window


def _by_layer(values: Mapping[str, Any]) -> int | None:
    if not values.get("use_sliding_window", False):
        return None
    layers, first = values.get("num_hidden_layers"), values.get("max_window_layers", 28)  # transformers' default
    listed = values.get("layer_types") or []
    for key, given, kind in (
        ("num_hidden_layers", layers, int),
        ("max_window_layers", first, int),
        ("layer_types", listed, list),
    ):
        if not isinstance(given, kind) or not all(isinstance(part, str) for part in listed):
            raise UserError(f"{key} {shown(given)} does not fit\nallowed: {_ALLOWED[kind]}")
    kinds = set(listed)
    if not kinds:
        kinds = {
            kind
            for kind, is_there in (("full_attention", first > 0), ("sliding_attention", layers > first))
            if is_there
        }
    if len(kinds) > 1:
        raise UserError(
            f"layers of type {' and '.join(sorted(kinds))} in one model are not supported\n"
            "fix: one type for all; for both, train it in transformers: docs/hugging_face.md"
        )
    return values.get("sliding_window", 4096) if "sliding_attention" in kinds else None
