"""What blocks of tokens have in common: kernels leave out what nobody sees, and look nothing up where all is alike.

From the smallest and the largest of each integer of two blocks a kernel knows, with a few comparisons, that no query of
one sees a key of the other, or that all do and have one row of the table: far from the diagonal, and between samples.
Needs Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_formula import IN_CONTEXT, PADDING, distance_of, load_tokens

NUMBERS = 14
"""Of a block: smallest and largest of each integer of its real tokens, in the order of `Tokens`, of contexts whether
there is one; whether all of its tokens are there and real; by what positions go up in it, 0 where unevenly."""

_NUMBERS = tl.constexpr(NUMBERS)


@triton.jit(do_not_specialize=("length",))
def extents_kernel(vectors, extents, length, SIZE: tl.constexpr):
    """One program: the numbers of a block of SIZE tokens. Grid: (blocks, batch).

    `vectors` is `Tokens.packed()`, extents int32 `[batch, blocks, NUMBERS]`. Without a real token in the block all are
    zero but for spans, which are of padding.
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
    step = tl.min(ahead)  # the last place has the whole way, which is longer than any step or as long
    is_even = (step > 0) & (first + SIZE <= length) & (step * (SIZE - 1) == tl.max(position) - tl.min(position))
    tl.store(at + 13, tl.where(is_even, step, 0))


@triton.jit
def _store(at, values, is_real, count, none):
    """Write the smallest and the largest value of the real tokens, `none` if there are no such."""
    some = tl.max(tl.where(is_real, values, -2147483648))  # any that there is
    tl.store(at, tl.where(count > 0, tl.min(tl.where(is_real, values, some)), none))
    tl.store(at + 1, tl.where(count > 0, some, none))


@triton.jit
def load_extents(extents, batch, block, blocks):
    """Return the numbers of a block of a batch; see `NUMBERS`."""
    at = extents + (tl.cast(batch, tl.int64) * blocks + block) * _NUMBERS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10), tl.load(at + 11),
        tl.load(at + 12), tl.load(at + 13),
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
    one_span = (query[8] == query[9]) & (key[8] == key[9]) & (query[8] == key[8])
    all_there = (query[12] != 0) & (key[12] != 0)
    of_sample = is_one_sample(query, key) | ((query[6] == 0) & (query[7] == 0) & are_other_samples(query, key))
    return all_there & one_span & of_sample & ((key[10] != 0) | ((query[11] == 0) & (key[1] <= query[0])))


@triton.jit
def is_one_sample(query, key):
    """Return whether all real tokens of two blocks are of one sample."""
    return (query[6] == query[7]) & (key[6] == key[7]) & (query[6] == key[6])


@triton.jit
def are_other_samples(query, key):
    """Return whether no token of a block is of a sample of the other, as far as their extents tell."""
    return (query[7] < key[6]) | (key[7] < query[6])


@triton.jit
def relation_of(query, key, lookup):
    """Return the relation that all pairs of two blocks of one sample have; -1 if their extents tell of none."""
    relations, entries, _, _, _, _ = lookup
    place = query[4] + key[2]
    is_there = (query[4] == query[5]) & (key[2] == key[3]) & (place >= 0) & (place < entries)
    return tl.load(relations + place, mask=is_one_sample(query, key) & is_there, other=-1)


@triton.jit
def common_bucket(query, key, lookup):
    """Return the row of the table that all pairs of two blocks have, if their extents tell that all see each other and
    have the same; else -1.
    """
    _, _, distances, max_distance, buckets, rows = lookup
    relation = tl.where(are_other_samples(query, key), IN_CONTEXT, relation_of(query, key, lookup))
    near = tl.load(distances + distance_of(key[0], query[1], max_distance))
    # On either side buckets go one way, and the sides share none.
    one_bucket = near == tl.load(distances + distance_of(key[1], query[0], max_distance))
    bucket = tl.where(relation == 0, near, relation - 1 + buckets)
    is_common = all_see(query, key) & ((relation > 0) | ((relation == 0) & one_bucket))
    return tl.where(is_common & (bucket < rows), bucket, -1)
