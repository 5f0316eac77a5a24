"""A cell's trainer: built as `bmburst train` builds it, with a method's attention or tensor parallelism put in."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bmburst.attention.options import MaskOption
from bmburst.bench.cells import Cell
from bmburst.bench.methods import Attend, Setting, all_methods
from bmburst.bench.training.cells import TrainCell
from bmburst.bench.training.methods import METHODS
from bmburst.train.config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from bmburst.train.trainer import Trainer

_SLOWLY = OptimizerConfig(lr=1e-5)  # of steps that are measured: random tokens teach nothing


def build(cell: TrainCell, setting: Setting, data: DataConfig, folder: Path, *, steps: int) -> Trainer:
    """Return a cell's trainer, before its first step. Every rank calls it.

    Args:
        cell: What is trained, and how.
        setting: Ranks and kernel.
        data: On what.
        folder: For the run folder, in which nothing is written.
        steps: How many there will be, for the learning rate.
    """
    method = METHODS[cell.method]
    is_measured = cell.suite == "step"
    config = TrainConfig(
        preset=None,
        model=cell.model,
        sequence_length=cell.tokens,
        steps=steps,
        dtype=cell.dtype,  # type: ignore[arg-type]  # check_fields looks
        recompute=method.recompute(cell),
        output=folder / "run",
        data=data,
        parallel=replace(method.parallel(cell), kernel=setting.kernel_name),  # type: ignore[arg-type]
        optimizer=_SLOWLY if is_measured else OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0) if is_measured else ScheduleConfig(),
    )
    trainer = Trainer(config)
    if method.replicated:
        from bmburst.bench.training.tensor_v1 import replicate

        replicate(trainer.model)
    if method.peer:
        _put(trainer.model, all_methods(cell.device)[method.peer].bind(attention_cell(cell), setting))
    return trainer


def attention_cell(cell: TrainCell) -> Cell:
    """Return a cell's attention as the attention benchmark knows it."""
    return Cell(
        suite="sequence",
        method=cell.method,
        ranks=cell.ranks,
        device=cell.device,
        tokens=cell.tokens,
        heads=cell.model.num_heads,
        kv_heads=cell.model.num_kv_heads,
        head_dim=cell.model.head_dim,
        dtype=cell.dtype,
    )


class _Peer(torch.nn.Module):
    """A peer's attention in the place of `BurstAttention`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, length: int | None = None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return attention's output; cells have neither padding nor documents."""
        del length
        assert mask is None
        return self._attend(q, k, v)


def _put(model: torch.nn.Module, attend: Attend) -> None:
    from bmburst.blocks.transformer import Attention

    places = [module for module in model.modules() if isinstance(module, Attention)]
    assert places
    for place in places:
        place.attention = _Peer(attend)
