"""Recomputation of packed documents whose following tokens are not finite. Importing this file needs Triton.

A kernel that loads whole tiles also reads the first tokens of the next document. It gives them weight 0, but 0 times
NaN is NaN. Each program here checks those tokens. If one is not finite, it recomputes its part of the document from the
document's own tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.flash.triton_backward import LOG2_E, load_queries, queries_of, slope_of
from bmburst_ops.flash.triton_forward import add_dot, dot, load_rows, matrix_of, scores_of, store_rows

NOT_SPECIALIZED = ("parts", "tokens", "left", "right")


@triton.jit
def is_finite_behind(
    tensor, strides, batch, batches, head, after, tokens, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Return whether ROWS tokens are finite, from token `after` of a sample on and into the next samples.

    Strides are of (batch, token, head) of `[batch, tokens, heads, HEAD_DIM]`.
    """
    place = tl.cast(batch, tl.int64) * tokens + after + tl.arange(0, ROWS)
    rows = (
        tensor + (place // tokens) * strides[0] + (place % tokens) * strides[1] + tl.cast(head, tl.int64) * strides[2]
    )
    columns = tl.arange(0, DIM)
    mask = (place < tl.cast(batches, tl.int64) * tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    numbers = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.max(tl.max(tl.where(tl.abs(numbers) < float("inf"), 0, 1), 1), 0) == 0


@triton.jit
def document_of(query_ends, key_ends, parts, ROWS: tl.constexpr):
    """Return a program's part of a document: `(first block, step, first query, end, first key, end)`."""
    document, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    queries, keys = query_ends + document, key_ends + document
    return (
        part * ROWS, parts * ROWS, tl.load(queries), tl.load(queries + 1), tl.load(keys), tl.load(keys + 1),
    )  # fmt: skip


@triton.jit
def is_inside(rows, columns, band):
    """Return the mask of queries `rows` and keys `columns` in a document, aligned at the bottom right."""
    first_key, query_end, key_end, left, right = band
    middle = rows[:, None] + (key_end - query_end)
    visible = (columns[None, :] >= first_key) & (columns[None, :] < key_end)
    return visible & (columns[None, :] >= middle - left) & (columns[None, :] <= middle + right)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q, k, v, out, q_strides, k_strides, v_strides, out_strides,
    query_ends, key_ends, parts, tokens, group, scale, cap, left, right,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BEHIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a part of a document's queries, all heads of a KV head. Grid: (documents * parts, KV heads, batch).

    Strides are of (batch, token, head); `tokens` is the number of keys of a sample; left and right are the bounds of
    the band; cap is as in `capped`, or None.
    """
    kv_head, batch, batches = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, step, first_query, query_end, first_key, key_end = document_of(query_ends, key_ends, parts, QUERIES)
    band = first_key, query_end, key_end, left, right
    is_finite = is_finite_behind(
        v, v_strides, batch, batches, kv_head, key_end, tokens, VALUE_HEAD_DIM, VALUE_DIM, BEHIND
    )  # fmt: skip
    if is_finite == 0:
        k_matrix, v_matrix = matrix_of(k, k_strides, batch, kv_head), matrix_of(v, v_strides, batch, kv_head)
        for head in tl.range(kv_head * group, kv_head * group + group):
            q_matrix, out_matrix = matrix_of(q, q_strides, batch, head), matrix_of(out, out_strides, batch, head)
            for first in tl.range(first_query + at, query_end, step):
                rows = first + tl.arange(0, QUERIES)
                query = load_rows(q_matrix, first, q_strides[1], query_end, HEAD_DIM, QUERIES, DIM, True)
                acc = tl.zeros([QUERIES, VALUE_DIM], tl.float32)
                total = tl.zeros([QUERIES], tl.float32)
                peak = tl.full([QUERIES], float("-inf"), tl.float32)
                for other in tl.range(first_key, key_end, KEYS):
                    key = load_rows(k_matrix, other, k_strides[1], key_end, HEAD_DIM, KEYS, DIM, True)
                    value = load_rows(v_matrix, other, v_strides[1], key_end, VALUE_HEAD_DIM, KEYS, VALUE_DIM, True)
                    visible = is_inside(rows, other + tl.arange(0, KEYS), band)
                    scores = scores_of(query, key, cap, PRECISION)
                    scores = tl.where(visible, scores * (scale * LOG2_E), float("-inf"))
                    higher = tl.maximum(peak, tl.max(scores, 1))
                    base = tl.where(higher == float("-inf"), 0.0, higher)
                    weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
                    total = total * fade + tl.sum(weights, 1)
                    acc = add_dot(acc * fade[:, None], weights.to(value.dtype), value, PRECISION)
                    peak = higher
                acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                store_rows(out_matrix, acc, first, out_strides[1], query_end, VALUE_HEAD_DIM, QUERIES, VALUE_DIM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def keys_kernel(
    grad, q, k, v, lse, delta, grad_k, grad_v,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_k_strides, grad_v_strides,
    query_ends, key_ends, parts, tokens, group, scale, cap, left, right,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BEHIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of a part of a document's keys. See `forward_kernel`; `tokens` is a number of queries."""
    kv_head, batch, batches = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, step, first_query, query_end, first_key, key_end = document_of(query_ends, key_ends, parts, KEYS)
    band = first_key, query_end, key_end, left, right
    is_finite = kv_head >= 0
    for head in tl.range(kv_head * group, kv_head * group + group):
        is_finite &= is_finite_behind(q, q_strides, batch, batches, head, query_end, tokens, HEAD_DIM, DIM, BEHIND)
        is_finite &= is_finite_behind(
            grad, grad_strides, batch, batches, head, query_end, tokens, VALUE_HEAD_DIM, VALUE_DIM, BEHIND
        )  # fmt: skip
        is_finite &= is_finite_behind(delta, delta_strides, batch, batches, head, query_end, tokens, 1, 16, BEHIND)
    if is_finite == 0:
        k_matrix, v_matrix = matrix_of(k, k_strides, batch, kv_head), matrix_of(v, v_strides, batch, kv_head)
        for first in tl.range(first_key + at, key_end, step):
            columns = first + tl.arange(0, KEYS)
            key = load_rows(k_matrix, first, k_strides[1], key_end, HEAD_DIM, KEYS, DIM, True)
            value = load_rows(v_matrix, first, v_strides[1], key_end, VALUE_HEAD_DIM, KEYS, VALUE_DIM, True)
            key_acc = tl.zeros([KEYS, DIM], tl.float32)
            value_acc = tl.zeros([KEYS, VALUE_DIM], tl.float32)
            for head in tl.range(kv_head * group, kv_head * group + group):
                of_queries = queries_of(
                    grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head
                )  # fmt: skip
                for other in tl.range(first_query, query_end, QUERIES):
                    query, grad_out, level, row_delta = load_queries(
                        of_queries, other, query_end, HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, True
                    )  # fmt: skip
                    rows = other + tl.arange(0, QUERIES)
                    visible = tl.trans(is_inside(rows, columns, band))
                    scores = scores_of(key, query, cap, PRECISION)
                    weights = tl.exp2(scores * (scale * LOG2_E) - level[None, :])
                    weights = tl.where(visible, weights, 0.0)
                    value_acc = add_dot(value_acc, weights.to(grad_out.dtype), grad_out, PRECISION)
                    inner = dot(value, tl.trans(grad_out), PRECISION)
                    grad_scores = weights * (inner - row_delta[None, :])
                    if cap is not None:
                        grad_scores *= slope_of(scores, cap)
                    key_acc = add_dot(key_acc, grad_scores.to(query.dtype), query, PRECISION)
            grad_k_matrix = matrix_of(grad_k, grad_k_strides, batch, kv_head)
            grad_v_matrix = matrix_of(grad_v, grad_v_strides, batch, kv_head)
            store_rows(grad_k_matrix, key_acc * scale, first, grad_k_strides[1], key_end, HEAD_DIM, KEYS, DIM)
            store_rows(grad_v_matrix, value_acc, first, grad_v_strides[1], key_end, VALUE_HEAD_DIM, KEYS, VALUE_DIM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def queries_kernel(
    grad, q, k, v, lse, delta, grad_q,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, grad_q_strides,
    query_ends, key_ends, parts, tokens, group, scale, cap, left, right,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BEHIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of a part of a document's queries. See `forward_kernel`."""
    kv_head, batch, batches = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, step, first_query, query_end, first_key, key_end = document_of(query_ends, key_ends, parts, QUERIES)
    band = first_key, query_end, key_end, left, right
    is_finite = is_finite_behind(k, k_strides, batch, batches, kv_head, key_end, tokens, HEAD_DIM, DIM, BEHIND)
    is_finite &= is_finite_behind(
        v, v_strides, batch, batches, kv_head, key_end, tokens, VALUE_HEAD_DIM, VALUE_DIM, BEHIND
    )  # fmt: skip
    if is_finite == 0:
        k_matrix, v_matrix = matrix_of(k, k_strides, batch, kv_head), matrix_of(v, v_strides, batch, kv_head)
        for head in tl.range(kv_head * group, kv_head * group + group):
            of_queries = queries_of(
                grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head
            )  # fmt: skip
            grad_q_matrix = matrix_of(grad_q, grad_q_strides, batch, head)
            for first in tl.range(first_query + at, query_end, step):
                rows = first + tl.arange(0, QUERIES)
                query, grad_out, level, row_delta = load_queries(
                    of_queries, first, query_end, HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, True
                )  # fmt: skip
                acc = tl.zeros([QUERIES, DIM], tl.float32)
                for other in tl.range(first_key, key_end, KEYS):
                    key = load_rows(k_matrix, other, k_strides[1], key_end, HEAD_DIM, KEYS, DIM, True)
                    value = load_rows(v_matrix, other, v_strides[1], key_end, VALUE_HEAD_DIM, KEYS, VALUE_DIM, True)
                    visible = is_inside(rows, other + tl.arange(0, KEYS), band)
                    scores = scores_of(query, key, cap, PRECISION)
                    weights = tl.exp2(scores * (scale * LOG2_E) - level[:, None])
                    weights = tl.where(visible, weights, 0.0)
                    inner = dot(grad_out, tl.trans(value), PRECISION)
                    grad_scores = weights * (inner - row_delta[:, None])
                    if cap is not None:
                        grad_scores *= slope_of(scores, cap)
                    acc = add_dot(acc, grad_scores.to(key.dtype), key, PRECISION)
                store_rows(grad_q_matrix, acc * scale, first, grad_q_strides[1], query_end, HEAD_DIM, QUERIES, DIM)
