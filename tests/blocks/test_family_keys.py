"""The config.json of each family: every key is read, has no effect, or is refused by name."""

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bmburst import UserError
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import FAMILIES
from bmburst.blocks.family_keys import COMMON, ROTARY
from tests import tiny
from tests.blocks.hub import HUB
from tests.checkpoint.loss_program import loss_of, write_loss
from tests.checkpoint.test_convert import edit
from tests.distributed.programs import run_program
from tests.refusals import refused

THEIRS = sorted({*FAMILIES} - {"minicpm"})  # families that are part of transformers
SMALL = {"num_hidden_layers": 2, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "head_dim": 2}


def _theirs(folder: Path, values: Mapping[str, Any]) -> PretrainedConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    found: PretrainedConfig = AutoConfig.from_pretrained(folder)
    return found


def _windows(theirs: PretrainedConfig) -> set[int | None]:
    """Return the windows of the layers of transformers' own model."""
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(theirs).model.layers
    default = getattr(theirs, "sliding_window", None) if theirs.model_type == "mistral" else None
    return {getattr(layer.self_attn, "sliding_window", default) for layer in layers}


@pytest.mark.parametrize("name", HUB)
def test_published_models_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    values = HUB[name]
    config = LlamaConfig.from_hugging_face(json.loads(json.dumps(values)))
    if values["model_type"] == "minicpm":
        assert config.tie_embeddings and config.scale_emb == 12
        return
    theirs = _theirs(tmp_path, values)
    for ours, named in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "max_position_embeddings": "max_position_embeddings",
    }.items():
        assert getattr(config, ours) == getattr(theirs, named), named
    width = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert config.head_dim == width
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    scaling = config.rope_scaling
    assert ("default" if scaling is None else scaling.kind) == theirs.rope_parameters["rope_type"]
    theirs.num_hidden_layers = 1
    assert _windows(theirs) == {config.sliding_window}


WINDOWS: dict[str, list[dict[str, Any]]] = {
    "layer_types": [
        {},
        {"layer_types": None},
        *({"layer_types": kinds} for kinds in product(("full_attention", "sliding_attention"), repeat=2)),
        {"layer_types": ["full_attention"]},
        {"layer_types": ["chunked_attention"] * 2},
    ],
    "use_sliding_window": [{"use_sliding_window": False}, {"use_sliding_window": True}],
    "sliding_window": [{"sliding_window": None}, {"sliding_window": 5}],
    "max_window_layers": [{}, *({"max_window_layers": layers} for layers in (0, 1, 2))],
}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_window_of_each_layer_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """One window for all layers, or a refusal: of a mixture, and of what transformers refuses too."""
    plain = tiny.transformers_config(family, **SMALL).to_dict()
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        plain.pop(key, None)
    names = ("layer_types", "sliding_window") if family == "mistral" else tuple(WINDOWS)
    taken = 0
    for parts in product(*(WINDOWS[name] for name in names)):
        values = plain | {key: value for part in parts for key, value in part.items()}
        try:
            wanted = _windows(_theirs(tmp_path, values))
        except Exception:  # a huggingface_hub error of validation, or one of the model
            wanted = set()
        try:
            found = {LlamaConfig.from_hugging_face(json.loads(json.dumps(values))).sliding_window}
        except UserError:
            found = set()
            kinds = set(values.get("layer_types") or [])
            assert len(wanted) != 1 or kinds - {"full_attention"}, values
        else:
            taken += 1
            assert found == wanted, values
    assert taken >= 6


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_ministral_is_the_model_of_transformers(tmp_path: Path, kind: str) -> None:
    """model_type mistral with layer_types: on the text, with a window below its length, on 1 and 2 ranks."""
    folder = tiny.save(tmp_path / "model", "mistral")
    edit(folder, layer_types=[kind] * 2)
    ids = torch.arange(1, 20)[None]
    wanted = loss_of(tiny.load(folder), ids)
    for size in (1, 2):
        run_program(size, write_loss, folder, ids, tmp_path / f"{size}")
        assert torch.load(tmp_path / f"{size}" / "loss") == pytest.approx(wanted, rel=1e-6)
    edit(folder, layer_types=["full_attention", "sliding_attention"])
    with refused("full_attention and sliding_attention", "one type for all", "docs/hugging_face.md"):
        LlamaConfig.from_hugging_face(json.loads((folder / "config.json").read_text()))


def _values(family: str) -> dict[str, Any]:
    return tiny.config(family).to_hugging_face()


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_other_models_have_are_refused_by_name(family: str) -> None:
    others: dict[str, Any] = {
        "attn_logit_softcapping": 50.0,
        "no_rope_layers": [1, 0],
        "no_rope_layer_interval": 4,
        "_sliding_window_pattern": 6,
        "per_layer_config": {"0": {"sliding_window": 4}},
        "attention_chunk_size": 8192,
        "num_local_experts": 8,
        "logit_scale": 0.5,
        "embedding_multiplier": 12,
        "mup_denominator": 32,
        "compression_config": {"format": "int-quantized"},
        "of_a_new_version": None,
    }
    for key, value in others.items():
        with refused(key, f"a {family} model", "not known", "remove the key"):
            LlamaConfig.from_hugging_face(_values(family) | {key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act \'gelu\' | "silu", "swish"'),
        ({"attention_bias": True}, "attention_bias True | allowed: false"),
        ({"mlp_bias": True}, "mlp_bias True | allowed: false"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 | allowed: 0"),
        ({"quantization_config": {"bits": 4}}, "quantized | {'bits': 4} | allowed: null | fix: the model in 16 or"),
        ({"is_causal": False}, "is_causal False | true"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification | allowed: Llama"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel | allowed: LlamaForCausalLM"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full_attention and sliding_attention"),
        ({"layer_types": "full_attention"}, "layer_types 'full_attention' | a list of 2 names"),
        ({"use_sliding_window": True}, "use_sliding_window True | allowed: null, false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "truncate False | allowed: true"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section | not known"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "llama3 | low_freq_factor, high_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "rope_scaling": None},
            "llama3 | lacks high_freq_factor",
        ),
    ],
)
def test_values_that_change_the_model_are_refused(changes: dict[str, Any], words: str) -> None:
    with refused(words):
        LlamaConfig.from_hugging_face(_values("llama") | changes)


def test_swish_is_silu() -> None:
    assert LlamaConfig.from_hugging_face(_values("llama") | {"hidden_act": "swish"}) == tiny.config()


def test_every_field_of_the_installed_transformers_is_known_or_refused() -> None:
    """Of its configurations, of what its models read, and of the settings of generation that it takes out."""
    generation = set(GenerationConfig._get_default_generation_params())
    for name in THEIRS:
        family = FAMILIES[name]
        config = CONFIG_MAPPING[name]
        source = inspect.getsource(inspect.getmodule(AutoModelForCausalLM._model_mapping[config]))
        read = set(re.findall(r"config\.(\w+)|config, \"(\w+)\"", source))
        fields = {field.name for field in dataclasses.fields(config)} | {*config().to_dict()}
        for key in sorted(fields | generation | {word for pair in read for word in pair if word}):
            if key in family.known:
                continue
            with refused(key, "not known"):
                LlamaConfig.from_hugging_face(_values(name) | {key: None})
    for key in sorted({*RopeParameters.__annotations__} - {*ROTARY}):
        with refused(key, "not known"):
            LlamaConfig.from_hugging_face(
                _values("llama") | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, key: 1}}
            )
    assert not {key for key in COMMON if COMMON[key].only is not None} & generation
