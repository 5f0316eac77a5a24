"""Rotary frequencies and tables, at sizes and lengths that the model comparison does not reach."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bmburst.blocks.config import LlamaConfig, RopeScaling
from bmburst.blocks.presets import preset
from bmburst.blocks.rope import rotary_frequencies, rotary_tables

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
