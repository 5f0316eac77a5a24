"""Named model configurations, each with the source of its numbers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import RopeScaling
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
_LLAMA_2: Mapping[str, Any] = MappingProxyType({"vocab_size": 32000, "max_position_embeddings": 4096})
_LLAMA_3: Mapping[str, Any] = MappingProxyType(
    {"vocab_size": 128256, "num_kv_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 8192}
)
_MISTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "max_position_embeddings": 32768,
    }
)
_QWEN2: Mapping[str, Any] = MappingProxyType({"rope_theta": 1e6, "qkv_bias": True, "norm_eps": 1e-6})
_QWEN2_LONG: Mapping[str, Any] = MappingProxyType({**_QWEN2, "vocab_size": 152064, "max_position_embeddings": 131072})
_QWEN3: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151936,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "qk_norm": True,
        "norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    }
)


def _llama_3(factor: float) -> dict[str, Any]:
    scaling = RopeScaling(kind="llama3", factor=factor, original_max_position_embeddings=8192)
    return {**_LLAMA_3, "rope_scaling": scaling, "max_position_embeddings": 131072}


PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # 1.07 million parameters, for tests on a CPU. Few layers and a narrow stream, because at 4,096 tokens attention
        # takes twice as long as all matmuls. Vocabulary: 256 bytes and special ids, rounded up to a multiple of 64.
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
            hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32, **_LLAMA_2
        ),
        "llama-2-13b": LlamaConfig(
            hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40, **_LLAMA_2
        ),
        "llama-2-70b": LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8, **_LLAMA_2
        ),
        # arXiv:2407.21783, table 3.
        "llama-3-8b": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, **_LLAMA_3),
        "llama-3-70b": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, **_LLAMA_3),
        # config.json of huggingface.co/meta-llama/Llama-3.1-8B and -70B; arXiv:2407.21783, table 3.
        "llama-3.1-8b": LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, **_llama_3(8.0)
        ),
        "llama-3.1-70b": LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, **_llama_3(8.0)
        ),
        # config.json of huggingface.co/meta-llama/Llama-3.2-1B and -3B.
        "llama-3.2-1b": LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, tie_embeddings=True, **_llama_3(32.0)
        ),
        "llama-3.2-3b": LlamaConfig(
            hidden_size=3072, intermediate_size=8192, num_layers=28, num_heads=24, tie_embeddings=True, **_llama_3(32.0)
        ),
        # config.json of huggingface.co/mistralai/Mistral-7B-v0.1 and -v0.3.
        "mistral-7b-v0.1": LlamaConfig(vocab_size=32000, sliding_window=4096, **_MISTRAL),
        "mistral-7b-v0.3": LlamaConfig(vocab_size=32768, rope_theta=1e6, **_MISTRAL),
        # config.json of huggingface.co/Qwen/Qwen2-7B, Qwen2-72B, Qwen2.5-3B, Qwen2.5-7B and Qwen2.5-14B.
        "qwen2-7b": LlamaConfig(
            hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4, **_QWEN2_LONG
        ),
        "qwen2-72b": LlamaConfig(
            hidden_size=8192,
            intermediate_size=29568,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            **{**_QWEN2_LONG, "norm_eps": 1e-5},
        ),
        "qwen2.5-3b": LlamaConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=11008,
            num_layers=36,
            num_heads=16,
            num_kv_heads=2,
            tie_embeddings=True,
            max_position_embeddings=32768,
            **_QWEN2,
        ),
        "qwen2.5-7b": LlamaConfig(
            hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4, **_QWEN2_LONG
        ),
        "qwen2.5-14b": LlamaConfig(
            hidden_size=5120,
            intermediate_size=13824,
            num_layers=48,
            num_heads=40,
            num_kv_heads=8,
            **{**_QWEN2_LONG, "norm_eps": 1e-5},
        ),
        # config.json of huggingface.co/Qwen/Qwen3-0.6B, -4B, -8B, -14B and -32B; arXiv:2505.09388, table 1.
        "qwen3-0.6b": LlamaConfig(
            hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True, **_QWEN3
        ),
        "qwen3-4b": LlamaConfig(
            hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, tie_embeddings=True, **_QWEN3
        ),
        "qwen3-8b": LlamaConfig(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, **_QWEN3),
        "qwen3-14b": LlamaConfig(hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40, **_QWEN3),
        "qwen3-32b": LlamaConfig(hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64, **_QWEN3),
        # LLaMA architecture, without MiniCPM's factors. From copies of openbmb/MiniCPM5-1B's config.json; the maximum
        # position is from its model card.
        "minicpm5-1b": LlamaConfig(
            vocab_size=130560,
            hidden_size=1536,
            intermediate_size=4608,
            num_layers=24,
            num_heads=16,
            num_kv_heads=2,
            head_dim=128,
            rope_theta=5e6,
            norm_eps=1e-6,
            max_position_embeddings=131072,
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


def preset(name: str) -> LlamaConfig:
    """Return the named configuration.

    Raises:
        UserError: There is no preset of that name; the message suggests the closest name.
    """
    require_known("preset", name, PRESETS, "bmburst train --help")
    return PRESETS[name]
