"""A model is checked in every call, in a time that the forward pass of its layers does not notice."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from bmburst import Mesh
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_code import module_of
from bmburst.integrations.transformers_modules import Modules
from tests import tiny
from tests.distributed.processes import on_processes
from tests.distributed.threads import mesh_of
from tests.refusals import refused

IDS = torch.arange(3, 14)[None]


def _layer(model: Any) -> Any:
    return model.model.layers[1]


def _drops_layers(model: Any) -> None:
    _layer(model).layerdrop = 0.5
    model.train()


def _chunks(model: Any) -> None:
    model.config.chunk_size_feed_forward = 4


def _other_tokens(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(5, model.config.hidden_size))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attention": (lambda model: model.set_attn_implementation("sdpa"), "its attention is 'sdpa' | fix: register()"),
    "types of layers": (lambda model: setattr(model.config, "layer_types", ["full_attention", "conv"]), "type 'conv'"),
    "chunks": (_chunks, "chunk_size_feed_forward | divides the tokens | fix: "),
    "another layer": (
        lambda model: setattr(_layer(model).mlp, "act_fn", nn.Conv1d(1, 1, 3, padding=1)),
        "convolution model.layers.1.mlp.act_fn | neighbouring tokens",
    ),
    "positions": (
        lambda model: setattr(_layer(model), "create_position_ids_from_input_ids", lambda ids: ids),
        "positions begin behind the id of padding",
    ),
    "dropped layers": (_drops_layers, "skip different layers | fix: layerdrop=0.0"),
    "tokens": (_other_tokens, "token id 13 | vocabulary has 5"),
    "a state": (lambda model: setattr(model, "_is_stateful", True), "state | token"),
    "adapters": (
        lambda model: peft.inject_adapter_in_model(peft.LilyConfig(target_modules=["q_proj"]), model),
        "LILY | each token alone | fix: LoraConfig",
    ),
    "loss": (lambda model: setattr(model, "_loss_function", nn.functional.mse_loss), "loss_function | was set"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls(change: str) -> None:
    register()
    part = SplitSequences(mesh_of()).part(IDS)
    model = tiny.transformers_model("qwen3", attention="bmburst").eval()
    for _ in range(2):
        part.loss(model)
    make, words = CHANGES[change]
    make(model)
    with refused(words):
        part.loss(model)


def test_a_function_of_a_recurrent_layer_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    part, model = SplitSequences(mesh_of()).part(IDS), tiny.transformers_model("qwen3_next", attention="bmburst")
    part.loss(model)
    name = "torch_chunk_gated_delta_rule"
    monkeypatch.setattr(f"{module_of('qwen3_next')}.{name}", lambda query, **_: query)
    with refused(f"recurrent layer | not the one that was read | {name} takes query, _ | fix: "):
        part.loss(model)


@on_processes(2)
def test_weights_that_are_split_after_the_first_call() -> None:
    register()
    part = SplitSequences(Mesh.over_process_group()).part(IDS)
    model = tiny.transformers_model("qwen3", attention="bmburst")
    part.loss(model)
    parallelize_module(_layer(model).mlp, init_device_mesh("cpu", (2,)), {"up_proj": ColwiseParallel()})
    with refused("Qwen3ForCausalLM | tensor parallel | fix: leave tp_plan"):
        part.loss(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_modules_are_those_that_torch_finds() -> None:
    model: Any = peft.get_peft_model(tiny.transformers_model("qwen3"), peft.LoraConfig(target_modules="all-linear"))
    model.shared, model.none = _layer(model.base_model.model), None
    modules = Modules(model)
    assert modules.every == list(model.modules())
    assert modules.of(nn.Linear) == [module for module in model.modules() if isinstance(module, nn.Linear)]
    traced = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))  # has its modules in C++
    assert Modules(traced).every == list(traced.modules()) and len(Modules(traced).weights()) == 2
    assert modules.having("rope_type") == [model.base_model.model.model.rotary_emb]
    assert modules.having("peft_config")[0] is model
    assert {*map(id, modules.weights())} - {id(None)} == {*map(id, model.parameters())}
    inner = model.base_model.model.model.layers[0]
    assert modules.inside(inner)(modules.of(nn.Linear)) == Modules(inner).of(nn.Linear)
    assert modules.inside(model)(modules.of(nn.Linear)) == modules.of(nn.Linear)
    assert Modules("model").every == Modules("model").hooks() == []


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
def test_the_checks_of_a_call_do_not_grow_by_generators_of_each_module(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`named_modules` calls itself for every module: 20 uses of it took 9 ms of the host for 32 layers.

    A look at all modules takes half a millisecond with LoRA, so the parts of a model are not looked at one by one.
    """
    register()
    part, calls, own = SplitSequences(mesh_of()).part(IDS), [], nn.Module.named_modules
    found: Any = Modules.__init__

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        calls.append(self)
        return own(self, *args, **options)

    looks = []
    monkeypatch.setattr(Modules, "__init__", lambda self, *given: (looks.append(self), found(self, *given))[1])
    counts = []
    for layers in (1, 4):
        model: Any = tiny.transformers_model("qwen3", attention="bmburst", num_hidden_layers=layers)
        if adapted:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        part.loss(model)
        monkeypatch.setattr(nn.Module, "named_modules", counted)
        calls.clear()
        looks.clear()
        part.loss(model)
        counts.append(len(calls))
        monkeypatch.setattr(nn.Module, "named_modules", own)
    assert counts[0] == counts[1] < 30, counts
    assert len(looks) <= 2, looks
