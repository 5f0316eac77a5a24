"""Named LLaMA shapes. One row adds one."""

from collections.abc import Mapping
from types import MappingProxyType

from bmburst.blocks.config import LlamaConfig
from bmburst.errors import unknown

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
    }
)


def preset(name: str) -> LlamaConfig:
    """Return the named shape.

    Raises:
        UserError: There is no preset of that name.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
