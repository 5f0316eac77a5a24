"""The bias formula and its mask as Triton functions: the twin of `formula`. Needs Triton.

Each token has six integers. Functions of two blocks return the shape to which the blocks broadcast, so scores may have
queries in rows or in columns.

Table lookups use inline PTX. Triton would prefetch an ordinary load in a loop into shared memory. That is good for rows
of a matrix, but not for one 32-bit number per pair, which is best read from L1 where it is used.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.flash.triton_backward import LOG2_E

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


IN_CONTEXT = tl.constexpr(1)
PADDING = tl.constexpr(-1)

NOT_SPECIALIZED = ("queries", "keys", "entries", "relation_stride", "max_distance", "buckets", "rows")
"""Integer arguments that Triton must not specialize on: else it would recompile for 1 and for multiples of 16."""


@triton.jit
def load_tokens(vectors, batch, first, batches, length, ROWS: tl.constexpr):
    """Return (position, segment, row, sample, span, context) of tokens `first` to `first + ROWS`, `[ROWS]` each.

    `vectors` is `Tokens.packed()`, dense. Beyond the last token, values are those of padding.
    """
    rows = first + tl.arange(0, ROWS)
    inside = rows < length
    field = tl.cast(batches, tl.int64) * length
    at = vectors + tl.cast(batch, tl.int64) * length + rows
    position = tl.load(at, mask=inside, other=0)
    segment = tl.load(at + field, mask=inside, other=0)
    row = tl.load(at + 2 * field, mask=inside, other=0)
    sample = tl.load(at + 3 * field, mask=inside, other=0)
    span = tl.load(at + 4 * field, mask=inside, other=PADDING)
    context = tl.load(at + 5 * field, mask=inside, other=0)
    return position, segment, row, sample, span, context


@triton.jit
def load_positions(vectors, batch, first, length, ROWS: tl.constexpr):
    """Return the positions of tokens `first` to `first + ROWS`, `[ROWS]`; all must exist."""
    return tl.load(vectors + tl.cast(batch, tl.int64) * length + first + tl.arange(0, ROWS))


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
def distance_of(key, query, max_distance):
    """Return the index of the distance from a query's to a key's position in `RelativeBias.distances`."""
    return tl.minimum(tl.maximum(key - query, -max_distance), max_distance) + max_distance


@triton.jit
def lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows):
    """Return the lookup tuple of a batch, given `Pairs.lookup`: its relations, their number, `RelativeBias.distances`,
    the largest distance, the number of rows for distances, and the number of all rows.
    """
    relations += tl.cast(batch, tl.int64) * relation_stride
    return relations, entries, distances, max_distance, buckets, rows


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
