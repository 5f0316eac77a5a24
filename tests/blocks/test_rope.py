"""Rotary frequencies and tables, at sizes and lengths that the model comparison does not reach."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import preset
from bmburst.blocks.rope import rotary_frequencies, rotary_tables
from tests.pairs import in_turn
from tests.refusals import refused

LONG = 1_000_003
LLAMA_2, LLAMA_3 = preset("llama-2-7b"), preset("llama-3-8b")
CASES = {
    "plain": LLAMA_2,
    "linear": replace(LLAMA_2, rope_scaling=RopeScaling(kind="linear", factor=8.0)),
    "dynamic": replace(LLAMA_2, rope_scaling=RopeScaling(kind="dynamic", factor=2.0)),
    "yarn": replace(LLAMA_2, rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_max_position_embeddings=4096)),
    "yarn, own factor": replace(
        LLAMA_2,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=4.0,
            original_max_position_embeddings=4096,
            attention_factor=0.7,
            beta_fast=16,
            beta_slow=2,
        ),
    ),
    "llama3": replace(
        LLAMA_3, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    ),
}


def _theirs(config: LlamaConfig, length: int) -> tuple[torch.Tensor, float]:
    values = config.to_hugging_face()
    module = LlamaRotaryEmbedding(TheirConfig(**{k: v for k, v in values.items() if k != "rope_scaling"}))
    module(torch.zeros(1), torch.tensor([[length - 1]]))  # dynamic scaling looks at the last position
    return module.inv_freq, module.attention_scaling


@pytest.mark.parametrize("length", [100, 4096, 4097, LONG])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_hugging_faces(name: str, length: int) -> None:
    frequencies, factor = rotary_frequencies(CASES[name], length)
    expected, expected_factor = _theirs(CASES[name], length)
    torch.testing.assert_close(frequencies, expected, rtol=5e-7, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_dynamic_starts_from_the_length_trained_on() -> None:
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_position_embeddings=1024)
    given, derived = replace(LLAMA_2, rope_scaling=scaling), replace(CASES["dynamic"], max_position_embeddings=1024)
    assert torch.equal(rotary_frequencies(given, 5000)[0], rotary_frequencies(derived, 5000)[0])


def test_far_positions_keep_their_angle() -> None:
    """Against fp64: formed in fp32, angles at a million tokens would be off by 0.03 radians."""
    positions = torch.tensor([[0, LONG - 1, 5, 524_287]])
    cos, sin = rotary_tables(LLAMA_2, positions, None)
    angles = positions.double().unsqueeze(-1) * rotary_frequencies(LLAMA_2, None)[0].double()
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("model", "table"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_tables_are_fp32_or_wider(model: torch.dtype, table: torch.dtype) -> None:
    cos, sin = rotary_tables(CASES["yarn"], torch.zeros(1, 2, dtype=torch.int64), None, model)
    assert cos.dtype == sin.dtype == table
    assert cos[0, 0, 0].item() == pytest.approx(0.1 * torch.tensor(32.0).log().item() + 1)


def test_a_head_of_one_pair() -> None:
    config = replace(CASES["dynamic"], head_dim=2)
    assert rotary_frequencies(config, LONG)[0].tolist() == [1.0]


YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "dynamic from another length": {"factor": 2.0, "original_max_position_embeddings": 256},
    "yarn": YARN,
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.9},
    "yarn of no length": {"factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 256},
    "llama3 of no length": LLAMA3,
}


def _spelled(name: str, key: str, theta: float | None) -> dict[str, Any]:
    return {key: name.split()[0], **SETTINGS[name]} | ({} if theta is None else {"rope_theta": theta})


def _both(values: dict[str, Any], length: int) -> None:
    """Compare what config.json's keys make here and in transformers: frequencies, and the factor on their tables."""
    plain = {
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 128,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
    } | values
    ours = rotary_frequencies(LlamaConfig.from_hugging_face(json.loads(json.dumps(plain))), length)
    module = LlamaRotaryEmbedding(TheirConfig.from_dict(json.loads(json.dumps(plain))))
    module(torch.zeros(1), torch.tensor([[length - 1]]))
    torch.testing.assert_close(ours[0], module.inv_freq, rtol=1e-6, atol=0)
    assert ours[1] == pytest.approx(module.attention_scaling)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_each_kind_under_each_key(name: str, spelling: str) -> None:
    for where, inside, beside in product(("rope_scaling", "rope_parameters"), (None, 5e4), (None, 2e5)):
        top = {} if beside is None else {"rope_theta": beside}
        _both({where: _spelled(name, spelling, inside), **top}, 5000)


@pytest.mark.parametrize(("old", "new"), in_turn(SETTINGS, [*list(SETTINGS)[1:], *list(SETTINGS)[:1]]))
def test_two_keys_that_contradict_each_other(old: str, new: str) -> None:
    """A rope_scaling that says anything replaces all of rope_parameters, its base too; an empty one says nothing."""
    for spelling, inside, beside in product(("type", "rope_type"), (None, 5e4), (None, 2e5)):
        top = {} if beside is None else {"rope_theta": beside}
        parameters = _spelled(new, "rope_type", 7e5)
        _both({"rope_scaling": _spelled(old, spelling, inside), "rope_parameters": parameters, **top}, 5000)
        _both({"rope_scaling": {}, "rope_parameters": parameters, **top}, 5000)
        _both({"rope_scaling": None, "rope_parameters": parameters, **top}, 5000)


@pytest.mark.parametrize("name", ["yarn", "llama3", "linear", "dynamic"])
def test_the_length_trained_on_may_stand_outside(name: str) -> None:
    for where in ("rope_scaling", "rope_parameters"):
        _both({where: _spelled(name, "rope_type", 1e5), "original_max_position_embeddings": 128}, 5000)


@pytest.mark.parametrize("kind", ["longrope", "su", "proportional", "axial", "mrope", 5, ["linear"], "x" * 5000])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_other_kinds_are_refused_by_name(kind: object, spelling: str) -> None:
    values = LLAMA_2.to_hugging_face()
    for where in ("rope_scaling", "rope_parameters"):
        with refused("rope_type", "default, dynamic, linear, llama3, yarn", "fix: use it with tr") as caught:
            LlamaConfig.from_hugging_face(values | {where: {spelling: kind, "factor": 2.0}, "rope_theta": 1e4})
        assert str(kind)[:8] in str(caught.value) and len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": 5}, "rope_parameters 5 | object | rope_type"),
        ({"rope_scaling": "linear"}, "rope_scaling | 'linear' | object | rope_type"),
        ({"rope_scaling": {"full_attention": {"rope_type": "linear"}}}, "full_attention | all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 | allowed: null, 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 | 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": "a", "mscale_all_dim": 1}}, "mscale 'a' | above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": -1}}, "mscale -1 | above 0"),
    ],
)
def test_settings_that_are_none(changes: dict[str, Any], words: str) -> None:
    with refused(words):
        LlamaConfig.from_hugging_face(LLAMA_2.to_hugging_face() | changes)
