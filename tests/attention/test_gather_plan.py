"""Every key that a rank sees arrives once, in its place; every gradient goes home once; all pairs are attended to."""

from itertools import product

import pytest
import torch

from bmburst.attention.gather_plan import GatherShapes, Sight, make_gather_plan, make_units
from bmburst.layout import make_layout, real_tokens

CASES = [
    (layout, mask, size, tokens, length)
    for (layout, mask), size, tokens in product(
        [
            ("contiguous", "causal"),
            ("zigzag", "causal"),
            ("contiguous", "full"),
            ("zigzag", "full"),
            ("striped", "full"),
        ],
        (1, 2, 3, 4, 5),
        (2, 6),
    )
    for length in sorted({1, size, size * tokens // 2 + 1, size * tokens - 1, size * tokens})
]


def sight(layout, mask, size, tokens, length):
    return Sight(make_layout(layout, size, tokens), length, mask)


def shapes(at, batch=2, heads=6, kv_heads=3, head_dim=2, itemsize=4):
    return GatherShapes(sight=at, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, itemsize=itemsize)


def positions(at, rank):
    """Return the global positions of a rank's real tokens, in local order."""
    every = [run.start + run.stride * i for run in at.layout.runs(rank) for i in range(run.tokens)]
    return every[: real_tokens(at.layout, rank, at.length)]


def visible(at, rank, other):
    """Return `[queries of rank, keys of other]`: who sees whom, by definition."""
    queries, keys = (torch.tensor(positions(at, r), dtype=torch.long) for r in (rank, other))
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
    return seen if at.mask == "full" else keys[None] <= queries[:, None]


def numbered(boxes, nbytes):
    """Return the ranks' outboxes, each byte another number, as int64 stand-ins for bytes."""
    return [torch.arange(nbytes) + rank * nbytes for rank in range(boxes)]


def indices(block):
    return [block.offset + row * block.pitch + byte for row in range(block.rows) for byte in range(block.width)]


def exchanged(exchanges, boxes, targets):
    """Carry out an exchange on every rank's target buffers; each byte may be written once."""
    for rank, exchange in enumerate(exchanges):
        for owner, moves in enumerate(exchange.receives):
            assert moves == exchanges[owner].sends[rank]
            for source, target in moves:
                at = torch.tensor(indices(target))
                assert (targets[rank][target.buffer][at] == -1).all()
                targets[rank][target.buffer][at] = boxes[owner][torch.tensor(indices(source))]


def fields(box, shape, row):
    """Return the two halves of an outbox as `[..., bytes of a token]`."""
    half = len(box) // 2
    count = int(torch.tensor(shape).prod()) * row
    return [box[start : start + count].view(*shape, row) for start in (0, half)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_brings_every_key_that_is_seen_and_no_other(case):
    at = sight(*case)
    size, tokens = at.layout.size, at.layout.tokens
    plans = [make_gather_plan(shapes(at), rank, 2) for rank in range(size)]
    for unit in range(2):
        row = len(plans[0].units[unit].kv_heads) * 2 * 4
        exchanges = [plan.inbound[unit] for plan in plans]
        assert len({exchange.nbytes for exchange in exchanges}) == 1
        boxes = numbered(size, exchanges[0].nbytes)
        targets = [[torch.full((2 * plan.seen * row,), -1) for _ in (0, 1)] for plan in plans]
        exchanged(exchanges, boxes, targets)
        sent = [fields(box, (2, tokens), row) for box in boxes]
        for rank in range(size):
            wanted = []
            for other in range(size):
                seen = visible(at, rank, other).any(0).nonzero().flatten().tolist() if other != rank else []
                order = positions(at, other)
                wanted += [(order[token] if at.mask == "causal" else 0, other, token) for token in seen]
            for buffer in (0, 1):
                expected = [sent[other][buffer][:, token] for _, other, token in sorted(wanted)]
                got = targets[rank][buffer].view(2, -1, row)
                assert got.shape[1] == len(expected) == plans[rank].seen
                assert not expected or torch.equal(got, torch.stack(expected, 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attends_to_every_visible_pair_once(case):
    at = sight(*case)
    for rank in range(at.layout.size):
        plan = make_gather_plan(shapes(at), rank, 0)
        others = [visible(at, rank, other) for other in range(at.layout.size) if other != rank]
        keys = [p for other in range(at.layout.size) if other != rank for p in positions(at, other)]
        pairs = torch.cat(others, 1) if others else torch.zeros(plan.real, 0)
        order = sorted(range(len(keys)), key=lambda i: keys[i] if at.mask == "causal" else 0)
        pairs = pairs[:, order]
        assert not pairs[:, plan.seen :].any()
        for tiles in (plan.forward, plan.backward):
            count = torch.zeros(plan.real, plan.seen)
            for tile in tiles:
                assert not tile.causal
                count[tile.queries.slice, tile.keys.slice] += 1
            assert torch.equal(count, pairs[:, : plan.seen].float())
        queries = [i for tile in plan.forward for i in range(*tile.queries)]
        assert len(queries) == len(set(queries))  # one merge
        columns = [i for tile in plan.backward for i in range(*tile.keys)]
        assert sorted(columns) == list(range(plan.seen))  # one writer
        for token in range(plan.real):
            parts = [0] + [i for i, tile in enumerate(plan.backward, 1) if token in range(*tile.queries)]
            (rows,) = [rows for rows in plan.query_sums if token in range(*rows.tokens)]
            assert parts == list(range(rows.parts))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_come_home_from_all_that_saw_the_key(case):
    at = sight(*case)
    size = at.layout.size
    plans = [make_gather_plan(shapes(at), rank, 2) for rank in range(size)]
    row = len(plans[0].units[1].kv_heads) * 2 * 4
    exchanges = [plan.outbound[1] for plan in plans]
    assert len({exchange.nbytes for exchange in exchanges}) == 1
    boxes = numbered(size, exchanges[0].nbytes)
    targets = [[torch.full((plan.key_parts * 2 * plan.real * row,), -1) for _ in (0, 1)] for plan in plans]
    exchanged(exchanges, boxes, targets)
    inbound = [[torch.full((2 * plan.seen * row,), -1) for _ in (0, 1)] for plan in plans]
    keys = numbered(size, plans[0].inbound[1].nbytes)
    exchanged([plan.inbound[1] for plan in plans], keys, inbound)
    for rank, plan in enumerate(plans):
        for buffer in (0, 1):
            own = fields(keys[rank], (2, at.layout.tokens), row)[buffer]
            parts = targets[rank][buffer].view(plan.key_parts, 2, plan.real, row)
            assert (parts[0] == -1).all()  # own part
            for token in range(plan.real):
                (rows,) = [rows for rows in plan.key_sums if token in range(*rows.tokens)]
                seers = [p for p in range(size) if p != rank and visible(at, p, rank)[:, token].any()]
                assert rows.parts == 1 + len(seers)
                assert (parts[rows.parts :, :, token] == -1).all()
                expected = set()
                for p in seers:  # what lies in p's outbox where the key lies in p's buffer
                    place = (inbound[p][buffer].view(2, -1, row) == own[:, token, None]).all(-1).all(0).nonzero()
                    gradient = fields(boxes[p], (2, plans[p].seen), row)[buffer][:, int(place)]
                    expected.add(tuple(gradient.flatten().tolist()))
                assert {tuple(part[:, token].flatten().tolist()) for part in parts[1 : rows.parts]} == expected


def test_halves_of_an_outbox_are_aligned():
    """Kernels write vectors of 16 bytes, and copies are fastest from whole sectors."""
    plan = make_gather_plan(shapes(sight("zigzag", "causal", 3, 6, 18), batch=1, kv_heads=1, head_dim=1), 1, 0)
    assert all(exchange.nbytes % 1024 == 0 for exchange in (*plan.inbound, *plan.outbound))


def test_zigzag_moves_less_than_everything():
    """Rank r of P sees 2P - 1 - r chunks before its last; its first run's keys are among them."""
    for size in (2, 3, 4, 8):
        at = sight("zigzag", "causal", size, 8, size * 8)
        for rank in range(size):
            plan = make_gather_plan(shapes(at), rank, 0)
            chunks = 2 * size - 2 - rank
            assert plan.seen == 4 * chunks
            received = sum(m.target.nbytes for moves in plan.inbound[0].receives for m in moves)
            assert received == chunks * 4 * 2 * 2 * 3 * 2 * 4  # tokens, K and V, batch, heads, head_dim, bytes
            assert len(plan.forward) == len(plan.backward) == (1 if rank in (0, size - 1) else 2)
            assert len(plan.query_sums) == len(plan.key_sums) == (1 if rank == size - 1 else 2)
            home = sum(m.target.nbytes for moves in plan.outbound[0].receives for m in moves)
            assert home == (size - 1 + rank) * 4 * 2 * 2 * 3 * 2 * 4


@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("most", range(10))
def test_units(kv_heads, most):
    units = make_units(3 * kv_heads, kv_heads, most)
    assert [h for unit in units for h in range(*unit.kv_heads)] == list(range(kv_heads))
    assert [h for unit in units for h in range(*unit.heads)] == list(range(3 * kv_heads))
    assert all(len(unit.heads) == 3 * len(unit.kv_heads) for unit in units)
    sizes = [len(unit.kv_heads) for unit in units]
    assert max(sizes) <= (most or kv_heads)
    assert max(sizes) - min(sizes) <= 1
    assert len(units) == (-(-kv_heads // most) if most else 1)
