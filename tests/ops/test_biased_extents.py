"""What kernels are told of blocks of tokens is true of every pair of their tokens, by brute force."""

from dataclasses import fields

import torch
import triton
import triton.language as tl

from bmburst_ops.biased import PADDING, Pairs, Tokens, bee_bias
from bmburst_ops.biased.formula import visible
from bmburst_ops.biased.triton import extents
from bmburst_ops.biased.triton_blocks import common_bucket, is_hidden, load_extents, lookup_of
from tests.ops.test_biased import DEVICE

PAIRS, SIZE, ENTRIES = 65536, 4, 8
AT_ONCE = 1024 if DEVICE == "cuda" else PAIRS
FORMULA = bee_bias(num_buckets=8, num_segment_buckets=4, max_distance=9)


@triton.jit
def probe(
    queries, keys, hidden, common, relations, entries, distances, max_distance, buckets, rows,
    pairs, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What kernels ask of a pair of blocks, for many pairs at once."""
    pair = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    query, key = load_extents(queries, 0, pair, pairs), load_extents(keys, 0, pair, pairs)
    tl.store(hidden + pair, is_hidden(query, key).to(tl.int32))
    lookup = lookup_of(0, relations, 0, entries, distances, max_distance, buckets, rows)
    tl.store(common + pair, common_bucket(query, key, lookup))


def blocks(seed):
    """Blocks of tokens whose integers are mostly the same in a block, `[PAIRS, SIZE]`."""
    rng = torch.Generator().manual_seed(seed)

    def mostly(low, high):
        alike = torch.randint(low, high, (PAIRS, 1), generator=rng).expand(-1, SIZE)
        each = torch.randint(low, high, (PAIRS, SIZE), generator=rng)
        return torch.where(torch.rand(PAIRS, 1, generator=rng) < 0.85, alike, each).int()

    position = torch.randint(0, 20, (PAIRS, 1), generator=rng) + torch.arange(SIZE)
    return Tokens(position.int(), mostly(0, 3), 3 * mostly(0, 4), mostly(-1, 3), mostly(PADDING, 2), mostly(0, 2))


def test_hidden_and_common_blocks_are():
    queries, keys = blocks(0), blocks(1)
    kept = torch.tensor([[0, 0, 2, 3, 0, 4, 1, 9]], dtype=torch.int32)  # there is no relation 9
    beyond = torch.full((1, 16), 8, dtype=torch.int32)
    seen = visible(queries, keys).flatten(1)
    buckets = FORMULA.buckets(queries, keys, torch.cat((kept, beyond), 1)).flatten(1)
    buckets = buckets.masked_fill(buckets >= FORMULA.rows, -1)

    own, other = (numbers_of(side).to(DEVICE) for side in (queries, keys))
    hidden, common = torch.zeros(2, PAIRS, dtype=torch.int32, device=DEVICE)
    numbers = (FORMULA.max_distance, FORMULA.num_buckets, FORMULA.rows)
    distances = FORMULA.distances(torch.device(DEVICE))
    relations = torch.cat((kept, torch.zeros_like(beyond)), 1).to(DEVICE)  # what lies behind them is not to be read
    grid = (PAIRS // AT_ONCE,)
    probe[grid](own, other, hidden, common, relations, ENTRIES, distances, *numbers, PAIRS, AT_ONCE=AT_ONCE)
    hidden, common = hidden.cpu() != 0, common.cpu()

    assert not seen[hidden].any()
    assert seen[common >= 0].all()
    assert (buckets == common[:, None])[common >= 0].all()
    # And few are missed: blocks of which nobody sees anybody, and of which all have one row.
    assert hidden.sum() > 0.9 * (~seen.any(1)).sum() > 1000
    alike = seen.all(1) & (buckets == buckets[:, :1]).all(1) & (buckets[:, 0] >= 0)
    assert (common >= 0).sum() > 0.6 * alike.sum() > 100
    assert {FORMULA.num_buckets, FORMULA.num_buckets + 3} < set(common.tolist())  # other samples', and a relation's


def numbers_of(tokens):
    """Return the numbers of blocks, a row of tokens each: `NUMBERS` of them."""
    is_real = tokens.span >= 0
    found = []
    for name, vector in vectors(tokens).items():
        values = (vector != 0).int() if name == "context" else vector
        none = PADDING if name == "span" else 0
        lowest, highest = (torch.where(is_real, values, other) for other in (1000, -1000))
        found += [torch.where(is_real.any(1), end, none) for end in (lowest.amin(1), highest.amax(1))]
    ahead = tokens.position.diff(dim=1)
    is_even = (ahead == ahead[:, :1]).all(1) & (ahead[:, 0] > 0)
    return torch.stack([*found, is_real.all(1), torch.where(is_even, ahead[:, 0], 0)], 1).int()


def both_extents(queries, keys, query_size, key_size):
    sides = [Tokens.unpacked(side.packed().to(DEVICE)) for side in (queries, keys)]
    pairs = Pairs(FORMULA, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), *sides)
    return extents(pairs, "queries", query_size), extents(pairs, "keys", key_size)


def test_extents_are_those_of_real_tokens():
    """With padding inside of blocks, whole blocks of it, and an end that is no whole block."""
    rng = torch.Generator().manual_seed(0)
    tokens = Tokens.unpacked(torch.randint(-9, 9, (6, 2, 77), generator=rng, dtype=torch.int32))
    tokens.span[0, 16:48] = PADDING
    tokens.span[1, :16].abs_()
    tokens.position[1] = torch.arange(5, 313, 4)
    tokens.position[1, 43] += 1
    keys = tokens.part(slice(3, None))
    for found, whole, size in zip(both_extents(tokens, keys, 16, 32), (tokens, keys), (16, 32), strict=True):
        for block in range(found.shape[1]):
            there = whole.part(slice(block * size, (block + 1) * size))
            wanted = numbers_of(there)
            if there.shape[1] < size:
                wanted[:, 12:] = 0
            assert torch.equal(found[:, block].cpu(), wanted)
    assert both_extents(tokens, tokens, 16, 16)[0][:, :, 13].tolist() == [[0] * 5, [4, 4, 0, 4, 0]]


def vectors(tokens):
    return {field.name: getattr(tokens, field.name) for field in fields(tokens)}
