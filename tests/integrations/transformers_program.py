"""Tiny models of transformers, batches for them, and what every rank does with them. Rank 0 leaves what it saw."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from bmburst import Mesh
from bmburst.integrations.transformers import Part, SplitSequences, recompute, register
from bmburst_ops import IGNORE_INDEX
from tests import tiny

TOKENS = 37  # odd, and padded on 2 and 4 ranks
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},  # one layer of each kind
}


def make_model(family: str, attention: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Return a model whose weights are random, and the same for every attention and dtype."""
    changes = {"head_dim": 8} | FAMILIES[family] | options
    return tiny.transformers_model(family, attention=attention, **changes).to(dtype)


@dataclass(frozen=True)
class Case:
    """A batch as a user has it, and as the unsharded model takes it."""

    family: str
    batch: dict[str, Any]
    theirs: dict[str, Any]
    layout: str = "zigzag"


def cases() -> dict[str, Case]:
    """Return batches."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (2, TOKENS), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, IGNORE_INDEX)
    two = torch.tensor([[*range(5), *range(32)], [*range(20), *range(1), *range(16)]])
    ends = ids.masked_fill(two == 0, IGNORE_INDEX)
    found = {}
    for family in FAMILIES:
        batch = {"input_ids": ids, "labels": labels}
        found[f"{family} plain"] = Case(family, batch, batch)
        batch = {"input_ids": ids, "position_ids": two}
        found[f"{family} packed"] = Case(family, batch, {**batch, "labels": ends}, layout="striped")
    return found


def run(output: Path) -> None:
    """The cases on sequences over all ranks."""
    register()
    mesh, found = Mesh.over_process_group(), {}
    for name, case in cases().items():
        model = make_model(case.family, "bmburst", torch.float32)
        part = SplitSequences(mesh, layout=case.layout).part(**case.batch)
        found[name] = _step(model, part, averaged=True)
    if dist.get_rank() == 0:
        torch.save(found, output)


def run_wrapped(output: Path, size: int) -> None:
    """FSDP2 and DDP over data ranks and `size` sequence ranks."""
    register()
    mesh = Mesh.over_process_group(sequence=size)
    found = {kind: _parallel(mesh, kind, wrap) for kind, wrap in WRAPS.items()}
    if dist.get_rank() == 0:
        torch.save(found, output)


def alone(case: Case, mesh: Mesh) -> dict[str, Any]:
    """A case on this process alone."""
    register()
    model = make_model(case.family, "bmburst", torch.float32)
    return _step(model, SplitSequences(mesh, layout=case.layout).part(**case.batch), averaged=False)


def _parallel(mesh: Mesh, kind: str, wrap: Any) -> dict[str, Any]:
    """Return a step of two micro-batches, each rank's data group having samples of its own."""
    case = cases()["mistral plain"]
    split = SplitSequences(mesh)
    rows = slice(mesh.data_rank, None, mesh.shape.data)  # of two samples: both, or one for each group
    mine = {name: tensor[rows] for name, tensor in case.batch.items()}
    parts = [
        split.part(**{name: tensor[i : i + 1] for name, tensor in mine.items()}) for i in range(len(mine["labels"]))
    ]
    model = make_model("mistral", "bmburst", torch.float32).train()
    if kind == "ddp":
        model.gradient_checkpointing_enable()
    else:
        recompute(model, "block-keep-attention+offload")
    model = wrap(model)
    valid = split.valid(*parts)
    found = 0.0
    for part in parts:
        loss = part.loss(model, valid)
        loss.backward()
        found += split.mean(loss.detach())
    inner = model.module if kind == "ddp" else model
    return {"loss": found, "gradients": {name: _whole(p.grad) for name, p in inner.named_parameters()}}


def _fsdp2(model: PreTrainedModel) -> torch.nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPS = {"fsdp2": _fsdp2, "ddp": DistributedDataParallel}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def _step(model: PreTrainedModel, part: Part, *, averaged: bool) -> dict[str, Any]:
    """Return whole logits, the mean loss, and the gradients as data parallelism would average them."""
    with torch.no_grad():
        logits = part.logits(model.eval())
    loss = part.loss(model)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    size = dist.get_world_size() if averaged else 1
    for gradient in gradients.values() if averaged else ():
        dist.all_reduce(gradient)
        gradient /= size
    return {"logits": part.whole(logits), "loss": part.mesh.sum(loss.item()) / size, "gradients": gradients}
