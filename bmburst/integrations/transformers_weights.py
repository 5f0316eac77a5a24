"""Notices in the first calls and steps that the ranks of a sequence do not have the same model.

A rank's gradients are those of its tokens alone, until DDP, FSDP2 or the script averages them over the ranks. Without
that, every rank trains weights of its own, and no loss shows it. So some elements of each weight are compared when the
model is called: at first the weights, then how optimizer steps changed them. A sharded weight is one weight, and its
gradient is reduced by whoever shards it. The configuration is compared once: it holds what no weight shows, such as the
frequencies of rotary embeddings.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError
from bmburst.integrations.transformers_modules import outermost

STEPS = 3
"""Number of optimizer steps that are compared."""

_SAMPLED = 16  # elements of each weight
_ALIKE = 0.25  # of the norm: equal gradients give equal changes, and those of other tokens differ by about their norm


@dataclass(slots=True)
class _Seen:
    names: tuple[str, ...] = ()
    values: Tensor | None = None
    """Samples of all ranks, fp64 `[ranks, elements]` in host memory; None before the first comparison."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class EqualWeights:
    """What was seen of the weights of each model. A model is forgotten with its last other reference."""

    _models: "WeakKeyDictionary[nn.Module, _Seen]" = field(default_factory=WeakKeyDictionary)

    def are_compared(self, model: nn.Module) -> bool:
        """Return whether `compare` has to see a model, or another step of its training; equal on all ranks."""
        seen = self._models.get(model)
        return seen is None or (torch.is_grad_enabled() and seen.steps < STEPS)

    def compare(self, model: nn.Module, comm: CheckedCommunicator) -> None:
        """Compare weights over the ranks, and how they changed since the last call. Collective; the host waits.

        Args:
            model: A module whose replicated weights have equal names on all ranks.
            comm: The ranks that share sequences.

        Raises:
            UserError: The ranks hold different models, or the same optimizer step changed them differently.
        """
        if model not in self._models:
            require_one_configuration(model, comm)
        samples = _samples(model)
        names, sizes = tuple(samples), [len(sample) for sample in samples.values()]
        seen = self._models.setdefault(model, _Seen())
        if names != seen.names:  # wrapped since, or seen without gradients
            seen.names, seen.values = names, None
        with comm.checking():
            # Otherwise a rank without such weights would not take part in the exchange.
            comm.agree(f"weights of {type(model).__name__}\n{len(names)} weights held whole, {_digest(names)}")
            if not names:
                seen.steps = STEPS
                return
            mine = torch.cat([sample.to(comm.device, torch.float64) for sample in samples.values()])
            (gathered,) = comm.all_gather(mine).wait()
        values = gathered.cpu()
        before, seen.values = seen.values, values
        change = values if before is None else values - before
        found = _different(change, sizes)
        if found is not None:
            raise UserError(_told(names[found[0]], found[1], is_first=before is None))
        if before is not None and bool((change != 0).any()):
            seen.steps += 1


def require_one_configuration(model: nn.Module, comm: CheckedCommunicator) -> None:
    """Raise UserError unless a transformers model is configured equally on all ranks. Collective; the host waits."""
    found = first_difference(f"configuration of {type(model).__name__}", _configuration(model), comm)
    if found is not None:
        raise UserError(
            f"the ranks that share a sequence have models of different configurations: {found[0]} of rank "
            f"{found[1]} is not rank 0's\nallowed: the same configuration on every rank\n"
            "fix: the same config.json and the same arguments on every rank"
        )


def first_difference(what: str, values: Mapping[str, str], comm: CheckedCommunicator) -> tuple[str, int] | None:
    """Return a name whose text is not rank 0's, and the first such rank, or None. Collective; the host waits.

    Args:
        what: What has the values, for the message of ranks that make another call or have other names.
        values: Texts by name, in one order on all ranks.
        comm: The ranks.
    """
    with comm.checking():
        comm.agree(f"{what}\n{len(values)} keys, {_digest(tuple(values))}")
        if not values:
            return None
        mine = torch.tensor([zlib.crc32(value.encode()) for value in values.values()], device=comm.device)
        (gathered,) = comm.all_gather(mine).wait()
    rows = gathered.cpu()
    differing = (rows != rows[0]).nonzero()
    if not len(differing):
        return None
    rank, place = differing[0].tolist()
    return list(values)[place], rank


def _configuration(model: nn.Module) -> dict[str, str]:
    """Return the values of a model's configuration as text, without where it was read from.

    `save_pretrained` writes the class and the dtype of a model into its configuration, and rank 0 alone saves. So these
    two are those of the model itself.
    """
    whole = outermost(model)
    values: dict[str, Any] = {}
    if whole is not None:
        of_model = {"architectures": type(whole).__name__, "dtype": str(whole.dtype)}
        values = whole.config.to_dict() | of_model
    return {name: _text(value) for name, value in sorted(values.items()) if not name.startswith("_")}


def _text(value: object) -> str:
    """Return a value as text; of one that JSON does not know, the type: the text may hold an address."""
    if isinstance(value, dict):
        value = {str(name): inner for name, inner in value.items() if not str(name).startswith("_")}
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)


def _digest(names: tuple[str, ...]) -> str:
    return f"{zlib.crc32(' '.join(names).encode()):08x}"


def _samples(model: nn.Module) -> dict[str, Tensor]:
    """Return some elements of each weight that each rank holds whole.

    Without gradients, adapters are left out: before they are trained, they may differ without changing the result.
    """
    wrapped = (module for module in model.modules() if isinstance(module, FullyShardedDataParallel))
    sharded = {id(weight) for module in wrapped for weight in module.parameters()}
    weights = {name: weight for name, weight in model.named_parameters() if id(weight) not in sharded}
    if not torch.is_grad_enabled():
        weights = {name: weight for name, weight in weights.items() if not weight.requires_grad} or weights
    found = {}
    for name, weight in weights.items():
        if weight.numel() and not weight.is_meta and not isinstance(weight, DTensor):
            step = max(1, weight.numel() // _SAMPLED | 1)  # odd: a matrix is not sampled in one column only
            found[name] = weight.detach().flatten()[::step][:_SAMPLED]
    return found


def _different(values: Tensor, sizes: list[int]) -> tuple[int, int] | None:
    """Return the first weight and rank whose samples differ from rank 0's by more than rounding, or None.

    Args:
        values: `[ranks, elements]`.
        sizes: Number of elements of each weight.
    """
    for i, part in enumerate(values.split(sizes, 1)):
        norms = part.norm(dim=1)
        apart = (part - part[0]).norm(dim=1) > _ALIKE * torch.maximum(norms, norms[0])
        if bool(apart.any()):
            return i, int(apart.nonzero()[0])
    return None


def _told(name: str, rank: int, *, is_first: bool) -> str:
    if is_first:
        return (
            f"the ranks that share a sequence hold different weights: {name} of rank {rank} is not rank 0's\n"
            "allowed: the same weights on every rank\n"
            "fix: the same seed or files on every rank, or DistributedDataParallel, which copies those of rank 0"
        )
    return (
        f"gradients were not averaged over the ranks that share a sequence: a step changed {name}\n"
        f"differently on rank {rank} than on rank 0, and each rank now trains weights of its own\n"
        "fix: DistributedDataParallel or fully_shard around the whole model, or dist.all_reduce(p.grad, ReduceOp.AVG)"
    )
