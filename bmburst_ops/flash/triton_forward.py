"""Flash attention's forward pass in Triton. Importing this file needs Triton.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 1. Scores are kept in units of log 2, for `exp2`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)

NOT_SPECIALIZED = ("queries", "keys", "cell_columns")
"""Integer arguments that Triton must not specialize on: else it would recompile for 1 and for multiples of 16."""


@triton.jit
def load_rows(
    matrix, first, stride, length, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Return rows `first` to `first + ROWS` of a `[length, HEAD_DIM]` matrix as `[ROWS, DIM]`, zero outside the matrix.

    Without MASKED all rows must be inside. The offset of the first row has 64 bits, offsets within a block have 32: the
    host ensures that ROWS strides fit.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    at = matrix + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        block = tl.load(at, mask=(first + rows < length)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == DIM:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    return block


@triton.jit
def store_rows(matrix, block, first, stride, length, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Write `[ROWS, DIM]` to rows `first` to `first + ROWS` of a `[length, HEAD_DIM]` matrix, in the matrix's dtype."""
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, DIM)
    at = matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, block.to(matrix.dtype.element_ty), mask=(rows < length)[:, None] & (columns < HEAD_DIM)[None, :])


@triton.jit
def add_dot(acc, a, b, PRECISION: tl.constexpr):
    """Return `acc + a b` in fp32. PRECISION: "ieee", "tf32", or "interpreter", which gets bf16 inputs as fp32."""
    if PRECISION == "interpreter":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        result = tl.dot(a, b, acc, input_precision=PRECISION)
    return result


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return `a b` in fp32; see `add_dot`."""
    if PRECISION == "interpreter":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def capped(products, cap):
    """Return `cap * tanh(products / cap)` in fp32; cap is softcap / scale. Triton has no tanh.

    Far from zero the absolute error is one rounding error of cap. Near zero, with a large cap, this could be as large
    as the product itself. So a series is used there; its first omitted term is below half a unit in the last place.
    """
    share = products / cap
    square = share * share
    near = products * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * 62.0 / 2835))))
    far = cap - 2.0 * cap / (1.0 + tl.exp2(share * (2.0 / LN_2)))
    return tl.where(tl.abs(share) < 0.25, near, far)


@triton.jit
def scores_of(a, b, cap, PRECISION: tl.constexpr):
    """Return the products of the rows of a and of b in fp32, `capped` unless the cap is None."""
    scores = dot(a, tl.trans(b), PRECISION)
    if cap is not None:
        scores = capped(scores, cap)
    return scores


@triton.jit
def has_nan(block):
    """Return whether any number of a block `[ROWS, COLUMNS]` is NaN."""
    return tl.max(tl.max(tl.where(block == block, 0, 1), 1), 0) > 0


@triton.jit
def add_visible_dot(acc, a, b, visible, PRECISION: tl.constexpr):
    """Return `acc + a b`, where a non-finite row of b affects only the rows of a that see it.

    A weight of 0 times NaN is NaN, and a hidden row may belong to another document. A row of the result is NaN if its
    row of a sees a non-finite row of b.

    Args:
        acc: fp32 `[ROWS, DIM]`.
        a: `[ROWS, COLUMNS]`, 0 where hidden.
        b: `[COLUMNS, DIM]`.
        visible: Which rows of a see which rows of b, `[ROWS, COLUMNS]`.
        PRECISION: See `add_dot`.
    """
    is_finite = tl.abs(b.to(tl.float32)) < float("inf")
    is_lost = tl.max(tl.where(is_finite, 0, 1), 1)
    sees_lost = tl.max(tl.where(visible, is_lost[None, :], 0), 1)
    acc = tl.where(sees_lost[:, None] > 0, float("nan"), acc)
    return add_dot(acc, a, tl.where(is_finite, b, 0.0).to(b.dtype), PRECISION)


@triton.jit
def matrix_of(tensor, strides, batch, head):
    """Return a pointer to the `[tokens, head_dim]` matrix of a batch and head; strides are of (batch, token, head)."""
    return tensor + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def ranges(
    first, count, starts, stops, tile_ends, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Return the loop bounds of rows `first` to `first + ROWS` of `count`: `(start, stop, open_start, open_size)`.

    In an open block every row sees every column, so it needs no mask. With MASK "rows" the bounds are columns: open
    blocks cover `open_size` columns from `open_start` on, within the blocks that any row sees. With "cells" they are
    indices in a list of blocks, in which the open blocks come before the others.
    """
    if MASK == "cells":
        ends = tile_ends + first // ROWS * 2
        open_start, start, stop = tl.load(ends), tl.load(ends + 1), tl.load(ends + 2)
        open_size = start - open_start
    else:
        last = tl.minimum(first + ROWS, count) - 1
        start = tl.load(starts + first) // COLUMNS * COLUMNS
        stop = tl.load(stops + last)
        open_start = tl.cdiv(tl.load(starts + last), COLUMNS) * COLUMNS
        open_size = tl.maximum(tl.load(stops + first) // COLUMNS * COLUMNS - open_start, 0)
        stop -= open_size  # the loop over masked blocks skips the open ones
    return start, stop, open_start, open_size


@triton.jit
def key_ranges(
    first, queries, keys, starts, stops, tile_ends, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Return `ranges` of a block of queries."""
    if MASK == "full" or MASK == "causal":
        hidden = keys - queries  # bottom-right aligned: the first query sees hidden + 1 keys
        open_size, stop = keys, keys  # keys that every query of the block sees, and keys that any of them sees
        if MASK == "causal":
            open_size = tl.maximum(tl.minimum(first + hidden + 1, keys), 0)
            stop = tl.maximum(tl.minimum(first + hidden + QUERIES, keys), 0)
        open_size = open_size // KEYS * KEYS
        start, open_start = open_size, 0
    else:
        start, stop, open_start, open_size = ranges(first, queries, starts, stops, tile_ends, QUERIES, KEYS, MASK)
    return start, stop, open_start, open_size


@triton.jit
def loop_of(bounds, MASKED: tl.constexpr):
    """Return start and stop of the loop over the masked blocks of `ranges`, or over the open ones."""
    start, stop, open_start, open_size = bounds
    if not MASKED:
        start, stop = open_start, open_start + open_size
    return start, stop


@triton.jit
def first_of_block(at, bounds, tiles, MASKED: tl.constexpr, MASK: tl.constexpr):
    """Return the first column of the current block in a loop of `loop_of`."""
    if MASK == "cells":
        first = tl.load(tiles + at)
    elif MASKED and MASK == "rows":
        first = tl.where(at < bounds[2], at, at + bounds[3])
    else:
        first = at
    return first


@triton.jit
def load_limits(vector, rows, count):
    """Return a mask's numbers of some rows, zero beyond the last."""
    return tl.load(vector + rows, mask=rows < count, other=0)


@triton.jit
def is_visible(pairs, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr):
    """Return the mask of a block, `[QUERIES, KEYS]`; `pairs` are the lengths and the mask as the kernels get them."""
    queries, keys, starts, stops, query_cells, key_cells, cells, cell_columns, _ = pairs
    rows, columns = first_query + tl.arange(0, QUERIES), first_key + tl.arange(0, KEYS)
    if MASK == "full" or MASK == "causal":
        visible = (columns < keys)[None, :]
        if MASK == "causal":
            visible = visible & (columns[None, :] <= (rows + keys - queries)[:, None])
    else:
        start, stop = load_limits(starts, rows, queries), load_limits(stops, rows, queries)
        visible = (columns[None, :] >= start[:, None]) & (columns[None, :] < stop[:, None])
        if MASK == "cells":
            row, column = load_limits(query_cells, rows, queries), load_limits(key_cells, columns, keys)
            visible = visible & (tl.load(cells + (row[:, None] * cell_columns + column[None, :])) != 0)
    return visible


@triton.jit(do_not_specialize=(*NOT_SPECIALIZED, "lse_batch", "lse_head"))
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_batch, lse_head,
    queries, keys, group, bits_scale, cap,
    starts, stops, query_cells, key_cells, cells, cell_columns, tiles, tile_ends,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head over all their keys. Grid: (query blocks, heads, batch).

    Strides are of (batch, token, head), those of lse `[batch, heads, queries]` of a batch and of a head; bits_scale is
    scale * log2(e), not negative; cap is as in `capped`, None without a softcap. For MASK and the vectors see
    `flash.triton.MaskArguments`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # longest rows of a causal tile first
    head, batch = tl.program_id(1), tl.program_id(2)
    first = block * QUERIES
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head // group), matrix_of(v, v_strides, batch, head // group)
    key_rows = k_matrix, v_matrix, k_strides[1], v_strides[1]
    q_matrix, out_matrix = matrix_of(q, q_strides, batch, head), matrix_of(out, out_strides, batch, head)
    query = load_rows(q_matrix, first, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    bounds = key_ranges(first, queries, keys, starts, stops, tile_ends, QUERIES, KEYS, MASK)
    pairs = queries, keys, starts, stops, query_cells, key_cells, cells, cell_columns, tiles
    acc, total, peak = _attend(
        query, key_rows, bounds, pairs, first, bits_scale, cap,
        HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, MASK, False, PRECISION,
    )  # fmt: skip
    if MASK == "rows" or MASK == "cells":  # noqa: SIM102 - decided at compile time, the other at run time
        if has_nan(acc):
            acc, total, peak = _attend(
                query, key_rows, bounds, pairs, first, bits_scale, cap,
                HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, MASK, True, PRECISION,
            )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out_matrix, acc, first, out_strides[1], queries, VALUE_HEAD_DIM, QUERIES, VALUE_DIM)
    rows = first + tl.arange(0, QUERIES)
    at = lse + tl.cast(batch, tl.int64) * lse_batch + tl.cast(head, tl.int64) * lse_head + rows
    tl.store(at, (peak + tl.log2(total)) * LN_2, mask=rows < queries)


@triton.jit
def _attend(
    query, key_rows, bounds, pairs, first, bits_scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the running softmax over all keys: the sum of weighted values, the sum of weights, and the largest score.

    `key_rows` is K and V with the strides of their tokens, `bounds` is `key_ranges`; for `pairs` see `is_visible`.
    Without HAS_NAN, all values must be finite: a weight of 0 times NaN is NaN, and a hidden value may belong to another
    document. With HAS_NAN, only visible values can make the result NaN.
    """
    acc = tl.zeros([QUERIES, VALUE_DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    for masked in tl.static_range(2):  # the open blocks first
        acc, total, peak = _over_keys(
            acc, total, peak, query, key_rows, bounds, pairs, first, bits_scale, cap,
            HEAD_DIM, DIM, VALUE_HEAD_DIM, VALUE_DIM, QUERIES, KEYS, masked == 1, MASK, HAS_NAN, PRECISION,
        )  # fmt: skip
    return acc, total, peak


@triton.jit
def _over_keys(
    acc, total, peak, query, key_rows, bounds, pairs, first_query, bits_scale, cap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, MASK: tl.constexpr, HAS_NAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with the MASKED blocks of keys of `key_ranges`, or the open ones."""
    k_matrix, v_matrix, k_stride, v_stride = key_rows
    keys = pairs[1]
    start, stop = loop_of(bounds, MASKED)
    for at in tl.range(start, stop, 1 if MASK == "cells" else KEYS):
        first = first_of_block(at, bounds, pairs[8], MASKED, MASK)
        key = load_rows(k_matrix, first, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
        scores = scores_of(query, key, cap, PRECISION)
        if MASKED:
            visible = is_visible(pairs, first_query, first, QUERIES, KEYS, MASK)
            scores = tl.where(visible, scores * bits_scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))  # full and causal masks: finite from the first block on
            base = higher
            if MASK == "rows" or MASK == "cells":
                base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
        else:
            higher = tl.maximum(peak, tl.max(scores, 1) * bits_scale)
            base = higher
            weights = tl.exp2(scores * bits_scale - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        value = load_rows(v_matrix, first, v_stride, keys, VALUE_HEAD_DIM, KEYS, VALUE_DIM, MASKED)
        if MASKED and HAS_NAN:
            acc = add_visible_dot(acc * fade[:, None], weights.to(value.dtype), value, visible, PRECISION)
        else:
            acc = add_dot(acc * fade[:, None], weights.to(value.dtype), value, PRECISION)
        peak = higher
    return acc, total, peak
