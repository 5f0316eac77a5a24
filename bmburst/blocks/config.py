"""Configuration of a LLaMA-family model, read from and written to Hugging Face's config.json. Imports no torch."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from bmburst.blocks.families import FAMILIES, SCALES, family_of, read_settings, write_settings
from bmburst.config import check_fields, field
from bmburst.config.fields import shown
from bmburst.errors import UserError, require_known
from bmburst.schedule.parallelism import MeshShape

ROPE_KINDS = ("linear", "dynamic", "yarn", "llama3")
# Far above any existing model, yet low enough to reject a corrupt number in a file immediately.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 10_000, 65_536, 2**24
_MOST_SCALE = 1e6  # upper bound of yarn's mscale, so that the ratio of two is finite
# Required keys of config.json, mapped to our field names.
_HF_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# Settings of transformers' LLaMA that have the same value in every supported model.
_HF_FIXED: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
)
# Hugging Face's own defaults, used where a config.json leaves the key out.
_HF_NORM_EPS, _HF_INIT_STD, _HF_ROPE_THETA, _HF_MAX_POSITIONS = 1e-6, 0.02, 10000.0, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Configuration of a LLaMA-family model. Weights are `[out_features, in_features]`.

    The last six fields are settings of Mistral, Qwen2, Qwen3 and MiniCPM (`bmburst.blocks.families`).

    Raises:
        UserError: A field is out of range, or fields contradict each other.
    """

    vocab_size: int = field(
        "Vocabulary size: rows of the embedding and of the head.", unit="token ids", minimum=1, maximum=2**31 - 1
    )
    hidden_size: int = field("Width of the residual stream.", unit="features", minimum=1, maximum=MOST_WIDTH)
    intermediate_size: int = field("Width inside the gated MLP.", unit="features", minimum=1, maximum=MOST_WIDTH)
    num_layers: int = field("Number of transformer blocks.", unit="layers", minimum=1, maximum=MOST_LAYERS)
    num_heads: int = field("Number of query heads.", unit="heads", minimum=1, maximum=MOST_HEADS)
    num_kv_heads: int = field("Number of KV heads; divides num_heads.", unit="heads", minimum=1, maximum=MOST_HEADS)
    # DEVIATION from keeping the given value: 0 is replaced in __post_init__, so that callers read the actual value.
    head_dim: int = field(
        "Dimension of a head; even.",
        default=0,
        default_text="hidden_size / num_heads",
        unit="features",
        minimum=0,
        maximum=MOST_HEADS,
    )
    rope_theta: float = field("Base of the rotary frequencies.", default=10000.0, above=1, maximum=1e15)
    rope_scaling: RopeScaling | None = field("Scaling of rotary positions.", default=None)  # noqa: RUF009
    norm_eps: float = field("Added to the mean square in RMSNorm.", default=1e-5, above=0)
    tie_embeddings: bool = field("Whether the output head shares the weights of the embedding.", default=False)
    init_std: float = field("Standard deviation of the initial weights.", default=0.02, above=0)
    max_position_embeddings: int = field(
        "Longest sequence that the model supports.", default=4096, unit="tokens", minimum=1
    )
    sliding_window: int | None = field(
        "Sliding window: tokens that a query attends to, including its own (Mistral).",
        default=None,
        default_text="all",
        unit="tokens",
        minimum=1,
    )
    qkv_bias: bool = field("Whether query, key and value projections have biases (Qwen2).", default=False)
    qk_norm: bool = field("Whether queries and keys are normalized per head (Qwen3).", default=False)
    scale_emb: float | None = field("Factor on embeddings (MiniCPM).", default=None, default_text="1", above=0)
    scale_depth: float | None = field(
        "Residual updates are multiplied by this value / sqrt(num_layers) (MiniCPM).",
        default=None,
        default_text="no factor",
        above=0,
    )
    dim_model_base: int | None = field(
        "Logits are divided by hidden_size / this value (MiniCPM).",
        default=None,
        default_text="no factor",
        unit="features",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        given = [name for name in SCALES if getattr(self, name) is not None]
        if given and len(given) < len(SCALES):
            missing = ", ".join(name for name in SCALES if name not in given)
            raise UserError(
                f"{', '.join(given)} given without {missing}\nfix: give all three (as MiniCPM does) or none"
            )
        self._family()
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise UserError(
                    f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}\n"
                    "fix: change one of them, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}\n"
                f"allowed: {', '.join(map(str, divisors))}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim {self.head_dim} is odd, but rotary embedding rotates pairs of features\n"
                "fix: give an even head_dim, or make hidden_size / num_heads even"
            )

    def _family(self) -> str:
        scaled = self.scale_emb is not None
        return family_of(
            qkv_bias=self.qkv_bias, qk_norm=self.qk_norm, sliding_window=self.sliding_window, scaled=scaled
        )

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings."""
        return 1.0 if self.scale_emb is None else self.scale_emb

    @property
    def residual_scale(self) -> float:
        """Factor on the outputs of attention and MLP before they are added to the residual stream."""
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_layers)

    @property
    def logit_scale(self) -> float:
        """Factor on logits."""
        return 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size

    @property
    def matrix_std(self) -> float:
        """Standard deviation of initial matrices in blocks; MiniCPM reduces it with the width (its table 7)."""
        return self.init_std * math.sqrt(self.logit_scale)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters; a tied head counts once."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * kv) + (query + 2 * kv) * self.qkv_bias
        norms = 2 * (self.hidden_size + self.head_dim * self.qk_norm)
        block = attention + 3 * self.hidden_size * self.intermediate_size + norms
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return tables + self.num_layers * block + self.hidden_size

    @property
    def shares_matrices(self) -> bool:
        """Whether tensor parallelism supports the model: biases and per-head norms cannot be split."""
        return not (self.qkv_bias or self.qk_norm)

    def require_mesh(self, shape: MeshShape) -> None:
        """Check that the parallel degrees of a mesh divide the model's heads and the width of its MLP.

        Raises:
            UserError: A degree does not divide them; the message names the nearest degrees that do.
        """
        if shape.tensor > 1 and not self.shares_matrices:
            raise UserError(
                f"tensor parallelism {shape.tensor} does not support {'qkv_bias' if self.qkv_bias else 'qk_norm'}\n"
                "fix: tensor parallelism 1 for models with qkv_bias or qk_norm"
            )
        shape.require_heads(self.num_heads, self.num_kv_heads)
        shape.require_width("intermediate_size", self.intermediate_size)

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Return the configuration described by the config.json of a Hugging Face model of one of `FAMILIES`.

        Reads `rope_scaling` with "type" or "rope_type" (transformers 4) and `rope_parameters` (transformers 5). If
        they contradict each other, the precedence is that of transformers: see `_rope_of`.

        Raises:
            UserError: A key is missing, or the model has a feature that is not supported.
        """
        settings = read_settings(values)
        _refuse_foreign(values)
        missing = [key for key in _HF_REQUIRED if values.get(key) is None]
        if missing:
            raise UserError(f"config.json of a {values['model_type']} lacks {', '.join(missing)}\nfix: add the keys")
        rope = _rope_of(values)
        max_positions = values.get("max_position_embeddings") or _HF_MAX_POSITIONS
        return cls(
            **{name: values[key] for key, name in _HF_REQUIRED.items()},
            num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or 0,
            rope_theta=_HF_ROPE_THETA if rope.get("rope_theta") is None else rope["rope_theta"],
            rope_scaling=_read_rope(rope, max_positions),
            norm_eps=values.get("rms_norm_eps", _HF_NORM_EPS),
            init_std=values.get("initializer_range", _HF_INIT_STD),
            max_position_embeddings=max_positions,
            **settings,
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the config.json of the same model for transformers, versions 4 and 5, or for MiniCPM's own code."""
        rope = _write_rope(self.rope_scaling)
        max_positions = self.max_position_embeddings
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic":
            # In transformers, dynamic scaling starts at max_position_embeddings.
            max_positions = self.rope_scaling.original_max_position_embeddings or max_positions
        scales, family = {name: getattr(self, name) for name in SCALES}, self._family()
        named = {"rope_type": FAMILIES[family].rope_key}
        return {
            **write_settings(family, self.num_layers, self.sliding_window, scales),
            **{key: getattr(self, name) for key, name in _HF_REQUIRED.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            **_HF_FIXED,
            "rms_norm_eps": self.norm_eps,
            "initializer_range": self.init_std,
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if rope is None else {named.get(key, key): value for key, value in rope.items()},
            "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": self.rope_theta},
        }


def _refuse_foreign(values: Mapping[str, Any]) -> None:
    for key, allowed in _HF_FIXED.items():
        if values.get(key, allowed) != allowed:
            raise UserError(
                f"{key} {shown(values[key])} is not supported\nfix: a model with {allowed!r}, as Meta's LLaMA models"
            )
    if values.get("quantization_config"):
        raise UserError("the weights are quantized (quantization_config)\nfix: give the unquantized model")


def _rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
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


def _read_rope(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise UserError(
            f"partial_rotary_factor {shown(rope['partial_rotary_factor'])} is not supported\nfix: a model with 1.0"
        )
    if kind == "default":
        return None
    require_known("rope_type", kind, (*ROPE_KINDS, "default"))
    if not rope.get("truncate", True):
        raise UserError("rope_scaling's truncate false is not supported\nfix: a model with true")
    known = {declared.name for declared in dataclasses.fields(RopeScaling)} - {"kind"}
    given: dict[str, Any] = {"kind": kind, **{key: rope[key] for key in known if rope.get(key) is not None}}
    if "factor" not in given:
        raise UserError(f"rope_scaling of rope_type {kind} lacks factor\nfix: add it, for example 8.0")
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
    return dataclasses.replace(scaling, attention_factor=up / down)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return only the keys that transformers expects for the kind: it warns about other keys."""
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
