"""The formula of a learned bias and its mask inside kernels: see `formula`, whose twin this is. Needs Triton.

A token's integers are loaded as a vector of six; what is returned of two blocks has the shape that they broadcast to,
so that scores may lie either way round.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_gather import gather_integers, gather_numbers

FIELDS = tl.constexpr(6)
IN_CONTEXT = tl.constexpr(1)
PADDING = tl.constexpr(-1)

NOT_SPECIALIZED = ("queries", "keys", "entries", "relation_stride", "max_distance", "buckets", "rows")
"""Numbers of a batch that kernels take: they are not compiled again for each 1 and each multiple of 16 among them."""


@triton.jit
def load_tokens(vectors, batch, first, batches, length, ROWS: tl.constexpr):
    """Return (position, segment, row, sample, span, context) of tokens `first` to `first + ROWS`, `[ROWS]` each.

    `vectors` is `Tokens.packed()`, dense. Beyond the last token they are those of padding.
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
    """Return the positions of tokens `first` to `first + ROWS`, all of which there are, `[ROWS]`."""
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
    """Return where the distance from a query's position to a key's stands in `RelativeBias.distances`."""
    return tl.minimum(tl.maximum(key - query, -max_distance), max_distance) + max_distance


@triton.jit
def bucket_of(
    query, key, visible, relations, entries, distances, max_distance, buckets, rows, PRECISION: tl.constexpr
):  # fmt: skip
    """Return the row of the table for each pair; `rows` where a query does not see a key, or there is no such row.

    `relations` are those of the batch, `entries` many; `distances` is `RelativeBias.distances`.
    """
    is_same = query[3] == key[3]
    place = query[2] + key[1]
    is_there = (place >= 0) & (place < entries)
    relation = gather_integers(relations, place, visible & is_same & is_there, IN_CONTEXT, PRECISION)
    near = gather_integers(distances, distance_of(key[0], query[0], max_distance), visible, 0, PRECISION)
    bucket = tl.where(relation == 0, near, relation - 1 + buckets)
    is_row = visible & (is_there | (is_same == 0)) & (bucket >= 0) & (bucket < rows)
    return tl.where(is_row, bucket, rows)


@triton.jit
def load_extents(extents, batch, block, blocks):
    """Return the smallest and the largest of each of a block's integers, `Extents.own`, as twelve numbers."""
    at = extents + (tl.cast(batch, tl.int64) * blocks + block) * 12
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10), tl.load(at + 11),
    )  # fmt: skip


@triton.jit
def is_hidden(query, key):
    """Return whether no query of a block sees a key of a block, as far as their extents tell."""
    other_span = (query[9] < key[8]) | (key[9] < query[8]) | (query[9] < 0) | (key[9] < 0)
    other_sample = ((query[6] > 0) | (query[7] < 0)) & ((query[7] < key[6]) | (key[7] < query[6]))
    behind = (key[11] == 0) & ((query[10] != 0) | (key[0] > query[1]))
    return other_span | other_sample | behind


@triton.jit
def all_see(query, key):
    """Return whether every query of a block sees every key of a block, as far as their extents tell."""
    one_span = (query[8] == query[9]) & (key[8] == key[9]) & (query[8] == key[8]) & (query[8] >= 0)
    of_sample = is_one_sample(query, key) | ((query[6] == 0) & (query[7] == 0) & are_other_samples(query, key))
    return one_span & of_sample & ((key[10] != 0) | ((query[11] == 0) & (key[1] <= query[0])))


@triton.jit
def is_one_sample(query, key):
    """Return whether all tokens of two blocks are of one sample."""
    return (query[6] == query[7]) & (key[6] == key[7]) & (query[6] == key[6])


@triton.jit
def are_other_samples(query, key):
    """Return whether no token of a block is of a sample of the other, as far as their extents tell."""
    return (query[7] < key[6]) | (key[7] < query[6])


@triton.jit
def relation_of(query, key, relations, entries):
    """Return the relation that all pairs of two blocks of one sample have; -1 if their extents tell of none."""
    place = query[4] + key[2]
    is_there = (query[4] == query[5]) & (key[2] == key[3]) & (place >= 0) & (place < entries)
    return tl.load(relations + place, mask=is_one_sample(query, key) & is_there, other=-1)


@triton.jit
def common_bucket(query, key, relations, entries, distances, max_distance, buckets, rows):
    """Return the row of the table that all pairs of two blocks have, if their extents tell that all see each other and
    have the same; else -1.
    """
    relation = tl.where(are_other_samples(query, key), IN_CONTEXT, relation_of(query, key, relations, entries))
    near = tl.load(distances + distance_of(key[0], query[1], max_distance))
    # On either side buckets go one way, and the sides share none.
    one_bucket = near == tl.load(distances + distance_of(key[1], query[0], max_distance))
    bucket = tl.where(relation == 0, near, relation - 1 + buckets)
    is_common = all_see(query, key) & ((relation > 0) | ((relation == 0) & one_bucket))
    return tl.where(is_common & (bucket < rows), bucket, -1)


@triton.jit
def bias_of(table_row, bucket, rows, PRECISION: tl.constexpr):
    """Return the biases of a head, in the table's units; of a row that it does not have, NaN."""
    return gather_numbers(table_row, bucket, bucket < rows, float("nan"), PRECISION)
