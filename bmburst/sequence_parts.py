"""A rank's tokens of a whole tensor, taken and put back."""

import torch
from torch import Tensor

from bmburst.attention.differentiable import no_autocast
from bmburst.comm.checks import require_own_memory
from bmburst.errors import UserError
from bmburst.schedule.layout import Layout


def dimension_of(x: Tensor, dim: int) -> int:
    """Return a dimension counted from the first.

    Raises:
        UserError: It is none of the tensor's, or `x` is no plain tensor.
    """
    if not isinstance(x, Tensor):
        raise UserError(f"a sequence is cut as a torch tensor, got {type(x).__name__}\nfix: torch.as_tensor")
    require_own_memory("a sequence that is cut", x)
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise UserError(
            f"dim {dim!r} is not a dimension of a tensor of shape {list(x.shape)}\nallowed: {-x.dim()} to {x.dim() - 1}"
        )
    return dim % x.dim()


def require_value(x: Tensor, pad_value: float) -> None:
    """Check that a tensor can hold the padding's value.

    Raises:
        UserError: It cannot.
    """
    try:
        x.new_full((), pad_value)
    except (TypeError, RuntimeError):  # of the ranks, some may have no padding to find it out by
        raise UserError(f"pad_value {pad_value!r} is no value of {x.dtype}\nfix: a number that it can hold") from None


def take(x: Tensor, layout: Layout, rank: int, dim: int, pad_value: float) -> Tensor:
    """Return a rank's tokens of `x`, whose dimension `dim` is the sequence, and padding behind them."""
    length, parts = x.shape[dim], []
    for run in layout.runs(rank):
        real = run.real(length)
        indices = slice(run.start, run.start + run.stride * real, run.stride) if real else slice(0, 0)
        parts.append(x[(slice(None),) * dim + (indices,)])
        if real < run.tokens:
            parts.append(x.new_full((*x.shape[:dim], run.tokens - real, *x.shape[dim + 1 :]), pad_value))
    with no_autocast(x.device.type):  # in which torch joins no 16-bit tensors but those of its own dtype
        return torch.cat(parts, dim)


def put(whole: Tensor, part: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """Write a rank's real tokens to their places in `whole`."""
    before, length = (slice(None),) * dim, whole.shape[dim]
    for run in layout.runs(rank):
        real = run.real(length)
        if real:
            places = slice(run.start, run.start + run.stride * real, run.stride)
            whole[(*before, places)] = part[(*before, slice(run.offset, run.offset + real))]
    return whole
