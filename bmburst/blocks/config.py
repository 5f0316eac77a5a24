"""Configuration of a LLaMA-family model, of its adapters, and of the chunks that a block computes. Imports no torch."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bmburst.blocks.families import (
    FAMILIES,
    SCALES,
    RopeScaling,
    family_of,
    read_rope,
    read_settings,
    rope_of,
    write_rope,
    write_settings,
)
from bmburst.blocks.lora import ALL as ALL
from bmburst.blocks.lora import TARGETS as TARGETS
from bmburst.blocks.lora import LoRAConfig as LoRAConfig
from bmburst.config import check_fields, field
from bmburst.errors import UserError
from bmburst.schedule.parallelism import MeshShape

AT_ONCE = 2
"""Blocks whose weights ZeRO-3 holds gathered at the same time: one in work, and the next one."""
AUTOMATIC_CHUNK = 16384
"""Tokens. Matmuls run at full rate from a few thousand tokens on. For LLaMA-3-8B the tensors of a chunk take 2.2 GiB.
Accumulating its weight gradients moves 1.3 GiB, 2 % of the time of its matmuls on an H200."""
GROUP_ROWS = 1 << 21
"""Query rows (tokens times heads) of one attention call. Each call reads the residual stream for its projections.
For llama-3-8b at 128K tokens on an H200, 8 calls cost 1.3 % of a step, and 2 calls need 1 GiB more memory."""
# Far above any existing model, yet low enough to reject a corrupt number in a file immediately.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 10_000, 65_536, 2**24
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
                f"allowed: {', '.join(map(str, divisors))}\nfix: give one of them as num_kv_heads"
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

    def require_packing(self, pack: str) -> None:
        """Check that the model supports the packing of a run; it may not support documents.

        Raises:
            UserError: Its rotary embedding depends on the length of the document (dynamic NTK scaling).
        """
        if pack != "stream" and self.rope_scaling is not None and self.rope_scaling.kind == "dynamic":
            raise UserError(
                f"pack {pack} does not support model.rope_scaling.kind dynamic, which depends on the document's "
                "length\nallowed: linear, yarn, llama3, or none\n"
                "fix: --pack stream, or another --model.rope_scaling.kind"
            )

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Return the configuration described by the config.json of a Hugging Face model of one of `FAMILIES`.

        Reads `rope_scaling` with "type" or "rope_type" (transformers 4) and `rope_parameters` (transformers 5). If
        they contradict each other, the precedence is that of transformers: see `rope_of`.

        Raises:
            UserError: A key is missing or unknown, or the model has a feature that is not supported.
        """
        settings = read_settings(values)
        missing = [key for key in _HF_REQUIRED if values.get(key) is None]
        if missing:
            raise UserError(f"config.json of a {values['model_type']} lacks {', '.join(missing)}\nfix: add the keys")
        rope = rope_of(values)
        max_positions = values.get("max_position_embeddings")
        max_positions = _HF_MAX_POSITIONS if max_positions is None else max_positions
        return cls(
            **{name: values[key] for key, name in _HF_REQUIRED.items()},
            num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or 0,
            rope_theta=_HF_ROPE_THETA if rope.get("rope_theta") is None else rope["rope_theta"],
            rope_scaling=read_rope(rope, max_positions),
            norm_eps=values.get("rms_norm_eps", _HF_NORM_EPS),
            init_std=values.get("initializer_range", _HF_INIT_STD),
            max_position_embeddings=max_positions,
            **settings,
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the config.json of the same model for transformers, versions 4 and 5, or for MiniCPM's own code."""
        rope = write_rope(self.rope_scaling)
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


def mlp_chunk(rows: int, wanted: int | None, *, recomputes: bool) -> int:
    """Return the chunk size of an MLP in rows, such that chunks have nearly equal sizes; `rows`: no chunks.

    Args:
        rows: Tokens of all sequences of a rank's batch, over its tensor group.
        wanted: Largest chunk, as set by the user; 0: all rows. None: `AUTOMATIC_CHUNK` if the block is recomputed,
            because chunks then need no additional matmuls; else all, because backward would recompute gate and up.
        recomputes: Whether backward recomputes the block.
    """
    if wanted is None:
        wanted = AUTOMATIC_CHUNK if recomputes else rows
    parts = max(1, -(-rows // wanted)) if wanted else 1
    return max(1, -(-rows // parts))


def kv_heads_at_once(kv_heads: int, query_rows: int, ranks: int = 1) -> int:
    """Return the number of KV heads (with their query heads) of one attention call in a recomputed block.

    The last call may have fewer heads. The number is a multiple of `ranks`, so that an all-to-all can exchange the
    heads of each call. If `ranks` does not divide `kv_heads`, one call computes all heads.

    Args:
        kv_heads: KV heads of the block.
        query_rows: Tokens of a rank times query heads. Below 2 `GROUP_ROWS`, one call computes all heads. Otherwise
            each call has at least half of `GROUP_ROWS`, except the last.
        ranks: Ranks that share a sequence.
    """
    shares = 1 if kv_heads % ranks else kv_heads // ranks
    parts = max(1, min(shares, query_rows // GROUP_ROWS))
    return kv_heads // shares * (shares // parts)
