"""Products of one row with a weight (GEMV) in Triton, the twins of `bmburst_ops.gemv`. Importing it needs Triton.

A program computes one output, or two that belong together: its rows of the weight are read from end to end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.flash.triton import is_interpreted
from bmburst_ops.triton_launch import after_previous, dependent_launch


class Tuning(NamedTuple):
    """Launch configuration."""

    features: int
    """Features per iteration."""
    warps: int


_LONG, _WIDE, _NARROW = Tuning(8192, 16), Tuning(2048, 8), Tuning(1024, 4)
_INTERPRETED = Tuning(16, 4)


def tuning_for(features: int) -> Tuning:
    """Return the launch configuration for rows of so many features."""
    if IS_INTERPRETED:
        return _INTERPRETED
    if features > _LONG.features and -features % _LONG.features <= _LONG.features // 2:  # the last block is used well
        return _LONG
    return _NARROW if features % _WIDE.features else _WIDE


def project(x: Tensor, weight: Tensor, rows: Sequence[slice], bias: Tensor | None = None) -> Tensor:
    """Return the products of x `[1, in]` with one to three slices of the rows of a weight, one after another.

    Args:
        x: See `bmburst_ops.gemv.project_rows`.
        weight: See there.
        rows: See there.
        bias: See there.
    """
    sizes = [each.stop - each.start for each in rows]
    shifts = [each.start - sum(sizes[:i]) for i, each in enumerate(rows)]
    shifts += shifts[-1:] * (3 - len(rows))
    out = torch.empty(1, sum(sizes), dtype=x.dtype, device=x.device)
    _launch(project_kernel, sum(sizes), x, weight, bias, out, sizes[0], sum(sizes[:2]), *shifts)
    return out


def gated(x: Tensor, weight: Tensor, gate: slice, up: slice) -> Tensor:
    """See `bmburst_ops.gemv.gated`."""
    out = torch.empty(1, gate.stop - gate.start, dtype=x.dtype, device=x.device)
    _launch(gated_kernel, out.shape[1], x, weight, out, gate.start, up.start)
    return out


def _launch(kernel: Any, programs: int, x: Tensor, weight: Tensor, *arguments: Any) -> None:
    features = x.shape[1]
    tuning = tuning_for(features)
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs,)](
            x, weight, weight.stride(0), *arguments, FEATURES=features, BLOCK=tuning.features,
            num_warps=tuning.warps, **dependent_launch(x.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "second", "shift", "second_shift", "third_shift"])
def project_kernel(
    x, weight, weight_stride, bias, out, first, second, shift, second_shift, third_shift,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: output i. Grid: (outputs,).

    It belongs to row i + shift of the weight; from `first` on to i + second_shift, from `second` on to i + third_shift.
    """
    index = tl.program_id(0)
    row = index + tl.where(index < first, shift, tl.where(index < second, second_shift, third_shift))
    result = tl.sum(_products(x, weight, row + tl.arange(0, 1), weight_stride, FEATURES, BLOCK, DEPENDENT), 0)
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)
    tl.store(out + index, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["gate", "up"])
def gated_kernel(
    x, weight, weight_stride, out, gate, up,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: output i, of rows gate + i and up + i. Grid: (outputs,)."""
    index, side = tl.program_id(0), tl.arange(0, 2)
    rows = index + tl.where(side == 0, gate, up)
    both = _products(x, weight, rows, weight_stride, FEATURES, BLOCK, DEPENDENT)
    opened, raised = tl.sum(tl.where(side == 0, both, 0.0), 0), tl.sum(tl.where(side == 0, 0.0, both), 0)
    tl.store(out + index, (opened * tl.sigmoid(opened) * raised).to(out.dtype.element_ty))


@triton.jit
def _products(
    x, weight, rows, weight_stride,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Return the products of x with some rows of the weight, fp32."""
    after_previous(DEPENDENT)
    columns = tl.arange(0, BLOCK)
    weight += rows.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    acc = tl.zeros(weight.shape, tl.float32)
    for begin in tl.range(0, FEATURES, BLOCK):
        inside = begin + columns < FEATURES
        # Weights are read once: they leave the caches before x and the results of small kernels.
        numbers = tl.load(weight + begin, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        acc += numbers * tl.load(x + begin + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.sum(acc, 1)


IS_INTERPRETED = is_interpreted(project_kernel)
"""Whether the kernels run in Triton's interpreter."""
