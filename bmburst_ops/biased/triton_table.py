"""The gradient of a bias table in Triton, of blocks with several of its rows. Importing this file needs Triton.

Along a diagonal of blocks each pair of places has the same distance in every block, so that what they give can be added
up place by place, and goes to the rows of the table once a run. Only where relations decide too does each block so.

Sums do not depend on the order of programs: they are sums of integers, in units of a power of two, which are exact and
so the same bits each time; atomic adds of floats are not. A score's gradient is at most P (|dO_q| |V_k| + |delta_q|),
and P adds up to 1 at most over the keys of a query. So all together are at most the queries times the largest bracket,
and a unit is such that these have `FREE_BITS`.
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
    distance_of,
    load_positions,
    load_tokens,
    lookup_of,
    near_bias,
    sees,
    table_row_of,
)
from bmburst_ops.biased.triton_runs import (
    GENERAL,
    NEAR,
    PARTLY,
    common_bucket,
    diagonal,
    is_singled_out,
    line_of,
    load_extents,
    load_run,
)
from bmburst_ops.flash.triton_backward import load_numbers, load_queries, queries_of
from bmburst_ops.flash.triton_forward import dot, load_rows, matrix_of

FREE_BITS = 61
"""Of a signed 64-bit integer, less one for rounding errors in the bound."""
PEAKS = 3
"""Numbers that stand behind the sums: the largest square of dO's and of V's rows, and of delta the largest."""
_LARGEST = tl.constexpr(100)  # of a unit's exponents: fp32 holds it, and its products with what it was made for


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def peaks_kernel(
    grad, v, delta, sums, grad_strides, v_strides, delta_strides, queries, keys, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: what TOKENS queries and as many keys of a head raise the peaks to, which are zero before. They stand
    behind the sums, `[heads, rows]`. Grid: (blocks, heads, batch).
    """
    first, head, batch = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    grad_matrix, v_matrix = matrix_of(grad, grad_strides, batch, head), matrix_of(v, v_strides, batch, head)
    grads = load_rows(grad_matrix, first, grad_strides[1], queries, HEAD_DIM, TOKENS, DIM, True)
    values = load_rows(v_matrix, first, v_strides[1], keys, HEAD_DIM, TOKENS, DIM, True)
    peaks = sums + tl.num_programs(1) * rows
    delta_row = matrix_of(delta, delta_strides, batch, head)
    _raise(peaks, _squares(grads))
    _raise(peaks + 1, _squares(values))
    _raise(peaks + 2, load_numbers(delta_row, first, delta_strides[1], queries, TOKENS, True))


@triton.jit
def _squares(block):
    numbers = block.to(tl.float32)
    return tl.sum(numbers * numbers, 1)


@triton.jit
def _raise(peak, numbers):
    """Raise a peak to the largest magnitude: as bits, in whose order a NaN is above all numbers."""
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(peak, tl.max(bits, 0).to(tl.int64), sem="relaxed")


@triton.jit
def unit_of(peaks, bits):
    """Return the factor that makes gradients of scores integers of so many bits, NaN if the bound is not finite."""
    bound = tl.sqrt(_peak(peaks)) * tl.sqrt(_peak(peaks + 1)) + _peak(peaks + 2)
    exponent = ((bound.to(tl.int32, bitcast=True) >> 23) & 255) - 127  # the bound is below 2 ** (exponent + 1)
    power = tl.minimum(bits - 1 - exponent, _LARGEST)
    return tl.where(exponent == 128, float("nan"), ((power + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _peak(peak):
    return tl.load(peak).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def add_integers(sums, values, unit, mask):
    """Add values to sums in units."""
    tl.atomic_add(sums, (values * unit).to(tl.int64), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=("bits", "rows", "heads"))
def numbers_kernel(sums, bits, numbers, rows, heads, AT_ONCE: tl.constexpr):
    """One program: AT_ONCE of the numbers that the sums are, `[rows, heads]` of `[heads, rows]`. Grid: blocks."""
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < rows * heads
    total = tl.load(sums + place % heads * rows + place // heads, mask=inside, other=0)
    number = (total.to(tl.float64) / unit_of(sums + rows * heads, bits).to(tl.float64)).to(tl.float32)
    tl.store(numbers + place, number.to(numbers.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def table_kernel(
    grad, q, k, v, lse, delta, sums, bits,
    grad_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides,
    queries, keys, bits_scale,
    query_tokens, key_tokens, runs, counts, query_extents, key_extents, line_runs, line_counts,
    biases, relations, relation_stride, entries, distances, max_distance, buckets, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the table's gradient of one head from one diagonal of blocks. Grid: (diagonals, heads, batch).

    Blocks must be those of `queries_kernel`, whose runs are `line_runs` and arguments the others; for runs and counts
    see `triton_runs.diagonals_kernel`.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    line, count = line_of(runs, counts, batch, tl.num_programs(0), tl.program_id(0), RUNS)
    query_blocks, key_blocks = tl.cdiv(queries, QUERIES), tl.cdiv(keys, KEYS)
    offset, _, _ = diagonal(tl.program_id(0), query_blocks, key_blocks, QUERIES // KEYS)
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head), matrix_of(v, v_strides, batch, head)
    of_queries = queries_of(grad, q, lse, delta, grad_strides, q_strides, lse_strides, delta_strides, batch, head)
    lookup = lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows)
    table_row = table_row_of(biases, head, lookup)
    batches = tl.num_programs(2)
    for index in tl.range(count):
        start, stop, kind = load_run(line, index)
        held = tl.zeros([QUERIES, KEYS], tl.float32)
        for block in tl.range(start, tl.where(kind == NEAR, stop, start)):
            first, first_key = block * QUERIES, (block * (QUERIES // KEYS) + offset) * KEYS
            position = load_positions(query_tokens, batch, first, queries, QUERIES)[:, None]
            key_position = load_positions(key_tokens, batch, first_key, keys, KEYS)[None, :]
            bias = near_bias(table_row, position, key_position, lookup, PRECISION)
            held += _grad_scores(
                bias, of_queries, k_matrix, v_matrix, k_strides[1], v_strides[1],
                first, first_key, queries, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, False, PRECISION,
            )  # fmt: skip
        for block in tl.range(start, tl.where(kind == PARTLY, stop, start)):
            first, first_key = block * QUERIES, (block * (QUERIES // KEYS) + offset) * KEYS
            own = as_rows(load_tokens(query_tokens, batch, first, batches, queries, QUERIES))
            others = as_columns(load_tokens(key_tokens, batch, first_key, batches, keys, KEYS))
            bias = near_bias(table_row, own[0], others[0], lookup, PRECISION)
            held += _grad_scores(
                tl.where(sees(own, others), bias, float("-inf")),
                of_queries, k_matrix, v_matrix, k_strides[1], v_strides[1],
                first, first_key, queries, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
            )  # fmt: skip
        if kind != GENERAL:
            first, first_key = start * QUERIES, (start * (QUERIES // KEYS) + offset) * KEYS
            position = load_tokens(query_tokens, batch, first, batches, queries, QUERIES)[0][:, None]
            key_position = load_tokens(key_tokens, batch, first_key, batches, keys, KEYS)[0][None, :]
            bucket = tl.load(distances + distance_of(key_position, position, max_distance))
            _add_by_bucket(sums, head, bucket, held, bits, rows)
        for block in tl.range(start, tl.where(kind == GENERAL, stop, start), num_stages=1):
            key_block = block * (QUERIES // KEYS) + offset
            query_extent = load_extents(query_extents, batch, block, query_blocks)
            key_extent = load_extents(key_extents, batch, key_block, key_blocks)
            common = common_bucket(query_extent, key_extent, lookup)
            is_singled = is_singled_out(line_runs, line_counts, batch, block, key_block, query_blocks, RUNS)
            if (common < 0) | (is_singled == 0):
                first, first_key = block * QUERIES, key_block * KEYS
                own = as_rows(load_tokens(query_tokens, batch, first, batches, queries, QUERIES))
                others = as_columns(load_tokens(key_tokens, batch, first_key, batches, keys, KEYS))
                visible = sees(own, others)
                bucket = bucket_of(own, others, visible, lookup, PRECISION)
                grad_scores = _grad_scores(
                    tl.where(visible, bias_of(table_row, bucket, rows, PRECISION), float("-inf")),
                    of_queries, k_matrix, v_matrix, k_strides[1], v_strides[1],
                    first, first_key, queries, keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, True, PRECISION,
                )  # fmt: skip
                _add_by_bucket(sums, head, bucket, grad_scores, bits, rows)


@triton.jit
def _grad_scores(
    bias, of_queries, k_matrix, v_matrix, k_stride, v_stride, first, first_key, queries, keys, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a block's scores, `[QUERIES, KEYS]`, from their bias, -inf where nothing is seen."""
    query, grad_out, level, row_delta = load_queries(of_queries, first, queries, HEAD_DIM, QUERIES, DIM, MASKED)
    key = load_rows(k_matrix, first_key, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
    scores = dot(query, tl.trans(key), PRECISION) * bits_scale + bias
    weights = tl.exp2(scores - level[:, None])
    value = load_rows(v_matrix, first_key, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
    return weights * (dot(grad_out, tl.trans(value), PRECISION) - row_delta[:, None])


@triton.jit
def _add_by_bucket(sums, head, bucket, values, bits, rows):
    """Add values to a head's sums of their buckets; none where the bucket is `rows`, nor zeros."""
    unit = unit_of(sums + tl.num_programs(1) * rows, bits)
    add_integers(sums + head * rows + bucket, values, unit, (bucket < rows) & (values != 0))
