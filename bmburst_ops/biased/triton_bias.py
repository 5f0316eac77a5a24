"""The bias formula and its mask in Triton, and the gradient of the bias table. Importing this file needs Triton.

The formula is the twin of `formula`. Functions of two blocks return the shape to which the blocks broadcast, so scores
may have queries in rows or in columns.

Table lookups use inline PTX. Triton would prefetch an ordinary load in a loop into shared memory. That is good for rows
of a matrix, but not for one 32-bit number per pair, which is best read from L1 where it is used.

The gradient of the table comes from blocks with several rows of it. Along a diagonal of blocks, each position in a
block has the same distance in every block. So gradients of scores are summed position by position along a run, and
added to the rows of the table once per run. Only blocks in which relations also matter are added one by one.

Sums do not depend on the order of programs, so they are bitwise reproducible: they are exact sums of integers, in units
of a power of two. Atomic adds of floats are not. The gradient of a score is at most P (|dO_q| |V_k| + |delta_q|), and
the sum of P over the keys of a query is at most 1. So a sum is at most the number of queries times the largest bracket,
and the unit is chosen such that this bound fits in `FREE_BITS`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_blocks import (
    GENERAL,
    IN_CONTEXT,
    NEAR,
    NOT_SPECIALIZED,
    PARTLY,
    common_bucket,
    diagonal,
    distance_of,
    is_singled_out,
    line_of,
    load_extents,
    load_positions,
    load_run,
    load_tokens,
    lookup_of,
)
from bmburst_ops.flash.triton_backward import LOG2_E, load_numbers, load_queries, queries_of
from bmburst_ops.flash.triton_forward import dot, load_rows, matrix_of

FREE_BITS = 61
"""Bits of a signed 64-bit integer without the sign, less one for rounding errors in the bound."""
PEAKS = 3
"""Number of peaks after the sums: the largest squared norm of rows of dO and of V, and the largest |delta|."""
_LARGEST = tl.constexpr(100)  # largest exponent of a unit, so that it and its products fit in fp32
_ALL = tl.constexpr("ld.global.nc.b32 $0, [$1];")
_SOME = tl.constexpr(
    "{ .reg .pred there; setp.ne.s32 there, $2, 0; mov.b32 $0, $3; @there ld.global.nc.b32 $0, [$1]; }"
)


@triton.jit
def load_at(vector, index, PRECISION: tl.constexpr):
    """Return int32 or fp32 `vector[index]`, all in range; for PRECISION see `flash.triton_forward.dot`."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index)
    else:
        bits = tl.inline_asm_elementwise(_ALL, "=r,l", [(vector + index).to(tl.int64)], tl.int32, True, 1)
        found = bits.to(vector.dtype.element_ty, bitcast=True)
    return found


@triton.jit
def load_masked_at(vector, index, is_there, other, PRECISION: tl.constexpr):
    """Return int32 or fp32 `vector[index]`, and `other` where not `is_there`."""
    if PRECISION == "interpreter":
        found = tl.load(vector + index, mask=is_there, other=other)
    else:
        absent = tl.full([], other, vector.dtype.element_ty).to(tl.int32, bitcast=True)
        operands = [(vector + index).to(tl.int64), is_there.to(tl.int32), absent]
        bits = tl.inline_asm_elementwise(_SOME, "=r,l,r,r", operands, tl.int32, True, 1)
        found = bits.to(vector.dtype.element_ty, bitcast=True)
    return found


@triton.jit
def as_rows(tokens):
    """Return a block's integers as a column of a matrix, `[ROWS, 1]`."""
    return (
        tokens[0][:, None], tokens[1][:, None], tokens[2][:, None],
        tokens[3][:, None], tokens[4][:, None], tokens[5][:, None],
    )  # fmt: skip


@triton.jit
def as_columns(tokens):
    """Return a block's integers as a row of a matrix, `[1, ROWS]`."""
    return (
        tokens[0][None, :], tokens[1][None, :], tokens[2][None, :],
        tokens[3][None, :], tokens[4][None, :], tokens[5][None, :],
    )  # fmt: skip


@triton.jit
def sees(query, key):
    """Return which queries see which keys."""
    of_span = (query[4] == key[4]) & (query[4] >= 0)
    of_sample = (query[3] == 0) | (query[3] == key[3])
    return of_span & of_sample & ((key[5] != 0) | ((query[5] == 0) & (key[0] <= query[0])))


@triton.jit
def bucket_of(query, key, visible, lookup, PRECISION: tl.constexpr):
    """Return the row of the table for each pair; `rows` for masked pairs and for rows that do not exist."""
    relations, entries, distances, max_distance, buckets, rows = lookup
    is_same = query[3] == key[3]
    place = query[2] + key[1]
    is_there = (place >= 0) & (place < entries)
    relation = load_masked_at(relations, place, visible & is_same & is_there, IN_CONTEXT, PRECISION)
    near = load_masked_at(distances, distance_of(key[0], query[0], max_distance), visible, 0, PRECISION)
    bucket = tl.where(relation == 0, near, relation - 1 + buckets)
    is_row = visible & (is_there | (is_same == 0)) & (bucket >= 0) & (bucket < rows)
    return tl.where(is_row, bucket, rows)


@triton.jit
def bias_of(table_row, bucket, rows, PRECISION: tl.constexpr):
    """Return the biases of a head, in the table's units; NaN for a row that does not exist."""
    return load_masked_at(table_row, bucket, bucket < rows, float("nan"), PRECISION)


@triton.jit
def near_bias(table_row, query_position, key_position, lookup, PRECISION: tl.constexpr):
    """Return the biases of a head for pairs whose bias depends on the distance."""
    return load_at(table_row + lookup[5], distance_of(key_position, query_position, lookup[3]), PRECISION)


@triton.jit
def table_row_of(biases, head, lookup):
    """Return a pointer to a head's biases: first those of each row of the table, then those of each distance."""
    return biases + head * (lookup[5] + 2 * lookup[3] + 1)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def biases_kernel(
    table, biases, row_stride, head_stride, distances, max_distance, rows, AT_ONCE: tl.constexpr
):  # fmt: skip
    """One program: AT_ONCE of a head's biases, in units of log 2, from the table. Grid: (blocks, heads).

    `biases` is fp32 `[heads, rows + 2 * max_distance + 1]`: see `table_row_of`. A "near" bias needs only one lookup.
    """
    head, place = tl.program_id(1), tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    width = rows + 2 * max_distance + 1
    bucket = tl.load(distances + place - rows, mask=(place >= rows) & (place < width), other=0)
    row = tl.where(place < rows, place, bucket)
    bias = tl.load(table + head * head_stride + row * row_stride, mask=place < width, other=0.0)
    tl.store(biases + head * width + place, bias.to(tl.float32) * LOG2_E, mask=place < width)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def peaks_kernel(
    grad, v, delta, sums, grad_strides, v_strides, delta_strides, queries, keys, rows,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: update the peaks with TOKENS queries and TOKENS keys of a head. Grid: (blocks, heads, batch).

    The peaks are initially zero and stored after the sums, `[heads, rows]`.
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
    """Raise a peak to the largest magnitude. Bit patterns are compared, in which NaN is above all numbers."""
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(peak, tl.max(bits, 0).to(tl.int64), sem="relaxed")


@triton.jit
def unit_of(peaks, bits):
    """Return the factor that scales gradients of scores to integers of `bits` bits; NaN if the bound is not finite."""
    bound = tl.sqrt(_peak(peaks)) * tl.sqrt(_peak(peaks + 1)) + _peak(peaks + 2)
    exponent = ((bound.to(tl.int32, bitcast=True) >> 23) & 255) - 127  # the bound is below 2 ** (exponent + 1)
    power = tl.minimum(bits - 1 - exponent, _LARGEST)
    return tl.where(exponent == 128, float("nan"), ((power + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _peak(peak):
    return tl.load(peak).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def add_integers(sums, values, unit, mask):
    """Add values to sums, as integers in units."""
    tl.atomic_add(sums, (values * unit).to(tl.int64), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=("bits", "rows", "heads"))
def numbers_kernel(sums, bits, numbers, rows, heads, AT_ONCE: tl.constexpr):
    """One program: convert AT_ONCE sums, `[heads, rows]`, to floats, `[rows, heads]`. Grid: blocks."""
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

    Block sizes must be those of `queries_kernel`, whose runs are `line_runs`. For runs and counts see
    `triton_blocks.diagonals_kernel`; other arguments are as in `queries_kernel`.
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
    """Return the gradients of a block's scores, `[QUERIES, KEYS]`, given the bias, -inf for masked pairs."""
    query, grad_out, level, row_delta = load_queries(
        of_queries, first, queries, HEAD_DIM, DIM, HEAD_DIM, DIM, QUERIES, MASKED
    )  # fmt: skip
    key = load_rows(k_matrix, first_key, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
    scores = dot(query, tl.trans(key), PRECISION) * bits_scale + bias
    weights = tl.exp2(scores - level[:, None])
    value = load_rows(v_matrix, first_key, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
    return weights * (dot(grad_out, tl.trans(value), PRECISION) - row_delta[:, None])


@triton.jit
def _add_by_bucket(sums, head, bucket, values, bits, rows):
    """Add values to a head's sums by bucket, except zeros and values whose bucket is `rows`."""
    unit = unit_of(sums + tl.num_programs(1) * rows, bits)
    add_integers(sums + head * rows + bucket, values, unit, (bucket < rows) & (values != 0))
