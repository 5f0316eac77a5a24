"""Models that are trained: the presets, and two small ones for losses."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.errors import require_known

_BYTES = 320  # ids: 256 bytes and special ones, rounded up
SHAPES: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        **PRESETS,
        # As narrow as llama-tiny, with heads for up to 8 ranks, wide enough for every kernel.
        "tiny-8-heads": replace(PRESETS["llama-tiny"], num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64),
        # 95 million parameters.
        "llama-95m": LlamaConfig(
            vocab_size=_BYTES,
            hidden_size=1024,
            intermediate_size=2816,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            rope_theta=500000.0,
            max_position_embeddings=131072,
        ),
    }
)


def shape(name: str, layers: int, tokens: int) -> LlamaConfig:
    """Return a shape with so many layers, for sequences of so many tokens.

    Raises:
        UserError: There is no shape of that name.
    """
    require_known("preset", name, SHAPES)
    model = SHAPES[name]
    longest = max(tokens, model.max_position_embeddings)
    return replace(model, num_layers=layers, max_position_embeddings=longest)
