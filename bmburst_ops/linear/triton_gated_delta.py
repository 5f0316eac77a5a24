"""The gated delta rule in Triton: two scans over the chunks of each fragment, and the gradients of each chunk.

In a chunk with keys K, values V, decays from its beginning G (the diagonal of exp2 of `sums`) and the state S before
it, the values that the chunk adds are

    N = A X,  X = beta (V - G K S),  A = (I + M)^-1,  M = tril(beta G K K^T G^-1, -1).

The output is `scale (G Q S + P N)` with `P = tril(G Q K^T G^-1)`, and the state after the chunk `g S + (g G^-1 K)^T N`,
where g is the last decay. Given the gradient of N, that of X is `Y = A^T dN`. As `dM = -Y N^T`, the inverse needs no
gradient of its own. So what other implementations write between their kernels (w and u of the WY representation, and
their gradients) is never written.

Forward, queries and keys are written divided by their norms. Backward, they are read as they are, and reciprocals of
the norms multiply G beside Q and K: nothing is divided again. The outputs have no room for norms: with them, only one
program fits the shared memory of a multiprocessor of an H200, and they take 2.2 ms in place of 1.2.

Tensors are contiguous, of one flat batch: `[1, tokens, heads, dim]`. Products are of 16-bit numbers and their sums in
fp32, but those of A, which are in TF32. Source of the chunks: arXiv:2412.06464, section 3.3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.fragments import CHUNK
from bmburst_ops.linear.kernel import EPSILON
from bmburst_ops.linear.spans import Fragments, Spans
from bmburst_ops.linear.tiles import (
    chunk_tiles,
    columns_of_states,
    divided,
    floats,
    gradient_sizes,
    kernel_sizes,
    unit_inverse,
)

_ROWS = 16  # of values for a program
_REGISTERS = 168  # of a thread: three programs of the chunks' inverses fit a multiprocessor


class Chunks(NamedTuple):
    """What the kernels read of the chunks.

    Attributes:
        queries: Q, `[1, tokens, key_heads, key_dim]`.
        keys: K, shaped alike.
        norms: Reciprocals of the norms by which queries and keys are to be divided, `[chunks, key_heads, 2, 64]`, fp32;
            None: they are not to be divided.
        numbers: Sums of the decays from the beginning of a chunk in units of log 2, and beta: `[chunks, heads, 2, 64]`,
            fp32. Behind the last token they are the last sum, and zero.
        inverse: A, `[1, tokens, heads, 64]`, typed as keys.
    """

    queries: Tensor
    keys: Tensor
    norms: Tensor | None
    numbers: Tensor
    inverse: Tensor


def make_chunks(
    queries: Tensor, keys: Tensor, decays: Tensor, beta: Tensor, normalize: bool, fragments: Fragments
) -> tuple[Chunks, Tensor | None]:
    """Return the chunks of queries and keys, and of decays and beta of each token, `[1, tokens, heads]`.

    Args:
        queries: Queries.
        keys: Keys.
        decays: Natural logarithms of the decays.
        beta: Beta.
        normalize: Whether queries and keys are divided by their norms. In these chunks they were.
        fragments: All fragments.

    Returns:
        The chunks, and the norms for `Chunks.norms`, or None.
    """
    heads, (key_heads, key_dim), count = beta.shape[2], keys.shape[2:], len(fragments.chunks)
    inverse, numbers = keys.new_empty(*beta.shape, CHUNK), floats(beta, count, heads, 2, CHUNK)
    norms, divided = None, (queries, keys)
    if normalize:
        norms, divided = floats(beta, count, key_heads, 2, CHUNK), (torch.empty_like(queries), torch.empty_like(keys))
    _chunk_kernel[count, heads](
        *(queries, keys, decays, beta, *divided, norms, numbers, inverse, fragments.edges, fragments.chunks, EPSILON),
        **{"heads": heads, "key_heads": key_heads, "key_dim": key_dim, "chunk": CHUNK},
        **{"block_key": max(16, triton.next_power_of_2(key_dim)), "num_warps": 4, "maxnreg": _REGISTERS},
    )
    return Chunks(*divided, None, numbers, inverse), norms


def summarize(chunks: Chunks, values: Tensor, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
    """Return M, `[fragments, heads, key_dim, key_dim]`, and U, `[fragments, heads, key_dim, value_dim]`, in fp32.

    Args:
        chunks: See `Chunks`.
        values: Values.
        spans: The fragments. U is zero where they have no tokens.
        of_matrices: Likewise. M is the identity where they have no tokens.
    """
    (heads, value_dim), key_dim, count = values.shape[2:], chunks.keys.shape[3], len(spans.begins)
    transitions = floats(values, count, heads, key_dim, key_dim)
    states = floats(values, count, heads, key_dim, value_dim)
    given = values, None, None, None, None, transitions, states, *spans, of_matrices.ends, 1.0
    _scan(_scan_kernel, chunks, given, spans, (value_dim, key_dim), tiles=1, stages=3)
    return transitions, states


def outputs(chunks: Chunks, values: Tensor, before: Tensor | None, scale: float, spans: Spans) -> Tensor:
    """Return the outputs of all fragments, given the states before them, `[fragments, heads, key_dim, value_dim]`."""
    found = torch.empty_like(values)
    given = values, before, found, None, None, None, None, *spans, None, scale
    _scan(_scan_kernel, chunks, given, spans, values.shape[3:], tiles=2, stages=2)
    return found


def states_of_chunks(
    chunks: Chunks, values: Tensor, before: Tensor | None, fragments: Fragments
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, `[chunks, heads, key_dim, value_dim]`, typed as values, and N."""
    states = values.new_empty(len(fragments.chunks), values.shape[2], chunks.keys.shape[3], values.shape[3])
    added = torch.empty_like(values)
    given = values, before, None, states, added, None, None, *fragments.spans, None, 1.0
    _scan(_scan_kernel, chunks, given, fragments.spans, values.shape[3:], tiles=1, stages=3)
    return states, added


def start_gradients(chunks: Chunks, grad_out: Tensor, scale: float, spans: Spans) -> Tensor:
    """Return the gradients of the states before fragments through the outputs of each, as states, in fp32."""
    found = floats(grad_out, len(spans.begins), grad_out.shape[2], chunks.keys.shape[3], grad_out.shape[3])
    given = grad_out, None, None, None, found, *spans, scale
    _scan(_reverse_kernel, chunks, given, spans, grad_out.shape[3:], tiles=2, stages=2)
    return found


def gradients_of_chunks(
    chunks: Chunks, grad_out: Tensor, after: Tensor | None, scale: float, fragments: Fragments
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state after each chunk, as `states_of_chunks`, and Y."""
    states = grad_out.new_empty(len(fragments.chunks), grad_out.shape[2], chunks.keys.shape[3], grad_out.shape[3])
    found = torch.empty_like(grad_out)
    given = grad_out, after, states, found, None, *fragments.spans, scale
    _scan(_reverse_kernel, chunks, given, fragments.spans, grad_out.shape[3:], tiles=2, stages=1)
    return states, found


def input_gradients(
    chunks: Chunks,
    values: Tensor,
    beta: Tensor,
    grad_out: Tensor,
    of_chunks: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    fragments: Fragments,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, decays (in fp32) and beta.

    Args:
        chunks: See `Chunks`.
        values: Values.
        beta: Beta.
        grad_out: Gradient of the output.
        of_chunks: What `states_of_chunks` and `gradients_of_chunks` returned.
        scale: Factor on the output.
        fragments: All fragments.
    """
    heads, (key_heads, key_dim) = values.shape[2], chunks.keys.shape[2:]
    dv, by_value = torch.empty_like(values), floats(beta, *beta.shape)  # sums of Y V: the part of beta's gradient
    _value_kernel[triton.cdiv(by_value.numel(), _ROWS),](
        *(values, of_chunks[3], beta, dv, by_value, by_value.numel()),
        **{"value_dim": values.shape[3], "block": _ROWS, "block_columns": triton.next_power_of_2(values.shape[3])},
    )
    dq, dk = (values.new_empty(*values.shape[:3], key_dim) for _ in range(2))
    dg, dbeta = torch.empty_like(by_value), torch.empty_like(beta)
    _gradient_kernel[len(fragments.chunks), heads](
        *(*chunks[:-1], by_value, grad_out, *of_chunks, dq, dk, dg, dbeta, fragments.edges, fragments.chunks, scale),
        **gradient_sizes(chunks.keys, _sizes(chunks, values, tiles=3, stages=3), warps=8),
    )
    if heads > key_heads:
        dq, dk = (t.unflatten(2, (key_heads, -1)).sum(3) for t in (dq, dk))
    return dq, dk, dv, dg, dbeta


def _scan(
    kernel: Any,
    chunks: Chunks,
    given: tuple[Any, ...],
    spans: Spans,
    columns: Sequence[int],
    *,
    tiles: int,
    stages: int,
) -> None:
    """Launch a scan: a program for each fragment, head and block of `columns`. `given` begins with the values."""
    sizes = _sizes(chunks, given[0], tiles, stages)
    grid = len(spans.begins) * sizes["heads"], sum(triton.cdiv(dim, sizes["block_columns"]) for dim in columns)
    kernel[grid](*chunks, *given, **sizes)


def _sizes(chunks: Chunks, values: Tensor, tiles: int, stages: int) -> dict[str, int]:
    """Return the constants of a kernel."""
    columns = columns_of_states(chunks.keys)
    return kernel_sizes(chunks.keys, values, tiles=tiles, narrow=2, stages=stages, columns=columns)


@triton.jit
def _chunk_kernel(
    queries, keys, decays, beta, divided_queries, divided_keys, norms, numbers, inverse, edges, places, epsilon,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, chunk: tl.constexpr, block_key: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    key_head = head // (heads // key_heads)
    first, first_key = row * heads + head, (row * key_heads + key_head) * key_dim
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    inside = rows < end - row
    is_key = inside[:, None] & (channels < key_dim)[None, :]
    in_keys = rows[:, None] * (key_heads * key_dim) + channels[None, :]
    each = tl.load(decays + first + rows * heads, mask=inside, other=0.0).to(tl.float32)
    each = tl.cumsum(each * 1.4426950408889634, 0)  # 1 / ln 2
    rate = tl.load(beta + first + rows * heads, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(keys + first_key + in_keys, mask=is_key, other=0.0)
    if norms is not None:
        norm, key = divided(key, epsilon)
        if head % (heads // key_heads) == 0:
            at_norm = norms + (number.to(tl.int64) * key_heads + key_head) * (2 * chunk) + rows
            tl.store(at_norm + chunk, norm)
            tl.store(divided_keys + first_key + in_keys, key, mask=is_key)
            query = tl.load(queries + first_key + in_keys, mask=is_key, other=0.0)
            norm, query = divided(query, epsilon)
            tl.store(at_norm, norm)
            tl.store(divided_queries + first_key + in_keys, query, mask=is_key)
    numbers += (number.to(tl.int64) * heads + head) * (2 * chunk) + rows
    tl.store(numbers, each)
    tl.store(numbers + chunk, rate)
    products = tl.dot(key, tl.trans(key)) * rate[:, None]
    is_below = (rows[:, None] > rows[None, :]) & inside[:, None]
    products = tl.where(is_below, products * tl.exp2(each[:, None] - each[None, :]), 0.0)
    found = unit_inverse(products, rows)
    in_inverse = rows[:, None] * (heads * chunk) + rows[None, :]
    tl.store(inverse + first * chunk + in_inverse, found.to(inverse.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _numbers(numbers, norms, number, head, rows, heads: tl.constexpr, key_heads: tl.constexpr, chunk: tl.constexpr):
    """Return a chunk's sums of decays with norms of queries, keys that read and keys that write; the last sum; beta."""
    numbers += (number * heads + head) * (2 * chunk)
    each, last, rate = tl.load(numbers + rows), tl.load(numbers + chunk - 1), tl.load(numbers + chunk + rows)
    if norms is None:
        asking, reading, writing = each, each, each
    else:
        norms += (number * key_heads + head // (heads // key_heads)) * (2 * chunk) + rows
        of_query, of_key = tl.log2(tl.load(norms)), tl.log2(tl.load(norms + chunk))
        asking, reading, writing = each + of_query, each + of_key, each - of_key
    return asking, reading, writing, last, rate


@triton.jit
def _scan_kernel(
    queries, keys, norms, numbers, inverse, values, before, out, states, added, transitions, lasts,
    begins, ends, firsts, ends_of_matrices, scale,
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
    begin, end = tl.load(begins + fragment), tl.load(ends + fragment)
    of_state = channels[:, None] * value_dim + columns[None, :]
    in_state = is_channel[:, None] & of_value[None, :]
    one = (fragment * heads + head).to(tl.int64) * key_dim
    if transitions is not None:
        end = tl.where(is_value, end, tl.load(ends_of_matrices + fragment))
        state = tl.where((channels[:, None] == columns[None, :]) & (is_value == 0), 1.0, 0.0)
    elif before is not None:
        state = tl.load(before + one * value_dim + of_state, mask=in_state, other=0.0)
    else:
        state = tl.zeros((block_key, block_columns), tl.float32)
    number = tl.load(firsts + fragment)
    if states is not None:
        states += (number * heads + head) * (key_dim * value_dim)
    for row in range(begin, end, chunk):
        at_key, at_value, is_key, is_there, inside = chunk_tiles(
            row, end, head, rows, channels, columns, is_channel, of_value, heads, key_heads, key_dim, value_dim
        )
        at_inverse = (row * heads + head) * chunk + rows[:, None] * (heads * chunk) + rows[None, :]
        key = tl.load(keys + at_key, mask=is_key, other=0.0)
        value = tl.load(values + at_value, mask=is_there, other=0.0).to(tl.float32)
        inner = tl.load(inverse + at_inverse, mask=inside[:, None], other=0.0)
        asking, reading, writing, last, rate = _numbers(numbers, norms, number, head, rows, heads, key_heads, chunk)
        low = state.to(key.dtype)
        if states is not None:
            tl.store(states + of_state, low, mask=in_state)
            states += heads * key_dim * value_dim
        value = rate[:, None] * (value - tl.exp2(reading)[:, None] * tl.dot(key, low))
        new = tl.dot(inner, value.to(key.dtype))
        if added is not None:
            tl.store(added + at_value, new.to(key.dtype), mask=is_there)
        if out is not None:
            query = tl.load(queries + at_key, mask=is_key, other=0.0)
            decays = tl.where(rows[:, None] >= rows[None, :], tl.exp2(asking[:, None] - writing[None, :]), 0.0)
            weights = tl.dot(query, tl.trans(key)) * decays
            result = tl.exp2(asking)[:, None] * tl.dot(query, low)
            result = tl.dot(weights.to(key.dtype), new.to(key.dtype), result) * scale
            tl.store(out + at_value, result.to(key.dtype), mask=is_there)
        new *= tl.exp2(last - writing)[:, None]
        state = tl.dot(tl.trans(key), new.to(key.dtype), state * tl.exp2(last))
        number += 1
    if transitions is not None:
        tl.store(lasts + one * value_dim + of_state, state, mask=in_state)
        place = one * key_dim + channels[:, None] * key_dim + columns[None, :]
        of_key = (is_value == 0) & (columns < key_dim)
        tl.store(transitions + place, state, mask=is_channel[:, None] & of_key[None, :])


@triton.jit
def _reverse_kernel(
    queries, keys, norms, numbers, inverse, grad_out, after, states, found, starts,
    begins, ends, firsts, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    fragment, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_channel, of_value = channels < key_dim, columns < value_dim
    begin, end = tl.load(begins + fragment), tl.load(ends + fragment)
    in_keys = rows[:, None] * (key_heads * key_dim) + channels[None, :]
    in_values = rows[:, None] * (heads * value_dim) + columns[None, :]
    in_inverse = rows[:, None] * (heads * chunk) + rows[None, :]
    of_state = channels[:, None] * value_dim + columns[None, :]
    in_state = is_channel[:, None] & of_value[None, :]
    one = (fragment * heads + head).to(tl.int64) * key_dim * value_dim
    if after is not None:
        state = tl.load(after + one + of_state, mask=in_state, other=0.0)
    else:
        state = tl.zeros((block_key, block_columns), tl.float32)
    last_chunk = (end - begin - 1) // chunk
    number = tl.load(firsts + fragment) + last_chunk
    if states is not None:
        states += (number * heads + head) * (key_dim * value_dim)
    last_row = begin + last_chunk * chunk
    for passed in range(0, end - begin, chunk):
        row = last_row - passed
        inside = rows < end - row
        first = row * heads + head
        at_key = (row * key_heads + head // (heads // key_heads)) * key_dim
        is_key = inside[:, None] & is_channel[None, :]
        is_there = inside[:, None] & of_value[None, :]
        key = tl.load(keys + at_key + in_keys, mask=is_key, other=0.0)
        query = tl.load(queries + at_key + in_keys, mask=is_key, other=0.0)
        grad = tl.load(grad_out + first * value_dim + in_values, mask=is_there, other=0.0)
        inner = tl.load(inverse + first * chunk + in_inverse, mask=inside[:, None], other=0.0)
        asking, reading, writing, last, rate = _numbers(numbers, norms, number, head, rows, heads, key_heads, chunk)
        number -= 1
        low = state.to(key.dtype)
        if states is not None:
            tl.store(states + of_state, low, mask=in_state)
            states -= heads * key_dim * value_dim
        decays = tl.where(rows[:, None] <= rows[None, :], tl.exp2(asking[None, :] - writing[:, None]), 0.0)
        weights = tl.dot(key, tl.trans(query)) * decays * scale
        new = tl.exp2(last - writing)[:, None] * tl.dot(key, low)
        new = tl.dot(weights.to(grad.dtype), grad, new)
        of_values = tl.dot(tl.trans(inner), new.to(key.dtype))
        if states is not None:
            tl.store(found + first * value_dim + in_values, of_values.to(key.dtype), mask=is_there)
        of_values *= (rate * tl.exp2(reading))[:, None]
        grad = (grad * (scale * tl.exp2(asking))[:, None]).to(key.dtype)
        state = tl.dot(tl.trans(query), grad, state * tl.exp2(last))
        state -= tl.dot(tl.trans(key), of_values.to(key.dtype))
    if starts is not None:
        tl.store(starts + one + of_state, state, mask=in_state)


@triton.jit
def _gradient_kernel(
    queries, keys, norms, numbers, by_value, grad_out, states, added, grad_states, grad_values,
    dq, dk, dg, dbeta, edges, places, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    first, first_key = row * heads + head, row * key_heads + head // (heads // key_heads)
    rows, channels = tl.arange(0, chunk), tl.arange(0, block_key)
    inside, is_channel = rows < end - row, channels < key_dim
    is_key = inside[:, None] & is_channel[None, :]
    in_keys = rows[:, None] * (key_heads * key_dim) + channels[None, :]
    number = number.to(tl.int64)
    asking, reading, writing, last, rate = _numbers(numbers, norms, number, head, rows, heads, key_heads, chunk)
    key = tl.load(keys + first_key * key_dim + in_keys, mask=is_key, other=0.0)
    query = tl.load(queries + first_key * key_dim + in_keys, mask=is_key, other=0.0)
    states += (number * heads + head) * (key_dim * value_dim)
    grad_states += (number * heads + head) * (key_dim * value_dim)
    grad_out, added = grad_out + first * value_dim, added + first * value_dim
    grad_values += first * value_dim

    of_query = tl.zeros((chunk, block_key), tl.float32)
    of_read = tl.zeros((chunk, block_key), tl.float32)  # Y S^T
    of_key = tl.zeros((chunk, block_key), tl.float32)
    of_weights = tl.zeros((chunk, chunk), tl.float32)
    of_inner = tl.zeros((chunk, chunk), tl.float32)  # Y N^T
    of_last = 0.0
    for begin in range(0, value_dim, block_columns):
        columns = begin + tl.arange(0, block_columns)
        of_value = columns < value_dim
        is_there = inside[:, None] & of_value[None, :]
        at_value = rows[:, None] * (heads * value_dim) + columns[None, :]
        in_state = of_value[:, None] & is_channel[None, :]
        at_state = columns[:, None] + channels[None, :] * value_dim  # transposed
        grad = tl.load(grad_out + at_value, mask=is_there, other=0.0)
        grad_value = tl.load(grad_values + at_value, mask=is_there, other=0.0)
        new = tl.load(added + at_value, mask=is_there, other=0.0)
        state = tl.load(states + at_state, mask=in_state, other=0.0)
        grad_state = tl.load(grad_states + at_state, mask=in_state, other=0.0)
        of_query = tl.dot(grad, state, of_query)
        of_read = tl.dot(grad_value, state, of_read)
        of_key = tl.dot(new, grad_state, of_key)
        of_weights = tl.dot(grad, tl.trans(new), of_weights)
        of_inner = tl.dot(grad_value, tl.trans(new), of_inner)
        of_last += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))

    # of_query, of_read and of_key become gradients of what is multiplied: queries, and keys that read and that write,
    # as if their norms were constants
    low = key.dtype
    decays = tl.exp2(asking[:, None] - writing[None, :]) * scale
    of_weights = tl.where(rows[:, None] >= rows[None, :], of_weights * decays, 0.0).to(low)
    decays = tl.exp2(reading[:, None] - writing[None, :])
    of_inner = tl.where(rows[:, None] > rows[None, :], -of_inner * decays, 0.0)
    of_query = tl.dot(of_weights, key, of_query * (scale * tl.exp2(asking))[:, None])
    of_read = tl.dot(of_inner.to(low), key, of_read * -tl.exp2(reading)[:, None])
    of_key *= tl.exp2(last - writing)[:, None]
    total = tl.sum(key.to(tl.float32) * of_key) + tl.exp2(last) * of_last
    of_key = tl.dot(tl.trans((rate[:, None] * of_inner).to(low)), key, of_key)
    of_key = tl.dot(tl.trans(of_weights), query, of_key)
    # a decay before a token is a factor of its query and of its key that reads, and divides its key that writes
    by_query = tl.sum(query.to(tl.float32) * of_query, 1)
    by_read = tl.sum(key.to(tl.float32) * of_read, 1)
    by_key = tl.sum(key.to(tl.float32) * of_key, 1)
    is_last = row + rows == tl.minimum(row + chunk, end) - 1
    of_sum = by_query - by_key + rate * by_read + tl.where(is_last, total, 0.0)
    tl.store(dg + first + rows * heads, tl.cumsum(of_sum, 0, reverse=True), mask=inside)
    of_rate = tl.load(by_value + first + rows * heads, mask=inside, other=0.0) + by_read
    tl.store(dbeta + first + rows * heads, of_rate.to(dbeta.dtype.element_ty), mask=inside)
    of_key += rate[:, None] * of_read
    if norms is not None:
        norms += (number * key_heads + head // (heads // key_heads)) * (2 * chunk) + rows
        norm = tl.load(norms)
        of_query -= (by_query * norm * norm)[:, None] * query.to(tl.float32)
        norm = tl.load(norms + chunk)
        of_key -= ((by_key + rate * by_read) * norm * norm)[:, None] * key.to(tl.float32)
    at_key = first * key_dim + rows[:, None] * (heads * key_dim) + channels[None, :]
    tl.store(dq + at_key, of_query.to(low), mask=is_key)
    tl.store(dk + at_key, of_key.to(low), mask=is_key)


@triton.jit
def _value_kernel(
    values, grad_values, beta, dv, by_value, count,
    value_dim: tl.constexpr, block: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block), tl.arange(0, block_columns)
    is_row = rows < count
    is_there = is_row[:, None] & (columns < value_dim)[None, :]
    place = rows[:, None] * value_dim + columns[None, :]
    value = tl.load(values + place, mask=is_there, other=0.0).to(tl.float32)
    grad = tl.load(grad_values + place, mask=is_there, other=0.0).to(tl.float32)
    rate = tl.load(beta + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(dv + place, (grad * rate[:, None]).to(dv.dtype.element_ty), mask=is_there)
    tl.store(by_value + rows, tl.sum(value * grad, 1), mask=is_row)
