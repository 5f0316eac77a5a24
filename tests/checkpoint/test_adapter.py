"""Adapters of PEFT: what is merged is what PEFT merges, and what changes the weights' meaning is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftType, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from bmburst.checkpoint.adapter import KEYS, open_merged
from tests import tiny
from tests.refusals import refused

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("adapters") / "base")


def _adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """Write an adapter by PEFT with numbers in both matrices."""
    torch.manual_seed(0)
    given = {"target_modules": TARGETS, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    get_peft_model(tiny.load(base), LoraConfig(r=2, lora_alpha=3, **given | settings)).save_pretrained(folder)
    return folder


def _says(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _require_pefts(folder: Path, base: Path) -> None:
    """Check the merged weights against PEFT, which reads adapter_config.json by itself."""
    wanted = PeftModel.from_pretrained(tiny.load(base), folder).merge_and_unload().state_dict()
    merged = open_merged(folder, base)
    for name in merged.places:
        numbers = merged.read(name, 0, wanted[name].numel()).view_as(wanted[name])
        torch.testing.assert_close(numbers, wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [True, False, "gaussian", "orthogonal", "eva"])
def test_the_first_numbers_do_not_matter(tmp_path: Path, base: Path, kind: Any) -> None:
    folder = _adapter(tmp_path / "adapter", base)
    _says(folder, init_lora_weights=kind, lora_dropout=0.1)
    _require_pefts(folder, base)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"layers.0.self_attn.q_proj": 5, "v_proj": 1}, "alpha_pattern": {r".*\.1\..*_proj": 9}},
        {"rank_pattern": {"qkv": 7, "v_proj": 1, "layers.9.self_attn.q_proj": 3}, "alpha_pattern": {"lm_head": 9}},
        {"modules_to_save": ["norm", "lm_head"], "use_rslora": True, "rank_pattern": {"q_proj": 4}},
        {"modules_to_save": ["model.embed_tokens"]},
    ],
)
def test_settings_that_change_what_is_merged(tmp_path: Path, base: Path, settings: dict[str, Any]) -> None:
    folder = _adapter(tmp_path / "adapter", base, **settings)
    path = folder / "adapter_model.safetensors"
    torch.manual_seed(7)
    changed = {name: each if "lora" in name else torch.randn_like(each) for name, each in load_file(path).items()}
    save_file(changed, path, {"format": "pt"})  # modules that were trained
    if settings == {"modules_to_save": ["model.embed_tokens"]}:
        with refused("modules_to_save | model.embed_tokens | embed_tokens"):
            open_merged(folder, base)
        return
    _require_pefts(folder, base)


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4", "olora"])
def test_first_numbers_that_change_the_model_are_refused(tmp_path: Path, base: Path, kind: str) -> None:
    """PEFT merges another model than W + scale B A of the weights in the files: earlier versions wrote the latter."""
    folder = _adapter(tmp_path / "adapter", base, init_lora_weights=kind)
    plain = _adapter(tmp_path / "plain", base)
    save_file(load_file(folder / "adapter_model.safetensors"), plain / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    ours = open_merged(plain, base).read(name, 0, 24 * 24).view(24, 24)
    theirs = PeftModel.from_pretrained(tiny.load(base), folder).merge_and_unload().state_dict()[name]
    assert (ours - theirs).abs().max() > 0.1
    with refused(f'init_lora_weights {kind!r} | allowed: null, true, false, "gaussian"', "merge_and_unload"):
        open_merged(folder, base)


# A value that PEFT gives a meaning to, for each field whose default alone is taken.
OTHER: dict[str, Any] = {
    "task_type": "SEQ_CLS",
    "init_lora_weights": "loftq",
    "bias": "lora_only",
    "trainable_token_indices": [3],
    "target_parameters": ["weight"],
    "exclude_modules": ["k_proj"],
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1, 2],
}


def test_every_field_of_the_installed_peft_is_known_or_refused(tmp_path: Path, base: Path) -> None:
    """Its own default is taken; another value is refused by name, unless it has no effect."""
    folder = _adapter(tmp_path / "adapter", base)
    values = json.loads((folder / "adapter_config.json").read_text())
    named = [field.name for field in dataclasses.fields(LoraConfig)]
    assert {*values} <= {*named} and "target_modules" in named
    open_merged(folder, base)
    for name in named:
        if name in KEYS and (KEYS[name].only is None or name == "peft_type"):
            continue
        (folder / "adapter_config.json").write_text(json.dumps(values | {name: OTHER.get(name, {"a": 1})}))
        with refused(name, "of an adapter"):
            open_merged(folder, base)
    (folder / "adapter_config.json").write_text(json.dumps(values | {"of_a_new_version": None}))
    with refused("of_a_new_version", "not known", "remove the key"):
        open_merged(folder, base)


def test_configurations_as_others_write_them(tmp_path: Path, base: Path) -> None:
    """Of PEFT 0.2 (alpaca-lora), of ms-swift, and of Unsloth."""
    folder = _adapter(tmp_path / "adapter", base)
    old = {"base_model_name_or_path": "x", "bias": "none", "enable_lora": None, "fan_in_fan_out": False}
    old |= {"inference_mode": True, "lora_alpha": 3, "lora_dropout": 0.05, "merge_weights": False}
    old |= {"modules_to_save": None, "peft_type": "LORA", "r": 2, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    swift = {"lora_dtype": None, "lorap_emb_lr": 1e-06, "lorap_lr_ratio": None}
    for values in (old, old | swift, old | {"auto_mapping": {"unsloth_fixed": True}, "revision": "main"}):
        (folder / "adapter_config.json").write_text(json.dumps(values))
        _require_pefts(folder, base)


@pytest.mark.parametrize(
    "given",
    [
        r".*\.self_attn\.(q|v)_proj",
        r"model\.layers\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)",
        ["self_attn.q_proj", "up_proj"],
        "all-linear",
        [f"model.layers.{layer}.mlp.gate_proj" for layer in range(2)],
        ["q_proj", "query_key_value"],
    ],
)
def test_targets_as_peft_reads_them(tmp_path: Path, base: Path, given: Any) -> None:
    _require_pefts(_adapter(tmp_path / "adapter", base, target_modules=given), base)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": r".*layers\.1.*\.q_proj"}, "model.layers.0.self_attn.q_proj.lora_A | some layers"),
        ({"target_modules": ["lm_head"]}, "lm_head.base_layer.weight | embeddings, heads"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens.base_layer.weight | embeddings, heads"),
    ],
)
def test_other_targets_are_refused_by_name(tmp_path: Path, base: Path, settings: dict[str, Any], words: str) -> None:
    with refused(words, "merge_and_unload"):
        open_merged(_adapter(tmp_path / "adapter", base, **settings), base)


def test_an_adapter_on_the_head_alone(tmp_path: Path, base: Path) -> None:
    """As PEFT writes it with save_embedding_layers=False."""
    folder = _adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: each for name, each in weights.items() if "lora_" in name}, folder / "adapter_model.safetensors")
    with refused("adapters on lm_head | allowed: q_proj", "merge_and_unload"):
        open_merged(folder, base)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (r".*\.q_proj", "does not select model.layers.0.self_attn.v_proj"),
        ([*TARGETS, "o_proj"], "selects model.layers.0.self_attn.o_proj | no adapter"),
        (r".*(q_proj|v_proj", "no regular expression"),
        (None, "target_modules None | names of modules"),
    ],
)
def test_targets_that_are_not_those_of_the_file(tmp_path: Path, base: Path, given: Any, words: str) -> None:
    folder = _adapter(tmp_path / "adapter", base)
    _says(folder, target_modules=given)
    with refused(words):
        open_merged(folder, base)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (".weight", ".default.weight", "lora_A.default.weight | does not save under this name"),
        ("base_model.model.", "", "holds model.layers.0.self_attn.q_proj.lora_A.weight | not save under this name"),
        ("model.layers", "model.language_model.layers", "base_model.model.model.language_model.layers | other mod"),
        (".model.model", ".model._orig_mod.model", "_orig_mod.model.layers | saved from a wrapped model"),
    ],
)
def test_names_that_peft_does_not_save(tmp_path: Path, base: Path, old: str, new: str, words: str) -> None:
    """PEFT leaves all but the first out with a warning, and merges nothing: so its merge is no advice here."""
    folder = _adapter(tmp_path / "adapter", base)
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new, 1): each for name, each in load_file(path).items()}, path)
    with refused(words, "save_pretrained", "rename") as caught:
        open_merged(folder, base)
    assert "merge_and_unload" not in str(caught.value)


def test_an_adapter_in_a_file_of_torch(tmp_path: Path, base: Path) -> None:
    folder = _adapter(tmp_path / "adapter", base)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    _require_pefts(folder, base)


def test_weights_beside_the_adapters(tmp_path: Path, base: Path) -> None:
    """PEFT adds a resized embedding to the file, without a word in adapter_config.json."""
    folder = tmp_path / "adapter"
    model = tiny.load(base)
    model.resize_token_embeddings(64)
    get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS)).save_pretrained(folder, save_embedding_layers=True)
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] is None
    with refused("lm_head.weight", "embeddings, heads", "merge_and_unload"):
        open_merged(folder, base)


def test_an_adapter_without_numbers(tmp_path: Path, base: Path) -> None:
    """As Trainers wrote it under ZeRO-3: huggingface/trl#4416, huggingface/peft#2450."""
    folder = _adapter(tmp_path / "adapter", base)
    weights = load_file(folder / "adapter_model.safetensors")
    for stored in ({}, {name: torch.zeros(0) for name in weights}):
        save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})
        with refused("adapter_model.safetensors is empty", "ZeRO-3", "stage3_gather"):
            open_merged(folder, base)


def test_weights_beside_an_adapter_are_those_of_the_model_that_it_names(tmp_path: Path, base: Path) -> None:
    """transformers takes them, whatever the adapter names; then the named model was evaluated without a word."""
    folder = _adapter(tiny.save(tmp_path / "both", seed=9), base)
    with refused(f"{folder} has the weights of a model | names another one, {base} | fix: --base DIR"):
        open_merged(folder, None)
    assert open_merged(folder, base).directory == base
    same = _adapter(tiny.save(tmp_path / "same"), base)
    assert open_merged(same, None).directory == base
    _require_pefts(same, base)


def test_other_kinds_of_adapters_are_refused_by_their_name(tmp_path: Path, base: Path) -> None:
    folder = tmp_path / "adapter"
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(tiny.load(base), prompts).save_pretrained(folder)
    for kind in PeftType:
        if kind != PeftType.LORA:
            _says(folder, peft_type=kind.value)
            with refused(f"peft_type is '{kind.value}'", "allowed: LORA"):
                open_merged(folder, base)
