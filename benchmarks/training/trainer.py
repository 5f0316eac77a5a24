"""Builds a cell's trainer as `bmburst train` does, with a method's attention or tensor parallelism; random tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bmtrain as bmt
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.attention.cells import Cell
from benchmarks.attention.methods import Attend, Setting, all_methods
from benchmarks.training.cells import TrainCell
from benchmarks.training.methods import METHODS
from bmburst.attention.options import MaskOption
from bmburst.blocks.layers import RMSNorm
from bmburst.blocks.model import Llama
from bmburst.blocks.tensor_parallel import TensorGroup
from bmburst.blocks.transformer import TransformerBlock
from bmburst.comm.checks import Checked
from bmburst.comm.groups import communicator
from bmburst.data.sources import Document
from bmburst.data.token_writer import write_token_file
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
        from benchmarks.training.trainer import replicate

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


Map = Callable[[Tensor], Tensor]


def replicate(model: Llama) -> None:
    """Let every rank of a tensor group have all tokens inside of a model's blocks; in place, before the first step."""
    if model.tensor.size == 1:
        return
    comm = communicator(bmt.config["tp_comm"])
    group = _Replicated(comm)
    for wrapped in model.model.layers:
        block: TransformerBlock = wrapped._module  # a bmt.Block's `modules()` leaves it out
        block.self_attn.tensor = block.mlp.tensor = group
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            setattr(norm, "scale", _SharedScale(norm, comm.size))  # noqa: B010  # mypy: a method
    model.model.layers = _Between(model.model.layers, comm)


class _Replicated(TensorGroup):
    """Every rank has all tokens: nothing is gathered, parts are added up on all ranks."""

    def __init__(self, comm: Checked) -> None:
        super().__init__(comm)
        self._sum = comm

    def gather(self, x: Tensor, tokens: int) -> Tensor:
        """Return x; its backward adds up the ranks' gradients."""
        del tokens
        return _pair(x, lambda x: x.view_as(x), partial(_summed, comm=self._sum))

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; its backward is the gradient as it is, which all ranks have."""
        return _pair(x, partial(_summed, comm=self._sum), lambda grad: grad)


class _SharedScale:
    """A norm's weight where its tokens are on all ranks: ZeRO adds up the gradient, of which each rank has all."""

    def __init__(self, norm: RMSNorm, ranks: int) -> None:
        self._norm, self._ranks = norm, ranks

    def __call__(self) -> Tensor:
        # A clone: a view would keep all that ZeRO gathered of the block.
        return _pair(self._norm.weight, torch.clone, lambda grad: grad / self._ranks)


class _Between(torch.nn.Module):
    """The blocks between own tokens and own tokens."""

    def __init__(self, layers: torch.nn.Module, comm: Checked) -> None:
        super().__init__()
        self.layers, self._comm = layers, comm

    def forward(self, hidden: Tensor, cos: Tensor, *rest: Any) -> Tensor:
        """Return the stream of this rank's tokens behind the blocks, `[batch, own tokens, hidden_size]`."""
        assert hidden.shape[1] * self._comm.size == cos.shape[1]  # cells' lengths divide
        gathered, cut = (partial(function, comm=self._comm) for function in (_gathered, _cut))
        return _pair(self.layers(_pair(hidden, gathered, cut), cos, *rest), cut, gathered)


def _gathered(x: Tensor, comm: Checked) -> Tensor:
    (parts,) = comm.all_gather(x).wait()
    return parts.movedim(0, 1).flatten(1, 2).contiguous()


def _cut(x: Tensor, comm: Checked) -> Tensor:
    return x.chunk(comm.size, 1)[comm.rank].contiguous()


def _summed(x: Tensor, comm: Checked) -> Tensor:
    (total,) = comm.all_reduce(x.contiguous()).wait()
    return total


class _Pair(torch.autograd.Function):
    """`(x, forward, backward) -> forward(x)`, whose gradient is `backward` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None


def _pair(x: Tensor, forward: Map, backward: Map) -> Tensor:
    result: Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result
