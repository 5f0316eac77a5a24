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
    {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192}
)
_MISTRAL: Mapping[str, Any] = MappingProxyType({"max_position_embeddings": 32768})
_QWEN2: Mapping[str, Any] = MappingProxyType({"rope_theta": 1e6, "qkv_bias": True, "norm_eps": 1e-6})
_QWEN2_LONG: Mapping[str, Any] = MappingProxyType({**_QWEN2, "vocab_size": 152064, "max_position_embeddings": 131072})
_QWEN3: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151936,
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


def _model(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> LlamaConfig:
    """Return a configuration from the numbers that every model has; `more` are other fields by name."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **more,
    )


# Numbers: hidden size, intermediate size of the MLP, layers, query heads, KV heads.
PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # 1.07 million parameters, for tests on a CPU. Few layers and a narrow stream, because at 4,096 tokens attention
        # takes twice as long as all matmuls. Vocabulary: 256 bytes and special ids, rounded up to a multiple of 64.
        "llama-tiny": _model(128, 512, 4, 4, 2, vocab_size=320, max_position_embeddings=131072),
        # arXiv:2307.09288, table 1.
        "llama-2-7b": _model(4096, 11008, 32, 32, 32, **_LLAMA_2),
        "llama-2-13b": _model(5120, 13824, 40, 40, 40, **_LLAMA_2),
        "llama-2-70b": _model(8192, 28672, 80, 64, 8, **_LLAMA_2),
        # arXiv:2407.21783, table 3.
        "llama-3-8b": _model(4096, 14336, 32, 32, 8, **_LLAMA_3),
        "llama-3-70b": _model(8192, 28672, 80, 64, 8, **_LLAMA_3),
        # config.json of huggingface.co/meta-llama/Llama-3.1-8B and -70B; arXiv:2407.21783, table 3.
        "llama-3.1-8b": _model(4096, 14336, 32, 32, 8, **_llama_3(8.0)),
        "llama-3.1-70b": _model(8192, 28672, 80, 64, 8, **_llama_3(8.0)),
        # config.json of huggingface.co/meta-llama/Llama-3.2-1B and -3B.
        "llama-3.2-1b": _model(2048, 8192, 16, 32, 8, tie_embeddings=True, **_llama_3(32.0)),
        "llama-3.2-3b": _model(3072, 8192, 28, 24, 8, tie_embeddings=True, **_llama_3(32.0)),
        # config.json of huggingface.co/mistralai/Mistral-7B-v0.1 and -v0.3.
        "mistral-7b-v0.1": _model(4096, 14336, 32, 32, 8, vocab_size=32000, sliding_window=4096, **_MISTRAL),
        "mistral-7b-v0.3": _model(4096, 14336, 32, 32, 8, vocab_size=32768, rope_theta=1e6, **_MISTRAL),
        # config.json of huggingface.co/Qwen/Qwen2-7B, Qwen2-72B, Qwen2.5-3B, Qwen2.5-7B and Qwen2.5-14B.
        "qwen2-7b": _model(3584, 18944, 28, 28, 4, **_QWEN2_LONG),
        "qwen2-72b": _model(8192, 29568, 80, 64, 8, **{**_QWEN2_LONG, "norm_eps": 1e-5}),
        "qwen2.5-3b": _model(
            *(2048, 11008, 36, 16, 2),
            **{**_QWEN2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_embeddings": True},
        ),
        "qwen2.5-7b": _model(3584, 18944, 28, 28, 4, **_QWEN2_LONG),
        "qwen2.5-14b": _model(5120, 13824, 48, 40, 8, **{**_QWEN2_LONG, "norm_eps": 1e-5}),
        # config.json of huggingface.co/Qwen/Qwen3-0.6B, -4B, -8B, -14B and -32B; arXiv:2505.09388, table 1.
        "qwen3-0.6b": _model(1024, 3072, 28, 16, 8, tie_embeddings=True, **_QWEN3),
        "qwen3-4b": _model(2560, 9728, 36, 32, 8, tie_embeddings=True, **_QWEN3),
        "qwen3-8b": _model(4096, 12288, 36, 32, 8, **_QWEN3),
        "qwen3-14b": _model(5120, 17408, 40, 40, 8, **_QWEN3),
        "qwen3-32b": _model(5120, 25600, 64, 64, 8, **_QWEN3),
        # LLaMA architecture, without MiniCPM's factors. From copies of openbmb/MiniCPM5-1B's config.json; the maximum
        # position is from its model card.
        "minicpm5-1b": _model(
            *(1536, 4608, 24, 16, 2),
            vocab_size=130560,
            head_dim=128,
            max_position_embeddings=131072,
            rope_theta=5e6,
            norm_eps=1e-6,
        ),
        # arXiv:2404.06395, section 6.1 with table 2; factors and init_std from its appendix A.1.
        "minicpm-1b": _model(1536, 3840, 52, 24, 8, vocab_size=73440, **_MINICPM),
        "minicpm-2b": _model(2304, 5760, 40, 36, 36, vocab_size=122753, **_MINICPM),
    }
)


def preset(name: str) -> LlamaConfig:
    """Return the named configuration; UserError, with the closest name, if there is none."""
    require_known("preset", name, PRESETS, "bmburst train --help")
    return PRESETS[name]
