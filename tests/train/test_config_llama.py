"""LlamaConfig against Hugging Face's own, in both forms of its config.json."""

import json

import pytest
import torch
from transformers import LlamaConfig as HuggingFaceConfig
from transformers import LlamaForCausalLM

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import PRESETS, preset
from bmburst.config import from_dict, to_dict
from tests import tiny
from tests.refusals import refusal_of, says


def small(**more):
    return tiny.config(**{"num_layers": 3, "num_heads": 6, **more})


SCALINGS = [
    None,
    RopeScaling(kind="linear", factor=2.5),
    RopeScaling(kind="dynamic", factor=4),
    RopeScaling(kind="yarn", factor=4, original_max_position_embeddings=16),
    RopeScaling(
        kind="yarn", factor=4, original_max_position_embeddings=16, beta_fast=20, beta_slow=2, attention_factor=1.25
    ),
    RopeScaling(kind="llama3", factor=8, original_max_position_embeddings=32, low_freq_factor=1.5, high_freq_factor=3),
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", ["both", "rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("more", [{}, {"head_dim": 10, "tie_embeddings": True, "norm_eps": 1e-6, "init_std": 0.5}])
def test_transformers_reads_what_we_write_and_we_what_it_writes(scaling, form, more):
    config = small(**more, rope_theta=5e5, rope_scaling=scaling)
    values = json.loads(json.dumps(config.to_hugging_face()))
    if form == "rope_scaling":
        del values["rope_parameters"]
    elif form == "rope_parameters":
        del values["rope_scaling"], values["rope_theta"]
    theirs = HuggingFaceConfig(**values)
    assert theirs.rope_parameters["rope_theta"] == 5e5
    assert theirs.rope_parameters["rope_type"] == ("default" if scaling is None else scaling.kind)
    assert LlamaConfig.from_hugging_face(theirs.to_dict()) == config
    assert LlamaConfig.from_hugging_face(values) == config
    assert from_dict(LlamaConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("more", [{}, {"head_dim": 10}, {"tie_embeddings": True}])
def test_num_parameters_is_what_transformers_makes(more):
    config = small(**more)
    with torch.device("meta"):
        model = LlamaForCausalLM(HuggingFaceConfig(**config.to_hugging_face()))
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


# Meta's models as their cards on Hugging Face count them; MiniCPM: arXiv:2404.06395, table 2, and one embedding.
PUBLISHED = {
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "minicpm-1b": 1247442432 + 73440 * 1536,
    "minicpm-2b": 2442057984 + 122753 * 2304,
}


def test_presets_have_the_published_number_of_parameters():
    found = {name: shape.num_parameters for name, shape in PRESETS.items() if name in PUBLISHED}
    assert found == PUBLISHED


def test_the_tiny_preset_serves_the_main_job():
    tiny = PRESETS["llama-tiny"]
    assert 1_000_000 <= tiny.num_parameters <= 2_000_000
    assert tiny.vocab_size >= 259
    assert tiny.num_kv_heads < tiny.num_heads
    assert tiny.max_position_embeddings >= 4096


def test_minicpm_code_finds_the_kind_of_scaling():
    """It reads `rope_scaling["type"]` and `["factor"]`, and knows linear and dynamic."""
    factors = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16}
    for scaling in SCALINGS[1:3]:
        config = small(**factors, rope_scaling=scaling)
        values = config.to_hugging_face()
        assert values["rope_scaling"] == {"type": scaling.kind, "factor": scaling.factor}
        assert LlamaConfig.from_hugging_face(values) == config
        del values["rope_parameters"]
        assert LlamaConfig.from_hugging_face(values) == config
        assert "type" not in small(rope_scaling=scaling).to_hugging_face()["rope_scaling"]


def test_defaults_of_keys_that_hugging_face_may_leave_out():
    values = {
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": None,
        "head_dim": None,
        "rope_scaling": None,
    }
    theirs, ours = HuggingFaceConfig(**values), LlamaConfig.from_hugging_face(values)
    assert (ours.num_kv_heads, ours.head_dim, ours.rope_theta) == (2, 4, theirs.rope_parameters["rope_theta"])
    assert (ours.norm_eps, ours.init_std) == (theirs.rms_norm_eps, theirs.initializer_range)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "architectures | LlamaForCausalLM | mistral | MistralForCausalLM"),
        (
            {"model_type": "gemma"},
            "model_type 'gemma' | llama, mistral, qwen2, qwen3, minicpm | fix: use it with transformers",
        ),
        ({"model_type": None}, "model_type None | llama, mistral, qwen2, qwen3, minicpm"),
        ({"hidden_size": None}, "llama | hidden_size | fix: "),
        ({"hidden_size": "wide"}, "hidden_size | 'wide' | integer | 16777216"),
        ({"num_key_value_heads": 4}, "num_kv_heads 4 | num_heads 6 | 1, 2, 3, 6"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear | factor | fix: "),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor | 0.5 | at least 1"),
    ],
)
def test_foreign_models_are_refused(changes, words):
    says(refusal_of(LlamaConfig.from_hugging_face, small().to_hugging_face() | changes), words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_heads": 5, "num_kv_heads": 5}, "hidden_size 24 | num_heads 5 | fix: | head_dim"),
        ({"num_kv_heads": 4}, "num_kv_heads 4 | num_heads 6 | 1, 2, 3, 6"),
        ({"num_heads": 8, "num_kv_heads": 8}, "head_dim 3 | odd | fix: "),
        ({"head_dim": 7}, "head_dim 7 | odd | fix: "),
        ({"head_dim": -2}, "head_dim | -2 | at least 0"),
        ({"vocab_size": 0}, "vocab_size | 0 | at least 1"),
        ({"num_layers": 1.5}, "num_layers | 1.5 | integer"),
        ({"rope_theta": 0.0}, "rope_theta | 0.0 | above 1"),
        ({"norm_eps": 0}, "norm_eps | 0 | above 0"),
        ({"rope_scaling": {"kind": "linear"}}, "rope_scaling | linear | RopeScaling"),
        ({"tie_embeddings": 1}, "tie_embeddings | 1 | true or false"),
        ({"kind": "ntk", "factor": 2}, "kind | 'ntk' | dynamic, linear, llama3, yarn"),
        ({"kind": "linear", "factor": 0.9}, "factor | 0.9 | at least 1"),
        ({"kind": "yarn", "factor": 2}, "yarn | original_max_position_embeddings | fix: "),
        ({"kind": "llama3", "factor": 2}, "llama3 | original_max_position_embeddings | fix: "),
        (
            {"kind": "llama3", "factor": 2, "original_max_position_embeddings": 8, "low_freq_factor": 4},
            "high_freq_factor 4 | low_freq_factor 4 | fix: ",
        ),
        (
            {"kind": "yarn", "factor": 2, "original_max_position_embeddings": 8, "beta_fast": 1},
            "beta_fast 1 | beta_slow 1 | fix: ",
        ),
    ],
)
def test_shapes_and_scalings_that_cannot_be_are_refused(values, words):
    says(refusal_of(RopeScaling if "kind" in values else small, **values), words)


def test_unknown_preset_names_the_nearest():
    says(refusal_of(preset, "lama-tiny"), "'lama-tiny' | mean 'llama-tiny' | known: llama-tiny | 17 more | --help")
