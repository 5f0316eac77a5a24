"""Biased attention in Triton: scores of a block with their bias, the forward and the backward pass. Needs Triton.

Scores and the table are scaled by log2(e), for `exp2`. KIND is "common" (all pairs of the block are visible and have
the same bias), "near" (all pairs are visible, and the distance determines the bias) or "general".

Backward needs the log-sum-exp and delta. It has two kernels: one with a program per block of keys, for dK and dV, and
one with a program per block of queries, for dQ. The latter also computes the table's gradient from "common" blocks;
`triton_bias` computes it from all others. That gradient is summed in integers, so repeated calls give bitwise equal
results although programs add in any order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_bias import (
    add_integers,
    as_columns,
    as_rows,
    bias_of,
    bucket_of,
    near_bias,
    sees,
    table_row_of,
    unit_of,
)
from bmburst_ops.biased.triton_blocks import (
    NOT_SPECIALIZED,
    line_of,
    load_positions,
    load_run,
    load_tokens,
    lookup_of,
    stop_of,
)
from bmburst_ops.flash.triton_backward import load_queries, queries_of
from bmburst_ops.flash.triton_forward import (
    LN_2,
    add_dot,
    add_visible_dot,
    dot,
    has_nan,
    load_rows,
    matrix_of,
    store_rows,
)


@triton.jit
def common_bias(table_row, kind):
    """Return the common bias of a run of blocks, 0 if it has none."""
    return tl.load(table_row + kind, mask=kind >= 0, other=0.0)


@triton.jit
def load_others(vectors, batch, first, batches, length, ROWS: tl.constexpr, KIND: tl.constexpr):
    """Return the integers that a kind of block needs of tokens `first` to `first + ROWS`: positions, or all six."""
    if KIND == "general":
        found = load_tokens(vectors, batch, first, batches, length, ROWS)
    else:
        position = load_positions(vectors, batch, first, length, ROWS)
        found = (position, position, position, position, position, position)
    return found


@triton.jit
def with_bias(
    scores, of_queries, of_keys, common, table_row, lookup, KIND: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return scores with their bias, -inf for masked pairs.

    Args:
        scores: Scores of a block, with queries in rows or in columns, in units of log 2.
        of_queries: Integers of the queries, as rows or columns; positions are enough if KIND is not "general".
        of_keys: Integers of the keys, in the other dimension.
        common: The bias, if KIND is "common".
        table_row: The head's biases, from `table_row_of`.
        lookup: Arguments of the lookup, from `lookup_of`.
    """
    if KIND == "common":
        scores += common
    elif KIND == "near":
        scores += near_bias(table_row, of_queries[0], of_keys[0], lookup, PRECISION)
    else:
        visible = sees(of_queries, of_keys)
        bucket = bucket_of(of_queries, of_keys, visible, lookup, PRECISION)
        scores = tl.where(visible, scores + bias_of(table_row, bucket, lookup[5], PRECISION), float("-inf"))
    return scores


@triton.jit
def is_seen(scores):
    """Return which scores of `with_bias` are of visible pairs; a NaN score is of a visible pair."""
    return scores != float("-inf")


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, queries, keys, bits_scale,
    query_tokens, key_tokens, runs, counts,
    biases, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head over all keys. Grid: (query blocks, heads, batch).

    Strides are of (batch, token, head); lse `[batch, heads, queries]` is dense; bits_scale is scale * log2(e). For
    biases see `triton_bias.biases_kernel`, for relations and what follows `Pairs.lookup`, for runs and counts
    `triton_blocks.lines_kernel`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # longest rows first: late queries see most keys
    head, batch = tl.program_id(1), tl.program_id(2)
    first = block * QUERIES
    q_matrix, out_matrix = matrix_of(q, q_strides, batch, head), matrix_of(out, out_strides, batch, head)
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    key_rows = k_matrix, v_matrix, k_strides[1], v_strides[1]
    query = load_rows(q_matrix, first, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    lookup = lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows)
    table_row = table_row_of(biases, head, lookup)
    line = line_of(runs, counts, batch, tl.num_programs(0), block, RUNS)
    pairs = query_tokens, key_tokens, batch, tl.num_programs(2), queries, keys
    acc, total, peak = _attend(
        query, key_rows, line, pairs, first, bits_scale, table_row, lookup,
        HEAD_DIM, DIM, QUERIES, KEYS, False, PRECISION,
    )  # fmt: skip
    if has_nan(acc):
        acc, total, peak = _attend(
            query, key_rows, line, pairs, first, bits_scale, table_row, lookup,
            HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out_matrix, acc, first, out_strides[1], queries, HEAD_DIM, QUERIES, DIM)
    tokens = first + tl.arange(0, QUERIES)
    at = lse + (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * queries + tokens
    tl.store(at, (peak + tl.log2(total)) * LN_2, mask=tokens < queries)


@triton.jit
def _attend(
    query, key_rows, line, pairs, first, bits_scale, table_row, lookup,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the running softmax over all keys; see `flash.triton_forward._attend`, also for HAS_NAN."""
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    for kind in tl.static_range(3):
        acc, total, peak = _over_runs(
            acc, total, peak, query, key_rows, line, pairs, first, bits_scale, table_row, lookup,
            HEAD_DIM, DIM, QUERIES, KEYS, "common" if kind == 0 else "near" if kind == 1 else "general",
            HAS_NAN, PRECISION,
        )  # fmt: skip
    return acc, total, peak


@triton.jit
def _over_runs(
    acc, total, peak, query, key_rows, line, pairs, first_query, bits_scale, table_row, lookup,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    KIND: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with the runs of one kind."""
    MASKED: tl.constexpr = KIND == "general"
    k_matrix, v_matrix, k_stride, v_stride = key_rows
    query_tokens, key_tokens, batch, batches, queries, keys = pairs
    of_queries = as_rows(load_tokens(query_tokens, batch, first_query, batches, queries, QUERIES))
    for index in tl.range(line[1]):
        start, stop, kind = load_run(line[0], index)
        bias = common_bias(table_row, kind)
        for block in tl.range(start, stop_of(start, stop, kind, KIND)):
            first = block * KEYS
            key = load_rows(k_matrix, first, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
            scores = dot(query, tl.trans(key), PRECISION) * bits_scale
            of_keys = as_columns(load_others(key_tokens, batch, first, batches, keys, KEYS, KIND))
            scores = with_bias(scores, of_queries, of_keys, bias, table_row, lookup, KIND, PRECISION)
            higher = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(peak - base)
            total = total * fade + tl.sum(weights, 1)
            value = load_rows(v_matrix, first, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
            if KIND == "general" and HAS_NAN:
                acc = add_visible_dot(acc * fade[:, None], weights.to(value.dtype), value, is_seen(scores), PRECISION)
            else:
                acc = add_dot(acc * fade[:, None], weights.to(value.dtype), value, PRECISION)
            peak = higher
    return acc, total, peak


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def keys_kernel(
    grad, q, k, v, lse, delta, grad_k, grad_v,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_k_strides, grad_v_strides,
    queries, keys, scale, bits_scale,
    query_tokens, key_tokens, runs, counts,
    biases, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of KEYS keys of one head, from scores `[KEYS, QUERIES]`. Grid: (key blocks, heads, batch).

    The arguments are those of `forward_kernel`; runs are of blocks of queries.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * KEYS
    of_queries = queries_of(grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head)
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    key = load_rows(k_matrix, first, k_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    value = load_rows(v_matrix, first, v_strides[1], keys, HEAD_DIM, KEYS, DIM, True)
    lookup = lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows)
    table_row = table_row_of(biases, head, lookup)
    line = line_of(runs, counts, batch, tl.num_programs(0), tl.program_id(0), RUNS)
    pairs = query_tokens, key_tokens, batch, tl.num_programs(2), queries, keys
    key_acc, value_acc = _over_all_queries(
        key, value, of_queries, line, pairs, first, bits_scale, table_row, lookup,
        HEAD_DIM, DIM, QUERIES, KEYS, False, PRECISION,
    )  # fmt: skip
    if has_nan(key_acc) | has_nan(value_acc):
        key_acc, value_acc = _over_all_queries(
            key, value, of_queries, line, pairs, first, bits_scale, table_row, lookup,
            HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
        )  # fmt: skip
    grad_k_matrix = matrix_of(grad_k, grad_k_strides, batch, head)
    grad_v_matrix = matrix_of(grad_v, grad_v_strides, batch, head)
    store_rows(grad_k_matrix, key_acc * scale, first, grad_k_strides[1], keys, HEAD_DIM, KEYS, DIM)
    store_rows(grad_v_matrix, value_acc, first, grad_v_strides[1], keys, HEAD_DIM, KEYS, DIM)


@triton.jit
def _over_all_queries(
    key, value, of_queries, line, pairs, first, bits_scale, table_row, lookup,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dK, not yet scaled, and dV. For HAS_NAN see `flash.triton_forward._attend`."""
    key_acc = tl.zeros([KEYS, DIM], tl.float32)
    value_acc = tl.zeros([KEYS, DIM], tl.float32)
    for kind in tl.static_range(3):
        key_acc, value_acc = _over_queries(
            key_acc, value_acc, key, value, of_queries, line, pairs, first, bits_scale, table_row, lookup,
            HEAD_DIM, DIM, QUERIES, KEYS, "common" if kind == 0 else "near" if kind == 1 else "general",
            HAS_NAN, PRECISION,
        )  # fmt: skip
    return key_acc, value_acc


@triton.jit
def _over_queries(
    key_acc, value_acc, key, value, of_queries, line, pairs, first_key, bits_scale, table_row, lookup,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    KIND: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate dK, not yet scaled, and dV over the runs of one kind."""
    MASKED: tl.constexpr = KIND == "general"
    query_tokens, key_tokens, batch, batches, queries, keys = pairs
    own = as_rows(load_tokens(key_tokens, batch, first_key, batches, keys, KEYS))
    for index in tl.range(line[1]):
        start, stop, kind = load_run(line[0], index)
        bias = common_bias(table_row, kind)
        for block in tl.range(start, stop_of(start, stop, kind, KIND)):
            first = block * QUERIES
            query, grad_out, level, row_delta = load_queries(
                of_queries, first, queries, HEAD_DIM, DIM, HEAD_DIM, DIM, QUERIES, MASKED
            )  # fmt: skip
            scores = dot(key, tl.trans(query), PRECISION) * bits_scale - level[None, :]
            others = as_columns(load_others(query_tokens, batch, first, batches, queries, QUERIES, KIND))
            scores = with_bias(scores, others, own, bias, table_row, lookup, KIND, PRECISION)
            weights = tl.exp2(scores)
            inner = dot(value, tl.trans(grad_out), PRECISION)
            grad_scores = weights * (inner - row_delta[None, :])
            if KIND == "general" and HAS_NAN:
                seen = is_seen(scores)
                grad_scores = tl.where(seen, grad_scores, 0.0)
                value_acc = add_visible_dot(value_acc, weights.to(grad_out.dtype), grad_out, seen, PRECISION)
                key_acc = add_visible_dot(key_acc, grad_scores.to(query.dtype), query, seen, PRECISION)
            else:
                value_acc = add_dot(value_acc, weights.to(grad_out.dtype), grad_out, PRECISION)
                key_acc = add_dot(key_acc, grad_scores.to(query.dtype), query, PRECISION)
    return key_acc, value_acc


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def queries_kernel(
    grad, q, k, v, lse, delta, grad_q, sums, bits,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_q_strides,
    queries, keys, scale, bits_scale,
    query_tokens, key_tokens, runs, counts,
    biases, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of QUERIES queries of one head, and a share of the table's. Grid: (query blocks, heads, batch).

    `sums` is int64 `[heads, rows]`, followed by the peaks, which with `bits` determine its unit (`triton_bias`). Other
    arguments are as in `forward_kernel`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    first = block * QUERIES
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    key_rows = k_matrix, v_matrix, k_strides[1], v_strides[1]
    of_queries = queries_of(grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head)
    row = load_queries(of_queries, first, queries, HEAD_DIM, DIM, HEAD_DIM, DIM, QUERIES, True)
    lookup = lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows)
    table_row = table_row_of(biases, head, lookup)
    line = line_of(runs, counts, batch, tl.num_programs(0), block, RUNS)
    pairs = query_tokens, key_tokens, batch, tl.num_programs(2), queries, keys
    into = sums + head * rows, sums + tl.num_programs(1) * rows, bits
    acc = _over_all_keys(
        row, key_rows, into, line, pairs, first, bits_scale, table_row, lookup,
        HEAD_DIM, DIM, QUERIES, KEYS, False, PRECISION,
    )  # fmt: skip
    if has_nan(acc):
        acc = _over_all_keys(
            row, key_rows, into, line, pairs, first, bits_scale, table_row, lookup,
            HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
        )  # fmt: skip
    grad_q_matrix = matrix_of(grad_q, grad_q_strides, batch, head)
    store_rows(grad_q_matrix, acc * scale, first, grad_q_strides[1], queries, HEAD_DIM, QUERIES, DIM)


@triton.jit
def _over_all_keys(
    row, key_rows, into, line, pairs, first, bits_scale, table_row, lookup,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dQ, not yet scaled. Add gradients of common biases to the sums, unless HAS_NAN: they were added before."""
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for kind in tl.static_range(3):
        acc = _over_keys(
            acc, row, key_rows, into, line, pairs, first, bits_scale, table_row, lookup,
            HEAD_DIM, DIM, QUERIES, KEYS, "common" if kind == 0 else "near" if kind == 1 else "general",
            HAS_NAN, PRECISION,
        )  # fmt: skip
    return acc


@triton.jit
def _over_keys(
    acc, row, key_rows, into, line, pairs, first_query, bits_scale, table_row, lookup,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    KIND: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate dQ over the runs of one kind; for the sums of a common bias see `_over_all_keys`."""
    MASKED: tl.constexpr = KIND == "general"
    query, grad_out, level, row_delta = row
    k_matrix, v_matrix, k_stride, v_stride = key_rows
    sum_row, peaks, bits = into
    query_tokens, key_tokens, batch, batches, queries, keys = pairs
    own = as_rows(load_tokens(query_tokens, batch, first_query, batches, queries, QUERIES))
    for index in tl.range(line[1]):
        start, stop, kind = load_run(line[0], index)
        bias = common_bias(table_row, kind)
        of_bias = tl.zeros([QUERIES], tl.float32)
        for block in tl.range(start, stop_of(start, stop, kind, KIND)):
            first = block * KEYS
            key = load_rows(k_matrix, first, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
            value = load_rows(v_matrix, first, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
            scores = dot(query, tl.trans(key), PRECISION) * bits_scale - level[:, None]
            others = as_columns(load_others(key_tokens, batch, first, batches, keys, KEYS, KIND))
            scores = with_bias(scores, own, others, bias, table_row, lookup, KIND, PRECISION)
            weights = tl.exp2(scores)
            inner = dot(grad_out, tl.trans(value), PRECISION)
            grad_scores = weights * (inner - row_delta[:, None])
            if KIND == "common":
                of_bias += tl.sum(grad_scores, 1)
            if KIND == "general" and HAS_NAN:
                seen = is_seen(scores)
                grad_scores = tl.where(seen, grad_scores, 0.0)
                acc = add_visible_dot(acc, grad_scores.to(key.dtype), key, seen, PRECISION)
            else:
                acc = add_dot(acc, grad_scores.to(key.dtype), key, PRECISION)
        if KIND == "common" and not HAS_NAN:
            add_integers(sum_row + kind, tl.sum(of_bias), unit_of(peaks, bits), kind >= 0)
    return acc
