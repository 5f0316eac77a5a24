"""Named model configurations, each with the source of its numbers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bmburst.blocks.config import LlamaConfig
from bmburst.errors import require_known

_MINICPM: Mapping[str, Any] = MappingProxyType(
    {
        "max_position_embeddings": 4096,
        "tie_embeddings": True,
        "init_std": 0.1,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
)
PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # 1.07 million parameters. Few layers and a narrow stream, because over 4,096 tokens on a CPU attention costs
        # twice as much as all matrices together. 256 bytes and special ids, rounded up to a multiple of 64.
        "llama-tiny": LlamaConfig(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=512,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            max_position_embeddings=131072,
        ),
        # arXiv:2307.09288, table 1.
        "llama-2-7b": LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            max_position_embeddings=4096,
        ),
        "llama-2-13b": LlamaConfig(
            vocab_size=32000,
            hidden_size=5120,
            intermediate_size=13824,
            num_layers=40,
            num_heads=40,
            num_kv_heads=40,
            max_position_embeddings=4096,
        ),
        "llama-2-70b": LlamaConfig(
            vocab_size=32000,
            hidden_size=8192,
            intermediate_size=28672,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            max_position_embeddings=4096,
        ),
        # arXiv:2407.21783, table 3.
        "llama-3-8b": LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            rope_theta=500000.0,
            max_position_embeddings=8192,
        ),
        "llama-3-70b": LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            rope_theta=500000.0,
            max_position_embeddings=8192,
        ),
        # arXiv:2404.06395, section 6.1 with table 2; factors and init_std from its appendix A.1.
        "minicpm-1b": LlamaConfig(
            vocab_size=73440,
            hidden_size=1536,
            intermediate_size=3840,
            num_layers=52,
            num_heads=24,
            num_kv_heads=8,
            **_MINICPM,
        ),
        "minicpm-2b": LlamaConfig(
            vocab_size=122753,
            hidden_size=2304,
            intermediate_size=5760,
            num_layers=40,
            num_heads=36,
            num_kv_heads=36,
            **_MINICPM,
        ),
    }
)


def preset(name: str, kind: str = "preset") -> LlamaConfig:
    """Return the named configuration.

    Args:
        name: The preset.
        kind: What the message calls a preset.

    Raises:
        UserError: There is no preset of that name; the message names the nearest.
    """
    require_known(kind, name, PRESETS)
    return PRESETS[name]
