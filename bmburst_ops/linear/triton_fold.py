"""The Triton twin of `bmburst_ops.linear.fold`: a program for some columns of a head's state and all fragments."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32  # of a state for a program: few heads then still fill a GPU
_WARPS = 8


def fold_fragments(
    transitions: Tensor, ends: Tensor, firsts: Tensor, edges: tuple[int, ...], *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """See `bmburst_ops.linear.fold.fold_fragments`; fp32."""
    pieces, heads, key_dim, columns = firsts.shape
    each = firsts.new_empty(len(transitions), heads, key_dim, columns)
    firsts, lasts = firsts.contiguous(), torch.empty_like(firsts, memory_format=torch.contiguous_format)
    row, column = (3, 2) if backward else (2, 3)  # M^T is M with its strides exchanged
    _fold_kernel[pieces * heads, triton.cdiv(columns, _COLUMNS)](
        transitions,
        ends,
        firsts,
        each,
        lasts,
        _on_device(edges, firsts.device),
        transitions.stride(0),
        transitions.stride(1),
        transitions.stride(row),
        transitions.stride(column),
        ends.stride(0),
        ends.stride(1),
        ends.stride(2),
        ends.stride(3),
        heads,
        columns,
        ends.shape[3],
        key_dim=key_dim,
        block_key=max(16, triton.next_power_of_2(key_dim)),
        block_columns=_COLUMNS,
        backward=backward,
        num_warps=_WARPS,
    )
    return each, lasts


@lru_cache(maxsize=64)
def _on_device(edges: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(edges, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=("heads", "columns", "given"))
def _fold_kernel(
    transitions, ends, firsts, each, lasts, edges,
    m_fragment, m_head, m_row, m_column, u_fragment, u_head, u_row, u_column,
    heads, columns, given,
    key_dim: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    piece, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    keys = tl.arange(0, block_key)
    cols = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_key = keys < key_dim
    inside = is_key[:, None] & (cols < columns)[None, :]
    place = keys[:, None] * columns + cols[None, :]
    size = key_dim * columns
    state = tl.load(firsts + (piece * heads + head).to(tl.int64) * size + place, mask=inside, other=0.0)
    begin, end = tl.load(edges + piece), tl.load(edges + piece + 1)
    for i in range(begin, end):
        step = i - begin
        fragment = (end - 1 - step if backward else begin + step).to(tl.int64)
        tl.store(each + (fragment * heads + head) * size + place, state, mask=inside)
        m = tl.load(
            transitions + fragment * m_fragment + head * m_head + keys[:, None] * m_row + keys[None, :] * m_column,
            mask=is_key[:, None] & is_key[None, :],
            other=0.0,
        )
        u = tl.load(
            ends + fragment * u_fragment + head * u_head + keys[:, None] * u_row + cols[None, :] * u_column,
            mask=is_key[:, None] & (cols < given)[None, :],
            other=0.0,
        )
        state = tl.dot(m, state, input_precision="ieee") + u  # fp32 without TF32: errors reach all later tokens
    tl.store(lasts + (piece * heads + head).to(tl.int64) * size + place, state, mask=inside)
