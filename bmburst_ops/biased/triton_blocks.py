"""Blocks of tokens, and runs of blocks that a program treats alike: its inner loops have no branches. Needs Triton.

Each token has six integers. Extents hold the minimum and maximum of each integer of a block's tokens. Comparing the
extents of two blocks tells whether no query of one sees a key of the other (skip the block), or whether all pairs are
visible and share one row of the table (one lookup for the block).

A line is the sequence of blocks that a program visits: the blocks of the other side, or pairs of blocks along a
diagonal. Its runs are stored in order as `[first, last + 1, kind]`. If there are too many runs, the last one extends to
the end of the line as `GENERAL`, which is valid for any block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

NUMBERS = 14
"""Numbers in the extents of a block: minimum and maximum of each integer of its real tokens, in the order of `Tokens`,
but for contexts whether there is one; whether all tokens exist and are real; the step of positions, 0 if uneven."""

_NUMBERS = tl.constexpr(NUMBERS)

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


@triton.jit(do_not_specialize=("length",))
def extents_kernel(vectors, extents, length, SIZE: tl.constexpr):
    """One program: the extents of a block of SIZE tokens. Grid: (blocks, batch).

    `vectors` is `Tokens.packed()`, extents are int32 `[batch, blocks, NUMBERS]`. For a block without real tokens all
    are zero, except spans, which are those of padding.
    """
    block, batch = tl.program_id(0), tl.program_id(1)
    first = block * SIZE
    position, segment, row, sample, span, context = load_tokens(
        vectors, batch, first, tl.num_programs(1), length, SIZE
    )  # fmt: skip
    at = extents + (tl.cast(batch, tl.int64) * tl.num_programs(0) + block) * _NUMBERS
    is_real = span >= 0
    count = tl.sum(is_real.to(tl.int32))
    _store(at, position, is_real, count, 0)
    _store(at + 2, segment, is_real, count, 0)
    _store(at + 4, row, is_real, count, 0)
    _store(at + 6, sample, is_real, count, 0)
    _store(at + 8, span, is_real, count, PADDING)
    _store(at + 10, (context != 0).to(tl.int32), is_real, count, 0)
    tl.store(at + 12, (count == SIZE).to(tl.int32))
    places = first + tl.arange(0, SIZE)
    start = vectors + tl.cast(batch, tl.int64) * length
    follows = tl.load(start + places + 1, mask=(places + 1 < length) & (places + 1 < first + SIZE), other=0)
    ahead = tl.where(places + 1 < first + SIZE, follows - position, tl.max(position) - tl.min(position))
    step = tl.min(ahead)  # the last element holds the whole range, which is no shorter than any step
    is_even = (step > 0) & (first + SIZE <= length) & (step * (SIZE - 1) == tl.max(position) - tl.min(position))
    tl.store(at + 13, tl.where(is_even, step, 0))


@triton.jit
def _store(at, values, is_real, count, none):
    """Store the minimum and the maximum of the real tokens' values; `none` if there are no real tokens."""
    some = tl.max(tl.where(is_real, values, -2147483648))  # the value of any real token
    tl.store(at, tl.where(count > 0, tl.min(tl.where(is_real, values, some)), none))
    tl.store(at + 1, tl.where(count > 0, some, none))


@triton.jit
def load_extents(extents, batch, block, blocks):
    """Return the extents of a block; see `NUMBERS`."""
    at = extents + (tl.cast(batch, tl.int64) * blocks + block) * _NUMBERS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10), tl.load(at + 11),
        tl.load(at + 12), tl.load(at + 13),
    )  # fmt: skip


@triton.jit
def is_hidden(query, key):
    """Return whether the extents prove that no query of a block sees a key of the other."""
    other_span = (query[9] < key[8]) | (key[9] < query[8]) | (query[9] < 0) | (key[9] < 0)
    other_sample = ((query[6] > 0) | (query[7] < 0)) & ((query[7] < key[6]) | (key[7] < query[6]))
    behind = (key[11] == 0) & ((query[10] != 0) | (key[0] > query[1]))
    return other_span | other_sample | behind


@triton.jit
def all_see(query, key):
    """Return whether the extents prove that every query of a block sees every key of the other."""
    one_span = (query[8] == query[9]) & (key[8] == key[9]) & (query[8] == key[8])
    all_there = (query[12] != 0) & (key[12] != 0)
    of_sample = is_one_sample(query, key) | ((query[6] == 0) & (query[7] == 0) & are_other_samples(query, key))
    return all_there & one_span & of_sample & ((key[10] != 0) | ((query[11] == 0) & (key[1] <= query[0])))


@triton.jit
def is_one_sample(query, key):
    """Return whether all real tokens of two blocks belong to one sample."""
    return (query[6] == query[7]) & (key[6] == key[7]) & (query[6] == key[6])


@triton.jit
def are_other_samples(query, key):
    """Return whether the extents prove that two blocks have no sample in common."""
    return (query[7] < key[6]) | (key[7] < query[6])


@triton.jit
def relation_of(query, key, lookup):
    """Return the relation of all pairs of two blocks of one sample; -1 if the extents do not prove a common one."""
    relations, entries, _, _, _, _ = lookup
    place = query[4] + key[2]
    is_there = (query[4] == query[5]) & (key[2] == key[3]) & (place >= 0) & (place < entries)
    return tl.load(relations + place, mask=is_one_sample(query, key) & is_there, other=-1)


@triton.jit
def common_bucket(query, key, lookup):
    """Return the row of the table of all pairs of two blocks, if their extents prove that all are visible and have the
    same row; else -1.
    """
    _, _, distances, max_distance, buckets, rows = lookup
    relation = tl.where(are_other_samples(query, key), IN_CONTEXT, relation_of(query, key, lookup))
    near = tl.load(distances + distance_of(key[0], query[1], max_distance))
    # Buckets are monotonic for either sign of the distance, and the two signs share no bucket.
    one_bucket = near == tl.load(distances + distance_of(key[1], query[0], max_distance))
    bucket = tl.where(relation == 0, near, relation - 1 + buckets)
    is_common = all_see(query, key) & ((relation > 0) | ((relation == 0) & one_bucket))
    return tl.where(is_common & (bucket < rows), bucket, -1)


# Kinds of blocks. From 0 on: all pairs are visible and have this row of the table.
HIDDEN = tl.constexpr(-1)  # no pair is visible; on a diagonal also: another kernel handles the block
NEAR = tl.constexpr(-2)  # all pairs are visible, and the distance determines the row
GENERAL = tl.constexpr(-3)
PARTLY = tl.constexpr(-4)  # on a diagonal: the distance determines the row of visible pairs


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def lines_kernel(
    query_extents, key_extents, runs, counts, queries, keys,
    relations, relation_stride, entries, distances, max_distance, buckets, rows,
    OF_QUERIES: tl.constexpr, RUNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: runs of the blocks of the other side, for one own block. Grid: (own blocks, batch).

    `queries` and `keys` are numbers of blocks. OF_QUERIES: own blocks are those of queries. Runs are int32
    `[batch, own blocks, RUNS, 3]`, counts `[batch, own blocks]`.
    """
    own, batch = tl.program_id(0), tl.program_id(1)
    line = tl.cast(batch, tl.int64) * tl.num_programs(0) + own
    lookup = lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows)
    stop = keys if OF_QUERIES else queries
    count = 0
    for at in tl.range(-1, stop, AT_ONCE):
        place = at + tl.arange(0, AT_ONCE)
        here = _kind(place, own, stop, batch, query_extents, key_extents, queries, keys, lookup, OF_QUERIES)
        after = _kind(place + 1, own, stop, batch, query_extents, key_extents, queries, keys, lookup, OF_QUERIES)
        count = _write(runs + line * RUNS * 3, count, place + 1, here, after, here != after, RUNS)
    _finish(runs + line * RUNS * 3, counts + line, count, stop, RUNS)


@triton.jit
def _kind(
    place, own, stop, batch, query_extents, key_extents, queries, keys, lookup, OF_QUERIES: tl.constexpr
):  # fmt: skip
    """Return the kinds of blocks on a line of `stop` >= 1 blocks; `HIDDEN` outside of it."""
    inside = (place >= 0) & (place < stop)
    other = tl.where(inside, place, 0)
    if OF_QUERIES:
        query, key = load_extents(query_extents, batch, own, queries), load_extents(key_extents, batch, other, keys)
    else:
        query, key = load_extents(query_extents, batch, other, queries), load_extents(key_extents, batch, own, keys)
    common = common_bucket(query, key, lookup)
    is_near = all_see(query, key) & (relation_of(query, key, lookup) == 0)
    kind = tl.where(common >= 0, common, tl.where(is_near, NEAR, GENERAL))
    return tl.where(inside & (is_hidden(query, key) == 0), kind, HIDDEN)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def diagonals_kernel(
    query_extents, key_extents, line_runs, line_counts, runs, counts, queries, keys,
    relations, relation_stride, entries, distances, max_distance, buckets, rows,
    RATIO: tl.constexpr, RUNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: runs of a diagonal, for the table's gradient. Grid: (diagonals, batch).

    A block of queries is RATIO blocks of keys; see `diagonal`. Blocks without visible pairs are left out, and so are
    blocks with a common row: the queries' kernel handles them, with the runs `line_runs` and `line_counts`. All blocks
    of a `NEAR` or `PARTLY` run have the same distances.
    """
    batch = tl.program_id(1)
    line = tl.cast(batch, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    offset, start, stop = diagonal(tl.program_id(0), queries, keys, RATIO)
    lookup = lookup_of(batch, relations, relation_stride, entries, distances, max_distance, buckets, rows)
    count = 0
    for at in tl.range(start - 1, stop, AT_ONCE):
        place = at + tl.arange(0, AT_ONCE)
        here, ahead, step = _diagonal_kind(
            place, offset, start, stop, batch, query_extents, key_extents, line_runs, line_counts, queries, keys,
            lookup, RATIO, RUNS,
        )  # fmt: skip
        after, ahead_after, step_after = _diagonal_kind(
            place + 1, offset, start, stop, batch, query_extents, key_extents, line_runs, line_counts, queries, keys,
            lookup, RATIO, RUNS,
        )  # fmt: skip
        differs = (here != after) | (ahead != ahead_after) | (step != step_after)
        count = _write(runs + line * RUNS * 3, count, place + 1, here, after, differs, RUNS)
    _finish(runs + line * RUNS * 3, counts + line, count, stop, RUNS)


@triton.jit
def diagonal(index, queries, keys, RATIO: tl.constexpr):
    """Return a diagonal's offset, its first block of queries, and the one after the last.

    A diagonal pairs each block of queries with the block of keys `RATIO * query + offset`, if it exists.
    """
    offset = index - RATIO * (queries - 1)
    start = tl.cdiv(tl.maximum(-offset, 0), RATIO)
    stop = tl.minimum(queries, tl.cdiv(tl.maximum(keys - offset, 0), RATIO))
    return offset, start, stop


@triton.jit
def _diagonal_kind(
    place, offset, start, stop, batch, query_extents, key_extents, line_runs, line_counts, queries, keys, lookup,
    RATIO: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Return the kinds of pairs of blocks, and for `NEAR` and `PARTLY` the numbers that determine their distances."""
    inside = (place >= start) & (place < stop)
    of_queries = tl.where(inside, place, start)
    of_keys = of_queries * RATIO + offset
    query, key = (
        load_extents(query_extents, batch, of_queries, queries),
        load_extents(key_extents, batch, of_keys, keys),
    )
    common = common_bucket(query, key, lookup)
    done = (common >= 0) & is_singled_out(line_runs, line_counts, batch, of_queries, of_keys, queries, RUNS)
    step = query[13]
    of_distance = (step == key[13]) & (step > 0) & (relation_of(query, key, lookup) == 0)
    kind = tl.where(of_distance, tl.where(all_see(query, key), NEAR, PARTLY), GENERAL)
    kind = tl.where(inside & (is_hidden(query, key) == 0) & (done == 0), kind, HIDDEN)
    is_alike = (kind == NEAR) | (kind == PARTLY)
    return kind, tl.where(is_alike, key[0] - query[0], 0), tl.where(is_alike, step, 0)


@triton.jit
def is_singled_out(line_runs, line_counts, batch, own, other, blocks, RUNS: tl.constexpr):
    """Return whether a block of a line is not in the `GENERAL` run that ends a line without capacity for more runs."""
    line = tl.cast(batch, tl.int64) * blocks + own
    is_full = tl.load(line_counts + line) == RUNS
    return other < tl.load(line_runs + (line * RUNS + RUNS - 1) * 3, mask=is_full, other=2147483647)


@triton.jit
def _write(runs, count, place, before, kind, differs, RUNS: tl.constexpr):
    """Store the runs that end before or begin at some places of a line; return how many runs have begun.

    Args:
        runs: The runs of the line.
        count: Number of runs that began before the first of these places.
        place: The places, in order.
        before: Kinds of the blocks before these places.
        kind: Kinds of the blocks at these places.
        differs: Whether the two blocks belong to different runs.
        RUNS: Capacity of runs.
    """
    begins, ends = differs & (kind != HIDDEN), differs & (before != HIDDEN)
    begun = count + tl.cumsum(begins.to(tl.int32), 0)
    last = tl.where(begins, begun - 2, begun - 1)  # the run before the place
    tl.store(runs + last * 3 + 1, place, mask=ends & (last < RUNS - 1))
    at = runs + (begun - 1) * 3
    tl.store(at, place, mask=begins & (begun <= RUNS))
    tl.store(at + 2, tl.where(begun < RUNS, kind, GENERAL), mask=begins & (begun <= RUNS))
    return count + tl.sum(begins.to(tl.int32))


@triton.jit
def _finish(runs, at, count, stop, RUNS: tl.constexpr):
    """Store the number of runs. If capacity ran out, the last run extends to the end of the line."""
    tl.store(at, tl.minimum(count, RUNS))
    tl.store(runs + (RUNS - 1) * 3 + 1, stop)


@triton.jit
def line_of(runs, counts, batch, lines, index, RUNS: tl.constexpr):
    """Return a pointer to the runs of a line, and their number; `lines` lines per sample of a batch."""
    line = tl.cast(batch, tl.int64) * lines + index
    return runs + line * RUNS * 3, tl.load(counts + line)


@triton.jit
def load_run(runs, index):
    """Return a run: first block, the one after the last, and their kind."""
    at = runs + index * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def stop_of(start, stop, kind, KIND: tl.constexpr):
    """Return the end of a loop over a run of blocks; its start if the run is of another kind."""
    if KIND == "common":
        is_it = kind >= 0
    elif KIND == "near":
        is_it = kind == NEAR
    else:
        is_it = kind == GENERAL
    return tl.where(is_it, stop, start)
