"""Models whose weights other libraries have sharded: tensor parallel ones are refused, gathered ones are exact."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from bmburst import Mesh
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests import tiny
from tests.distributed.processes import on_processes
from tests.refusals import refused

IDS = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))
WORDS = (
    "not exact | tensor parallel | different tokens | fix: leave tp_plan, tp_size and parallelize_module out | FSDP2"
)


def _saved(folder: Path, family: str) -> Path:
    tiny.transformers_model(family).save_pretrained(folder)
    dist.barrier()  # one rank has written it
    return folder


def _loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="bmburst", dtype=torch.float32, **options)


@on_processes(2)
def test_tensor_parallel_models_are_refused(tmp_path: Path) -> None:
    """Their losses were wrong without a word: a layer added up the results of other tokens."""
    register()
    mesh, folder = Mesh.over_process_group(), _saved(tmp_path, "qwen3")
    part = SplitSequences(mesh).part(IDS)
    model = _loaded(folder, distributed_config=DistributedConfig(tp_size=2))
    for call in (part.loss, part.logits, part.logps):
        with refused(f"Qwen3ForCausalLM | {WORDS}"):
            call(model)
    with refused(WORDS):
        generate(model, IDS, mesh=mesh, past_key_values=SplitCache(model.config, mesh), max_new_tokens=1)

    for gathered in (False, True):
        model = _loaded(folder)
        grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
        for layer in model.model.layers:
            plan = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(layer.mlp, grid["tp"], plan)
            if gathered:
                fully_shard(layer, mesh=grid["fsdp"])
        with refused(WORDS):
            part.loss(fully_shard(model, mesh=grid["fsdp"]) if gathered else model)


@on_processes(2)
def test_weights_that_transformers_shards_while_it_loads_them(tmp_path: Path) -> None:
    """By FSDP2, with experts that each rank holds some of: they get the tokens of all ranks."""
    register()
    folder = _saved(tmp_path, "qwen3_moe")
    whole = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    expected = whole(IDS, labels=IDS).loss
    expected.backward()
    split = SplitSequences(Mesh.over_process_group())
    for experts in (1, 2):
        model = _loaded(folder, distributed_config=DistributedConfig(fsdp_size=2, ep_size=experts))
        loss = split.part(IDS).loss(model)
        loss.backward()
        torch.testing.assert_close(torch.tensor(split.mean(loss.detach())), expected.detach(), rtol=1e-5, atol=0)
        for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
            gradient = found.grad.full_tensor()
            torch.testing.assert_close(gradient, wanted.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
