"""The gradient of a bias table in Triton, of blocks with several of its rows. Importing this file needs Triton.

Along a diagonal of blocks each pair of places has the same distance in every block, so that what they give can be added
up place by place, and goes to the rows of the table once a run. Only where relations decide too does each block so.
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
    distance_of,
    load_extents,
    load_positions,
    load_tokens,
    sees,
)
from bmburst_ops.biased.triton_gather import gather_near
from bmburst_ops.biased.triton_runs import GENERAL, NEAR, PARTLY, diagonal, is_singled_out, load_run
from bmburst_ops.flash.triton_backward import load_levels, load_numbers
from bmburst_ops.flash.triton_forward import load_rows, matrix_of, product


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def table_kernel(
    grad, q, k, v, lse, delta, sums, unit,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides,
    queries, keys, bits_scale,
    query_tokens, key_tokens, runs, counts, query_extents, key_extents, line_runs, line_counts,
    near, table, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the table's gradient of one head from one diagonal of blocks. Grid: (diagonals, heads, batch).

    Blocks must be those of `queries_kernel`, whose runs are `line_runs` and arguments the others; for runs and counts
    see `triton_runs.diagonals_kernel`.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    line = tl.cast(batch, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    count = tl.load(counts + line)
    query_blocks, key_blocks = tl.cdiv(queries, QUERIES), tl.cdiv(keys, KEYS)
    offset, _, _ = diagonal(tl.program_id(0), query_blocks, key_blocks, QUERIES // KEYS)
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    q_matrix, grad_matrix = matrix_of(q, q_strides, batch, head), matrix_of(grad, grad_strides, batch, head)
    lse_row, delta_row = matrix_of(lse, lse_strides, batch, head), matrix_of(delta, delta_strides, batch, head)
    relation_row, table_row = relations + tl.cast(batch, tl.int64) * relation_stride, table + head * rows
    near_row = near + head * (2 * max_distance + 1)
    batches = tl.num_programs(2)
    for index in tl.range(count):
        start, stop, kind = load_run(runs + line * RUNS * 3, index)
        held = tl.zeros([QUERIES, KEYS], tl.float32)
        for block in tl.range(start, tl.where(kind == NEAR, stop, start)):
            first, first_key = block * QUERIES, (block * (QUERIES // KEYS) + offset) * KEYS
            position = load_positions(query_tokens, batch, first, queries, QUERIES)[:, None]
            key_position = load_positions(key_tokens, batch, first_key, keys, KEYS)[None, :]
            bias = gather_near(near_row, distance_of(key_position, position, max_distance), PRECISION)
            held += _grad_scores(
                bias, q_matrix, grad_matrix, k_matrix, v_matrix, lse_row, delta_row,
                q_strides[1], grad_strides[1], k_strides[1], v_strides[1], lse_strides[1], delta_strides[1],
                first, first_key, queries, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, False, PRECISION,
            )  # fmt: skip
        for block in tl.range(start, tl.where(kind == PARTLY, stop, start)):
            first, first_key = block * QUERIES, (block * (QUERIES // KEYS) + offset) * KEYS
            of_queries = as_rows(load_tokens(query_tokens, batch, first, batches, queries, QUERIES))
            of_keys = as_columns(load_tokens(key_tokens, batch, first_key, batches, keys, KEYS))
            bias = gather_near(near_row, distance_of(of_keys[0], of_queries[0], max_distance), PRECISION)
            held += _grad_scores(
                tl.where(sees(of_queries, of_keys), bias, float("-inf")),
                q_matrix, grad_matrix, k_matrix, v_matrix, lse_row, delta_row,
                q_strides[1], grad_strides[1], k_strides[1], v_strides[1], lse_strides[1], delta_strides[1],
                first, first_key, queries, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
            )  # fmt: skip
        if kind != GENERAL:
            first, first_key = start * QUERIES, (start * (QUERIES // KEYS) + offset) * KEYS
            position = load_tokens(query_tokens, batch, first, batches, queries, QUERIES)[0][:, None]
            key_position = load_tokens(key_tokens, batch, first_key, batches, keys, KEYS)[0][None, :]
            bucket = tl.load(distances + distance_of(key_position, position, max_distance))
            _add_by_bucket(sums + head * rows, bucket, held, unit, rows)
        for block in tl.range(start, tl.where(kind == GENERAL, stop, start), num_stages=1):
            key_block = block * (QUERIES // KEYS) + offset
            query_extent = load_extents(query_extents, batch, block, query_blocks)
            key_extent = load_extents(key_extents, batch, key_block, key_blocks)
            common = common_bucket(
                query_extent, key_extent, relation_row, entries, distances, max_distance, buckets, rows
            )  # fmt: skip
            is_singled = is_singled_out(line_runs, line_counts, batch, block, key_block, query_blocks, RUNS)
            if (common < 0) | (is_singled == 0):
                first, first_key = block * QUERIES, key_block * KEYS
                of_queries = as_rows(load_tokens(query_tokens, batch, first, batches, queries, QUERIES))
                of_keys = as_columns(load_tokens(key_tokens, batch, first_key, batches, keys, KEYS))
                visible = sees(of_queries, of_keys)
                bucket = bucket_of(
                    of_queries, of_keys, visible, relation_row, entries, distances, max_distance, buckets, rows,
                    PRECISION,
                )  # fmt: skip
                grad_scores = _grad_scores(
                    tl.where(visible, bias_of(table_row, bucket, rows, PRECISION), float("-inf")),
                    q_matrix, grad_matrix, k_matrix, v_matrix, lse_row, delta_row,
                    q_strides[1], grad_strides[1], k_strides[1], v_strides[1], lse_strides[1], delta_strides[1],
                    first, first_key, queries, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
                )  # fmt: skip
                _add_by_bucket(sums + head * rows, bucket, grad_scores, unit, rows)


@triton.jit
def _grad_scores(
    bias, q_matrix, grad_matrix, k_matrix, v_matrix, lse_row, delta_row,
    q_stride, grad_stride, k_stride, v_stride, lse_stride, delta_stride, first, first_key, queries, keys, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a block's scores, `[QUERIES, KEYS]`, from their bias, -inf where nothing is seen."""
    query = load_rows(q_matrix, first, q_stride, queries, HEAD_DIM, QUERIES, DIM, MASKED)
    key = load_rows(k_matrix, first_key, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
    scores = product(query, tl.trans(key), PRECISION) * bits_scale + bias
    level = load_levels(lse_row, first, lse_stride, queries, QUERIES, MASKED)
    weights = tl.exp2(scores - level[:, None])
    grad_out = load_rows(grad_matrix, first, grad_stride, queries, HEAD_DIM, QUERIES, DIM, MASKED)
    value = load_rows(v_matrix, first_key, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
    row_delta = load_numbers(delta_row, first, delta_stride, queries, QUERIES, MASKED)
    return weights * (product(grad_out, tl.trans(value), PRECISION) - row_delta[:, None])


@triton.jit
def _add_by_bucket(sum_row, bucket, values, unit, rows):
    """Add values to the sums of their buckets; none where the bucket is `rows`, nor zeros."""
    added = (values * tl.load(unit)).to(tl.int64)
    tl.atomic_add(sum_row + bucket, added, mask=(bucket < rows) & (values != 0), sem="relaxed")
