"""Biased attention's forward pass in Triton. Importing this file needs Triton.

Scores are kept in units of log 2, for `exp2`; so is the table that kernels read.
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
from bmburst_ops.flash.triton_forward import LN_2, add_product, load_rows, matrix_of, product, store_rows


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, queries, keys, bits_scale,
    query_tokens, key_tokens, query_extents, key_extents, ranges,
    table, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head over all keys. Grid: (query blocks, heads, batch).

    Strides are of (batch, token, head); lse `[batch, heads, queries]` is dense, and so is the table `[heads, rows]`, in
    units of log 2; bits_scale is scale * log2(e).
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * QUERIES
    q_matrix, out_matrix = matrix_of(q, q_strides, batch, head), matrix_of(out, out_strides, batch, head)
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    query = load_rows(q_matrix, first, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    of_queries = as_rows(load_tokens(query_tokens, batch, first, tl.num_programs(2), queries, QUERIES))
    relation_row, table_row = relations + tl.cast(batch, tl.int64) * relation_stride, table + head * rows
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    queries_extents = load_extents(query_extents, batch, tl.program_id(0), tl.num_programs(0))
    range_at = ranges + (tl.cast(batch, tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    for block in tl.range(tl.load(range_at), tl.load(range_at + 1)):
        start = block * KEYS
        keys_extents = load_extents(key_extents, batch, block, tl.cdiv(keys, KEYS))
        if is_hidden(queries_extents, keys_extents) == 0:
            key = load_rows(k_matrix, start, k_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
            scores = product(query, tl.trans(key), PRECISION) * bits_scale
            common = common_bucket(
                queries_extents, keys_extents, relation_row, entries, distances, max_distance, buckets, rows
            )  # fmt: skip
            if common >= 0:
                scores += tl.load(table_row + common)
            else:
                of_keys = as_columns(load_tokens(key_tokens, batch, start, tl.num_programs(2), keys, KEYS))
                visible = sees(of_queries, of_keys)
                bucket = bucket_of(
                    of_queries, of_keys, visible, relation_row, entries, distances, max_distance, buckets, rows
                )  # fmt: skip
                scores = tl.where(visible, scores + bias_of(table_row, bucket, rows), float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(peak - base)
            total = total * fade + tl.sum(weights, 1)
            value = load_rows(v_matrix, start, v_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
            acc = add_product(acc * fade[:, None], weights.to(value.dtype), value, PRECISION)
            peak = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out_matrix, acc, first, out_strides[1], queries, HEAD_DIM, QUERIES, DIM)
    tokens = first + tl.arange(0, QUERIES)
    at = lse + (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * queries + tokens
    tl.store(at, (peak + tl.log2(total)) * LN_2, mask=tokens < queries)
