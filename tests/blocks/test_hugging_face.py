"""Files of Hugging Face directories, good and bad: what needs no ranks."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.checkpoint.hugging_face import check_weights, expected_shapes, read_config
from bmburst.checkpoint.tensor_files import SafetensorsWriter, open_tensors
from bmburst.schedule.parallelism import MeshShape
from tests import tiny
from tests.refusals import refused

MINICPM: dict[str, Any] = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 2}
CONFIG = tiny.config(vocab_size=11, hidden_size=6, intermediate_size=10, num_heads=3, num_kv_heads=1)


def _directory(folder: Path, config: LlamaConfig = CONFIG) -> Path:
    (folder / "config.json").write_text(json.dumps(config.to_hugging_face()))
    return folder


def _read(folder: Path, config: LlamaConfig = CONFIG) -> dict[str, Tensor]:
    files = check_weights(folder, config)
    return {
        name: files[name].read(name, 0, torch.Size(shape).numel()).view(shape)
        for name, shape in expected_shapes(config).items()
    }


def _whole(folder: Path) -> None:
    save_file(tiny.weights(CONFIG), folder / "model.safetensors")


def _in_parts(folder: Path) -> None:
    weights = tiny.weights(CONFIG)
    names = sorted(weights)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for part, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / part)
    where = {name: part for part, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _by_torch(folder: Path) -> None:
    torch.save(tiny.weights(CONFIG), folder / "pytorch_model.bin")


def _by_torch_in_parts(folder: Path) -> None:
    weights = tiny.weights(CONFIG)
    parameters = {name: torch.nn.Parameter(weight) for name, weight in weights.items() if "mlp" in name}
    torch.save(parameters, folder / "a.bin")
    torch.save({name: weight for name, weight in weights.items() if "mlp" not in name}, folder / "b.bin")
    where = {name: "a.bin" if "mlp" in name else "b.bin" for name in weights}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("write", [_whole, _in_parts, _by_torch, _by_torch_in_parts])
def test_every_kind_of_directory(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(_directory(tmp_path))
    found = _read(tmp_path)
    for name, weight in tiny.weights(CONFIG).items():
        assert torch.equal(found[name], weight) and not found[name].requires_grad, name


@pytest.mark.parametrize("write", [_whole, _by_torch])
def test_any_run_of_a_tensor(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """ZeRO cuts anywhere, not only between rows."""
    write(_directory(tmp_path))
    files, weights = check_weights(tmp_path, CONFIG), tiny.weights(CONFIG)
    for name in ("lm_head.weight", "model.norm.weight"):
        flat = weights[name].flatten()
        for begin in range(len(flat)):
            for end in range(begin + 1, len(flat) + 1):
                assert torch.equal(files[name].read(name, begin, end), flat[begin:end])


def test_redundant_tensors_are_passed_over(tmp_path: Path) -> None:
    config = replace(CONFIG, tie_embeddings=True)
    weights = tiny.weights(config)
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, _directory(tmp_path, config) / "model.safetensors")
    assert "lm_head.weight" not in _read(tmp_path, config)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _change(name: str, weight: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = tiny.weights(CONFIG) | ({} if weight is None else {name: weight})
        if weight is None:
            del weights[name]
        save_file(weights, folder / "model.safetensors")

    return change


def _named(prefix: str, wrapped: str = "") -> Callable[[Path], None]:
    """Weights under names with another prefix, and perhaps within a layer of PEFT."""

    def change(folder: Path) -> None:
        weights = tiny.weights(CONFIG).items()
        renamed = {re.sub("^model.", prefix, name).replace("_proj", f"_proj{wrapped}"): each for name, each in weights}
        save_file(renamed, folder / "model.safetensors")

    return change


def _other_parts(*, alone: bool) -> Callable[[Path], None]:
    """Weights of another model in parts: alone without their index, or indexed beside the model."""

    def change(folder: Path) -> None:
        part, other = "model-00001-of-00001.safetensors", tiny.weights(CONFIG, seed=1)
        save_file(other, folder / part)
        if alone:
            (folder / "model.safetensors").unlink()
        else:
            index = {"weight_map": dict.fromkeys(other, part)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def _config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        other = {"architectures": None} if "model_type" in values else {}
        (folder / "config.json").write_text(json.dumps(CONFIG.to_hugging_face() | other | values))

    return change


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _text(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def _indexed(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def _pickled(value: object, **options: bool) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(value, folder / "pytorch_model.bin", **options)

    return change


def _bin(data: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({}, "llama"),
        ({"sliding_window": 3}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "sliding_window": 3}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "sliding_window": 3}, "qwen3"),
        (MINICPM, "minicpm"),
        (MINICPM | {"tie_embeddings": True}, "minicpm"),
    ],
)
def test_families_are_read_as_they_were_written(settings: dict[str, Any], family: str) -> None:
    config = replace(CONFIG, **settings)
    values = config.to_hugging_face()
    assert values["model_type"] == family
    assert LlamaConfig.from_hugging_face(values) == config
    assert {"scale_emb", "scale_depth", "dim_model_base"}.isdisjoint(values) != (family == "minicpm")
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in expected_shapes(config).values())


def test_a_minicpm_is_tied_where_it_does_not_say_otherwise() -> None:
    """As its own code has it, and as its published files, which leave the key out, mean it."""
    values = replace(CONFIG, **MINICPM).to_hugging_face()
    del values["tie_word_embeddings"]
    assert LlamaConfig.from_hugging_face(values).tie_embeddings
    llama = CONFIG.to_hugging_face()
    del llama["tie_word_embeddings"]
    assert not LlamaConfig.from_hugging_face(llama).tie_embeddings


def test_factors_are_the_published_ones() -> None:
    """arXiv:2404.06395, table 7."""
    config = replace(CONFIG, num_layers=4, scale_emb=12, scale_depth=1.4, dim_model_base=2)
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12, 0.7, 2 / 6)
    assert config.matrix_std == pytest.approx(0.02 / 3**0.5)
    assert (CONFIG.embedding_scale, CONFIG.residual_scale, CONFIG.logit_scale, CONFIG.matrix_std) == (1, 1, 1, 0.02)


def test_settings_that_cannot_be() -> None:
    for name in MINICPM:
        with refused(*MINICPM, f"without {name}", "fix: "):
            replace(CONFIG, **(MINICPM | {name: None}))
    for other in ({"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 3}):
        with refused(*MINICPM, *other, "fix: "):
            replace(CONFIG, **MINICPM, **other)
    with refused("qkv_bias", "qk_norm", "fix: "):
        replace(CONFIG, qkv_bias=True, qk_norm=True)
    for name in ("qkv_bias", "qk_norm"):
        with refused("tensor parallelism 3", "tensor parallelism 1", name):
            replace(CONFIG, num_kv_heads=3, **{name: True}).require_mesh(MeshShape(1, 1, 3))


OWN = "allowed: .safetensors files in its own directory | fix: "


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without("config.json"), "config.json | No such file | fix: "),
        (_text("config.json", "{"), "config.json | JSON | fix: "),
        (_text("config.json", "[]"), "config.json | JSON object | fix: "),
        (_config(model_type="gpt2"), "model_type 'gpt2' | llama, mistral, qwen2, qwen3, minicpm | fix: use it with"),
        (_config(sliding_window=4), "llama | sliding_window is 4 | fix: set model_type | 'mistral'"),
        (_config(model_type="gemma2"), "gemma2 | logit softcap | attn_logit_softcapping | allowed: model_type llama"),
        (_config(model_type="gpt_oss"), "gpt_oss | attention sinks | allowed: model_type llama"),
        (_config(model_type="minicpm", scale_emb=12), "minicpm | scale_depth, dim_model_base | fix: "),
        (_config(model_type="minicpm", **MINICPM), "scale_emb | None | 12.0 | fix: "),
        (_config(model_type="minicpm", **MINICPM, num_experts=8), "num_experts | minicpm | fix: "),
        (_config(model_type="minicpm", **MINICPM, sparse_config={"topk": 64}), "sparse_config | minicpm | fix: "),
        (_config(model_type="mistral"), "config.json | mistral | sliding_window | fix: "),
        (_config(model_type="mistral", sliding_window=4), "sliding_window | None | 4 | fix: "),
        (
            _config(model_type="qwen2", use_sliding_window=True, max_window_layers=1),
            "full_attention | sliding_attention | one type | docs/hugging_face.md",
        ),
        (_config(model_type="qwen2", use_sliding_window="false"), "use_sliding_window 'false' | true, false | fix: "),
        (_config(tie_word_embeddings="false"), "tie_word_embeddings 'false' | true, false | fix: "),
        (_config(tie_word_embeddings=None), "tie_word_embeddings None | true, false | fix: "),
        (_config(model_type="qwen2"), "qkv_bias | False | True | fix: "),
        (_config(model_type="qwen3", attention_bias=True), "attention_bias True | allowed: false | fix: "),
        (_config(num_key_value_heads=5), "config.json: | num_kv_heads 5 | num_heads | allowed: | fix: "),
        (_config(max_position_embeddings=0), "config.json: | max_position_embeddings: 0 | at least 1 | fix: "),
        (_config(hidden_size="wide"), "config.json: | hidden_size | 'wide' | allowed: | 16777216"),
        (_config(rope_scaling="linear"), "rope_scaling | 'linear' | object | rope_type"),
        (_config(num_hidden_layers=3), "num_layers | 2 | 3 | fix: "),
        (_config(rms_norm_eps=1e-6), "norm_eps | 1e-05 | 1e-06 | fix: "),
        (_without("model.safetensors"), "no weights | allowed: | model.safetensors | pytorch_model.bin"),
        (_truncate, "model.safetensors | fix: | truncated"),
        (_text("model.safetensors", ""), "model.safetensors | fix: | truncated"),
        (_text("model.safetensors", "x" * 5000), "model.safetensors | fix: | truncated"),
        (_change("model.norm.weight", None), "lacks | model.norm.weight | fix: the complete"),
        (_named("model.language_model."), "lacks | has model.language_model.embed_tokens | 'model.' for 'model.lang"),
        (_named("_orig_mod.model."), "lacks | has _orig_mod.model.embed_tokens.weight | without its wrapper | rename"),
        (_named(""), "lacks | has embed_tokens.weight in its place | rename its tensors: 'model.' for ''"),
        (_named("base_model.model.model.", ".base_layer"), "lacks | has base_model | not merged | merge_and_unload"),
        (_change("model.norm.weight", torch.zeros(0)), "model.norm.weight | no numbers | ZeRO-3 | fix: save"),
        (_other_parts(alone=True), "has model-00001-of-00001.safetensors | no index | fix: copy model.safetensors.ind"),
        (_other_parts(alone=False), "model.safetensors differs from | model-00001-of-00001.safetensors | remove"),
        (_change("model.layers.2.mlp.up_proj.weight", torch.zeros(2)), "model.layers.2.mlp.up_proj.weight | fix: "),
        (_change("lm_head.weight", torch.zeros(6, 11)), "lm_head.weight | [6, 11] | config.json | [11, 6] | fix: "),
        (
            _change("lm_head.weight", torch.zeros(11, 6, dtype=torch.int8)),
            "lm_head.weight | I8 | allowed: BF16 | unquantized",
        ),
        (_indexed("{}"), "index.json | weight_map | fix: "),
        (_indexed('{"weight_map": {"lm_head.weight": "gone.safetensors"}}'), "no file | gone.safetensors | fix: "),
        (_indexed('{"weight_map": {"a": "../gone.safetensors"}}'), f"{OWN} | ../gone.safetensors"),
        (_indexed('{"weight_map": {"a": "/etc/gone.safetensors"}}'), f"{OWN} | /etc/gone.safetensors"),
        (_indexed('{"weight_map": {"a": "part/gone.safetensors"}}'), f"{OWN} | part/gone.safetensors"),
        (_indexed('{"weight_map": {"a": "pytorch_model.bin"}}'), f"{OWN} | pytorch_model.bin"),
        (_indexed('{"weight_map": {"a": "a\\u0000.safetensors"}}'), f"{OWN} | a\\x00.safetensors"),
        (_indexed('{"weight_map": {"a": "' + "x" * 300 + '.safetensors"}}'), "no file | xxx.safetensors | fix: "),
        (_indexed('{"weight_map": ' * 100 + "1" + "}" * 100), "nested too deeply | 64 | fix: "),
        (_indexed('{"weight_map": ' + "9" * 5000 + "}"), "... | integer | float | fix: "),
        (_config(num_hidden_layers=10**9), "num_layers | 1000000000 | allowed: | 10000"),
        (_config(num_attention_heads=10**9), "num_heads | 1000000000 | allowed: | 65536"),
        (_pickled([1, 2]), "pytorch_model.bin | dictionary of tensors | fix: "),
        (_pickled({"state_dict": {}, "step": 3}), "dictionary of tensors | 'state_dict' | fix: torch.save(torch.load("),
        (_pickled({"step": 3}), "dictionary of tensors | 'step' is int | fix: "),
        (_pickled(LlamaConfig), "pytorch_model.bin | bmburst.blocks.config.LlamaConfig | run code | fix: "),
        (
            _pickled({}, _use_new_zipfile_serialization=False),
            "pytorch_model.bin | before torch 1.6 | fix: write it again",
        ),
        (_bin(b"no pickle"), "pytorch_model.bin | torch.save did not write it | fix: "),
        (_bin(b""), "pytorch_model.bin | fix: "),
    ],
)
def test_bad_directory(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    _whole(_directory(tmp_path))
    spoil(tmp_path)
    with refused(words) as error:
        check_weights(tmp_path, CONFIG)
    assert len(str(error.value)) < 600


def test_layers_are_compared_with_the_tensors_before_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _whole(_directory(tmp_path))
    _config(num_hidden_layers=9000)(tmp_path)
    monkeypatch.setattr("bmburst.checkpoint.hugging_face.expected_shapes", lambda _: pytest.fail("all were listed"))
    with refused("21 tensors", "config.json", "9000 layers", "fix: "):
        check_weights(tmp_path, replace(CONFIG, num_layers=9000))


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    """In Hugging Face's cache a model's directory holds links to ../../blobs."""
    directory = tmp_path / "snapshots" / "main"
    blobs = tmp_path / "blobs"
    for folder in (directory, blobs):
        folder.mkdir(parents=True)
    _in_parts(_directory(directory))
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert set(check_weights(directory, CONFIG)) == set(expected_shapes(CONFIG))


def test_no_directory(tmp_path: Path) -> None:
    with refused("no directory", "nowhere", "fix: ", "config.json"):
        read_config(tmp_path / "nowhere")


def test_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 1, 2).double().transpose(0, 2),
    }
    path = tmp_path / "w.safetensors"
    with SafetensorsWriter(
        path, [(n, tuple(t.shape), t.dtype) for n, t in tensors.items()], {"format": "pt"}
    ) as writer:
        for tensor in tensors.values():
            writer.write(tensor)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert open_tensors(path).shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("failure", ["interrupted", "incomplete", "other shape"])
def test_an_unfinished_file_replaces_nothing(tmp_path: Path, failure: str) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(2)}, path)

    def write() -> None:
        with SafetensorsWriter(path, [("a", (2,), torch.float32), ("b", (2,), torch.float32)]) as writer:
            writer.write(torch.zeros(2))
            if failure == "interrupted":
                raise KeyboardInterrupt
            if failure == "other shape":
                writer.write(torch.zeros(3))

    with pytest.raises(KeyboardInterrupt if failure == "interrupted" else ValueError):
        write()
    assert torch.equal(load_file(path)["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
