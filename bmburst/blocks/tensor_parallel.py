"""Tensor parallelism: ranks of a tensor group share every large matrix, and the tokens between those.

A tensor group holds one part of a sequence. Outside of attention and MLP each of its ranks has one run of those
tokens (embedding, norms, stream, loss: arXiv:2205.05198, "sequence parallelism"); before a projection into heads or
into the MLP they gather all, and after the projection back they add up their parts and keep their own tokens. The two
are each other's transposes, so that every rank's gradients are those of its own token losses alone, as they are between
sequence ranks: BMTrain's sum over ranks, and `bmburst.loss.global_mean`, need to know nothing of it.

Matrices are BMTrain's tensor-parallel parameters, cut by ZeRO over the ranks that hold the same part (`tp_zero_comm`).
BMTrain's own layers around them (`bmtrain.nn.ColumnParallelLinear`, `RowParallelLinear`, version 1.0.1) are not used:
they gather along the first dimension, which is the batch here; their reduce-scatter fails unless a rank's rows divide
by 2 (IndexError in `async_reduce_scatter_linear_func`); query, key and value would each gather the same tokens, as
would gate and up, in forward and again in backward; and where the input is not gathered in the layer, its backward
takes the loss for the same on all ranks and adds up the input's gradient itself.
"""

from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.nn.functional import pad

from bmburst.comm.checks import Checked
from bmburst.comm.groups import alone, communicator
from bmburst.errors import UserError
from bmburst_ops.first_order import first_order


class TensorGroup:
    """The ranks that share this rank's matrices, and how they share tokens. A group of one does nothing.

    Every rank has `ceil(tokens / size)` tokens; those beyond the last are padding.
    """

    def __init__(self, comm: Checked) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank

    @classmethod
    def of_bmtrain(cls) -> "TensorGroup":
        """Return the group of this rank in the running BMTrain, which was started with `tp_size` ranks in each."""
        return cls(communicator(bmt.config["tp_comm"]) if bmt.config["tp_size"] > 1 else alone())

    def own(self, x: Tensor, pad_value: int = 0) -> Tensor:
        """Return this rank's tokens of `[batch, tokens]`, which all ranks of the group hold; no gradient."""
        if self.size == 1:
            return x
        each = -(-x.shape[1] // self.size)
        padded = pad(x, (0, each * self.size - x.shape[1]), value=pad_value)
        return padded[:, self.rank * each : (self.rank + 1) * each]

    def gather(self, x: Tensor, tokens: int) -> Tensor:
        """Return all ranks' `[batch, own tokens, features]` as `[batch, tokens, features]`, without padding.

        Its backward adds up the ranks' gradients and returns those of this rank's tokens.
        """
        if self.size == 1:
            return x
        gathered: Tensor = _Gather.apply(x, tokens, self._comm)  # type: ignore[no-untyped-call]
        return gathered

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of `[batch, tokens, features]`, of this rank's tokens: the transpose of `gather`.

        Summed in the dtype of `x`. Its backward gathers.
        """
        if self.size == 1:
            return x
        summed: Tensor = _AddUp.apply(x, self._comm)  # type: ignore[no-untyped-call]
        return summed


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int, comm: Checked) -> Tensor:
        ctx.comm = comm
        return _gathered(x, tokens, comm)

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _added_up(grad, ctx.comm), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Checked) -> Tensor:
        ctx.comm, ctx.tokens = comm, x.shape[1]
        return _added_up(x, comm)

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.tokens, ctx.comm), None


def _gathered(x: Tensor, tokens: int, comm: Checked) -> Tensor:
    (parts,) = comm.all_gather(x).wait()
    return parts.movedim(0, 1).flatten(1, 2)[:, :tokens].contiguous()


def _added_up(x: Tensor, comm: Checked) -> Tensor:
    padded = pad(x, (0, 0, 0, -x.shape[1] % comm.size))
    (mine,) = comm.reduce_scatter(padded.unflatten(1, (comm.size, -1)).movedim(1, 0)).wait()
    return mine
