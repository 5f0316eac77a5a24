"""Kimi delta attention in Triton: the tiles of each chunk, and two scans over the chunks of each fragment.

The notation is that of `bmburst_ops.linear.triton_gated_delta`, but a decay has a number for each channel of a key: G
is a matrix shaped as K, and products with it are elementwise. The values that a chunk adds to the state S before it are

    N = A X,  X = beta (V - (G K) S),  A = (I + M)^-1,  M = tril(beta (G K) (K / G)^T, -1).

The output is `scale (G Q) S + P N` with `P = scale tril((G Q) (K / G)^T)`, and the state after the chunk is
`g S + (g K / G)^T N`. The numbers of G Q, G K and g K / G are at most those of Q and K. One kernel writes these tiles,
and the scans multiply them as they are.

K / G may overflow. P and M are therefore products `(G Q / c) (c K / G)^T`, where c belongs to a channel and to the 16
rows of P, a group: in units of log 2, the mean of the group's first and last sum of decays. Both factors are finite if
no group decays by more than `2^-200`. In a group that does, a decay counts as at least `2^-100`, or `2^-50`, `2^-25`,
`2^-12.5`: the smallest with which this holds. The last of them, for more than 8 tokens of 16 that decay by more than
`2^-25` each, is less than the rounding of 16-bit numbers.

Tensors are contiguous, of one flat batch: `[1, tokens, heads, dim]`. Products are of 16-bit numbers and their sums in
fp32, but those of A are in TF32, and with fp16 also P and M, whose factors need the exponents of fp32. Source of the
chunks: arXiv:2510.26692, section 3.
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
from bmburst_ops.linear.tiles import columns_of_states, divided, floats, kernel_sizes, unit_inverse

GROUP = 16
"""Rows of a group; see above."""
_CHANNELS = 64  # of keys at a time


class Chunks(NamedTuple):
    """What the kernels read of the chunks. Tiles are typed as keys, `[1, tokens, heads, key_dim]`.

    Attributes:
        asking: `G Q`.
        reading: `G K`.
        writing: `g K / G`.
        sums: Sums of the decays from the beginning of a chunk in units of log 2, shaped alike, fp32.
        rates: Beta, `[chunks, heads, 64]`, fp32. Behind the last token it is zero.
        weights: P, `[1, tokens, heads, 64]`, typed as keys.
        inverse: A, likewise.
        norms: Reciprocals of the norms of queries and keys, `[chunks, key_heads, 2, 64]`, fp32; None: queries and keys
            are not to be divided.
    """

    asking: Tensor
    reading: Tensor
    writing: Tensor
    sums: Tensor
    rates: Tensor
    weights: Tensor
    inverse: Tensor
    norms: Tensor | None


def make_chunks(
    queries: Tensor,
    keys: Tensor,
    decays: Tensor,
    beta: Tensor,
    normalize: bool,
    scale: float,
    fragments: Fragments,
    given: tuple[Tensor, ...] = (),
) -> Chunks:
    """Return the chunks.

    Args:
        queries: Queries, `[1, tokens, key_heads, key_dim]`.
        keys: Keys, shaped alike.
        decays: Natural logarithms of the decays, `[1, tokens, heads, key_dim]`.
        beta: Beta, `[1, tokens, heads]`.
        normalize: Whether queries and keys are divided by their norms.
        scale: Factor on the output.
        fragments: All fragments.
        given: In backward, P and A of the forward pass.
    """
    heads, (key_heads, key_dim), count = beta.shape[2], keys.shape[2:], len(fragments.chunks)
    asking, reading, writing = (keys.new_empty(decays.shape) for _ in range(3))
    sums, rates = floats(beta, *decays.shape), floats(beta, count, heads, CHUNK)
    norms = floats(beta, count, key_heads, 2, CHUNK) if normalize else None
    width = max(16, triton.next_power_of_2(key_dim))
    sizes = {"heads": heads, "key_heads": key_heads, "key_dim": key_dim, "chunk": CHUNK, "group": GROUP}
    _tile_kernel[count, heads](
        *(queries, keys, decays, beta, asking, reading, writing, sums, rates, norms),
        *(fragments.edges, fragments.chunks, EPSILON),
        **sizes | {"block_key": width, "width": min(_CHANNELS, width), "num_stages": 1},
    )
    weights, inverse = given or (keys.new_empty(*beta.shape, CHUNK) for _ in range(2))
    if not given:
        _chunk_kernel[count, heads](
            *(queries, keys, sums, rates, norms, weights, inverse, fragments.edges, fragments.chunks, scale),
            **sizes | {"block_key": min(_CHANNELS, width), "num_warps": 4, "num_stages": 1},
        )
    return Chunks(asking, reading, writing, sums, rates, weights, inverse, norms)


def summarize(chunks: Chunks, values: Tensor, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
    """Return M, `[fragments, heads, key_dim, key_dim]`, and U, `[fragments, heads, key_dim, value_dim]`, in fp32.

    Args:
        chunks: See `Chunks`.
        values: Values.
        spans: The fragments. U is zero where they have no tokens.
        of_matrices: Likewise. M is the identity where they have no tokens.
    """
    (heads, value_dim), key_dim, count = values.shape[2:], chunks.sums.shape[3], len(spans.begins)
    transitions = floats(values, count, heads, key_dim, key_dim)
    states = floats(values, count, heads, key_dim, value_dim)
    given = values, None, None, None, None, transitions, states, *spans, of_matrices.ends, 1.0
    _scan(_scan_kernel, chunks, given, spans, (value_dim, key_dim), tiles=2, narrow=2, stages=2)
    return transitions, states


def outputs(chunks: Chunks, values: Tensor, before: Tensor | None, scale: float, spans: Spans) -> Tensor:
    """Return the outputs of all fragments, given the states before them, `[fragments, heads, key_dim, value_dim]`."""
    found = torch.empty_like(values)
    given = values, before, found, None, None, None, None, *spans, None, scale
    _scan(_scan_kernel, chunks, given, spans, values.shape[3:], tiles=3, narrow=3, stages=2)
    return found


def states_of_chunks(
    chunks: Chunks, values: Tensor, before: Tensor | None, fragments: Fragments
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, `[chunks, heads, key_dim, value_dim]`, typed as values, and N."""
    states = values.new_empty(len(fragments.chunks), values.shape[2], chunks.sums.shape[3], values.shape[3])
    added = torch.empty_like(values)
    given = values, before, None, states, added, None, None, *fragments.spans, None, 1.0
    _scan(_scan_kernel, chunks, given, fragments.spans, values.shape[3:], tiles=2, narrow=2, stages=3)
    return states, added


def start_gradients(chunks: Chunks, grad_out: Tensor, scale: float, spans: Spans) -> Tensor:
    """Return the gradients of the states before fragments through the outputs of each, as states, in fp32."""
    found = floats(grad_out, len(spans.begins), grad_out.shape[2], chunks.sums.shape[3], grad_out.shape[3])
    given = grad_out, None, None, None, found, *spans, scale
    _scan(_reverse_kernel, chunks, given, spans, grad_out.shape[3:], tiles=3, narrow=3, stages=2)
    return found


def gradients_of_chunks(
    chunks: Chunks, grad_out: Tensor, after: Tensor | None, scale: float, fragments: Fragments
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state after each chunk, as `states_of_chunks`, and Y."""
    states = grad_out.new_empty(len(fragments.chunks), grad_out.shape[2], chunks.sums.shape[3], grad_out.shape[3])
    found = torch.empty_like(grad_out)
    given = grad_out, after, states, found, None, *fragments.spans, scale
    _scan(_reverse_kernel, chunks, given, fragments.spans, grad_out.shape[3:], tiles=3, narrow=3, stages=2)
    return states, found


def _scan(
    kernel: Any,
    chunks: Chunks,
    given: tuple[Any, ...],
    spans: Spans,
    columns: Sequence[int],
    *,
    tiles: int,
    narrow: int,
    stages: int,
) -> None:
    """Launch a scan: a program for each fragment, head and block of `columns`. `given` begins with the values."""
    width = columns_of_states(chunks.reading)
    sizes = kernel_sizes(chunks.reading, given[0], tiles=tiles, narrow=narrow, stages=stages, columns=width)
    grid = len(spans.begins) * sizes["heads"], sum(triton.cdiv(dim, width) for dim in columns)
    sizes.pop("key_heads")
    kernel[grid](*chunks[:-1], *given, **sizes)


@triton.jit
def _sums_of(chosen, each, part: tl.constexpr):
    """Return the sums of the chosen rows, as products of ones with 8 bits of each number at a time, which are exact.

    They take less time than sums along rows that several warps hold. In Triton's interpreter, a part has all bits.
    """
    ones, first = chosen.to(tl.float32).to(part), each.to(part)
    rest = each - first.to(tl.float32)
    second = rest.to(part)
    third = (rest - second.to(tl.float32)).to(part)
    return tl.dot(ones, third, tl.dot(ones, second, tl.dot(ones, first)))


@triton.jit
def _limited(each, chunk: tl.constexpr, group: tl.constexpr, width: tl.constexpr):
    """Return decays in units of log 2 with which no group decays by more than 200; see the module."""
    groups = tl.reshape(each, (chunk // group, group, width))
    least = tl.full((chunk // group, 1, width), -12.5, tl.float32)
    for level in tl.static_range(3):
        limit = -25.0 * (1 << level)
        total = tl.sum(tl.maximum(groups, limit), 1, keep_dims=True)
        least = tl.where(total >= -200.0, limit, least)
    groups = tl.maximum(groups, tl.broadcast_to(least, groups.shape), propagate_nan=tl.PropagateNan.ALL)
    return tl.reshape(groups, (chunk, width))


@triton.jit
def _tile_kernel(
    queries, keys, decays, beta, asking, reading, writing, sums, rates, norms, edges, places, epsilon,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr,
    chunk: tl.constexpr, group: tl.constexpr, block_key: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    key_head = head // (heads // key_heads)
    first, first_key = row * heads + head, row * key_heads + key_head
    rows = tl.arange(0, chunk)
    inside = rows < end - row
    rate = tl.load(beta + first + rows * heads, mask=inside, other=0.0).to(tl.float32)
    tl.store(rates + (number.to(tl.int64) * heads + head) * chunk + rows, rate)
    in_keys, in_tile = rows[:, None] * (key_heads * key_dim), rows[:, None] * (heads * key_dim)
    queries, keys = queries + first_key * key_dim, keys + first_key * key_dim
    of_query, of_key = tl.full((chunk,), 1.0, tl.float32), tl.full((chunk,), 1.0, tl.float32)
    if norms is not None:
        every = tl.arange(0, block_key)[None, :]
        in_row = inside[:, None] & (every < key_dim)
        of_query = divided(tl.load(queries + in_keys + every, mask=in_row, other=0.0), epsilon)[0]
        of_key = divided(tl.load(keys + in_keys + every, mask=in_row, other=0.0), epsilon)[0]
        norms += (number.to(tl.int64) * key_heads + key_head) * (2 * chunk) + rows
        if head % (heads // key_heads) == 0:
            tl.store(norms, of_query)
            tl.store(norms + chunk, of_key)
    low: tl.constexpr = keys.dtype.element_ty
    part: tl.constexpr = tl.float32 if low == tl.float32 else tl.bfloat16
    for begin in range(0, key_dim, width):
        channels = begin + tl.arange(0, width)
        is_key = inside[:, None] & (channels < key_dim)[None, :]
        at_tile = first * key_dim + in_tile + channels[None, :]
        each = tl.load(decays + at_tile, mask=is_key, other=0.0).to(tl.float32) * 1.4426950408889634  # 1 / ln 2
        if tl.min(each) < -12.5:
            each = _limited(each, chunk, group, width)
        later = _sums_of(rows[:, None] < rows[None, :], each, part)
        each = _sums_of(rows[:, None] >= rows[None, :], each, part)
        tl.store(sums + at_tile, each, mask=is_key)
        query = tl.load(queries + in_keys + channels[None, :], mask=is_key, other=0.0) * of_query[:, None]
        key = tl.load(keys + in_keys + channels[None, :], mask=is_key, other=0.0) * of_key[:, None]
        tl.store(asking + at_tile, (query * tl.exp2(each)).to(low), mask=is_key)
        tl.store(reading + at_tile, (key * tl.exp2(each)).to(low), mask=is_key)
        tl.store(writing + at_tile, (key * tl.exp2(later)).to(low), mask=is_key)


@triton.jit
def reference_of(sums, begin, count, stride, mask, group: tl.constexpr):
    """Return the reference of the group of rows from `begin` on: the mean of its first and last sums of decays.

    Args:
        sums: Where those of a chunk's first token lie.
        begin: First row of the group, or of the group of each row.
        count: Number of tokens of the chunk.
        stride: Distance between the sums of two tokens.
        mask: Which of the results are needed.
        group: Rows of a group.
    """
    first, last = tl.minimum(begin, count - 1), tl.minimum(begin + group, count) - 1
    first = tl.load(sums + first * stride, mask=mask, other=0.0)
    return 0.5 * (first + tl.load(sums + last * stride, mask=mask, other=0.0))


@triton.jit
def _chunk_kernel(
    queries, keys, sums, rates, norms, weights, inverse, edges, places, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr,
    chunk: tl.constexpr, group: tl.constexpr, block_key: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    key_head = head // (heads // key_heads)
    first, first_key = row * heads + head, row * key_heads + key_head
    rows = tl.arange(0, chunk)
    count = tl.minimum(end - row, chunk)
    inside = rows < count
    low: tl.constexpr = tl.bfloat16 if keys.dtype.element_ty == tl.bfloat16 else tl.float32
    asked = tl.zeros((chunk, chunk), tl.float32)
    products = tl.zeros((chunk, chunk), tl.float32)
    for channel in range(0, key_dim, block_key):
        channels = channel + tl.arange(0, block_key)
        is_channel = channels < key_dim
        is_key = inside[:, None] & is_channel[None, :]
        at_key = first_key * key_dim + rows[:, None] * (key_heads * key_dim) + channels[None, :]
        query = tl.load(queries + at_key, mask=is_key, other=0.0)
        key = tl.load(keys + at_key, mask=is_key, other=0.0)
        at_sum = sums + first * key_dim + channels[None, :]
        each = tl.load(at_sum + rows[:, None] * (heads * key_dim), mask=is_key, other=0.0)
        own = reference_of(at_sum, rows[:, None] // group * group, count, heads * key_dim, is_key, group)
        raised = tl.exp2(each - own)
        asking, reading = (query * raised).to(low), (key * raised).to(low)
        for begin in range(0, chunk, group):
            reference = reference_of(at_sum, begin, count, heads * key_dim, is_channel[None, :], group)
            written = tl.trans((key * tl.exp2(reference - each)).to(low))  # of later rows infinite, and not used
            in_group = rows[:, None] // group == begin // group
            asked += tl.where(in_group, tl.dot(asking, written), 0.0)
            products += tl.where(in_group, tl.dot(reading, written), 0.0)
    rate = tl.load(rates + (number.to(tl.int64) * heads + head) * chunk + rows)
    if norms is not None:
        norms += (number.to(tl.int64) * key_heads + key_head) * (2 * chunk) + rows
        of_key = tl.load(norms + chunk)
        asked *= tl.load(norms)[:, None] * of_key[None, :]
        products *= of_key[:, None] * of_key[None, :]
    at_weights = first * chunk + rows[:, None] * (heads * chunk) + rows[None, :]
    asked = tl.where(rows[:, None] >= rows[None, :], asked * scale, 0.0)
    tl.store(weights + at_weights, asked.to(weights.dtype.element_ty), mask=inside[:, None])
    is_below = (rows[:, None] > rows[None, :]) & inside[:, None]
    found = unit_inverse(tl.where(is_below, products * rate[:, None], 0.0), rows)
    tl.store(inverse + at_weights, found.to(inverse.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _scan_kernel(
    asking, reading, writing, sums, rates, weights, inverse,
    values, before, out, states, added, transitions, lasts, begins, ends, firsts, ends_of_matrices, scale,
    heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
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
    rates += (number * heads + head) * chunk
    if states is not None:
        states += (number * heads + head) * (key_dim * value_dim)
    for row in range(begin, end, chunk):
        inside = rows < end - row
        first = row * heads + head
        is_key = inside[:, None] & is_channel[None, :]
        is_there = inside[:, None] & of_value[None, :]
        at_key = first * key_dim + rows[:, None] * (heads * key_dim) + channels[None, :]
        at_value = first * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
        at_weights = first * chunk + rows[:, None] * (heads * chunk) + rows[None, :]
        read = tl.load(reading + at_key, mask=is_key, other=0.0)
        write = tl.load(writing + at_key, mask=is_key, other=0.0)
        value = tl.load(values + at_value, mask=is_there, other=0.0).to(tl.float32)
        inner = tl.load(inverse + at_weights, mask=inside[:, None], other=0.0)
        rate = tl.load(rates + rows)
        last_row = (tl.minimum(row + chunk, end) - 1) * heads + head
        last = tl.load(sums + last_row * key_dim + channels, mask=is_channel, other=0.0)
        low = state.to(read.dtype)
        if states is not None:
            tl.store(states + of_state, low, mask=in_state)
            states += heads * key_dim * value_dim
        value = rate[:, None] * (value - tl.dot(read, low))
        new = tl.dot(inner, value.to(read.dtype)).to(read.dtype)
        if added is not None:
            tl.store(added + at_value, new, mask=is_there)
        if out is not None:
            ask = tl.load(asking + at_key, mask=is_key, other=0.0)
            weight = tl.load(weights + at_weights, mask=inside[:, None], other=0.0)
            result = tl.dot(weight, new, tl.dot(ask, low) * scale)
            tl.store(out + at_value, result.to(read.dtype), mask=is_there)
        state = tl.dot(tl.trans(write), new, state * tl.exp2(last)[:, None])
        rates += heads * chunk
    if transitions is not None:
        tl.store(lasts + one * value_dim + of_state, state, mask=in_state)
        place = one * key_dim + channels[:, None] * key_dim + columns[None, :]
        of_key = (is_value == 0) & (columns < key_dim)
        tl.store(transitions + place, state, mask=is_channel[:, None] & of_key[None, :])


@triton.jit
def _reverse_kernel(
    asking, reading, writing, sums, rates, weights, inverse,
    grad_out, after, states, found, starts, begins, ends, firsts, scale,
    heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
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
    number = tl.load(firsts + fragment) + last_chunk
    rates += (number * heads + head) * chunk
    if states is not None:
        states += (number * heads + head) * (key_dim * value_dim)
    for passed in range(0, end - begin, chunk):
        row = begin + last_chunk * chunk - passed
        inside = rows < end - row
        first = row * heads + head
        is_key = inside[:, None] & is_channel[None, :]
        is_there = inside[:, None] & of_value[None, :]
        at_key = first * key_dim + rows[:, None] * (heads * key_dim) + channels[None, :]
        at_value = first * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
        at_weights = first * chunk + rows[:, None] * (heads * chunk) + rows[None, :]
        ask = tl.load(asking + at_key, mask=is_key, other=0.0)
        read = tl.load(reading + at_key, mask=is_key, other=0.0)
        write = tl.load(writing + at_key, mask=is_key, other=0.0)
        grad = tl.load(grad_out + at_value, mask=is_there, other=0.0)
        inner = tl.load(inverse + at_weights, mask=inside[:, None], other=0.0)
        weight = tl.load(weights + at_weights, mask=inside[:, None], other=0.0)
        rate = tl.load(rates + rows)
        last_row = (tl.minimum(row + chunk, end) - 1) * heads + head
        last = tl.load(sums + last_row * key_dim + channels, mask=is_channel, other=0.0)
        low = state.to(read.dtype)
        if states is not None:
            tl.store(states + of_state, low, mask=in_state)
            states -= heads * key_dim * value_dim
        new = tl.dot(tl.trans(weight), grad, tl.dot(write, low))
        of_values = tl.dot(tl.trans(inner), new.to(read.dtype))
        if states is not None:
            tl.store(found + at_value, of_values.to(read.dtype), mask=is_there)
        of_values = (of_values * rate[:, None]).to(read.dtype)
        state = tl.dot(tl.trans(ask), (grad * scale).to(grad.dtype), state * tl.exp2(last)[:, None])
        state -= tl.dot(tl.trans(read), of_values)
        rates -= heads * chunk
    if starts is not None:
        tl.store(starts + one + of_state, state, mask=in_state)
