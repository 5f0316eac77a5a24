"""Builds a cell's trainer as `bmburst train` does, with a method's attention or tensor parallelism; random tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.attention.cells import Cell
from benchmarks.attention.methods import Attend, Setting, all_methods
from benchmarks.training.cells import TrainCell
from benchmarks.training.methods import METHODS
from bmburst.attention.options import MaskOption
from bmburst.data.sources import Document
from bmburst.data.token_file import write_token_file
from bmburst.train.config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from bmburst.train.trainer import Trainer

_DOCUMENTS = 32  # of random tokens
_MORE = 1.25  # random tokens over those of a sequence: a part is held out
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
        from benchmarks.training.tensor_v1 import replicate

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


def write_random_tokens(path: Path, *, tokens: int, vocab_size: int) -> None:
    """Write a token file of random ids that has one training sequence of so many tokens, or more.

    A step then costs what any text would cost, whatever the vocabulary.

    Args:
        path: Where.
        tokens: Of a sequence.
        vocab_size: Ids are drawn evenly from all but the last, which ends a document.
    """
    each = int(tokens * _MORE) // _DOCUMENTS + 8
    documents = (Document(name=str(n), pieces=(f"document {n}",)) for n in range(_DOCUMENTS))
    write_token_file(path, documents, _Random(vocab_size, each))


class _Random:
    """A tokenizer that makes random ids of any text."""

    name = identity = "random"

    def __init__(self, vocab_size: int, each: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, vocab_size - 1
        self._each, self._generator = each, np.random.default_rng(0)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return random ids, whatever the text."""
        del text
        return self._generator.integers(0, self.eos_id, self._each, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return random ids for each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return nothing: they stand for no text."""
        del ids
        return ""
