"""Linear layers of decoding: few rows times a weight, so that memory bandwidth bounds them, not arithmetic.

One row is multiplied by a Triton kernel (`triton_gemv`), which is 1.05 to 1.5 times as fast as cuBLAS on an H200. More
rows, and other devices, take torch's product, which is also the definition. None has a gradient.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bmburst_ops.fused import triton_twin
from bmburst_ops.swiglu import swiglu


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`.

    Args:
        x: `[count, in]`.
        weight: `[out, in]`, rows of any stride.

    Returns:
        `[count, out]` in x's dtype.
    """
    return project_rows(x, weight, [slice(0, len(weight))])[0]


@torch.no_grad()
def project_rows(x: Tensor, weight: Tensor, rows: Sequence[slice], bias: Tensor | None = None) -> Sequence[Tensor]:
    """Return the products of x with slices of the rows of a weight.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`, rows of any stride.
        rows: One to three slices.
        bias: `[out]`, or None.

    Returns:
        For each slice `[..., rows of the slice]` in x's dtype.
    """
    fused, sizes = _fused(x, weight), [each.stop - each.start for each in rows]
    if fused:
        joined: Tensor = fused.project(x, weight, rows, bias)
        return torch.split(joined, sizes, -1)
    are_adjacent = all(a.stop == b.start for a, b in pairwise(rows))
    read = [slice(rows[0].start, rows[-1].stop)] if are_adjacent else rows  # one product is faster than three
    products = [linear(x, weight[each], None if bias is None else bias[each]) for each in read]
    return torch.split(products[0], sizes, -1) if are_adjacent else products


@torch.no_grad()
def gated(x: Tensor, weight: Tensor, gate: slice, up: slice) -> Tensor:
    """Return `silu(x @ weight[gate].T) * (x @ weight[up].T)`.

    Args:
        x: See `project`.
        weight: See `project`.
        gate: Rows of the gate.
        up: As many rows.

    Returns:
        `[count, rows of gate]` in x's dtype. The Triton kernel rounds once, torch also both products.
    """
    fused = _fused(x, weight)
    if fused:
        product: Tensor = fused.gated(x, weight, gate, up)
        return product
    return swiglu(*project_rows(x, weight, (gate, up)))


def _fused(x: Tensor, weight: Tensor) -> Any | None:
    """Return `triton_gemv` if it supports these tensors, else None."""
    is_one_row = x.dim() == 2 and len(x) == 1 and weight.stride(1) == x.stride(1) == 1
    return triton_twin("triton_gemv", x, weight) if is_one_row else None
