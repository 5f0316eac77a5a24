"""One step of the real model on the host runtime, and the most bytes of activations alive in it."""

import gc
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bmburst.attention.options import AttentionOptions
from bmburst.blocks import config as block_config
from bmburst.blocks.config import LoRAConfig
from bmburst.comm.communicator import CompletedTransfer
from bmburst.comm.memory import MessageMover, copy_own
from bmburst.loss import global_mean
from bmburst.mesh import Mesh
from bmburst.plan import rates
from bmburst.schedule.exchange import Exchange
from bmburst.schedule.hardware import NUMBERS
from bmburst.schedule.units import HeadShapes
from bmburst_ops import nf4
from bmburst_ops.flash import BackwardInputs, Gradients, Partial
from tests import lazy, tiny
from tests.live_bytes import LiveBytes


class Activations(LiveBytes):
    """Without the memory in which ZeRO gathers weights and collects gradients."""

    def __enter__(self) -> Any:
        from bmburst.blocks.gathering import Layout

        self._allocate = allocate = Layout.allocate

        def unseen(*args: Any) -> dict[str, Tensor]:
            with _disable_current_modes():
                return allocate(*args)

        Layout.allocate = unseen  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        from bmburst.blocks.gathering import Layout

        super().__exit__(*error)
        Layout.allocate = self._allocate  # type: ignore[method-assign]


class WithGathered(LiveBytes):
    """With what ZeRO gathers, and without what is there all the time."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        stored = [p for module in model.modules() for p in getattr(module, "_storage_params", {}).values()]
        there = (tensor for parameter in (*model.parameters(), *stored) for tensor in (parameter, parameter.grad))
        self._known.update(tensor.untyped_storage()._cdata for tensor in there if tensor is not None)


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Return the bytes alive at the peak of a second step, beyond those before it, and what ZeRO gathers of a block."""
    config = tiny.config(**case["model"])
    model = lazy.Llama(
        config,
        attention=partial(lazy.BurstAttention, group=Mesh.over_bmtrain().sequence),
        dtype=getattr(torch, case["dtype"]),
        recompute=case["recompute"],
        zero_level=case["zero"],
        loss_chunk=case["loss_chunk"],
        mlp_chunk=case.get("mlp_chunk"),
        lora=LoRAConfig(**case["lora"]) if "lora" in case else None,
    )
    ids = torch.randint(config.vocab_size, (1, case["tokens"] + 1))
    positions = torch.arange(case["tokens"])[None]

    def step() -> Tensor:
        nats = model.loss(ids[:, :-1], positions, ids[:, 1:])
        mean = global_mean(nats, case["tokens"], 1)
        mean.backward()
        return mean

    before = step()  # held during the next step, as callers do
    gc.collect()
    store = model.model.layers[0].store
    live, taken = WithGathered(model) if case.get("gathered") else Activations(), store.nbytes
    with live:
        step()
    assert store.nbytes == taken  # host memory of the step before is used again
    del before
    block = model.model.layers[0]
    gathered = sum(info["partition_size"] * info["world_size"] for info in block._storage_info.values())
    numbers = sum(parameter.numel() for parameter in model.parameters())
    nbytes = sum(
        block._storage_info[name]["partition_size"] * block._storage_info[name]["world_size"] * each.element_size()
        for name, each in block._storage_params.items()
    )
    return {"peak": live.peak, "block": gathered, "block_bytes": nbytes, "parameters": numbers}


def after_frozen_forward(level: int) -> None:
    """Check that a model without gradients, such as a reference, holds no gathered block after its forward pass."""
    attention = partial(lazy.BurstAttention, group=Mesh.over_bmtrain().sequence)
    model = lazy.Llama(tiny.config(num_layers=3), attention=attention, zero_level=level, seed=0)
    model.requires_grad_(False)
    ids = torch.randint(61, (1, 14))
    live = WithGathered(model)
    with live, torch.no_grad():
        nats = model.loss(ids, torch.arange(14)[None], ids)
    gc.collect()
    block = sum(info["partition_size"] for info in model.model.layers[0]._storage_info.values())
    assert live.now < 4 * block < live.peak, (live.now, block, live.peak)  # block: numbers, of 4 bytes, of one rank
    assert nats.isfinite()


def links() -> None:
    """Measure links between the ranks of a process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "call_seconds", partial(rates.call_seconds, budget=0.0))  # s; the fewest calls
        found = rates.measure_links(torch.device("cpu"))
    assert len(found) == 4 and set(found) < set(NUMBERS)
    assert all(fact.value > 0 and fact.kind == "measured" and "gloo, 2 ranks" in fact.source for fact in found.values())


class KernelOfWork:
    """Allocates what the planner counts of a GPU kernel's own memory, and computes nothing."""

    name, recordable, takes_delta = "work", False, True

    def forward(self, q: Tensor, *_rest: Any, into: Partial | None = None) -> Partial:
        """Return results that are not written."""
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        own = torch.empty_like(lse)
        del own
        return into or Partial(torch.empty_like(q), lse)

    def backward(
        self, given: BackwardInputs, _scoring: object, *, into: Gradients | None = None, **_options: Any
    ) -> Gradients:
        """Return gradients that are not written, beside sums in fp32 and two statistics."""
        _, q, k, v, lse, _ = given
        summed = (q, k, v) if q.shape[2] > k.shape[2] else (q,)
        sums = [torch.empty(each.shape, dtype=torch.float32) for each in summed]
        statistics = [torch.empty(lse.shape, dtype=torch.float32) for _ in range(2)]
        results = into or Gradients(*map(torch.empty_like, (q, k, v)))
        del sums, statistics
        return results


def _own_blocks_alone(
    mover: MessageMover, exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> CompletedTransfer:
    """Make no messages, as copy engines need none."""
    del mover
    copy_own(exchange, sources, targets)
    return CompletedTransfer(tuple(targets))


def measure_heads(cases: list[dict[str, Any]], file: Path) -> None:
    """Write what is measured where attention takes the memory that it takes on GPUs, of as few heads as may be.

    Heads are exchanged in units, as in long sequences: the planner does not count the buffers of one collective, which
    is for short ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionOptions, "kernel_for", lambda *_: KernelOfWork())
        patch.setattr(MessageMover, "_exchange", _own_blocks_alone)
        patch.setattr(HeadShapes, "can_exchange_at_once", False)
        found = []
        for case in cases:
            patch.setattr(block_config, "GROUP_ROWS", case["group_rows"])
            found.append(measure(case))
    if not Mesh.over_bmtrain().sequence_rank:
        file.write_text(json.dumps(found))


def measure_in_4bit(cases: list[dict[str, Any]], file: Path) -> None:
    """Write what is measured where dequantization allocates its result alone, as Triton's kernel does."""

    def dequantize(_words: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nf4, "dequantize", dequantize)
        measure_all(cases, file)


def measure_all(cases: list[dict[str, Any]], file: Path) -> None:
    """Write what is measured of each case, in order, as JSON."""
    file.write_text(json.dumps([measure(case) for case in cases]))
