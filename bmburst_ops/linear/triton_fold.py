"""Folds in one Triton kernel, for recurrences whose M is a number: many small operations would keep the host busy."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import lru_cache
from math import prod

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device
from bmburst_ops.linear.paths import Paths

_BLOCK = 1024  # numbers of a state for a program


def fold(
    transitions: Tensor,
    ends: Tensor,
    paths: Paths,
    firsts: Tensor | None = None,
    *,
    out: Tensor | None = None,
    products: Tensor | None = None,
) -> Tensor:
    """See `bmburst_ops.linear.fold.fold`. All is in fp32; the numbers of a head lie together."""
    heads, *state = ends.shape[1:]
    found = paths.memory(ends, heads, *state) if out is None else out
    numbers = prod(state)
    strides = [t.stride(dim) for t in (transitions, ends, found) for dim in (0, 1)]
    strides += (0, 0) if products is None else (products.stride(0), products.stride(1))
    if firsts is not None:
        firsts = firsts.contiguous()
    if paths.each:
        _fold_kernel[len(paths.each), heads, triton.cdiv(numbers, _BLOCK)](
            transitions,
            ends,
            firsts,
            found,
            products,
            *_sent(paths, ends.device).here(),
            *strides,
            heads,
            numbers,
            _BLOCK,
        )
    return found


@lru_cache(maxsize=64)
def _sent(paths: Paths, device: torch.device) -> DeviceVectors:
    """Return the edges of paths in steps, `rows` and `before` of all steps, and `after` and `first` of all paths."""
    each = paths.each
    numbers = (
        np.cumsum([0, *(len(path.rows) for path in each)]),
        [row for path in each for row in path.rows],
        [place for path in each for place in path.before],
        [path.after for path in each],
        [path.first for path in each],
    )
    return copy_to_device([np.array(vector, np.int64) for vector in numbers], device, torch.int64)


@triton.jit
def _fold_kernel(
    transitions, ends, firsts, found, products, edges, rows, before, after, first,
    m_row, m_head, u_row, u_head, found_row, found_head, product_row, product_head,
    heads, numbers, block: tl.constexpr,
):  # fmt: skip
    path, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * block + tl.arange(0, block)
    inside = at < numbers
    transitions += head * m_head
    ends += head * u_head + at
    found += head * found_head + at
    if firsts is not None:
        number = tl.load(first + path)
        state = tl.load(firsts + (number * heads + head) * numbers + at, mask=inside & (number >= 0), other=0.0)
    else:
        state = tl.zeros((block,), tl.float32)
    product = 1.0
    for step in range(tl.load(edges + path), tl.load(edges + path + 1)):
        row, place = tl.load(rows + step), tl.load(before + step)
        tl.store(found + place * found_row, state, mask=inside & (place >= 0))
        m = tl.load(transitions + row * m_row)
        state = m * state + tl.load(ends + row * u_row, mask=inside, other=0.0)
        product *= m
    place = tl.load(after + path)
    tl.store(found + place * found_row, state, mask=inside & (place >= 0))
    if products is not None:
        at_product = products + place * product_row + head * product_head
        tl.store(at_product, product, mask=(tl.program_id(2) == 0) & (place >= 0))
