"""`bmburst convert` for every preset and family: exact both ways, and what is wrong or missing is one clear line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import FAMILIES
from bmburst.blocks.presets import PRESETS
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.conversion import convert
from model_center_ext import config_files
from tests.checkpoint.test_convert import TOKENIZER, assert_same, hugging_face_directory, tensors, weights_of
from tests.refusals import refusal_of, says

SIZES: dict[str, int] = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_layers": 2, "head_dim": 6}
CODE = {"configuration_minicpm.py": "# its configuration", "modeling_minicpm.py": "# its model"}


def _tiny(shape: LlamaConfig) -> LlamaConfig:
    few = 4 if shape.num_kv_heads == shape.num_heads else 2
    return replace(shape, **SIZES, num_heads=4, num_kv_heads=few)


def _family(**settings: Any) -> LlamaConfig:
    return replace(_tiny(PRESETS["llama-3-8b"]), **settings)


THERE = {name: _tiny(PRESETS[name]) for name in config_files()}
NOT_THERE = {
    "mistral": _family(sliding_window=7),
    "qwen2": _family(qkv_bias=True, tie_embeddings=True),
    "qwen2-window": _family(qkv_bias=True, sliding_window=5),
    "qwen3": _family(qk_norm=True),
}


def published(folder: Path, config: LlamaConfig) -> Path:
    """A directory of Hugging Face weights, with the code that MiniCPM's have beside them."""
    hugging_face_directory(folder, config)
    if config.scale_emb is not None:  # as OpenBMB publishes it, with its own code
        path = folder / "config.json"
        own = {"AutoConfig": "configuration_minicpm.MiniCPMConfig", "AutoModel": "modeling_minicpm.MiniCPMModel"}
        elsewhere = {"AutoModelForCausalLM": "owner/other--modeling_other.Model"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": own | elsewhere}))
        for name, text in CODE.items():
            (folder / name).write_text(text)
    return folder


def _assert_carried(source: Path, target: Path) -> None:
    """Configuration, tokenizer and code are the source's."""
    assert json.loads((target / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    named = [name for name in (*TOKENIZER, *CODE) if (source / name).exists()]
    assert len(named) >= len(TOKENIZER)
    for name in named:
        assert (source / name).read_bytes() == (target / name).read_bytes(), name


def test_every_family_is_here() -> None:
    found = {shape.to_hugging_face()["model_type"] for shape in (*THERE.values(), *NOT_THERE.values())}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("name", [*THERE, *NOT_THERE])
def test_a_copy_is_exact(tmp_path: Path, name: str) -> None:
    config = (THERE | NOT_THERE)[name]
    source = published(tmp_path / "source", config)
    convert(source, tmp_path / "copy", to="bmburst", part_bytes=4000)
    assert_same(weights_of(tmp_path / "copy"), tensors(config))
    _assert_carried(source, tmp_path / "copy")
    assert hugging_face.read_config(tmp_path / "copy") == config


@pytest.mark.parametrize("name", THERE)
def test_to_model_center_and_back(tmp_path: Path, name: str) -> None:
    config = THERE[name]
    source = published(tmp_path / "source", config)
    convert(source, tmp_path / "theirs", to="model-center")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {"scale_emb", "scale_depth", "dim_model_base"}.isdisjoint(values) == name.startswith("llama")
    convert(tmp_path / "theirs", tmp_path / "back", to="huggingface")
    assert_same(weights_of(tmp_path / "back"), tensors(config))
    _assert_carried(source, tmp_path / "back")
    # Without what lies aside the configuration says as much.
    (tmp_path / "theirs" / "config.huggingface.json").unlink()
    convert(tmp_path / "theirs", tmp_path / "fresh", to="bmburst")
    assert hugging_face.read_config(tmp_path / "fresh") == config


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_model_center_has_not_is_refused(tmp_path: Path, name: str) -> None:
    source = published(tmp_path / "source", NOT_THERE[name])
    says(_refused(source, tmp_path / "out", to="model-center"), "ModelCenter", "allowed: ")


def _refused(source: Path, output: Path, to: str = "bmburst") -> str:
    told = refusal_of(convert, source, output, to=to)
    assert not output.exists()
    return told


def _weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(source: Path) -> None:
        weights = weights_of(source)
        for path in source.glob("*.safetensors*"):
            path.unlink()
        change(weights)
        save_file(weights, source / "model.safetensors")
        assert load_file(source / "model.safetensors").keys() == weights.keys()

    return spoil


def _says(**values: Any) -> Callable[[Path], None]:
    def spoil(source: Path) -> None:
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("qwen2", _weights(lambda w: w.pop("model.layers.1.self_attn.k_proj.bias")), "lacks | model.layers.1."),
        ("qwen3", _weights(lambda w: w.pop("model.layers.0.self_attn.q_norm.weight")), "lacks | model.layers.0."),
        ("minicpm-2b", _weights(lambda w: w.pop("model.embed_tokens.weight")), "lacks | model.embed_tokens.weight"),
        ("minicpm-1b", _says(tie_word_embeddings=False), "lacks | lm_head.weight"),
        ("minicpm-1b", _says(scale_depth=None), "scale_emb, dim_model_base | scale_depth"),
        ("minicpm-1b", _says(model_type="minicpm3"), "model_type | 'minicpm3'"),
        ("qwen2", _says(model_type="llama", architectures=None), "weights | model.layers.0.self_attn."),
        ("llama-3-8b", _says(model_type="qwen3", architectures=None), "lacks | model.layers.0.self_attn.q_norm.weight"),
    ],
)  # fmt: skip
def test_a_wrong_family_or_missing_tensor_is_one_line(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], words: str
) -> None:
    source = published(tmp_path / "source", (THERE | NOT_THERE)[name])
    spoil(source)
    says(_refused(source, tmp_path / "out"), words)
