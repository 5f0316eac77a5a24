"""Flash attention's backward pass in Triton, from the log-sum-exp and delta. Importing this file needs Triton.

There are two kernels: one has a program per block of keys, for dK and dV, the other a program per block of queries, for
dQ. Neither uses atomics, so repeated calls give bitwise equal results.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.flash.triton_forward import (
    NOT_SPECIALIZED,
    add_dot,
    add_visible_dot,
    dot,
    first_of_block,
    has_nan,
    is_visible,
    key_ranges,
    load_limits,
    load_rows,
    loop_of,
    matrix_of,
    ranges,
    scores_of,
    store_rows,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def keys_kernel(
    grad, q, k, v, lse, delta, grad_k, grad_v,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_k_strides, grad_v_strides,
    queries, keys, group, scale, bits_scale, cap,
    starts, stops, query_cells, key_cells, cells, cell_columns, tiles, tile_ends,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of KEYS keys of one KV head. Grid: (key blocks, KV heads, batch).

    Strides are of (batch, token, head); bits_scale is scale * log2(e); cap is that of `capped`, None
    without a softcap. For MASK and the vectors see `flash.triton.MaskArguments`.
    """
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * KEYS  # longest first: in a causal tile most queries see the first keys
    bounds = _query_ranges(first, queries, keys, starts, stops, tile_ends, QUERIES, KEYS, MASK)
    pairs = queries, keys, starts, stops, query_cells, key_cells, cells, cell_columns, tiles
    of_queries = grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides
    key = load_rows(matrix_of(k, k_strides, batch, kv_head), first, k_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    v_matrix = matrix_of(v, v_strides, batch, kv_head)
    value = load_rows(v_matrix, first, v_strides[1], keys, VALUE_HEAD_DIM, KEYS, VALUE_DIM, True)
    key_acc, value_acc = _over_heads(
        key, value, of_queries, batch, kv_head, group, bounds, pairs, first, bits_scale, cap,
        HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, MASK, False, PRECISION,
    )  # fmt: skip
    if MASK == "rows" or MASK == "cells":  # noqa: SIM102 - decided at compile time, the other at run time
        if has_nan(key_acc) | has_nan(value_acc):
            key_acc, value_acc = _over_heads(
                key, value, of_queries, batch, kv_head, group, bounds, pairs, first, bits_scale, cap,
                HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, MASK, True, PRECISION,
            )  # fmt: skip
    grad_k_matrix = matrix_of(grad_k, grad_k_strides, batch, kv_head)
    grad_v_matrix = matrix_of(grad_v, grad_v_strides, batch, kv_head)
    store_rows(grad_k_matrix, key_acc * scale, first, grad_k_strides[1], keys, HEAD_DIM, KEYS, DIM)
    store_rows(grad_v_matrix, value_acc, first, grad_v_strides[1], keys, VALUE_HEAD_DIM, KEYS, VALUE_DIM)


@triton.jit
def _over_heads(
    key, value, of_queries, batch, kv_head, group, bounds, pairs, first, bits_scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dK, not yet scaled, and dV. For HAS_NAN see `triton_forward._attend`."""
    key_acc = tl.zeros([KEYS, DIM], tl.float32)
    value_acc = tl.zeros([KEYS, VALUE_DIM], tl.float32)
    for head in tl.range(kv_head * group, kv_head * group + group):
        of_head = queries_of(*of_queries, batch, head)
        # Masked blocks lie on both sides of the open ones: the diagonal before them, an incomplete block after them.
        for masked in tl.static_range(2):
            key_acc, value_acc = _over_queries(
                key_acc, value_acc, key, value, of_head, bounds, pairs, first, bits_scale, cap,
                HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, masked == 1, MASK, HAS_NAN, PRECISION,
            )  # fmt: skip
    return key_acc, value_acc


@triton.jit
def _query_ranges(
    first, queries, keys, starts, stops, tile_ends, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Return `ranges` of a block of keys."""
    if MASK == "full" or MASK == "causal":
        start, open_start = 0, 0  # the first block of queries that sees any of the keys, and the first that sees all
        if MASK == "causal":
            first_query = first - (keys - queries)
            start = tl.maximum(first_query, 0) // QUERIES * QUERIES
            open_start = tl.cdiv(tl.maximum(first_query + KEYS - 1, 0), QUERIES) * QUERIES
        open_size = tl.maximum(queries // QUERIES * QUERIES - open_start, 0)
        stop = queries - open_size
    else:
        start, stop, open_start, open_size = ranges(first, keys, starts, stops, tile_ends, KEYS, QUERIES, MASK)
    return start, stop, open_start, open_size


@triton.jit
def _sees(pairs, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr):
    """Return the mask of a block, `[KEYS, QUERIES]`, from the intervals of the keys; see `is_visible`."""
    queries, keys, starts, stops, query_cells, key_cells, cells, cell_columns, _ = pairs
    rows, columns = first_query + tl.arange(0, QUERIES), first_key + tl.arange(0, KEYS)
    if MASK == "causal":
        visible = (columns - (keys - queries))[:, None] <= rows[None, :]
    else:
        start, stop = load_limits(starts, columns, keys), load_limits(stops, columns, keys)
        visible = (rows[None, :] >= start[:, None]) & (rows[None, :] < stop[:, None])
        if MASK == "cells":
            row, column = load_limits(query_cells, rows, queries), load_limits(key_cells, columns, keys)
            visible = visible & (tl.load(cells + (row[None, :] * cell_columns + column[:, None])) != 0)
    return visible


@triton.jit
def _over_queries(
    key_acc, value_acc, key, value, of_queries, bounds, pairs, first_key, bits_scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, MASK: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV over the MASKED blocks of queries of `_query_ranges`, or the open ones.

    Scores are transposed, `[KEYS, QUERIES]`, so both products use them without another transpose. Rows beyond the last
    key hold arbitrary values, which are not stored.
    """
    start, stop = loop_of(bounds, MASKED)
    for at in tl.range(start, stop, 1 if MASK == "cells" else QUERIES):
        if MASK == "cells":
            first = tl.load(pairs[8] + at)
        elif MASKED:
            first = tl.where(at < bounds[2], at, at + bounds[3])
        else:
            first = at
        query, grad, level, delta = load_queries(
            of_queries, first, pairs[0], HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, MASKED
        )  # fmt: skip
        scores = scores_of(key, query, cap, PRECISION)
        weights = tl.exp2(scores * bits_scale - level[None, :])
        if MASKED and MASK != "full":
            visible = _sees(pairs, first, first_key, QUERIES, KEYS, MASK)
            weights = tl.where(visible, weights, 0.0)
        inner = dot(value, tl.trans(grad), PRECISION)
        grad_scores = weights * (inner - delta[None, :])
        if cap is not None:
            grad_scores *= slope_of(scores, cap)
        if MASKED and HAS_NAN:
            grad_scores = tl.where(visible, grad_scores, 0.0)
            value_acc = add_visible_dot(value_acc, weights.to(grad.dtype), grad, visible, PRECISION)
            key_acc = add_visible_dot(key_acc, grad_scores.to(query.dtype), query, visible, PRECISION)
        else:
            value_acc = add_dot(value_acc, weights.to(grad.dtype), grad, PRECISION)
            key_acc = add_dot(key_acc, grad_scores.to(query.dtype), query, PRECISION)
    return key_acc, value_acc


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def queries_kernel(
    grad, q, k, v, lse, delta, grad_q,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_q_strides,
    queries, keys, group, scale, bits_scale, cap,
    starts, stops, query_cells, key_cells, cells, cell_columns, tiles, tile_ends,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of QUERIES queries of one head. Grid: (query blocks, heads, batch)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # longest rows of a causal tile first
    head, batch = tl.program_id(1), tl.program_id(2)
    first = block * QUERIES
    bounds = key_ranges(first, queries, keys, starts, stops, tile_ends, QUERIES, KEYS, MASK)
    pairs = queries, keys, starts, stops, query_cells, key_cells, cells, cell_columns, tiles
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head // group), matrix_of(v, v_strides, batch, head // group)
    key_rows = k_matrix, v_matrix, k_strides[1], v_strides[1]
    of_queries = queries_of(grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head)
    row = load_queries(of_queries, first, queries, HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, True)
    acc = _over_all_keys(
        row, key_rows, bounds, pairs, first, bits_scale, cap,
        HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, MASK, False, PRECISION,
    )  # fmt: skip
    if MASK == "rows" or MASK == "cells":  # noqa: SIM102 - decided at compile time, the other at run time
        if has_nan(acc):
            acc = _over_all_keys(
                row, key_rows, bounds, pairs, first, bits_scale, cap,
                HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, MASK, True, PRECISION,
            )  # fmt: skip
    grad_q_matrix = matrix_of(grad_q, grad_q_strides, batch, head)
    store_rows(grad_q_matrix, acc * scale, first, grad_q_strides[1], queries, HEAD_DIM, QUERIES, DIM)


@triton.jit
def _over_all_keys(
    row, key_rows, bounds, pairs, first, bits_scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dQ, not yet scaled. For HAS_NAN see `triton_forward._attend`."""
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for masked in tl.static_range(2):  # the open blocks first
        acc = _over_keys(
            acc, row, key_rows, bounds, pairs, first, bits_scale, cap,
            HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, masked == 1, MASK, HAS_NAN, PRECISION,
        )  # fmt: skip
    return acc


@triton.jit
def _over_keys(
    acc, row, key_rows, bounds, pairs, first_query, bits_scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, MASK: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate dQ of the `load_queries` over the MASKED blocks of keys of `key_ranges`, or the open ones."""
    query, grad_out, level, row_delta = row
    k_matrix, v_matrix, k_stride, v_stride = key_rows
    keys = pairs[1]
    start, stop = loop_of(bounds, MASKED)
    for at in tl.range(start, stop, 1 if MASK == "cells" else KEYS):
        first = first_of_block(at, bounds, pairs[8], MASKED, MASK)
        key = load_rows(k_matrix, first, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
        value = load_rows(v_matrix, first, v_stride, keys, VALUE_HEAD_DIM, KEYS, VALUE_DIM, MASKED)
        scores = scores_of(query, key, cap, PRECISION)
        weights = tl.exp2(scores * bits_scale - level[:, None])
        if MASKED:
            visible = is_visible(pairs, first_query, first, QUERIES, KEYS, MASK)
            weights = tl.where(visible, weights, 0.0)
        inner = dot(grad_out, tl.trans(value), PRECISION)
        grad_scores = weights * (inner - row_delta[:, None])
        if cap is not None:
            grad_scores *= slope_of(scores, cap)
        if MASKED and HAS_NAN:
            grad_scores = tl.where(visible, grad_scores, 0.0)
            acc = add_visible_dot(acc, grad_scores.to(key.dtype), key, visible, PRECISION)
        else:
            acc = add_dot(acc, grad_scores.to(key.dtype), key, PRECISION)
    return acc


@triton.jit
def slope_of(scores, cap):
    """Return the derivative of `capped`, given its results."""
    share = scores / cap
    return 1.0 - share * share


@triton.jit
def queries_of(grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head):
    """Return pointers and strides of a head's queries, dO and statistics, for `load_queries`."""
    return (
        matrix_of(q, q_strides, batch, head), matrix_of(grad, grad_strides, batch, head),
        matrix_of(lse, lse_strides, batch, head), matrix_of(delta, delta_strides, batch, head),
        q_strides[1], grad_strides[1], lse_strides[1], delta_strides[1],
    )  # fmt: skip


@triton.jit
def load_queries(
    of_queries, first, queries,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return queries `first` to `first + QUERIES` with dO, `load_levels` and deltas; without MASKED all must exist."""
    q_matrix, grad_matrix, lse_row, delta_row, q_stride, grad_stride, lse_stride, delta_stride = of_queries
    query = load_rows(q_matrix, first, q_stride, queries, HEAD_DIM, QUERIES, DIM, MASKED)
    grad_out = load_rows(grad_matrix, first, grad_stride, queries, VALUE_HEAD_DIM, QUERIES, VALUE_DIM, MASKED)
    level = load_levels(lse_row, first, lse_stride, queries, QUERIES, MASKED)
    row_delta = load_numbers(delta_row, first, delta_stride, queries, QUERIES, MASKED)
    return query, grad_out, level, row_delta


@triton.jit
def load_levels(row, first, stride, length, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Return log-sum-exps in units of log 2; inf for rows without a query or visible key, so their weights are 0."""
    level = load_numbers(row, first, stride, length, ROWS, MASKED) * LOG2_E
    if MASKED:
        level = tl.where(first + tl.arange(0, ROWS) < length, level, float("inf"))
    return tl.where(level == float("-inf"), float("inf"), level)


@triton.jit
def load_numbers(row, first, stride, length, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Return ROWS numbers of a row in fp32, zero beyond `length`."""
    rows = first + tl.arange(0, ROWS)
    at = row + rows.to(tl.int64) * stride
    numbers = tl.load(at, mask=rows < length, other=0.0) if MASKED else tl.load(at)
    return numbers.to(tl.float32)
