"""LLaMA's parameters as BMTrain modules (matrix, norm, embedding table), and the tensor group that shares them.

A tensor group holds one part of a sequence. Outside of attention and MLP each of its ranks has a run of those tokens
(embedding, norms, residual stream, loss: arXiv:2205.05198, "sequence parallelism"). Before the projections of attention
and MLP the ranks gather all tokens of the group; after them a reduce-scatter returns each rank its own. The two are
each other's transposes, so every rank's gradients are those of its own token losses, as between sequence ranks:
BMTrain's sum over ranks and `bmburst.loss.global_mean` need no special case.

Matrices are BMTrain's tensor-parallel parameters, which ZeRO shards over the ranks that hold the same part
(`tp_zero_comm`). BMTrain's own layers (`bmtrain.nn.ColumnParallelLinear`, `RowParallelLinear`, version 1.0.1) are not
used. They gather along the first dimension, which is the batch here. Their reduce-scatter fails unless a rank's rows
divide by 2 (IndexError in `async_reduce_scatter_linear_func`). Query, key and value would each gather the same tokens,
as would gate and up, in forward and again in backward. Where the layer does not gather its input, its backward assumes
the same loss on all ranks and sums the input's gradient itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from bmburst.blocks.lora import LoRAConfig
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError
from bmburst_ops.errors import first_order
from bmburst_ops.linears import LowRank, linears
from bmburst_ops.merge import accumulation_dtype
from bmburst_ops.rms_norm import rms_norm, stream_norm

NO_DECAY = "no_decay"
"""BMTrain's parameter group without weight decay: vectors."""


def parameter(*shape: int, dtype: torch.dtype, split: int | None = None) -> bmt.DistributedParameter:
    """Return an uninitialized parameter, sharded over all ranks; only matrices have weight decay.

    Args:
        shape: Shape of the whole parameter.
        dtype: Its dtype.
        split: Dimension that the ranks of a tensor group share evenly; None: every rank has the whole.
    """
    degree = bmt.config["tp_size"]
    if split is None or degree == 1:
        return bmt.DistributedParameter(torch.empty(shape, dtype=dtype), group=NO_DECAY if len(shape) == 1 else None)
    local = [size // degree if dim == split else size for dim, size in enumerate(shape)]
    # BMTrain calls the parameter group "tp", whatever it is told.
    return bmt.DistributedParameter(torch.empty(local, dtype=dtype), tp_mode=True, tp_split_dim=split)


class Linear(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """A linear layer, or this rank's part of it, without communication. `weight` is `[out, in]`, `bias` `[out]`.

    Args:
        in_features: Width of the input, over all ranks of a tensor group.
        out_features: Width of the output, over all ranks of a tensor group.
        dtype: dtype of the weight.
        split: Dimension that the ranks of a tensor group share: 0, outputs; 1, inputs, whose results sum up to the
            product; None, neither. See the module's docstring.
        rows: The outputs that this rank computes.
        bias: Whether there is a bias; not with `split`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        split: int | None = None,
        rows: slice = slice(None),
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype, split=split)
        if bias:
            self.bias = parameter(out_features, dtype=dtype)
        self.has_bias, self.rows, self.split, self.adapter_scale = bias, rows, split, 0.0
        self._features = in_features, out_features

    def add_adapter(self, rank: int, scale: float) -> None:
        """Add a trained low-rank term, `lora_A` `[rank, in]` and `lora_B` `[out, rank]`; before BMTrain makes a block.

        Of a rank's inputs it has its part of A, of a rank's outputs its part of B. The rest is on every rank, and
        BMTrain's sum over ranks is its gradient.
        """
        inward, outward = self._features
        dtype = self.weight.dtype
        self.lora_A = parameter(rank, inward, dtype=dtype, split=1 if self.split == 1 else None)
        self.lora_B = parameter(outward, rank, dtype=dtype, split=0 if self.split == 0 else None)
        self.adapter_scale = scale

    @property
    def adapter(self) -> LowRank | None:
        """The low-rank term, with the parameters' present numbers."""
        return LowRank(self.lora_A, self.lora_B, self.adapter_scale, self.rows) if self.adapter_scale else None

    def forward(self, x: Tensor, *, is_needed: bool = True) -> Tensor:
        """Return x @ weight[rows].T + bias; undefined where a recomputation does not need the result."""
        (result,) = project(x, self, is_needed=is_needed)
        return result


def project(x: Tensor, *matrices: Linear, is_needed: bool = True) -> tuple[Tensor, ...]:
    """Return what each of some matrices makes of one input; its gradient is added up inside of their products."""
    weights, rows, terms = zip(*((each.weight, each.rows, each.adapter) for each in matrices), strict=True)
    products = linears(x, weights, rows, terms, is_needed=is_needed)
    pairs = zip(products, matrices, strict=True)
    return tuple(product + each.bias if each.has_bias else product for product, each in pairs)


def with_graph(hidden: Tensor) -> Tensor:
    """Return the input of a block with a graph behind it, unless gradients are off: else BMTrain runs the block twice.

    Where nothing before the block is trained, the graph begins with the input and drops its gradient. A leaf that
    requires a gradient would stay alive until the end of backward, with its gradient, also where the block keeps its
    input in host memory.
    """
    if hidden.requires_grad or not torch.is_grad_enabled():
        return hidden
    found: Tensor = _Root.apply(hidden, hidden.new_empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return found


class _Root(torch.autograd.Function):
    """The beginning of a graph, which keeps nothing."""

    @staticmethod
    def forward(_ctx: Any, hidden: Tensor, _trained: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> tuple[None, None]:
        return None, None


def freeze(module: torch.nn.Module) -> None:
    """Let all parameters need no gradient; before BMTrain makes a block of the module."""
    for each in module._parameters.values():
        if each is not None:
            each.requires_grad_(False)
    for child in module.children():
        freeze(child)


@contextmanager
def without_adapters(module: torch.nn.Module) -> Iterator[None]:
    """Compute without the adapters of a module in the block: the model that they were added to."""
    scales = {each: each.adapter_scale for each in module.modules() if isinstance(each, Linear)}
    try:
        for each in scales:
            each.adapter_scale = 0.0
        yield
    finally:
        for each, scale in scales.items():
            each.adapter_scale = scale


def add_adapters(module: torch.nn.Module, lora: LoRAConfig) -> None:
    """Freeze a block's module, and add adapters to its matrices."""
    freeze(module)
    for name, child in module.named_modules():
        if name.rpartition(".")[2] in lora.matrices:
            child.add_adapter(lora.rank, lora.scale)


class RMSNorm(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Root mean square norm with a learned scale; statistics in fp32 or wider.

    Args:
        features: Of a row.
        eps: Added to the mean square.
        dtype: Of the weight.
        factor: On the result. It goes into the weight, in fp32 or wider, so that it costs no pass over the rows.
        kernel: See `bmburst_ops.rms_norm.KERNELS`.
    """

    def __init__(
        self, features: int, *, eps: float, dtype: torch.dtype, factor: float = 1.0, kernel: str = "auto"
    ) -> None:
        super().__init__()
        self.weight = parameter(features, dtype=dtype)
        self.eps, self.factor, self.kernel = eps, factor, kernel

    def scale(self) -> Tensor:
        """Return what the normalised rows are multiplied with, `[features]`."""
        weight: Tensor = self.weight
        return weight if self.factor == 1 else weight.to(accumulation_dtype(weight.dtype)) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `[..., features]`."""
        return rms_norm(x, self.scale(), self.eps, self.kernel)

    def of_stream(self, x: Tensor, added: Tensor | None = None, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return x + factor * added, and that normalised; see `bmburst_ops.rms_norm.stream_norm`."""
        return stream_norm(x, added, self.scale(), self.eps, factor=factor, kernel=self.kernel)


class Table(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """One row a token id: the embedding, or the head. The caller reads `weight`, once a forward pass.

    Each read gathers the whole table from all ranks, and its gradient is reduced once for each read.
    """

    def __init__(self, rows: int, features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(rows, features, dtype=dtype)


def rows_of(ids: Tensor, table: Tensor, *, factor: float = 1.0, padding: int | None = None) -> Tensor:
    """Return rows of a gathered table, multiplied by a factor: `[..., features]` in its dtype.

    On a CPU torch sums a row's gradients in the table's dtype, so the table is cast to fp32.

    Args:
        ids: `[...]`, integers.
        table: `[rows, features]`.
        factor: On the rows.
        padding: The id whose row gets no gradient.
    """
    wide = table if table.is_cuda else table.to(accumulation_dtype(table.dtype))
    rows = embedding(ids, wide, padding_idx=padding).to(table.dtype)
    return rows if factor == 1 else rows * factor


class TensorGroup:
    """The ranks that share this rank's matrices, with the transfers of their tokens. A group of one does nothing.

    Every rank has `ceil(tokens / size)` tokens; those beyond the last are padding.
    """

    def __init__(self, comm: CheckedCommunicator) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank

    @classmethod
    def of_bmtrain(cls) -> "TensorGroup":
        """Return the group of this rank in the running BMTrain, which was started with `tp_size` ranks in each."""
        return cls(communicator(bmt.config["tp_comm"]) if bmt.config["tp_size"] > 1 else single_rank_group())

    def own(self, x: Tensor, pad_value: int = 0) -> Tensor:
        """Return this rank's part of `[batch, tokens]`, which all ranks of the group hold; no gradient."""
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
    def forward(ctx: Any, x: Tensor, tokens: int, comm: CheckedCommunicator) -> Tensor:
        ctx.comm = comm
        return _gathered(x, tokens, comm)

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _added_up(grad, ctx.comm), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: CheckedCommunicator) -> Tensor:
        ctx.comm, ctx.tokens = comm, x.shape[1]
        return _added_up(x, comm)

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.tokens, ctx.comm), None


def _gathered(x: Tensor, tokens: int, comm: CheckedCommunicator) -> Tensor:
    (parts,) = comm.all_gather(x).wait()
    return parts.movedim(0, 1).flatten(1, 2)[:, :tokens].contiguous()


def _added_up(x: Tensor, comm: CheckedCommunicator) -> Tensor:
    padded = pad(x, (0, 0, 0, -x.shape[1] % comm.size))
    (mine,) = comm.reduce_scatter(padded.unflatten(1, (comm.size, -1)).movedim(1, 0)).wait()
    return mine
