"""ModelCenter's configurations: those in files, as `bmburst train` reads them, and what ours adds."""

import dataclasses
from pathlib import Path

import pytest

from bmburst.blocks.config import LlamaConfig as Shape
from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import PRESETS
from bmburst.checkpoint.hugging_face import expected_shapes
from bmburst.checkpoint.model_center import ModelCenterConfig, model_center_name
from bmburst.cli import CommandParser
from bmburst.cli.training import configure, resolve_options
from bmburst.train.resolve import resolve
from model_center_ext import LlamaConfig, config_files
from tests.refusals import refused


@pytest.mark.parametrize("name", config_files())
def test_files_are_the_presets_in_other_words(name: str) -> None:
    """The presets own the figures, of which a test of theirs has the published numbers of parameters."""
    parser = CommandParser(prog="bmburst train", description="")
    configure(parser)
    trained = resolve_options(parser.read(["--config", str(config_files()[name]), "--data.tokenizer", "bytes"]))
    assert trained.model == resolve((), {"preset": name}).model == PRESETS[name]
    named, made = LlamaConfig.named(name), ModelCenterConfig.of(PRESETS[name], "float16")
    assert named.shape() == PRESETS[name]
    for std in ("emb_init_std", "att_init_std", "ffn_init_std"):
        assert getattr(named, std) == getattr(made, std)


def test_every_file_is_a_preset() -> None:
    assert set(config_files()) < set(PRESETS)


def test_options_win_over_the_file() -> None:
    config = resolve((config_files()["llama-3-8b"],), {"model.num_layers": "3", "dtype": "bfloat16"})
    assert (config.model.num_layers, config.model.num_kv_heads, config.dtype) == (3, 8, "bfloat16")


@pytest.mark.parametrize(
    "shape",
    [
        *(PRESETS[name] for name in config_files()),
        Shape(
            vocab_size=9,
            hidden_size=10,
            intermediate_size=3,
            num_layers=1,
            num_heads=3,
            num_kv_heads=1,
            head_dim=6,
            norm_eps=1e-4,
            init_std=0.5,
            tie_embeddings=True,
            max_position_embeddings=7,
            rope_scaling=RopeScaling(kind="dynamic", factor=2.5),
        ),
    ],
    ids=[*config_files(), "odd"],
)
def test_values_and_back(shape: Shape) -> None:
    config = ModelCenterConfig.of(shape, "bfloat16")
    values = config.to_values()
    assert ModelCenterConfig.from_values(values).shape() == shape
    assert ModelCenterConfig.from_values(values).dtype_name == "bfloat16"
    names = [model_center_name(name) for name in expected_shapes(shape)]
    assert len(set(names)) == len(names)


def test_what_model_center_can_say_is_said_in_its_own_fields(tmp_path: Path) -> None:
    ours = {"num_heads_kv", "rope_theta", "rope_scaling", "max_position_embeddings", "dtype"}
    LlamaConfig.named("llama-2-7b", layout="striped").to_json_file(tmp_path / "config.json")
    again = LlamaConfig.from_json_file(tmp_path / "config.json")
    assert again == LlamaConfig.named("llama-2-7b")
    assert ours.isdisjoint(again.to_values())
    assert "layout" not in again.to_values()
    assert {"scale_emb", "scale_depth", "dim_model_base"}.isdisjoint(again.to_values())
    assert set(LlamaConfig.named("llama-3-8b").to_values()) & ours == {
        "num_heads_kv",
        "rope_theta",
        "max_position_embeddings",
    }


def test_a_length_alone_keeps_no_one_from_reading_it() -> None:
    shape = dataclasses.replace(PRESETS["llama-2-7b"], max_position_embeddings=2048)
    assert "max_position_embeddings" not in ModelCenterConfig.of(shape, "float16").to_values()
    few = dataclasses.replace(shape, num_kv_heads=8)  # which ModelCenter 1.0.2 cannot read anyway
    assert ModelCenterConfig.of(few, "float16").to_values()["max_position_embeddings"] == 2048


def test_other_models_have_no_name_there() -> None:
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.weight",
        "model.layers.0.input_layernorm.q_proj.weight",
        "transformer.h.0.weight",
    ):
        with refused(name, "ModelCenter", "plain LLaMA"):
            model_center_name(name)
