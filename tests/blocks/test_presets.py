"""Presets are the published config.json files of their models, and transformers' own defaults where it has them."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS

KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}
LLAMA_31 = {"model_type": "llama", "rope_scaling": LLAMA_3 | {"factor": 8.0}}
LLAMA_32 = {"model_type": "llama", "rope_scaling": LLAMA_3 | {"factor": 32.0}}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}
QWEN3 = {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": None, "head_dim": 128}
# As in huggingface.co/<name>/config.json: the numbers of KEYS, then keys that not every family has.
PUBLISHED = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, 131072, 500000.0, 1e-5, False, LLAMA_31),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128256, 131072, 500000.0, 1e-5, False, LLAMA_31),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256, 131072, 500000.0, 1e-5, True, LLAMA_32 | {"head_dim": 64}),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256, 131072, 500000.0, 1e-5, True, LLAMA_32 | {"head_dim": 128}),
    "mistral-7b-v0.1": (
        *(4096, 14336, 32, 32, 8, 32000, 32768, 10000.0, 1e-5, False),
        {"model_type": "mistral", "sliding_window": 4096},
    ),
    "mistral-7b-v0.3": (
        *(4096, 14336, 32, 32, 8, 32768, 32768, 1000000.0, 1e-5, False),
        {"model_type": "mistral", "sliding_window": None},
    ),
    "qwen2-7b": (3584, 18944, 28, 28, 4, 152064, 131072, 1000000.0, 1e-6, False, QWEN2),
    "qwen2-72b": (8192, 29568, 80, 64, 8, 152064, 131072, 1000000.0, 1e-5, False, QWEN2),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, 32768, 1000000.0, 1e-6, True, QWEN2),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, 131072, 1000000.0, 1e-6, False, QWEN2),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, 131072, 1000000.0, 1e-5, False, QWEN2),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 151936, 40960, 1000000, 1e-6, True, QWEN3),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 151936, 40960, 1000000, 1e-6, True, QWEN3),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 151936, 40960, 1000000, 1e-6, False, QWEN3),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 151936, 40960, 1000000, 1e-6, False, QWEN3),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 151936, 40960, 1000000, 1e-6, False, QWEN3),
    "minicpm5-1b": (
        *(1536, 4608, 24, 16, 2, 130560, 131072, 5000000, 1e-6, False),
        {"model_type": "llama", "head_dim": 128},
    ),
}
PARAMETERS = {"minicpm5-1b": 1_080_632_832, "llama-3.2-1b": 1_235_814_400, "qwen3-8b": 8_190_735_360}
"""As the model cards have them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_configuration(name):
    *numbers, others = PUBLISHED[name]
    values = {**dict(zip(KEYS, numbers, strict=True)), "initializer_range": 0.02, "hidden_act": "silu", **others}
    assert LlamaConfig.from_hugging_face(values) == PRESETS[name]
    assert PRESETS[name].num_parameters == PARAMETERS.get(name, PRESETS[name].num_parameters)
    theirs = AutoConfig.for_model(**values).to_dict()  # transformers reads the same model
    assert LlamaConfig.from_hugging_face(theirs) == PRESETS[name]


def test_presets_are_the_defaults_of_transformers():
    mistral, llama = (AutoConfig.for_model(name).to_dict() for name in ("mistral", "llama"))
    theirs = replace(LlamaConfig.from_hugging_face(mistral), norm_eps=1e-5)  # published with 1e-5
    assert replace(theirs, max_position_embeddings=32768) == PRESETS["mistral-7b-v0.1"]
    theirs = replace(LlamaConfig.from_hugging_face(llama), norm_eps=1e-5)
    assert replace(theirs, max_position_embeddings=4096) == PRESETS["llama-2-7b"]
