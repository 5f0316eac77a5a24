"""ModelCenter's LLaMA as plain data: its config.json and its parameter names. Does not import torch.

Fields and names are those of model-center 1.0.2 (model_center/model/config/llama_config.py, model/llama.py and
layer/*). Features that this version lacks (KV heads, rotary base and scaling, bfloat16) have additional fields of ours.
They are written only if they differ from the default: ModelCenter itself can read a config.json without them. MiniCPM's
three factors are such fields too, with the names of OpenBMB's training code of MiniCPM.
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.dtypes import DtypeName
from bmburst.blocks.families import SCALES, RopeScaling
from bmburst.config import check_fields, field, from_dict, to_dict
from bmburst.errors import UserError

# Maps Hugging Face's names of the weights of a block to ModelCenter's.
BLOCK_PLACES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "self_att.layernorm_before_attention",
        "self_attn": "self_att.self_attention",
        "post_attention_layernorm": "ffn.layernorm_before_ffn",
        "mlp": "ffn.ffn",
    }
)
ATTENTION_PLACES: Mapping[str, str] = MappingProxyType(
    {"q_proj": "project_q", "k_proj": "project_k", "v_proj": "project_v", "o_proj": "attention_out"}
)
MLP_PLACES: Mapping[str, str] = MappingProxyType({"gate_proj": "w_in.w_0", "up_proj": "w_in.w_1", "down_proj": "w_out"})
_WHOLE = {
    "model.embed_tokens.weight": "input_embedding.weight",
    "model.norm.weight": "encoder.output_layernorm.weight",
    "lm_head.weight": "output_projection.weight",
}
_INNER = {"self_attn": ATTENTION_PLACES, "mlp": MLP_PLACES}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)\.(?:(\w+)\.)?weight")
# The only supported values of these fields: bmburst's LLaMA has no other behavior.
_ONLY: Mapping[str, Any] = MappingProxyType(
    {
        "dropout_p": 0.0,
        "pos_bias_type": "rotary",
        "norm_bias": False,
        "att_bias": False,
        "ffn_bias": False,
        "ffn_activate_fn": "gated_silu",
        "proj_bias": False,
        "length_scale": False,
        "attn_scale": True,
        "int8": False,
        "cls_head": None,
        "post_layer_norm": False,
    }
)
# Fields of both configurations: maps ModelCenter's name to bmburst's.
_SAME = {
    "vocab_size": "vocab_size",
    "dim_model": "hidden_size",
    "dim_ff": "intermediate_size",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "dim_head": "head_dim",
    "norm_eps": "norm_eps",
    "tied": "tie_embeddings",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "max_position_embeddings": "max_position_embeddings",
    **{name: name for name in SCALES},
}
_OURS = ("num_heads_kv", "rope_theta", "rope_scaling", "max_position_embeddings", "dtype", *SCALES)
# Fields without effect. att_mask_value replaces masked scores, which do not contribute; -Infinity is not valid JSON.
_WITHOUT_MEANING = ("att_mask_value", "model_type")

Config = TypeVar("Config", bound="ModelCenterConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCenterConfig:
    """A LLaMA's configuration with ModelCenter's fields and defaults. Features that bmburst lacks must be off."""

    vocab_size: int = field("Rows of the embedding and of the head.", default=32000, unit="token ids", minimum=1)
    dim_model: int = field("Width of the residual stream.", default=4096, unit="features", minimum=1)
    num_heads: int = field("Query heads.", default=32, unit="heads", minimum=1)
    dim_head: int = field("Width of a head, even.", default=128, unit="features", minimum=2)
    dim_ff: int = field("Width inside the gated MLP.", default=11008, unit="features", minimum=1)
    num_layers: int = field("Blocks.", default=32, unit="layers", minimum=1)
    dropout_p: float = field("Dropout; only 0.", default=0.0)
    emb_init_mean: float = field("Mean of the initial embedding.", default=0.0)
    emb_init_std: float = field("Standard deviation of the initial embedding.", default=0.02, minimum=0)
    pos_bias_type: str = field("Positions; only rotary.", default="rotary")
    norm_init_var: float = field("Initial scale of a norm.", default=1.0)
    norm_bias: bool = field("Bias of norms; only false, which makes them RMSNorm.", default=False)
    norm_eps: float = field("Added to the mean square in RMSNorm.", default=1e-6, above=0)
    att_init_mean: float = field("Mean of the initial attention matrices.", default=0.0)
    att_init_std: float = field("Standard deviation of the initial attention matrices.", default=0.02, minimum=0)
    att_bias: bool = field("Bias of attention's matrices; only false.", default=False)
    ffn_init_mean: float = field("Mean of the initial MLP matrices.", default=0.0)
    ffn_init_std: float = field("Standard deviation of the initial MLP matrices.", default=0.02, minimum=0)
    ffn_bias: bool = field("Bias of the MLP's matrices; only false.", default=False)
    ffn_activate_fn: str = field("Activation; only gated_silu.", default="gated_silu")
    proj_init_mean: float = field("Mean of the initial head.", default=0.0)
    proj_init_std: float = field("Standard deviation of the initial head.", default=0.02, minimum=0)
    proj_bias: bool = field("Bias of the head; only false.", default=False)
    length_scale: bool = field("Whether widths scale activations; only false.", default=False)
    attn_scale: bool = field("Whether scores are divided by sqrt(dim_head); only true.", default=True)
    half: bool = field("Whether weights are float16, else float32; dtype overrides it.", default=True)
    int8: bool = field("Quantized weights; only false.", default=False)
    tied: bool = field("Whether the head is the embedding, transposed.", default=False)
    cls_head: int | None = field("Classes of a classifier instead of the head; only none.", default=None)
    post_layer_norm: bool = field("Norms after the residual; only false.", default=False)
    num_heads_kv: int | None = field(
        "Key and value heads; divides num_heads.", default=None, default_text="num_heads", unit="heads", minimum=1
    )
    rope_theta: float = field("Base of the rotary frequencies.", default=10000.0, above=1)
    rope_scaling: RopeScaling | None = field("Scaling of rotary positions.", default=None)  # noqa: RUF009
    max_position_embeddings: int = field("Longest sequence of the model.", default=4096, unit="tokens", minimum=1)
    dtype: DtypeName | None = field(  # noqa: RUF009
        "Type of weights and activations.", default=None, default_text="by half"
    )
    scale_emb: float | None = field("See bmburst's LlamaConfig (MiniCPM).", default=None, above=0)
    scale_depth: float | None = field("See bmburst's LlamaConfig (MiniCPM).", default=None, above=0)
    dim_model_base: int | None = field("See bmburst's LlamaConfig (MiniCPM).", default=None, minimum=1)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, allowed in _ONLY.items():
            if getattr(self, name) != allowed:
                raise UserError(
                    f"{name} {getattr(self, name)!r} of a ModelCenter model is not supported\n"
                    f"allowed: {allowed!r}\nfix: give a model that was trained so"
                )
        self.shape()

    @classmethod
    def from_values(cls: type[Config], values: Mapping[str, Any], source: str = "") -> Config:
        """Build the configuration from a config.json of ModelCenter's LLaMA.

        Args:
            values: The object in the file.
            source: Name of the file, for messages.

        Raises:
            UserError: A field is unknown, has a wrong type, or has a value that is not supported.
        """
        known = {declared.name for declared in dataclasses.fields(cls)}
        foreign = [key for key in values if key not in known and key not in _WITHOUT_MEANING]
        if foreign:
            raise UserError(
                f"{source or 'config.json'} is not a config.json of ModelCenter's LLaMA, which has no {foreign[0]}\n"
                "fix: give the directory of a ModelCenter LLaMA; other models of ModelCenter are not supported"
            )
        plain = {key: value for key, value in values.items() if key not in _WITHOUT_MEANING}
        return from_dict(cls, plain, source)

    @classmethod
    def of(cls: type[Config], shape: LlamaConfig, dtype: DtypeName) -> Config:
        """Build the configuration from a bmburst model's, with weights in `dtype`."""
        if shape.qkv_bias or shape.qk_norm or shape.sliding_window is not None:
            raise UserError(
                "ModelCenter's LLaMA has no sliding_window, qkv_bias or qk_norm\n"
                "allowed: LLaMA and MiniCPM; not Mistral, Qwen2 and Qwen3\n"
                "fix: convert it to Hugging Face, --to huggingface"
            )
        return cls(
            **{name: getattr(shape, same) for name, same in _SAME.items()},
            num_heads_kv=shape.num_kv_heads,
            emb_init_std=shape.init_std,
            att_init_std=shape.matrix_std,
            ffn_init_std=shape.matrix_std,
            proj_init_std=shape.init_std,
            half=dtype == "float16",
            dtype=dtype,
        )

    def shape(self) -> LlamaConfig:
        """Return the bmburst configuration of the same model."""
        return LlamaConfig(
            **{same: getattr(self, name) for name, same in _SAME.items()},
            num_kv_heads=self.num_heads_kv or self.num_heads,
            init_std=self.att_init_std if self.scale_emb is None else self.emb_init_std,
        )

    @property
    def dtype_name(self) -> str:
        """torch's name of the data type of weights and activations."""
        return self.dtype or ("float16" if self.half else "float32")

    def to_values(self) -> dict[str, Any]:
        """Return the object for config.json. ModelCenter 1.0.2 can read it unless the model needs our extra fields."""
        values = {name: value for name, value in to_dict(self).items() if name in _FIELDS}
        defaults: dict[str, Any] = to_dict(ModelCenterConfig()) | {
            "num_heads_kv": self.num_heads,
            "dtype": "float16" if self.half else "float32",
        }
        ours = {name for name in _OURS if values[name] not in (None, defaults[name])}
        if ours == {"max_position_embeddings"}:  # it does not change the computation
            ours = set()
        return {name: value for name, value in values.items() if name not in _OURS or name in ours}


_FIELDS = {declared.name for declared in dataclasses.fields(ModelCenterConfig)}


def is_model_center(values: Mapping[str, Any]) -> bool:
    """Return whether the object in a file is a ModelCenter configuration."""
    return "dim_model" in values


def model_center_name(name: str) -> str:
    """Return ModelCenter's name of the weight with a Hugging Face name; UserError if its LLaMA has none."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = _LAYER.fullmatch(name)
    if found is not None:
        layer, part, inner = found.groups()
        place = BLOCK_PLACES.get(part)
        inside = _INNER.get(part, {}).get(inner) if inner else ""
        if place is not None and inside is not None and (inner is None) == (part not in _INNER):
            return ".".join(filter(None, ("encoder.layers", layer, place, inside, "weight")))
    raise UserError(
        f"{name} has no place in ModelCenter's LLaMA\nallowed: a plain LLaMA, without biases and further norms\n"
        "fix: convert it to Hugging Face, --to huggingface"
    )
