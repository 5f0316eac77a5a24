"""LLaMA's parameters as BMTrain modules (matrix, norm, embedding table), and the tensor group that shares them.

A tensor group holds one shard of a sequence. Outside of attention and MLP (embedding, norms, residual stream, loss)
each of its ranks has a contiguous part of these tokens ("sequence parallelism", arXiv:2205.05198). An all-gather before
attention and MLP gives each rank all tokens of the group; a reduce-scatter after them returns each rank its part. These
two operations are transposes of each other, so each rank's gradients are those of its own token losses, as between
sequence ranks: BMTrain's sum over ranks and `bmburst.loss.global_mean` need no special case.

Matrices are BMTrain's tensor-parallel parameters, which ZeRO shards over the ranks that hold the same part
(`tp_zero_comm`). BMTrain's tensor-parallel layers (`bmtrain.nn.ColumnParallelLinear`, `RowParallelLinear`, version
1.0.1) are not used, for four reasons. They gather along the first dimension, which is the batch here. Their
reduce-scatter fails if a rank's number of rows is odd (IndexError in `async_reduce_scatter_linear_func`). Query, key
and value would each gather the same tokens, as would gate and up, in forward and again in backward. A layer that does
not gather its input assumes in backward that all ranks have the same loss, and sums the input's gradient itself.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from bmburst.blocks.kinds import group_in_block
from bmburst.blocks.lora import LoRAConfig
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError
from bmburst_ops.dropout import Dropout
from bmburst_ops.dropout import keys as column_keys
from bmburst_ops.errors import first_order
from bmburst_ops.linears import LaterProducts, LowRank, linears
from bmburst_ops.merge import accumulation_dtype
from bmburst_ops.nf4 import Layout
from bmburst_ops.rms_norm import rms_norm, stream_norm

NO_DECAY = "no_decay"
"""BMTrain's parameter group without weight decay, which holds all vectors (norms and biases)."""
NF4 = "nf4"
"""Name of the parameter that holds a weight in 4 bits."""


def parameter(*shape: int, dtype: torch.dtype, split: int | None = None) -> bmt.DistributedParameter:
    """Return an uninitialized parameter, sharded by ZeRO; only matrices have weight decay.

    Args:
        shape: Shape of the whole parameter.
        dtype: Its dtype.
        split: Dimension that tensor parallelism splits; None: each rank of a tensor group has the whole parameter.
    """
    degree = bmt.config["tp_size"]
    if split is None or degree == 1:
        made = torch.empty(shape, dtype=dtype, device="cuda")  # unwritten: copies from the host would take time
        return bmt.DistributedParameter(made, group=NO_DECAY if len(shape) == 1 else None)
    local = [size // degree if dim == split else size for dim, size in enumerate(shape)]
    # BMTrain always names the parameter group of such parameters "tp".
    made = torch.empty(local, dtype=dtype, device="cuda")
    return bmt.DistributedParameter(made, tp_mode=True, tp_split_dim=split)


class Composite(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """A module that has parameters in its modules only."""

    # BMTrain's own looks for a parameter to gather, with calls of Python for each module that it finds instead.
    __getattr__ = torch.nn.Module.__getattr__


class Linear(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """A linear layer, or this rank's shard of it, without communication. `weight` is `[out, in]`, `bias` `[out]`.

    Args:
        in_features: Width of the input, over all ranks of a tensor group.
        out_features: Width of the output, over all ranks of a tensor group.
        dtype: dtype of the weight.
        split: Dimension of the weight that tensor parallelism splits: 0, outputs (column-parallel); 1, inputs
            (row-parallel: the product is the sum of all ranks' results); None, neither. See the module's docstring.
        rows: The outputs that this rank computes.
        bias: Whether there is a bias; not with `split`.

    Attributes:
        later: Receives the gradient of the weight while it is open; layers that share an input share it too.
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
        self.is_quantized = False
        self._features = in_features, out_features
        self._dropout, self._name = 0.0, ""
        self._columns: Tensor | None = None
        self.later: LaterProducts | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole weight, over all ranks of a tensor group."""
        return self._features[1], self._features[0]

    def quantize(self) -> None:
        """Hold the frozen weight in 4 bits: see `bmburst.blocks.sharded`. Call it before BMTrain wraps the block."""
        like = self.weight
        del self.weight
        self.weight = torch.empty(0, dtype=like.dtype, device=like.device)
        self.nf4 = parameter(Layout(prod(self.shape)).words, dtype=torch.float32).requires_grad_(False)
        self.is_quantized = True

    def add_adapter(self, rank: int, scale: float, dropout: float, name: str) -> None:
        """Add a trained low-rank term, `lora_A` `[rank, in]` and `lora_B` `[out, rank]`.

        Call it before BMTrain wraps the module in a block. If tensor parallelism splits the inputs, A is split like
        them; if it splits the outputs, B is. The other matrix is replicated, and BMTrain sums its gradient over ranks.

        Args:
            rank: Rank of the term.
            scale: Factor on the term.
            dropout: Probability that an element of its input is dropped.
            name: Full name of this module in the model, on which the dropped elements depend.
        """
        inward, outward = self._features
        dtype = self.weight.dtype
        self.lora_A = parameter(rank, inward, dtype=dtype, split=1 if self.split == 1 else None)
        self.lora_B = parameter(outward, rank, dtype=dtype, split=0 if self.split == 0 else None)
        self.adapter_scale, self._dropout, self._name = scale, dropout, name

    def adapter(self, keys: Tensor | None = None) -> LowRank | None:
        """Return the low-rank term with the current parameters; None if there is no adapter.

        Args:
            keys: Keys of the input's tokens, which select what dropout drops: int32, of as many elements as the input
                has tokens. None: no dropout.
        """
        if not self.adapter_scale:
            return None
        dropout = None
        if keys is not None and self._dropout:
            dropout = Dropout(self._dropout, keys.reshape(-1), self._column_keys(keys.device))
        return LowRank(self.lora_A, self.lora_B, self.adapter_scale, self.rows, dropout)

    def _column_keys(self, device: torch.device) -> Tensor:
        """Return the keys of this rank's features of the input, computed once."""
        if self._columns is None:
            parts = bmt.config["tp_size"] if self.split == 1 else 1
            size = self._features[0] // parts
            first = bmt.config["tp_rank"] * size if parts > 1 else 0
            self._columns = column_keys(torch.arange(first, first + size, device=device), self._name)
        return self._columns

    def forward(self, x: Tensor, *, keys: Tensor | None = None, is_needed: bool = True) -> Tensor:
        """Return x @ weight[rows].T + bias; undefined if not `is_needed` in a recompute. `keys`: see `adapter`."""
        (result,) = project(x, self, keys=keys, is_needed=is_needed)
        return result


def quantized_linears(module: torch.nn.Module) -> dict[str, Linear]:
    """Return the linear layers of a module with weights in 4 bits, by the names of their parameters."""
    named = module.named_modules()
    return {f"{name}.{NF4}": each for name, each in named if isinstance(each, Linear) and each.is_quantized}


def project(x: Tensor, *matrices: Linear, keys: Tensor | None = None, is_needed: bool = True) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers that share an input; backward accumulates its gradient inside the matmuls."""
    weights, rows, terms = zip(*[(each.weight, each.rows, each.adapter(keys)) for each in matrices], strict=True)
    products = linears(x, weights, rows, terms, is_needed=is_needed, later=matrices[0].later)
    pairs = zip(products, matrices, strict=True)
    return tuple([product + each.bias if each.has_bias else product for product, each in pairs])


def with_graph(hidden: Tensor) -> Tensor:
    """Return the input of a block as a tensor that requires a gradient, unless gradients are disabled.

    BMTrain runs a block twice if its input requires no gradient. If nothing before the block is trained, the returned
    tensor is the output of a function that drops the gradient. A leaf would stay alive until the end of backward,
    with its gradient, even if the block offloads its input to host memory.
    """
    if hidden.requires_grad or not torch.is_grad_enabled():
        return hidden
    found: Tensor = _Root.apply(hidden, hidden.new_empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return found


class _Root(torch.autograd.Function):
    """Starts an autograd graph: saves nothing and drops the gradient."""

    @staticmethod
    def forward(_ctx: Any, hidden: Tensor, _trained: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> tuple[None, None]:
        return None, None


def freeze(module: torch.nn.Module, lora: LoRAConfig, prefix: str) -> None:
    """Set requires_grad to False for all parameters that are not trained whole (`lora.modules_to_save`).

    Call it before BMTrain wraps the module in a block. `prefix` is the name of the module in the model, with a dot.
    """
    for name, each in module.named_parameters(prefix=prefix.removesuffix(".")):
        if not lora.is_saved(name):
            each.requires_grad_(False)


@contextmanager
def without_adapters(module: torch.nn.Module) -> Iterator[None]:
    """Disable a module's adapters inside the `with` block: it then computes the base model."""
    scales = {each: each.adapter_scale for each in module.modules() if isinstance(each, Linear)}
    try:
        for each in scales:
            each.adapter_scale = 0.0
        yield
    finally:
        for each, scale in scales.items():
            each.adapter_scale = scale


def add_adapters(block: torch.nn.Module, lora: LoRAConfig, layer: int) -> None:
    """Freeze a transformer block, add adapters to the matrices that `lora` names, and quantize it if `lora` says so.

    Args:
        block: The block, before BMTrain wraps it.
        lora: The adapters, and the modules that stay trained.
        layer: Number of the block in the model.
    """
    freeze(block, lora, f"model.layers.{layer}.")
    for name in lora.modules(layer):
        linear: Any = block.get_submodule(name.removeprefix(f"model.layers.{layer}."))
        linear.add_adapter(lora.rank_of(name), lora.scale_of(name), lora.dropout, name)
    if lora.is_4bit:
        for each in [module for module in block.modules() if isinstance(module, Linear)]:
            each.quantize()


def keep_apart(block: torch.nn.Module, kept_apart: frozenset[str]) -> None:
    """Give some parameters of a block BMTrain groups of their own. Call it before BMTrain wraps the block.

    Args:
        block: The block.
        kept_apart: Result of `bmburst.blocks.kinds.apart`.
    """
    parameters: Iterable[tuple[str, Any]] = block.named_parameters()
    for name, parameter in parameters:
        if group := group_in_block(name, tuple(parameter._tp_original_shape), kept_apart):
            # BMTrain's constructor always names the group of tensor-parallel parameters "tp".
            parameter._group = "_".join(filter(None, (parameter.group, group)))


class RMSNorm(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Root mean square norm with a learned scale; statistics in fp32 or wider.

    Args:
        features: Size of the normalized (last) dimension.
        eps: Added to the mean square.
        dtype: dtype of the weight.
        factor: Factor on the result. It is folded into the weight in fp32 or wider, so that it needs no extra pass.
        kernel: See `bmburst_ops.rms_norm.KERNELS`.
    """

    def __init__(
        self, features: int, *, eps: float, dtype: torch.dtype, factor: float = 1.0, kernel: str = "auto"
    ) -> None:
        super().__init__()
        self.weight = parameter(features, dtype=dtype)
        self.eps, self.factor, self.kernel = eps, factor, kernel

    def scale(self) -> Tensor:
        """Return the factors on normalized rows, `[features]`: weight times `factor`."""
        weight: Tensor = self.weight
        return weight if self.factor == 1 else weight.to(accumulation_dtype(weight.dtype)) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `[..., features]`."""
        return rms_norm(x, self.scale(), self.eps, self.kernel)

    def of_stream(self, x: Tensor, added: Tensor | None = None, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the sum x + factor * added, and the normalized sum; see `bmburst_ops.rms_norm.stream_norm`."""
        return stream_norm(x, added, self.scale(), self.eps, factor=factor, kernel=self.kernel)


class Table(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """The embedding or the head, `[rows, features]`: one row per token id. Read `weight` once per forward pass.

    Each read gathers the whole table from all ranks, and adds a reduction of its gradient to backward.
    """

    def __init__(self, rows: int, features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(rows, features, dtype=dtype)
        self._kept: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the gathered table; inside `gathered` the same one each time."""
        return self.weight if self._kept is None else self._kept

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the table once for many forward and backward passes, and reduce its gradient once, at the end."""
        weight = self.weight
        self._kept = weight.detach().requires_grad_(weight.requires_grad)
        yield
        gradient, self._kept = self._kept.grad, None
        if gradient is not None:
            torch.autograd.backward(weight, gradient)


def rows_of(ids: Tensor, table: Tensor, *, factor: float = 1.0, padding: int | None = None) -> Tensor:
    """Look up rows of a gathered table and multiply them by a factor: `[..., features]` in the table's dtype.

    On a CPU, torch accumulates the gradient of a row in the table's dtype, so a 16-bit table is cast to fp32.

    Args:
        ids: `[...]`, integers.
        table: `[rows, features]`.
        factor: Factor on the rows.
        padding: Id whose row gets no gradient.
    """
    wide = table if table.is_cuda else table.to(accumulation_dtype(table.dtype))
    rows = embedding(ids, wide, padding_idx=padding).to(table.dtype)
    return rows if factor == 1 else rows * factor


class TensorGroup:
    """This rank's tensor group and its collectives over tokens. In a group of one they return their input.

    Each rank has `ceil(tokens / size)` tokens; the tokens are padded at the end.
    """

    def __init__(self, comm: CheckedCommunicator) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank

    @classmethod
    def of_bmtrain(cls) -> "TensorGroup":
        """Return this rank's tensor group of the running BMTrain, of `tp_size` ranks."""
        return cls(communicator(bmt.config["tp_comm"]) if bmt.config["tp_size"] > 1 else single_rank_group())

    def own(self, x: Tensor, pad_value: int = 0) -> Tensor:
        """Return this rank's part of `[batch, tokens]` that is replicated in the group; not differentiable."""
        if self.size == 1:
            return x
        each = -(-x.shape[1] // self.size)
        padded = pad(x, (0, each * self.size - x.shape[1]), value=pad_value)
        return padded[:, self.rank * each : (self.rank + 1) * each]

    def gather(self, x: Tensor, tokens: int) -> Tensor:
        """All-gather `[batch, own tokens, features]` to `[batch, tokens, features]` and drop the padding.

        Backward is a reduce-scatter.
        """
        if self.size == 1:
            return x
        gathered: Tensor = _Gather.apply(x, tokens, self._comm)  # type: ignore[no-untyped-call]
        return gathered

    def add_up(self, x: Tensor) -> Tensor:
        """Reduce-scatter `[batch, tokens, features]` to `[batch, own tokens, features]`: the transpose of `gather`.

        The sum is in the dtype of `x`. Backward is an all-gather.
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
