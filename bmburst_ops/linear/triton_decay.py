"""Scalar decay (Lightning, SSD of Mamba 2) in Triton: two scans over the chunks of each fragment, and their gradients.

In a chunk with queries Q, keys K, values V, the exponentials of the sums of decays from its beginning on the diagonal
of G, and the state S before it, the output is `scale (G Q S + P V)` with `P = tril(G Q K^T G^-1)`, and the state after
the chunk is `g S + (g G^-1 K)^T V`, where g is the last decay. Each kernel sums the decays of a chunk for itself, so
nothing is written but results, and the states between chunks that the gradients read.

Tensors are contiguous, of one flat batch: `[1, tokens, heads, dim]`. Products are of 16-bit numbers and their sums in
fp32. Source of the chunks: arXiv:2405.21060, section 6.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.linear.spans import Fragments, Spans
from bmburst_ops.linear.tiles import chunk_tiles, floats, gradient_sizes, kernel_sizes


class DecayInputs(NamedTuple):
    """What the kernels read of the tokens, besides values.

    Attributes:
        queries: Q, `[1, tokens, key_heads, key_dim]`.
        keys: K, shaped alike.
        decays: Natural logarithms of the decays, `[1, tokens, heads]`.
    """

    queries: Tensor
    keys: Tensor
    decays: Tensor


def summarize(inputs: DecayInputs, values: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """Return M, `[fragments, heads, 1, 1]`, and U, `[fragments, heads, key_dim, value_dim]`, in fp32.

    Args:
        inputs: See `DecayInputs`.
        values: Values, `[1, tokens, heads, value_dim]`.
        spans: The fragments. M is one and U zero where they have no tokens.
    """
    count, heads = len(spans.begins), values.shape[2]
    transitions = floats(values, count, heads, 1, 1)
    states = floats(values, count, heads, inputs.keys.shape[3], values.shape[3])
    given = values, None, None, None, transitions, states, *spans, 1.0
    _scan(_scan_kernel, inputs, given, spans, tiles=1, stages=3)
    return transitions, states


def outputs(inputs: DecayInputs, values: Tensor, before: Tensor | None, scale: float, spans: Spans) -> Tensor:
    """Return the outputs of all fragments, given the states before them, `[fragments, heads, key_dim, value_dim]`."""
    found = torch.empty_like(values)
    _scan(_scan_kernel, inputs, (values, before, found, None, None, None, *spans, scale), spans, tiles=2, stages=2)
    return found


def states_of_chunks(inputs: DecayInputs, values: Tensor, before: Tensor | None, fragments: Fragments) -> Tensor:
    """Return the state before each chunk, `[chunks, heads, key_dim, value_dim]`, typed as values."""
    found = values.new_empty(len(fragments.chunks), values.shape[2], inputs.keys.shape[3], values.shape[3])
    given = values, before, None, found, None, None, *fragments.spans, 1.0
    _scan(_scan_kernel, inputs, given, fragments.spans, tiles=1, stages=3)
    return found


def start_gradients(inputs: DecayInputs, grad_out: Tensor, scale: float, spans: Spans) -> Tensor:
    """Return the gradients of the states before fragments through the outputs of each, as states, in fp32."""
    found = floats(grad_out, len(spans.begins), grad_out.shape[2], inputs.keys.shape[3], grad_out.shape[3])
    given = grad_out, None, None, None, found, *spans, scale
    _scan(_reverse_kernel, inputs, given, spans, tiles=1, stages=3)
    return found


def gradients_of_chunks(
    inputs: DecayInputs, grad_out: Tensor, after: Tensor | None, scale: float, fragments: Fragments
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state after each chunk, as `states_of_chunks`, and that of the values."""
    states = grad_out.new_empty(len(fragments.chunks), grad_out.shape[2], inputs.keys.shape[3], grad_out.shape[3])
    dv = torch.empty_like(grad_out)
    given = grad_out, after, states, dv, None, *fragments.spans, scale
    _scan(_reverse_kernel, inputs, given, fragments.spans, tiles=2, stages=2)
    return states, dv


def input_gradients(
    inputs: DecayInputs,
    values: Tensor,
    grad_out: Tensor,
    states: Tensor,
    grad_states: Tensor,
    scale: float,
    fragments: Fragments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and, in fp32, of the logarithms of the decays.

    Args:
        inputs: See `DecayInputs`.
        values: Values.
        grad_out: Gradient of the output.
        states: What `states_of_chunks` returned.
        grad_states: What `gradients_of_chunks` returned first.
        scale: Factor on the output.
        fragments: All fragments.
    """
    heads, (key_heads, key_dim) = values.shape[2], inputs.keys.shape[2:]
    dq, dk = (values.new_empty(*values.shape[:3], key_dim) for _ in range(2))
    dg = floats(values, *values.shape[:3])
    _gradient_kernel[len(fragments.chunks), heads](
        *(*inputs, values, grad_out, states, grad_states, dq, dk, dg, fragments.edges, fragments.chunks, scale),
        **gradient_sizes(inputs.keys, kernel_sizes(inputs.keys, values, tiles=2, narrow=1, stages=2), warps=4),
    )
    if heads > key_heads:
        dq, dk = (t.unflatten(2, (key_heads, -1)).sum(3) for t in (dq, dk))
    return dq, dk, dg


def _scan(kernel: Any, inputs: DecayInputs, given: tuple[Any, ...], spans: Spans, *, tiles: int, stages: int) -> None:
    """Launch a scan: a program for each fragment, head and block of columns. `given` begins with the values."""
    sizes = kernel_sizes(inputs.keys, given[0], tiles=tiles, narrow=1, stages=stages)
    grid = len(spans.begins) * sizes["heads"], triton.cdiv(sizes["value_dim"], sizes["block_columns"])
    kernel[grid](*inputs, *given, **sizes)


@triton.jit
def _sums(decays, first, rows, inside, heads: tl.constexpr, chunk: tl.constexpr):
    """Return the sums of a chunk's decays from its beginning, in units of log 2, and the last of them."""
    each = tl.load(decays + first + rows * heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    each = tl.cumsum(each, 0)
    return each, tl.sum(tl.where(rows == chunk - 1, each, 0.0))  # a sum in another order would differ from it


@triton.jit
def _scan_kernel(
    queries, keys, decays, values, before, out, states, transitions, lasts, begins, ends, firsts, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    fragment, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_channel, of_value = channels < key_dim, columns < value_dim
    begin, end = tl.load(begins + fragment), tl.load(ends + fragment)
    of_state = channels[:, None] * value_dim + columns[None, :]
    in_state = is_channel[:, None] & of_value[None, :]
    one = (fragment * heads + head).to(tl.int64) * key_dim * value_dim
    if before is not None:
        state = tl.load(before + one + of_state, mask=in_state, other=0.0)
    else:
        state = tl.zeros((block_key, block_columns), tl.float32)
    if states is not None:
        states += (tl.load(firsts + fragment) * heads + head) * (key_dim * value_dim)
    total = 0.0
    for row in range(begin, end, chunk):
        at_key, at_value, is_key, is_there, inside = chunk_tiles(
            row, end, head, rows, channels, columns, is_channel, of_value, heads, key_heads, key_dim, value_dim
        )
        key = tl.load(keys + at_key, mask=is_key, other=0.0)
        value = tl.load(values + at_value, mask=is_there, other=0.0)
        each, last = _sums(decays, row * heads + head, rows, inside, heads, chunk)
        low = state.to(key.dtype)
        if states is not None:
            tl.store(states + of_state, low, mask=in_state)
            states += heads * key_dim * value_dim
        if out is not None:
            query = tl.load(queries + at_key, mask=is_key, other=0.0)
            weights = tl.where(rows[:, None] >= rows[None, :], tl.exp2(each[:, None] - each[None, :]), 0.0)
            weights *= tl.dot(query, tl.trans(key))
            result = tl.exp2(each)[:, None] * tl.dot(query, low)
            result = tl.dot(weights.to(key.dtype), value, result) * scale
            tl.store(out + at_value, result.to(key.dtype), mask=is_there)
        new = (value * tl.exp2(last - each)[:, None]).to(key.dtype)
        state = tl.dot(tl.trans(key), new, state * tl.exp2(last))
        total += last
    if lasts is not None:
        tl.store(lasts + one + of_state, state, mask=in_state)
        tl.store(transitions + fragment * heads + head, tl.exp2(total), mask=tl.program_id(1) == 0)


@triton.jit
def _reverse_kernel(
    queries, keys, decays, grad_out, after, states, dv, starts, begins, ends, firsts, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    fragment, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_channel, of_value = channels < key_dim, columns < value_dim
    begin, end = tl.load(begins + fragment), tl.load(ends + fragment)
    of_state = channels[:, None] * value_dim + columns[None, :]
    in_state = is_channel[:, None] & of_value[None, :]
    one = (fragment * heads + head).to(tl.int64) * key_dim * value_dim
    if after is not None:
        state = tl.load(after + one + of_state, mask=in_state, other=0.0)
    else:
        state = tl.zeros((block_key, block_columns), tl.float32)
    last_chunk = (end - begin - 1) // chunk
    if states is not None:
        states += ((tl.load(firsts + fragment) + last_chunk) * heads + head) * (key_dim * value_dim)
    last_row = begin + last_chunk * chunk
    for passed in range(0, end - begin, chunk):
        row = last_row - passed
        at_key, at_value, is_key, is_there, inside = chunk_tiles(
            row, end, head, rows, channels, columns, is_channel, of_value, heads, key_heads, key_dim, value_dim
        )
        query = tl.load(queries + at_key, mask=is_key, other=0.0)
        grad = tl.load(grad_out + at_value, mask=is_there, other=0.0)
        each, last = _sums(decays, row * heads + head, rows, inside, heads, chunk)
        if states is not None:
            key = tl.load(keys + at_key, mask=is_key, other=0.0)
            low = state.to(key.dtype)
            tl.store(states + of_state, low, mask=in_state)
            states -= heads * key_dim * value_dim
            weights = tl.where(rows[:, None] <= rows[None, :], tl.exp2(each[None, :] - each[:, None]), 0.0)
            weights *= tl.dot(key, tl.trans(query)) * scale
            result = tl.exp2(last - each)[:, None] * tl.dot(key, low)
            result = tl.dot(weights.to(grad.dtype), grad, result)
            tl.store(dv + at_value, result.to(key.dtype), mask=is_there)
        grad = (grad * (scale * tl.exp2(each))[:, None]).to(query.dtype)
        state = tl.dot(tl.trans(query), grad, state * tl.exp2(last))
    if starts is not None:
        tl.store(starts + one + of_state, state, mask=in_state)


@triton.jit
def _gradient_kernel(
    queries, keys, decays, values, grad_out, states, grad_states, dq, dk, dg, edges, places, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    first = row * heads + head
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    inside, is_channel = rows < end - row, channels < key_dim
    is_key = inside[:, None] & is_channel[None, :]
    at_key = (row * key_heads + head // (heads // key_heads)) * key_dim
    at_key += rows[:, None] * (key_heads * key_dim) + channels[None, :]
    key = tl.load(keys + at_key, mask=is_key, other=0.0)
    query = tl.load(queries + at_key, mask=is_key, other=0.0)
    each, last = _sums(decays, first, rows, inside, heads, chunk)
    states += (number.to(tl.int64) * heads + head) * (key_dim * value_dim)
    grad_states += (number.to(tl.int64) * heads + head) * (key_dim * value_dim)

    of_query = tl.zeros((chunk, block_key), tl.float32)
    of_key = tl.zeros((chunk, block_key), tl.float32)
    of_weights = tl.zeros((chunk, chunk), tl.float32)
    of_last = 0.0
    for begin in range(0, value_dim, block_columns):
        columns = begin + tl.arange(0, block_columns)
        of_value = columns < value_dim
        is_there = inside[:, None] & of_value[None, :]
        at_value = first * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
        in_state = of_value[:, None] & is_channel[None, :]
        at_state = columns[:, None] + channels[None, :] * value_dim  # transposed
        grad = tl.load(grad_out + at_value, mask=is_there, other=0.0)
        value = tl.load(values + at_value, mask=is_there, other=0.0)
        state = tl.load(states + at_state, mask=in_state, other=0.0)
        grad_state = tl.load(grad_states + at_state, mask=in_state, other=0.0)
        of_query = tl.dot(grad, state, of_query)
        of_key = tl.dot(value, grad_state, of_key)
        of_weights = tl.dot(grad, tl.trans(value), of_weights)
        of_last += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))

    factors = tl.where(rows[:, None] >= rows[None, :], tl.exp2(each[:, None] - each[None, :]) * scale, 0.0)
    of_weights = (of_weights * factors).to(key.dtype)
    of_query = tl.dot(of_weights, key, of_query * (scale * tl.exp2(each))[:, None])
    of_key *= tl.exp2(last - each)[:, None]
    total = tl.sum(key.to(tl.float32) * of_key) + tl.exp2(last) * of_last
    of_key = tl.dot(tl.trans(of_weights), query, of_key)
    # a decay is a factor of the queries that follow it, and divides the keys that follow it
    of_sum = tl.sum(query.to(tl.float32) * of_query, 1) - tl.sum(key.to(tl.float32) * of_key, 1)
    of_sum += tl.where(row + rows == tl.minimum(row + chunk, end) - 1, total, 0.0)
    tl.store(dg + first + rows * heads, tl.cumsum(of_sum, 0, reverse=True), mask=inside)
    at_key = first * key_dim + rows[:, None] * (heads * key_dim) + channels[None, :]
    tl.store(dq + at_key, of_query.to(key.dtype), mask=is_key)
    tl.store(dk + at_key, of_key.to(key.dtype), mask=is_key)
