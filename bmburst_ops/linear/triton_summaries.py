"""Summaries of fragments of KDA in Triton: M and U of each fragment, and the gradient of the state before it.

fla's kernels for whole sequences would also write the state before each chunk of 64 tokens. These write nothing but
their results. All tensors are contiguous, of one flat batch: `[1, tokens, heads, dim]`. Products are of 16-bit numbers
and their sums in fp32, as in fla's kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.linear.spans import Spans
from bmburst_ops.linear.tiles import COLUMNS, kernel_sizes

_MOST_STAGES = 3  # loads of so many chunks in flight, if shared memory holds them


def summarize(
    keys: Tensor, written: Tensor, values: Tensor, sums: Tensor, spans: Spans, of_matrices: Spans
) -> tuple[Tensor, Tensor]:
    """Return M, `[fragments, heads, key_dim, key_dim]`, and U, `[fragments, heads, key_dim, value_dim]`, in fp32.

    Args:
        keys: Keys of the scan.
        written: What each chunk reads of the state before it (w of the WY representation), typed as keys, `[1, tokens,
            heads, key_dim]`.
        values: Values of the scan (u of the WY representation).
        sums: Sums of the decays from the beginning of each chunk, in units of log 2, `[1, tokens, heads, key_dim]`,
            fp32.
        spans: The fragments. They begin at chunks. U is zero where they have no tokens.
        of_matrices: Likewise. M is the identity where they have no tokens.
    """
    heads, value_dim, key_dim = *values.shape[2:], keys.shape[3]
    transitions = sums.new_empty(len(spans.begins), heads, key_dim, key_dim)
    states = sums.new_empty(len(spans.begins), heads, key_dim, value_dim)
    blocks = triton.cdiv(value_dim, COLUMNS) + triton.cdiv(key_dim, COLUMNS)
    _summary_kernel[len(spans.begins) * heads, blocks](
        *(keys, written, values, sums, transitions, states, *spans[:2], of_matrices.ends),
        **kernel_sizes(keys, values, tiles=2, narrow=1, stages=_MOST_STAGES),
    )
    return transitions, states


def start_gradients(
    queries: Tensor,
    keys: Tensor,
    written: Tensor,
    grad_out: Tensor,
    grad_values: Tensor,
    sums: Tensor,
    scale: float,
    spans: Spans,
) -> Tensor:
    """Return the gradients of the states before fragments through the outputs of each, shaped as U, in fp32.

    Args:
        queries: Queries of the scan.
        keys: See `summarize`.
        written: See `summarize`.
        grad_out: Gradient of the output.
        grad_values: Gradients of the values through the outputs of their own chunk.
        sums: See `summarize`.
        scale: Factor on the output.
        spans: See `summarize`.
    """
    heads, value_dim = grad_out.shape[2:]
    states = sums.new_empty(len(spans.begins), heads, keys.shape[3], value_dim)
    _start_gradient_kernel[len(spans.begins) * heads, triton.cdiv(value_dim, COLUMNS)](
        *(queries, keys, written, grad_out, grad_values, sums, states, *spans[:2], scale),
        **kernel_sizes(keys, grad_out, tiles=3, narrow=2, stages=_MOST_STAGES),
    )
    return states


@triton.jit
def _summary_kernel(
    keys, written, values, sums, transitions, states, begins, ends, ends_of_matrices,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    fragment, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    value_blocks: tl.constexpr = (value_dim + block_columns - 1) // block_columns
    is_value = tl.program_id(1) < value_blocks  # the other programs compute M: columns whose values are zero
    block = tl.where(is_value, tl.program_id(1), tl.program_id(1) - value_blocks)
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    columns = block * block_columns + tl.arange(0, block_columns)
    is_channel = channels < key_dim
    of_value = is_value & (columns < value_dim)
    begin = tl.load(begins + fragment)
    end = tl.where(is_value, tl.load(ends + fragment), tl.load(ends_of_matrices + fragment))
    state = tl.where((channels[:, None] == columns[None, :]) & (is_value == 0), 1.0, 0.0)
    for row in range(begin, end, chunk):
        inside = rows < end - row
        last_row = tl.minimum(row + chunk, end) - 1
        place = (row * heads + head) * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
        added = tl.load(values + place, mask=inside[:, None] & of_value[None, :], other=0.0).to(tl.float32)
        place = (row * heads + head) * key_dim + rows[:, None] * (heads * key_dim) + channels[None, :]
        read = tl.load(written + place, mask=inside[:, None] & is_channel[None, :], other=0.0)
        added -= tl.dot(read, state.to(read.dtype))
        last = tl.load(sums + (last_row * heads + head) * key_dim + channels, mask=is_channel, other=0.0)
        state *= tl.exp2(last)[:, None]
        place = (row * key_heads + head // (heads // key_heads)) * key_dim
        place += rows[None, :] * (key_heads * key_dim) + channels[:, None]
        key = tl.load(keys + place, mask=inside[None, :] & is_channel[:, None], other=0.0)
        state = tl.dot(key, added.to(key.dtype), state)
    one = (fragment * heads + head).to(tl.int64) * key_dim
    place = one * value_dim + channels[:, None] * value_dim + columns[None, :]
    tl.store(states + place, state, mask=is_channel[:, None] & of_value[None, :])
    place = one * key_dim + channels[:, None] * key_dim + columns[None, :]
    of_key = (is_value == 0) & (columns < key_dim)
    tl.store(transitions + place, state, mask=is_channel[:, None] & of_key[None, :])


@triton.jit
def _start_gradient_kernel(
    queries, keys, written, grad_out, grad_values, sums, states, begins, ends, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    fragment, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_channel, of_value = channels < key_dim, columns < value_dim
    begin, end = tl.load(begins + fragment), tl.load(ends + fragment)
    state = tl.zeros((block_key, block_columns), tl.float32)
    last_chunk = begin + (end - begin - 1) // chunk * chunk
    for passed in range(0, end - begin, chunk):
        row = last_chunk - passed
        inside = rows < end - row
        last_row = tl.minimum(row + chunk, end) - 1
        of_key = (row * key_heads + head // (heads // key_heads)) * key_dim
        of_head = (row * heads + head) * key_dim
        at_value = (row * heads + head) * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
        is_there = inside[:, None] & of_value[None, :]
        grad = tl.load(grad_out + at_value, mask=is_there, other=0.0)
        last = tl.load(sums + (last_row * heads + head) * key_dim + channels, mask=is_channel, other=0.0)
        place = of_key + rows[:, None] * (key_heads * key_dim) + channels[None, :]
        key = tl.load(keys + place, mask=inside[:, None] & is_channel[None, :], other=0.0)
        added = tl.dot(key, state.to(key.dtype))
        added += tl.load(grad_values + at_value, mask=is_there, other=0.0)
        place = of_key + rows[None, :] * (key_heads * key_dim) + channels[:, None]
        query = tl.load(queries + place, mask=inside[None, :] & is_channel[:, None], other=0.0)
        state *= tl.exp2(last)[:, None]
        state += tl.dot(query.to(grad.dtype), grad) * scale
        place = of_head + rows[None, :] * (heads * key_dim) + channels[:, None]
        read = tl.load(written + place, mask=inside[None, :] & is_channel[:, None], other=0.0)
        state -= tl.dot(read, added.to(read.dtype))
    place = (fragment * heads + head).to(tl.int64) * key_dim * value_dim
    place += channels[:, None] * value_dim + columns[None, :]
    tl.store(states + place, state, mask=is_channel[:, None] & of_value[None, :])
