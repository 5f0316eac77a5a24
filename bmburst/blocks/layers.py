"""The parameters of LLaMA as BMTrain modules: matrix, norm and embedding table."""

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst_ops.linears import linears
from bmburst_ops.merge import accumulation_dtype
from bmburst_ops.rms_norm import rms_norm, stream_norm

NO_DECAY = "no_decay"
"""BMTrain's parameter group of everything that weight decay leaves alone: vectors."""


def parameter(*shape: int, dtype: torch.dtype, split: int | None = None) -> bmt.DistributedParameter:
    """Return a parameter of undefined value, cut over all ranks: a vector without weight decay, a matrix with.

    Args:
        shape: Of the whole parameter.
        dtype: Its type.
        split: Dimension of which each rank of a tensor group has a part; it divides. None: every rank has all.
    """
    degree = bmt.config["tp_size"]
    if split is None or degree == 1:
        return bmt.DistributedParameter(torch.empty(shape, dtype=dtype), group=NO_DECAY if len(shape) == 1 else None)
    local = [size // degree if dim == split else size for dim, size in enumerate(shape)]
    # BMTrain calls the parameter group "tp", whatever it is told.
    return bmt.DistributedParameter(torch.empty(local, dtype=dtype), tp_mode=True, tp_split_dim=split)


class Linear(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """A matrix, or this rank's part of it. `weight` is `[out, in]`, `bias` `[out]`; nothing is sent.

    Args:
        in_features: Width of the input, over all ranks of a tensor group.
        out_features: Width of the output, likewise.
        dtype: Of the weight.
        split: Of which width each rank of a tensor group has a part: 0, out; 1, in, so that results add up to the
            product; None, of neither. See `bmburst.blocks.tensor_parallel`.
        rows: Which of its outputs this rank computes.
        bias: Whether something is added. Not for parts.
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
        self.has_bias, self.rows = bias, rows

    def forward(self, x: Tensor, *, is_needed: bool = True) -> Tensor:
        """Return x @ weight[rows].T + bias; undefined if it is not needed, of a recomputation that goes no further."""
        (result,) = project(x, self, is_needed=is_needed)
        return result


def project(x: Tensor, *matrices: Linear, is_needed: bool = True) -> tuple[Tensor, ...]:
    """Return what each of some matrices makes of one input; its gradient is added up inside of their products."""
    products = linears(x, [each.weight for each in matrices], [each.rows for each in matrices], is_needed=is_needed)
    pairs = zip(products, matrices, strict=True)
    return tuple(product + each.bias if each.has_bias else product for product, each in pairs)


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
