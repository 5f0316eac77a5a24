"""Kimi delta attention in Triton: the gradients of the inputs.

`bmburst_ops.linear.triton_kda` has the notation. As `dM = -Y N^T`, the inverse A needs no gradient of its own. One
kernel writes dP and dM, which are sums over the columns of values, and dV = beta Y. In the next, a program has 32
channels of a chunk's keys: with more, the numbers do not fit into registers.

The terms of a token with itself have no decay. They are left out of dP and added to the gradients of query and key
alone: in the gradient of a decay they cancel, and with them roundings would remain.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.fragments import CHUNK
from bmburst_ops.linear.spans import Fragments
from bmburst_ops.linear.tiles import COLUMNS, floats
from bmburst_ops.linear.triton_kda import GROUP, Chunks, reference_of
from bmburst_ops.linear.triton_norms import before_norms

_CHANNELS = 32  # of keys for a program


def input_gradients(
    chunks: Chunks,
    queries: Tensor,
    keys: Tensor,
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
        queries: Queries.
        keys: Keys.
        values: Values.
        beta: Beta.
        grad_out: Gradient of the output.
        of_chunks: What `states_of_chunks` and `gradients_of_chunks` returned.
        scale: Factor on the output.
        fragments: All fragments.
    """
    (heads, value_dim), (key_heads, key_dim) = values.shape[2:], keys.shape[2:]
    count, width = len(fragments.chunks), max(16, triton.next_power_of_2(key_dim))
    channels = min(_CHANNELS, width)
    blocks = triton.cdiv(key_dim, channels)
    dq, dk, dv, dg = (torch.empty_like(t) for t in (*chunks[:2], values, chunks.sums))
    dbeta = floats(beta, blocks + 1, *beta.shape)  # sums over the channels of a block each, and over the values
    exact = keys.dtype if keys.dtype == torch.bfloat16 else torch.float32
    products = [torch.empty_like(chunks.weights, dtype=exact) for _ in range(2)]
    own = torch.empty_like(chunks.rates)
    _, added, _, grad_values = of_chunks
    at = fragments.edges, fragments.chunks
    sizes = {"heads": heads, "value_dim": value_dim, "chunk": CHUNK, "block_columns": COLUMNS}
    _product_kernel[count, heads](
        *(values, chunks.rates, grad_out, added, grad_values, *products, own, dv, dbeta[blocks], *at, scale), **sizes
    )
    sizes |= {"key_heads": key_heads, "key_dim": key_dim, "group": GROUP, "block_key": channels}
    _gradient_kernel[blocks, count, heads](
        *(queries, keys, chunks.sums, chunks.rates, chunks.norms, *products, own, grad_out, *of_chunks),
        *(dq, dk, dg, dbeta, *at, scale, beta.numel()),
        **sizes | {"num_warps": 4, "num_stages": 1},
    )
    if heads > key_heads:
        dq, dk = (t.unflatten(2, (key_heads, -1)).sum(3) for t in (dq, dk))
    if chunks.norms is not None:
        dq, dk = before_norms(queries, dq), before_norms(keys, dk)
    return dq, dk, dv, dg, dbeta.sum(0).to(beta.dtype)


@triton.jit
def _product_kernel(
    values, rates, grad_out, added, grad_values, of_weights, of_inner, of_own, dv, dbeta, edges, places, scale,
    heads: tl.constexpr, value_dim: tl.constexpr, chunk: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    first, rows = row * heads + head, tl.arange(0, chunk)
    inside = rows < end - row
    at_number = (number.to(tl.int64) * heads + head) * chunk + rows
    rate = tl.load(rates + at_number)
    asked = tl.zeros((chunk, chunk), tl.float32)
    inner = tl.zeros((chunk, chunk), tl.float32)  # Y N^T
    by_value = tl.zeros((chunk,), tl.float32)
    for begin in range(0, value_dim, block_columns):
        columns = begin + tl.arange(0, block_columns)
        is_there = inside[:, None] & (columns < value_dim)[None, :]
        at_value = first * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
        grad = tl.load(grad_out + at_value, mask=is_there, other=0.0)
        grad_value = tl.load(grad_values + at_value, mask=is_there, other=0.0)
        value = tl.load(values + at_value, mask=is_there, other=0.0)
        new = tl.trans(tl.load(added + at_value, mask=is_there, other=0.0))
        asked = tl.dot(grad, new, asked)
        inner = tl.dot(grad_value, new, inner)
        by_value += tl.sum(value.to(tl.float32) * grad_value, 1)
        tl.store(dv + at_value, (grad_value * rate[:, None]).to(dv.dtype.element_ty), mask=is_there)
    tl.store(dbeta + first + rows * heads, by_value, mask=inside)
    asked *= scale
    tl.store(of_own + at_number, tl.sum(tl.where(rows[:, None] == rows[None, :], asked, 0.0), 1))
    is_below = rows[:, None] > rows[None, :]
    at_weights = first * chunk + rows[:, None] * (heads * chunk) + rows[None, :]
    asked, inner = tl.where(is_below, asked, 0.0), tl.where(is_below, -inner, 0.0)
    tl.store(of_weights + at_weights, asked.to(of_weights.dtype.element_ty), mask=inside[:, None])
    tl.store(of_inner + at_weights, inner.to(of_inner.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _gradient_kernel(
    queries, keys, sums, rates, norms, of_weights, of_inner, of_own, grad_out, states, added, grad_states, grad_values,
    dq, dk, dg, dbeta, edges, places, scale, tokens,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk: tl.constexpr, group: tl.constexpr, block_key: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    block, number, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fragment, place = tl.load(places + number * 2), tl.load(places + number * 2 + 1)
    row, end = tl.load(edges + fragment) + place * chunk, tl.load(edges + fragment + 1)
    key_head = head // (heads // key_heads)
    first, first_key = row * heads + head, row * key_heads + key_head
    rows, channels = tl.arange(0, chunk), block * block_key + tl.arange(0, block_key)
    count = tl.minimum(end - row, chunk)
    inside, is_channel = rows < count, channels < key_dim
    is_key = inside[:, None] & is_channel[None, :]
    one = (number.to(tl.int64) * heads + head) * (key_dim * value_dim)
    states, grad_states = states + one, grad_states + one
    grad_out, added = grad_out + first * value_dim, added + first * value_dim
    grad_values += first * value_dim

    of_query = tl.zeros((chunk, block_key), tl.float32)
    of_read = tl.zeros((chunk, block_key), tl.float32)  # Y S^T
    of_key = tl.zeros((chunk, block_key), tl.float32)
    of_last = tl.zeros((block_key,), tl.float32)
    for begin in range(0, value_dim, block_columns):
        columns = begin + tl.arange(0, block_columns)
        of_value = columns < value_dim
        is_there = inside[:, None] & of_value[None, :]
        at_value = rows[:, None] * (heads * value_dim) + columns[None, :]
        in_state = of_value[:, None] & is_channel[None, :]
        at_state = columns[:, None] + channels[None, :] * value_dim  # transposed
        state = tl.load(states + at_state, mask=in_state, other=0.0)
        of_query = tl.dot(tl.load(grad_out + at_value, mask=is_there, other=0.0), state, of_query)
        of_read = tl.dot(tl.load(grad_values + at_value, mask=is_there, other=0.0), state, of_read)
        grad_state = tl.load(grad_states + at_state, mask=in_state, other=0.0)
        of_key = tl.dot(tl.load(added + at_value, mask=is_there, other=0.0), grad_state, of_key)
        of_last += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 0)

    # of_query, of_read and of_key become gradients of what is multiplied: queries, and keys that read and that write
    at_key = first_key * key_dim + rows[:, None] * (key_heads * key_dim) + channels[None, :]
    query = tl.load(queries + at_key, mask=is_key, other=0.0)
    key = tl.load(keys + at_key, mask=is_key, other=0.0)
    if norms is not None:
        norms += (number.to(tl.int64) * key_heads + key_head) * (2 * chunk) + rows
        query = (query * tl.load(norms)[:, None]).to(keys.dtype.element_ty)
        key = (key * tl.load(norms + chunk)[:, None]).to(keys.dtype.element_ty)
    at_sum = sums + first * key_dim + channels[None, :]
    each = tl.load(at_sum + rows[:, None] * (heads * key_dim), mask=is_key, other=0.0)
    last = tl.load(at_sum + (count - 1) * (heads * key_dim), mask=is_channel[None, :], other=0.0)
    at_number = (number.to(tl.int64) * heads + head) * chunk + rows
    rate, alone = tl.load(rates + at_number)[:, None], tl.load(of_own + at_number)[:, None]
    of_query *= tl.exp2(each) * scale
    of_read *= -tl.exp2(each)
    of_key *= tl.exp2(last - each)
    total = tl.sum(key.to(tl.float32) * of_key, 0)[None, :] + tl.exp2(last) * of_last[None, :]
    at_weights = first * chunk + rows[:, None] * (heads * chunk) + rows[None, :]
    low: tl.constexpr = of_weights.dtype.element_ty
    own = reference_of(at_sum, rows[:, None] // group * group, count, heads * key_dim, is_key, group)
    raised = tl.exp2(each - own)
    asking, reading = (query * raised).to(low), (key * (raised * rate)).to(low)
    for begin in range(0, chunk, group):
        reference = reference_of(at_sum, begin, count, heads * key_dim, is_channel[None, :], group)
        lowered = tl.where(rows[:, None] < begin + group, tl.exp2(reference - each), 0.0)
        written = (key * lowered).to(low)
        in_group = (rows // group == begin // group) & inside
        weights = tl.load(of_weights + at_weights, mask=in_group[:, None], other=0.0)
        inner = tl.load(of_inner + at_weights, mask=in_group[:, None], other=0.0)
        of_query += raised * tl.dot(weights, written)
        of_read += raised * tl.dot(inner, written)
        of_key += lowered * tl.dot(tl.trans(inner), reading, tl.dot(tl.trans(weights), asking))
    # a decay before a token is a factor of its query and of its key that reads, and divides its key that writes
    wide = key.to(tl.float32)
    is_last = (rows == count - 1)[:, None]
    of_sum = query * of_query + wide * (rate * of_read - of_key) + tl.where(is_last, total, 0.0)
    at_tile = first * key_dim + rows[:, None] * (heads * key_dim) + channels[None, :]
    # not a product with ones, which takes longer here, and which Triton 3.6 compiles wrongly for Hopper
    tl.store(dg + at_tile, tl.cumsum(of_sum, 0, reverse=True), mask=is_key)
    tl.store(dbeta + block.to(tl.int64) * tokens + first + rows * heads, tl.sum(wide * of_read, 1), mask=inside)
    of_key += rate * of_read
    tl.store(dq + at_tile, (of_query + alone * wide).to(dq.dtype.element_ty), mask=is_key)
    tl.store(dk + at_tile, (of_key + alone * query).to(dk.dtype.element_ty), mask=is_key)
