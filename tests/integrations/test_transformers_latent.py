"""Latent attention of transformers over ranks that exchange latents, against each document alone in one process."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.tiny_families import tiny_config, tiny_model
from bmburst.integrations import transformers_attention as attention
from bmburst.integrations import transformers_cache as cache_module
from bmburst.integrations import transformers_latent as latent
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests.distributed.processes import run_processes
from tests.distributed.threads import mesh_of
from tests.integrations import latent_program, recurrent_program
from tests.integrations.test_transformers_recurrent import ALONE, IDS, LIMIT, distances
from tests.refusals import refused

TYPES = sorted(path.split(".")[2] for path in latent.READ)
HEADS = 4


alone = cache(recurrent_program.alone)


def compare(folder: Path, size: int, cases: Sequence[tuple[str, str]]) -> None:
    """Also under FSDP2 with recomputation, and under DDP with transformers' own."""
    output = folder / "results.pt"
    run_processes(size, latent_program.run, output, cases, size, ("fsdp2", "ddp"))
    found, wrong = torch.load(output), {}
    assert len(found) == len(cases) + 2
    for key, ours in found.items():
        name, _, case = key.partition(" ")
        theirs = alone(name if case else cases[0][0], case or "documents")
        assert (ours.pop("times") > 0) == (size > 1 and HEADS % size == 0), key
        if off := distances(ours, theirs, LIMIT):
            wrong[key] = off
    assert wrong == {}


def test_on_two_ranks(tmp_path: Path) -> None:
    compare(tmp_path, 2, [("deepseek_v3", "padding")])


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_types(tmp_path: Path, size: int) -> None:
    compare(tmp_path, size, [*product(TYPES, recurrent_program.SPANS)])


def test_a_type_of_another_types_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes sarvam_mla of DeepSeek-V3's classes, as internlm3 of LLaMA's."""
    register()
    assert not latent.caches_latents(tiny_config("internlm3"))
    monkeypatch.setattr(latent, "READ", frozenset({"transformers.models.llama.modeling_llama"}))
    assert latent.caches_latents(tiny_config("internlm3"))


def test_a_configuration_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = tiny_model("deepseek_v3", attention.NAME)
    monkeypatch.setattr(cache_module, "caches_latents", lambda _: False)
    with refused("DeepseekV3ForCausalLM | split cache | fix: "):
        cache_module.generate(model, IDS, mesh=ALONE, max_new_tokens=1)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked(module: Any) -> None:
    module.kv_b_proj.register_forward_hook(lambda _, __, out: 2 * out)


def patched(module: Any) -> None:
    weight = module.kv_b_proj.weight
    module.kv_b_proj.forward = lambda x: 2 * nn.functional.linear(x, weight)


def biased(module: Any) -> None:
    module.kv_b_proj.bias = nn.Parameter(torch.ones(len(module.kv_b_proj.weight), dtype=torch.float64))


def of_a_class(module: Any) -> None:
    module.kv_b_proj.__class__ = Doubled


def of_another_forward(module: Any) -> None:
    """It might read keys and values."""
    theirs = type(module).forward
    module.__class__ = type(
        "Other", (type(module),), {"forward": lambda self, *args, **asked: theirs(self, *args, **asked)}
    )


@pytest.mark.parametrize("change", [hooked, patched, biased, of_a_class, of_another_forward])
def test_a_layer_that_is_not_as_it_was_read_expands_itself(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    register()
    calls: list[object] = []
    exchanged = attention.attend_latents
    monkeypatch.setattr(attention, "attend_latents", lambda *given: calls.append(given) or exchanged(*given))
    part = SplitSequences(ALONE).part(IDS)
    ours, theirs = (tiny_model("deepseek_v3", kind) for kind in ("bmburst", "eager"))
    for model in (ours, theirs):
        change(model.model.layers[0].self_attn)
    expected = theirs(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(part.logits(ours)[:, : IDS.shape[1]], expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1  # of two layers
    adapted = get_peft_model(ours, LoraConfig(r=2, target_modules=["kv_b_proj"]))
    calls.clear()
    part.logits(adapted)
    assert not calls


@pytest.mark.parametrize("changes", [{}, {"lora_bias": True}, None])
def test_generation_needs_matrices_that_are_linear(changes: dict[str, Any] | None) -> None:
    """A decoding step multiplies queries by `kv_b_proj`: what that adds or clamps was left out of the answer."""
    register()
    ids = torch.randint(2, recurrent_program.VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}

    def made(attention: str) -> Any:
        model: Any = tiny_model("deepseek_v3", attention)
        if changes is None:
            model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *each: each[2].clamp(-0.5, 0.5))
            return model
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **changes)
        model = get_peft_model(model, lora)
        for name, weight in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(weight, std=0.3)
        return model.double().eval()

    expected = made("eager").generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    model, mesh = made("bmburst"), mesh_of()
    given = {"mesh": mesh, "past_key_values": SplitCache(model.config, mesh), **options}
    if changes == {}:
        assert generate(model, ids, **given).tolist() == expected.tolist()
    else:
        with refused("not linear | kv_b_proj | bias | hook | fix: leave kv_b_proj out | one rank"):
            generate(model, ids, **given)
