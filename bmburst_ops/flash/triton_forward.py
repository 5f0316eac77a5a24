"""Flash attention's forward pass in Triton. Importing this file needs Triton.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 1. Scores are kept in units of log 2, for `exp2`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    matrix, first, stride, length, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Return rows `first` to `first + ROWS` of a `[length, HEAD_DIM]` matrix as `[ROWS, DIM]`, zero outside of it.

    Without MASKED all rows must be inside. The first row's offset is 64 bits wide, those within a block 32: the host
    sees to it that ROWS strides fit.
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
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """Return `acc + a b` in fp32. PRECISION: "ieee", "tf32", or "interpreter", which multiplies bf16 as integers."""
    if PRECISION == "interpreter":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        result = tl.dot(a, b, acc, input_precision=PRECISION)
    return result


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return `a b` in fp32; see `add_product`."""
    if PRECISION == "interpreter":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def matrix_of(tensor, strides, batch, head):
    """Return where the `[tokens, head_dim]` matrix of a batch and a head begins; strides of (batch, token, head)."""
    return tensor + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]


@triton.jit(do_not_specialize=["queries", "keys"])
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides,
    queries, keys, group, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head over all their keys. Grid: (query blocks, heads, batch).

    Strides are of (batch, token, head); lse `[batch, heads, queries]` is dense; bits_scale is scale * log2(e), not
    negative.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal tile's longest rows first
    head, batch = tl.program_id(1), tl.program_id(2)
    first = block * QUERIES
    k_matrix, v_matrix = matrix_of(k, k_strides, batch, head // group), matrix_of(v, v_strides, batch, head // group)
    q_matrix, out_matrix = matrix_of(q, q_strides, batch, head), matrix_of(out, out_strides, batch, head)
    query = load_rows(q_matrix, first, q_strides[1], queries, HEAD_DIM, QUERIES, DIM, True)
    hidden = keys - queries  # bottom-right aligned: the first query sees this many keys and one more
    open_keys, seen_keys = keys, keys  # keys that every query of the block sees, and that any sees
    if CAUSAL:
        open_keys = tl.maximum(tl.minimum(first + hidden + 1, keys), 0)
        seen_keys = tl.maximum(tl.minimum(first + hidden + QUERIES, keys), 0)
    open_keys = open_keys // KEYS * KEYS
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    acc, total, peak = _over_keys(
        acc, total, peak, query, k_matrix, v_matrix, k_strides[1], v_strides[1], 0, open_keys, first + hidden, keys,
        bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, False, CAUSAL, PRECISION,
    )  # fmt: skip
    acc, total, peak = _over_keys(
        acc, total, peak, query, k_matrix, v_matrix, k_strides[1], v_strides[1], open_keys, seen_keys, first + hidden,
        keys, bits_scale, HEAD_DIM, DIM, QUERIES, KEYS, True, CAUSAL, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out_matrix, acc, first, out_strides[1], queries, HEAD_DIM, QUERIES, DIM)
    rows = first + tl.arange(0, QUERIES)
    at = lse + (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * queries + rows
    tl.store(at, (peak + tl.log2(total)) * LN_2, mask=rows < queries)


@triton.jit
def _over_keys(
    acc, total, peak, query, k_matrix, v_matrix, k_stride, v_stride, start, stop, last_key, keys, bits_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take keys `start` to `stop` into the running softmax; `last_key` is the last one that the first query sees."""
    last_keys = last_key + tl.arange(0, QUERIES)
    for first in tl.range(start, stop, KEYS):
        key = load_rows(k_matrix, first, k_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
        scores = product(query, tl.trans(key), PRECISION)
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            visible = (columns < keys)[None, :]
            if CAUSAL:
                visible = visible & (columns[None, :] <= last_keys[:, None])
            scores = tl.where(visible, scores * bits_scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))  # finite: every query sees a key of the first block
            weights = tl.exp2(scores - higher[:, None])
        else:
            higher = tl.maximum(peak, tl.max(scores, 1) * bits_scale)
            weights = tl.exp2(scores * bits_scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, 1)
        value = load_rows(v_matrix, first, v_stride, keys, HEAD_DIM, KEYS, DIM, MASKED)
        acc = add_product(acc * fade[:, None], weights.to(value.dtype), value, PRECISION)
        peak = higher
    return acc, total, peak
