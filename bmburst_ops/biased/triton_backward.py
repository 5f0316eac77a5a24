"""Biased attention's backward pass in Triton, from the log-sum-exp and delta. Importing this file needs Triton.

Two kernels: one a block of keys, for dK and dV, and one a block of queries, for dQ and the table. What the table gets
is added up as integers (`fixed_point`), so that repeated calls give the same bits although programs add in any order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_formula import (
    NOT_SPECIALIZED,
    as_columns,
    as_rows,
    bias_of,
    bucket_of,
    common_bucket,
    is_hidden,
    load_extents,
    load_tokens,
    sees,
)
from bmburst_ops.flash.triton_backward import load_levels, load_numbers
from bmburst_ops.flash.triton_forward import add_product, load_rows, matrix_of, product, store_rows


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def keys_kernel(
    grad, q, k, v, lse, delta, grad_k, grad_v,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_k_strides, grad_v_strides,
    queries, keys, scale, bits_scale,
    query_tokens, key_tokens, query_extents, key_extents, ranges,
    table, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of KEYS keys of one head, from scores `[KEYS, QUERIES]`. Grid: (key blocks, heads, batch).

    The arguments are those of `forward_kernel`.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * KEYS
    q_matrix, grad_matrix = matrix_of(q, q_strides, batch, head), matrix_of(grad, grad_strides, batch, head)
    lse_row, delta_row = matrix_of(lse, lse_strides, batch, head), matrix_of(delta, delta_strides, batch, head)
    key = load_rows(matrix_of(k, k_strides, batch, head), first, k_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    value = load_rows(matrix_of(v, v_strides, batch, head), first, v_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    of_keys = as_rows(load_tokens(key_tokens, batch, first, tl.num_programs(2), keys, KEYS))
    relation_row, table_row = relations + tl.cast(batch, tl.int64) * relation_stride, table + head * rows
    key_acc = tl.zeros([KEYS, DIM], tl.float32)
    value_acc = tl.zeros([KEYS, DIM], tl.float32)
    keys_extents = load_extents(key_extents, batch, tl.program_id(0), tl.num_programs(0))
    range_at = ranges + (tl.cast(batch, tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    for block in tl.range(tl.load(range_at), tl.load(range_at + 1)):
        start = block * QUERIES
        queries_extents = load_extents(query_extents, batch, block, tl.cdiv(queries, QUERIES))
        if is_hidden(queries_extents, keys_extents) == 0:
            query = load_rows(q_matrix, start, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
            grad_out = load_rows(grad_matrix, start, grad_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
            level = load_levels(lse_row, start, lse_strides[1], queries, QUERIES, True)
            row_delta = load_numbers(delta_row, start, delta_strides[1], queries, QUERIES, True)
            scores = product(key, tl.trans(query), PRECISION) * bits_scale - level[None, :]
            common = common_bucket(
                queries_extents, keys_extents, relation_row, entries, distances, max_distance, buckets, rows
            )  # fmt: skip
            if common >= 0:
                scores += tl.load(table_row + common)
            else:
                of_queries = as_columns(load_tokens(query_tokens, batch, start, tl.num_programs(2), queries, QUERIES))
                visible = sees(of_queries, of_keys)
                bucket = bucket_of(
                    of_queries, of_keys, visible, relation_row, entries, distances, max_distance, buckets, rows
                )  # fmt: skip
                scores = tl.where(visible, scores + bias_of(table_row, bucket, rows), float("-inf"))
            weights = tl.exp2(scores)
            value_acc = add_product(value_acc, weights.to(grad_out.dtype), grad_out, PRECISION)
            inner = product(value, tl.trans(grad_out), PRECISION)
            grad_scores = weights * (inner - row_delta[None, :])
            key_acc = add_product(key_acc, grad_scores.to(query.dtype), query, PRECISION)
    grad_k_matrix = matrix_of(grad_k, grad_k_strides, batch, head)
    grad_v_matrix = matrix_of(grad_v, grad_v_strides, batch, head)
    store_rows(grad_k_matrix, key_acc * scale, first, grad_k_strides[1], keys, HEAD_DIM, KEYS, DIM)
    store_rows(grad_v_matrix, value_acc, first, grad_v_strides[1], keys, HEAD_DIM, KEYS, DIM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def queries_kernel(
    grad, q, k, v, lse, delta, grad_q, sums, unit,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_q_strides,
    queries, keys, scale, bits_scale,
    query_tokens, key_tokens, query_extents, key_extents, ranges,
    table, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of QUERIES queries of one head, and a share of the table's. Grid: (query blocks, heads, batch).

    `sums` is int64 `[heads, rows]`, in the units that `unit` points to. The others are those of `forward_kernel`.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * QUERIES
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    q_matrix, grad_matrix = matrix_of(q, q_strides, batch, head), matrix_of(grad, grad_strides, batch, head)
    lse_row, delta_row = matrix_of(lse, lse_strides, batch, head), matrix_of(delta, delta_strides, batch, head)
    query = load_rows(q_matrix, first, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    grad_out = load_rows(grad_matrix, first, grad_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    level = load_levels(lse_row, first, lse_strides[1], queries, QUERIES, True)
    row_delta = load_numbers(delta_row, first, delta_strides[1], queries, QUERIES, True)
    of_queries = as_rows(load_tokens(query_tokens, batch, first, tl.num_programs(2), queries, QUERIES))
    relation_row, table_row = relations + tl.cast(batch, tl.int64) * relation_stride, table + head * rows
    factor, sum_row = tl.load(unit), sums + head * rows
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    queries_extents = load_extents(query_extents, batch, tl.program_id(0), tl.num_programs(0))
    range_at = ranges + (tl.cast(batch, tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    for block in tl.range(tl.load(range_at), tl.load(range_at + 1)):
        start = block * KEYS
        keys_extents = load_extents(key_extents, batch, block, tl.cdiv(keys, KEYS))
        if is_hidden(queries_extents, keys_extents) == 0:
            key = load_rows(k_matrix, start, k_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
            value = load_rows(v_matrix, start, v_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
            scores = product(query, tl.trans(key), PRECISION) * bits_scale - level[:, None]
            inner = product(grad_out, tl.trans(value), PRECISION) - row_delta[:, None]
            common = common_bucket(
                queries_extents, keys_extents, relation_row, entries, distances, max_distance, buckets, rows
            )  # fmt: skip
            if common >= 0:
                grad_scores = tl.exp2(scores + tl.load(table_row + common)) * inner
                tl.atomic_add(sum_row + common, (tl.sum(grad_scores) * factor).to(tl.int64))
            else:
                of_keys = as_columns(load_tokens(key_tokens, batch, start, tl.num_programs(2), keys, KEYS))
                visible = sees(of_queries, of_keys)
                bucket = bucket_of(
                    of_queries, of_keys, visible, relation_row, entries, distances, max_distance, buckets, rows
                )  # fmt: skip
                scores = tl.where(visible, scores + bias_of(table_row, bucket, rows), float("-inf"))
                grad_scores = tl.exp2(scores) * inner
                _add_by_bucket(sum_row, bucket, grad_scores, factor, rows)
            acc = add_product(acc, grad_scores.to(key.dtype), key, PRECISION)
    grad_q_matrix = matrix_of(grad_q, grad_q_strides, batch, head)
    store_rows(grad_q_matrix, acc * scale, first, grad_q_strides[1], queries, HEAD_DIM, QUERIES, DIM)


@triton.jit
def _add_by_bucket(sum_row, bucket, values, factor, rows):
    """Add values to the sums of their buckets; none where the bucket is `rows`.

    Far from the diagonal and between samples a whole tile has one bucket: it is added up here, and added once.
    """
    lowest = tl.min(bucket)
    highest = tl.max(tl.where(bucket < rows, bucket, -1))
    if lowest == highest:
        tl.atomic_add(sum_row + lowest, (tl.sum(values) * factor).to(tl.int64))
    else:
        tl.atomic_add(sum_row + bucket, (values * factor).to(tl.int64), mask=bucket < rows)
