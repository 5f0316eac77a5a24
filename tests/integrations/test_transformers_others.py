"""Code that may mix the tokens of a rank is named once: modules, hooks and wrappers of nobody that is known."""

import warnings
from collections.abc import Iterator
from functools import partial, wraps
from types import MethodType
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from bmburst.integrations.transformers import Part, SplitSequences, register
from tests import tiny
from tests.distributed.threads import mesh_of
from tests.refusals import says


def _part() -> Part:
    register()
    return SplitSequences(mesh_of()).part(torch.arange(3, 14).expand(2, -1))


def _model() -> PreTrainedModel:
    register()
    return tiny.transformers_model("llama", attention="bmburst")


class Shifted(nn.Linear):
    """Code of nobody's: it reads the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def _mean(module: nn.Module, args: object, x: Tensor, *, dim: int) -> Tensor:
    return x + x.mean(dim, keepdim=True)


def _mean_of_norms(module: nn.Module, args: object, x: Tensor) -> Tensor | None:
    return x.mean(1, keepdim=True).expand_as(x) if isinstance(module, LlamaRMSNorm) else None


class Mixes:
    @torch.no_grad()  # whose wrapper is torch's
    def mix(self, _: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0].cumsum(1)

    def mix_gradients(self, _: nn.Module, grads: tuple[Tensor]) -> tuple[Tensor]:
        return (grads[0].cumsum(1),)


def _centered(_: nn.Module, grads: tuple[Tensor], __: object) -> tuple[Tensor]:
    return (grads[0] - grads[0].mean(1, keepdim=True),)


def test_code_of_others_is_named_once(recwarn: pytest.WarningsRecorder) -> None:
    """It may mix the tokens of a rank, as this one does."""
    part, model = _part(), _model().eval()
    derived = type("Derived", (type(model),), {})  # without code of its own
    model.__class__ = derived
    part.logits(model)
    assert not [each for each in recwarn if "not code of transformers" in str(each.message)]
    one, other = model.model.layers[1].mlp.up_proj, model.model.layers[0].mlp
    changes = (
        lambda: setattr(one, "__class__", Shifted),
        lambda: setattr(other, "forward", lambda x: x.cumsum(1)),
        lambda: other.register_forward_hook(partial(_mean, dim=1)),
        lambda: model.model.norm.register_forward_pre_hook(Mixes().mix),
        lambda: model.lm_head.register_full_backward_hook(_centered),
        lambda: model.lm_head.register_full_backward_pre_hook(Mixes().mix_gradients),
    )
    for change in changes:
        change()
        for _ in range(2):
            part.logits(model)
            with warnings.catch_warnings():  # as torch and others do: Python forgets what it has warned of
                pass
    told = [str(each.message) for each in recwarn if "not code of transformers" in str(each.message)]
    assert len(told) == len(changes)
    says(told[0], "forward of test_transformers_others.Shifted", "one process", "check_hugging_face.py")
    says(told[1], "modeling_llama.LlamaMLP, test_transformers_others.Shifted")
    says(told[2], "Shifted and hook test_transformers_others._mean")
    says(told[3], "hook test_transformers_others.Mixes.mix, test_transformers_others._mean")
    says(told[4], "Mixes.mix, test_transformers_others._centered, test_transformers_others._mean is")
    says(
        told[5],
        "Mixes.mix, test_transformers_others.Mixes.mix_gradients, test_transformers_others._centered and 1 more",
    )


def test_a_hook_of_all_modules_and_a_wrapper_are_named(recwarn: pytest.WarningsRecorder) -> None:
    """A wrapper looks as if transformers had defined it."""
    part, model = _part(), _model().eval()
    own = model.model.norm.forward
    model.model.norm.forward = wraps(own)(lambda x: own(x).cumsum(1))
    part.logits(model)
    handle = nn.modules.module.register_module_forward_hook(_mean_of_norms)
    part.logits(model)
    handle.remove()
    del model.model.norm.forward
    part.logits(model)
    handle = nn.modules.module.register_module_full_backward_hook(_centered)
    part.logits(model)
    handle.remove()
    first, second, third = [str(each.message) for each in recwarn if "not code of transformers" in str(each.message)]
    says(third, "hook test_transformers_others._centered is")
    says(first, "forward of modeling_llama.LlamaRMSNorm is not")
    says(second, "modeling_llama.LlamaRMSNorm and hook test_transformers_others._mean_of_norms")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_code_of_libraries_is_not_named(recwarn: pytest.WarningsRecorder) -> None:
    """What they register and replace for FSDP2, mixed precision, NEFTune, adapters and checkpoints in layers."""
    model: Any = peft.get_peft_model(_model(), peft.LoraConfig(r=2, target_modules="all-linear"))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    add_hook_to_module(model.base_model.model.model.norm, ModelHook())
    model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    _part().loss(model.train()).backward()
    assert not [each for each in recwarn if "not code of transformers" in str(each.message)]
