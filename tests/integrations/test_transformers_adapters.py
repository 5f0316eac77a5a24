"""Adapters of PEFT: methods that are accepted change each token alone, and all others are refused."""

from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_adapters import BY_TOKEN
from tests import tiny
from tests.distributed.threads import mesh_of
from tests.refusals import refused

WIDTH, TOKENS = 8, 5
OWN: dict[str, dict[str, Any]] = {
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 8},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["norm"]},
    "MISS": {"r": 4},
    "OFT": {"r": 0, "oft_block_size": 4},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "SUPERTUNING": {"sparsity": 0.5},
    "TRAINABLE_TOKENS": {"target_modules": ["embed"], "token_indices": [1, 2]},
    "VBLORA": {"vector_length": 4, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 8},
}
"""Options that a method needs, or whose default does not fit `Layers`."""


class Layers(nn.Module):
    """Layers that change each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(self.norm(self.embed(ids))).tanh())
        return found


def _adapted(kind: str) -> nn.Module:
    """Return `Layers` with an adapter whose weights are not those at the start."""
    torch.manual_seed(0)
    config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    options = {"target_modules": ["up", "down"], **OWN.get(kind, {})}
    made: nn.Module = peft.get_peft_model(Layers(), config(**options))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


@pytest.mark.parametrize("kind", sorted(BY_TOKEN))
def test_accepted_methods_change_each_token_alone(kind: str) -> None:
    """In training too: a method that draws random numbers, or that averages over a batch, would not."""
    adapted, ids = _adapted(kind).train(), torch.randint(1, 9, (2, TOKENS))
    with torch.no_grad():
        whole = adapted(ids)
        alone = torch.cat([adapted(ids[:, i : i + 1]) for i in range(TOKENS)], 1)
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    assert not torch.allclose(whole, Layers()(ids), atol=1e-3), "the adapter has an effect"


def test_a_method_that_mixes_tokens_would_be_noticed() -> None:
    adapted, ids = _adapted("LILY"), torch.randint(1, 9, (2, TOKENS))
    assert not torch.allclose(adapted(ids)[:, :1], adapted(ids[:, :1]), atol=1e-3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=3), "PROMPT_TUNING | adds tokens | fix: LoraConfig"),
        (peft.PromptEncoderConfig(num_virtual_tokens=3), "P_TUNING | adds tokens"),
        (peft.PrefixTuningConfig(num_virtual_tokens=3), "PREFIX_TUNING | adds tokens"),
        (peft.LilyConfig(target_modules=["q_proj"]), "LILY | each token alone | fix: LoraConfig"),
        (
            peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3]),
            "LORA | alora_invocation_tokens | on another rank",
        ),
        (
            peft.AdaLoraConfig(target_modules=["q_proj"], init_r=4, target_r=2, total_step=9),
            "ADALORA | adds to the loss | orth_reg_weight=0.5 | fix: orth_reg_weight=0.0",
        ),
    ],
)
def test_other_methods(config: Any, words: str) -> None:
    """They were dropped, or failed inside PEFT."""
    register()
    part = SplitSequences(mesh_of()).part(torch.arange(3, 14)[None])
    config.task_type = "CAUSAL_LM"
    model: Any = peft.get_peft_model(tiny.transformers_model("qwen3", attention="bmburst"), config)
    with refused(words):
        part.loss(model)
    if "ADALORA" in words:
        config.orth_reg_weight = 0.0
        part.loss(model)


def test_tied_adapters() -> None:
    """A model that is moved or converted keeps them equal, but no longer trains them as one."""
    register()
    part = SplitSequences(mesh_of()).part(torch.arange(3, 14)[None])

    def adapted(**targets: Any) -> Any:
        model: Any = tiny.transformers_model("qwen3", attention="bmburst", tie_word_embeddings=True)
        return peft.get_peft_model(model, peft.LoraConfig(ensure_weight_tying=True, **targets))

    tied, saved = adapted(target_modules=["embed_tokens"]), adapted(modules_to_save=["embed_tokens"])
    loss = part.loss(tied)
    for model in (tied, saved):
        model.double().float()
    with refused("ensure_weight_tying | embedding and of lm_head | moved or converted | fix: the embedding in modules"):
        part.loss(tied)
    torch.testing.assert_close(part.loss(saved), loss)
    torch.testing.assert_close(part.loss(tied.requires_grad_(False)), loss)
