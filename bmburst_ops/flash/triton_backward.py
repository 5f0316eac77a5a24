"""Flash attention's backward pass in Triton, from the log-sum-exp and delta. Importing this file needs Triton.

Two kernels and no atomics, so that repeated calls give the same bits: one a block of keys, for dK and dV, and one a
block of queries, for dQ.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.flash.triton_forward import add_product, load_rows, matrix_of, product, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["queries", "keys"])
def keys_kernel(
    grad, q, k, v, lse, delta, grad_k, grad_v,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_k_strides, grad_v_strides,
    queries, keys, group, scale, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of KEYS keys of one KV head. Grid: (key blocks, KV heads, batch).

    Strides are of (batch, token, head); bits_scale is scale * log2(e).
    """
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * KEYS  # a causal tile's first keys, which most queries see, first
    first_query = first - (keys - queries)  # the first that sees the first key, if the tile is causal
    start, open_start = 0, 0  # the first block of queries that sees any of the keys, and the first that sees them all
    if CAUSAL:
        start = tl.maximum(first_query, 0) // QUERIES * QUERIES
        open_start = tl.cdiv(tl.maximum(first_query + KEYS - 1, 0), QUERIES) * QUERIES
    open_queries = tl.maximum(queries // QUERIES * QUERIES - open_start, 0)
    key = load_rows(matrix_of(k, k_strides, batch, kv_head), first, k_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    value = load_rows(matrix_of(v, v_strides, batch, kv_head), first, v_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    key_acc = tl.zeros([KEYS, DIM], tl.float32)
    value_acc = tl.zeros([KEYS, DIM], tl.float32)
    for head in tl.range(kv_head * group, kv_head * group + group):
        q_matrix, grad_matrix = matrix_of(q, q_strides, batch, head), matrix_of(grad, grad_strides, batch, head)
        lse_row, delta_row = matrix_of(lse, lse_strides, batch, head), matrix_of(delta, delta_strides, batch, head)
        key_acc, value_acc = _over_queries(
            key_acc, value_acc, key, value, q_matrix, grad_matrix, lse_row, delta_row,
            q_strides[1], grad_strides[1], lse_strides[1], delta_strides[1],
            open_start, open_start + open_queries, open_start, 0, first_query, queries, bits_scale,
            HEAD_DIM, DIM, QUERIES, KEYS, False, CAUSAL, PRECISION,
        )  # fmt: skip
        # The rest lies on both sides of the open blocks: the diagonal before them, an incomplete block behind them.
        key_acc, value_acc = _over_queries(
            key_acc, value_acc, key, value, q_matrix, grad_matrix, lse_row, delta_row,
            q_strides[1], grad_strides[1], lse_strides[1], delta_strides[1],
            start, queries - open_queries, open_start, open_queries, first_query, queries, bits_scale,
            HEAD_DIM, DIM, QUERIES, KEYS, True, CAUSAL, PRECISION,
        )  # fmt: skip
    grad_k_matrix = matrix_of(grad_k, grad_k_strides, batch, kv_head)
    grad_v_matrix = matrix_of(grad_v, grad_v_strides, batch, kv_head)
    store_rows(grad_k_matrix, key_acc * scale, first, grad_k_strides[1], keys, HEAD_DIM, KEYS, DIM)
    store_rows(grad_v_matrix, value_acc, first, grad_v_strides[1], keys, HEAD_DIM, KEYS, DIM)


@triton.jit
def _over_queries(
    key_acc, value_acc, key, value, q_matrix, grad_matrix, lse_row, delta_row,
    q_stride, grad_stride, lse_stride, delta_stride,
    start, stop, gap, gap_queries, first_query, queries, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what queries `start` to `stop` give to dK and dV, those from `gap` on shifted by `gap_queries`.

    Scores are transposed, `[KEYS, QUERIES]`: both sums then take them as they are. Rows beyond the last key hold
    nonsense, which stays in its rows and is not stored.
    """
    first_queries = first_query + tl.arange(0, KEYS)
    for at in tl.range(start, stop, QUERIES):
        first = at
        if MASKED:
            first = tl.where(at < gap, at, at + gap_queries)
        query = load_rows(q_matrix, first, q_stride, queries, HEAD_DIM, QUERIES, DIM, MASKED)
        grad = load_rows(grad_matrix, first, grad_stride, queries, HEAD_DIM, QUERIES, DIM, MASKED)
        level = _load_levels(lse_row, first, lse_stride, queries, QUERIES, MASKED)
        delta = _load_numbers(delta_row, first, delta_stride, queries, QUERIES, MASKED)
        scores = product(key, tl.trans(query), PRECISION)
        weights = tl.exp2(scores * bits_scale - level[None, :])
        if MASKED and CAUSAL:
            rows = first + tl.arange(0, QUERIES)
            weights = tl.where(first_queries[:, None] <= rows[None, :], weights, 0.0)
        value_acc = add_product(value_acc, weights.to(grad.dtype), grad, PRECISION)
        inner = product(value, tl.trans(grad), PRECISION)
        grad_scores = weights * (inner - delta[None, :])
        key_acc = add_product(key_acc, grad_scores.to(query.dtype), query, PRECISION)
    return key_acc, value_acc


@triton.jit(do_not_specialize=["queries", "keys"])
def queries_kernel(
    grad, q, k, v, lse, delta, grad_q,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_q_strides,
    queries, keys, group, scale, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of QUERIES queries of one head. Grid: (query blocks, heads, batch)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal tile's longest rows first
    head, batch = tl.program_id(1), tl.program_id(2)
    first = block * QUERIES
    last_key = first + keys - queries  # the last that the first query sees, if the tile is causal
    open_keys, seen_keys = keys, keys  # keys that every query of the block sees, and that any sees
    if CAUSAL:
        open_keys = tl.maximum(tl.minimum(last_key + 1, keys), 0)
        seen_keys = tl.maximum(tl.minimum(last_key + QUERIES, keys), 0)
    open_keys = open_keys // KEYS * KEYS
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head // group), matrix_of(v, v_strides, batch, head // group)
    q_matrix, grad_matrix = matrix_of(q, q_strides, batch, head), matrix_of(grad, grad_strides, batch, head)
    lse_row, delta_row = matrix_of(lse, lse_strides, batch, head), matrix_of(delta, delta_strides, batch, head)
    query = load_rows(q_matrix, first, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    grad_out = load_rows(grad_matrix, first, grad_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    level = _load_levels(lse_row, first, lse_strides[1], queries, QUERIES, True)
    row_delta = _load_numbers(delta_row, first, delta_strides[1], queries, QUERIES, True)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    acc = _over_keys(
        acc, query, grad_out, level, row_delta, k_matrix, v_matrix, k_strides[1], v_strides[1], 0, open_keys,
        last_key, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, False, CAUSAL, PRECISION,
    )  # fmt: skip
    acc = _over_keys(
        acc, query, grad_out, level, row_delta, k_matrix, v_matrix, k_strides[1], v_strides[1], open_keys, seen_keys,
        last_key, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, True, CAUSAL, PRECISION,
    )  # fmt: skip
    grad_q_matrix = matrix_of(grad_q, grad_q_strides, batch, head)
    store_rows(grad_q_matrix, acc * scale, first, grad_q_strides[1], queries, HEAD_DIM, QUERIES, DIM)


@triton.jit
def _over_keys(
    acc, query, grad_out, level, row_delta, k_matrix, v_matrix, k_stride, v_stride, start, stop, last_key, keys,
    bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what keys `start` to `stop` give to dQ; `last_key` is the last one that the first query sees."""
    last_keys = last_key + tl.arange(0, QUERIES)
    for first in tl.range(start, stop, KEYS):
        key = load_rows(k_matrix, first, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
        value = load_rows(v_matrix, first, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
        scores = product(query, tl.trans(key), PRECISION)
        weights = tl.exp2(scores * bits_scale - level[:, None])
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            visible = (columns < keys)[None, :]
            if CAUSAL:
                visible = visible & (columns[None, :] <= last_keys[:, None])
            weights = tl.where(visible, weights, 0.0)
        inner = product(grad_out, tl.trans(value), PRECISION)
        grad_scores = weights * (inner - row_delta[:, None])
        acc = add_product(acc, grad_scores.to(key.dtype), key, PRECISION)
    return acc


@triton.jit
def _load_levels(row, first, stride, length, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Return log-sum-exps in units of log 2; where there is no query, or it saw no key, inf: its weights become 0."""
    level = _load_numbers(row, first, stride, length, ROWS, MASKED) * LOG2_E
    if MASKED:
        level = tl.where(first + tl.arange(0, ROWS) < length, level, float("inf"))
    return tl.where(level == float("-inf"), float("inf"), level)


@triton.jit
def _load_numbers(row, first, stride, length, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Return ROWS numbers of a row in fp32, zero beyond its length."""
    rows = first + tl.arange(0, ROWS)
    at = row + rows.to(tl.int64) * stride
    numbers = tl.load(at, mask=rows < length, other=0.0) if MASKED else tl.load(at)
    return numbers.to(tl.float32)
