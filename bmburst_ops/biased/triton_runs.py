"""Which blocks a program has to do with, as runs of blocks that are alike: what a program learns here it need not ask
block by block, so that its loops have no branch and their loads go ahead. Needs Triton.

A line is what a program goes along: the blocks of the other side, or pairs of blocks along a diagonal. Its runs are
written in order, `[first, one after the last, kind]` each. Where there is no room for all, the last goes on to the end
of the line and is `GENERAL`, which is true of any block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_extents import all_see, common_bucket, is_hidden, load_extents, relation_of
from bmburst_ops.biased.triton_formula import NOT_SPECIALIZED, lookup_of

# Kinds of blocks; from 0 on the row of the table that all pairs have, which all see each other.
HIDDEN = tl.constexpr(-1)  # nobody sees anybody, or on a diagonal: what concerns others
NEAR = tl.constexpr(-2)  # all see each other, and distance decides
GENERAL = tl.constexpr(-3)
PARTLY = tl.constexpr(-4)  # on a diagonal: distance decides of those that see each other


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def lines_kernel(
    query_extents, key_extents, runs, counts, queries, keys,
    relations, relation_stride, entries, distances, max_distance, buckets, rows,
    OF_QUERIES: tl.constexpr, RUNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: runs of the blocks that one block has to do with. Grid: (own blocks, batch).

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
    """Return the kinds of blocks on a line of `stop` blocks, one or more; `HIDDEN` outside of it."""
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

    A block of queries is RATIO blocks of keys; see `diagonal`. Left out are blocks without pairs and those whose one
    row of the table the queries' kernel adds to, whose runs are `line_runs`, as many as `line_counts`. Runs of `NEAR`
    or `PARTLY` have the same distances in each block.
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
    """Return a diagonal's offset, and its first block of queries and the one after the last.

    It pairs each block of queries with the block of keys `RATIO * query + offset`, if there is one.
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
    """Return the kinds of pairs of blocks; and of those where distance decides, what tells their distances."""
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
    """Return whether a line's block is not in the run that is there for want of room; of `blocks` lines a batch."""
    line = tl.cast(batch, tl.int64) * blocks + own
    is_full = tl.load(line_counts + line) == RUNS
    return other < tl.load(line_runs + (line * RUNS + RUNS - 1) * 3, mask=is_full, other=2147483647)


@triton.jit
def _write(runs, count, place, before, kind, differs, RUNS: tl.constexpr):
    """Write the runs that end before some places, and those that begin there; return how many have begun.

    Args:
        runs: Of the line.
        count: How many began before the first of these places.
        place: Places, in order.
        before: The kinds of blocks before them.
        kind: Theirs.
        differs: Whether the two are of different runs.
        RUNS: How many there is room for.
    """
    begins, ends = differs & (kind != HIDDEN), differs & (before != HIDDEN)
    begun = count + tl.cumsum(begins.to(tl.int32), 0)
    last = tl.where(begins, begun - 2, begun - 1)  # that began before the place
    tl.store(runs + last * 3 + 1, place, mask=ends & (last < RUNS - 1))
    at = runs + (begun - 1) * 3
    tl.store(at, place, mask=begins & (begun <= RUNS))
    tl.store(at + 2, tl.where(begun < RUNS, kind, GENERAL), mask=begins & (begun <= RUNS))
    return count + tl.sum(begins.to(tl.int32))


@triton.jit
def _finish(runs, at, count, stop, RUNS: tl.constexpr):
    """Write how many runs there are; the last that there is room for ends with the line."""
    tl.store(at, tl.minimum(count, RUNS))
    tl.store(runs + (RUNS - 1) * 3 + 1, stop)


@triton.jit
def line_of(runs, counts, batch, lines, index, RUNS: tl.constexpr):
    """Return where the runs of a line begin, and how many they are; of `lines` lines a batch."""
    line = tl.cast(batch, tl.int64) * lines + index
    return runs + line * RUNS * 3, tl.load(counts + line)


@triton.jit
def load_run(runs, index):
    """Return a run: first block, the one after the last, and their kind."""
    at = runs + index * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)
