"""Every key that a rank sees arrives once, in its place; every gradient goes home once; all pairs are attended to."""

import random
from itertools import product

import numpy as np
import pytest
import torch

from bmburst.schedule.documents import Documents, PrefixLM
from bmburst.schedule.gather_plan import (
    GradientSumPlan,
    SummedTokens,
    Visibility,
    make_gather_plan,
    most_seen,
    pulled,
    sums_own_tiles,
)
from bmburst.schedule.layout import make_layout, padded_layout, real_tokens
from bmburst.schedule.mask import BlockSparse, Causal, Full, SlidingWindow
from bmburst.schedule.tiles import Span
from bmburst.schedule.units import HeadShapes
from bmburst_ops.pattern import FULL, Segments
from tests.mask_oracle import random_mask
from tests.mask_oracle import visible as defined
from tests.ops.masks import visible as shown
from tests.schedule.test_ring_schedule import check_needs


def _plain():
    """Causal and full masks, down to one token in all."""
    layouts = [("contiguous", Causal()), ("zigzag", Causal())]
    layouts += [(name, Full()) for name in ("contiguous", "zigzag", "striped")]
    for place, ((name, mask), size, tokens) in enumerate(product(layouts, (1, 2, 3, 5), (2, 6))):
        for length in sorted({1, size * tokens // 2 + 1, size * tokens}):
            is_long = (place + place // 2 + place // 8) % 2 == 1  # each size of a layout has one number of tokens
            yield Visibility(make_layout(name, size, tokens), length, mask), is_long


def _drawn(count):
    """Masks, layouts and lengths at random, padding for whole ranks among them."""
    for seed in range(count):
        rng = random.Random(seed)
        name, size = rng.choice(("contiguous", "zigzag", "balanced")), rng.randint(1, 6)
        length = rng.randint(size, size + 50)
        mask = random_mask(rng, length)
        yield Visibility(padded_layout(name, size, length, mask), length, mask), seed >= 40


CASES = [*_plain(), *_drawn(120)]
cases = pytest.mark.parametrize(
    "at",
    [
        pytest.param(
            at,
            marks=pytest.mark.long if is_long else (),
            id=f"{i}-{at.layout.name}-{at.layout.size}-{at.length}-{at.mask}",
        )
        for i, (at, is_long) in enumerate(CASES)
    ],
)


def shapes(at, batch=2, heads=6, kv_heads=3, head_dim=2, itemsize=4):
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "itemsize": itemsize}
    return HeadShapes(layout=at.layout, degree=1, statistics_itemsize=4, **sizes), at.length, at.mask


def visibility(layout, mask, size, tokens, length=None):
    length = size * tokens if length is None else length
    return Visibility(make_layout(layout, size, tokens, mask, length), length, mask)


def plans_of(at, most=0):
    return [make_gather_plan(*shapes(at), rank, most) for rank in range(at.layout.size)]


def positions(at, rank):
    """Return the global positions of a rank's real tokens, in local order."""
    every = [run.start + run.stride * i for run in at.layout.runs(rank) for i in range(run.tokens)]
    return every[: real_tokens(at.layout, rank, at.length)]


def visible(at, rank, other):
    """Return `[queries of rank, keys of other]`: who sees whom, by definition."""
    return torch.from_numpy(defined(at.mask, at.length)[np.ix_(positions(at, rank), positions(at, other))])


def wanted(at, rank):
    """Return `(owner, local token)` of what a rank must pull, and of what it may: to the block, where cells are off."""
    must, may = [], []
    blocks = at.mask.blocks
    for other in range(at.layout.size):
        if other == rank:
            continue
        seen = visible(at, rank, other).any(0)
        must += [(other, token) for token in seen.nonzero().flatten().tolist()]
        if blocks is not None:
            rows, columns = (np.array(positions(at, r), dtype=int) // blocks.size for r in (rank, other))
            seen = torch.from_numpy(blocks.cells[np.ix_(rows, columns)].any(0))
        may += [(other, token) for token in seen.nonzero().flatten().tolist()]
    return must, may


def buffer_of(at, rank):
    """Return `(owner, local token)` of each token in a rank's buffer."""
    found = []
    for piece in pulled(at, rank):
        assert piece.start == len(found) and len(piece.tokens) > 0
        if found and found[-1] == (piece.owner, piece.tokens.start - 1):  # one move, but at the seam of two runs
            assert piece.tokens.start in {run.offset for run in at.layout.runs(piece.owner)}
        found += [(piece.owner, token) for token in range(*piece.tokens)]
    return found


def numbered(boxes, nbytes):
    """Return the ranks' outboxes, each byte another number, as int64 stand-ins for bytes."""
    return [torch.arange(nbytes) + rank * nbytes for rank in range(boxes)]


def indices(block):
    return [block.offset + row * block.pitch + byte for row in range(block.rows) for byte in range(block.width)]


def exchanged(exchanges, boxes, targets):
    """Carry out an exchange on every rank's target buffers; each byte may be written once."""
    for rank, exchange in enumerate(exchanges):
        assert not exchange.receives[rank] and not exchange.sends[rank]
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


@cases
def test_brings_every_key_that_is_seen_and_no_other(at):
    size, tokens = at.layout.size, at.layout.tokens
    plans = plans_of(at, 2)
    held = [buffer_of(at, rank) for rank in range(size)]
    for rank, plan in enumerate(plans):
        must, may = wanted(at, rank)
        assert len(held[rank]) == len(set(held[rank])) == plan.seen
        assert set(must) <= set(held[rank]) <= set(may)
        if at.mask != Full():  # in global order
            order = [positions(at, owner)[token] for owner, token in held[rank]]
            assert order == sorted(order)
        assert plan.most_seen == most_seen(at) == max(map(len, held))
    assert sums_own_tiles(at) == (max(len(plan.own) for plan in plans) > 1)
    for unit in range(2):
        row = len(plans[0].units[unit].kv_heads) * 2 * 4
        exchanges = [plan.inbound[unit].exchange for plan in plans]
        assert len({exchange.nbytes for exchange in exchanges}) == 1
        boxes = numbered(size, exchanges[0].nbytes)
        targets = [[torch.full((2 * plan.seen * row,), -1) for _ in (0, 1)] for plan in plans]
        exchanged(exchanges, boxes, targets)
        sent = [fields(box, (2, tokens), row) for box in boxes]
        for rank, buffer in product(range(size), (0, 1)):
            expected = [sent[owner][buffer][:, token] for owner, token in held[rank]]
            assert not expected or torch.equal(targets[rank][buffer].view(2, -1, row), torch.stack(expected, 1))


def count(tiles, queries, keys):
    """Return how often each query meets each key."""
    found = torch.zeros(queries, keys, dtype=torch.long)
    for tile in tiles:
        pairs = shown(tile.pattern, len(tile.queries), len(tile.keys))
        assert tile.area == pairs.sum() > 0
        found[tile.queries.slice, tile.keys.slice] += pairs
    return found


@cases
def test_attends_to_every_visible_pair_once(at):
    for rank, plan in enumerate(plans_of(at)):
        assert plan.real == len(positions(at, rank))
        assert torch.equal(count(plan.own, plan.real, plan.real), visible(at, rank, rank).long())
        columns = [visible(at, rank, owner)[:, token] for owner, token in buffer_of(at, rank)]
        pairs = torch.stack(columns, 1).long() if columns else torch.zeros(plan.real, 0, dtype=torch.long)
        for tiles in (plan.forward, plan.backward):
            assert torch.equal(count(tiles, plan.real, plan.seen), pairs)
            for tile in (*plan.own, *tiles):
                check_needs(tile.pattern.needs, at.mask)
        for tiles, dim in ((plan.forward, 1), (plan.backward, 0)):  # one merge of each query, one writer of each key
            seers = sum(count([tile], plan.real, plan.seen).any(dim).long() for tile in tiles)
            assert not tiles or seers.max() <= 1


@cases
def test_kernels_write_where_gradients_lie_only_if_tiles_are_apart(at):
    for plan in plans_of(at):
        writes = torch.zeros(plan.seen, dtype=torch.long)
        for tile in plan.backward:
            writes[tile.keys.slice] += 1
        assert plan.apart == bool((writes == 1).all())


def hold_sums(sums, tokens, written):
    """Hold sums of parts to what was written: `written[token]` are the parts that have something for it.

    Args:
        sums: How the parts are added.
        tokens: How many there are.
        written: For each token, its parts, ascending.
    """
    assert [span for rows in sums.rows for span in rows.tokens] == _edges(sums.rows, tokens)
    first_ones = [parts == list(range(len(parts))) for parts in written]
    assert sums.zeroed == (not all(first_ones))
    for rows in sums.rows:
        for token in range(*rows.tokens):
            if sums.zeroed:  # zero where it was not written: more may be read, none may be missed
                assert max(written[token]) < rows.parts
            else:
                assert len(written[token]) == rows.parts


def _edges(rows, tokens):
    """Return starts and stops of spans that follow each other from 0 to `tokens`."""
    starts = [span.start for span, _ in rows]
    return [edge for pair in zip(starts, [*starts[1:], tokens], strict=True) for edge in pair] if rows else []


@cases
def test_parts_of_query_gradients_are_added_once_written(at):
    for plan in plans_of(at):
        written = [
            [0] + [i for i, tile in enumerate(plan.backward, 1) if token in range(*tile.queries)]
            for token in range(plan.real)
        ]
        hold_sums(plan.query_sums, plan.real, written)


@cases
def test_gradients_come_home_from_all_that_pulled_the_key(at):
    size = at.layout.size
    plans = plans_of(at, 2)
    row = len(plans[0].units[1].kv_heads) * 2 * 4
    exchanges = [plan.outbound[1].exchange for plan in plans]
    assert len({exchange.nbytes for exchange in exchanges}) == 1
    assert {plan.most_key_parts for plan in plans} == {max(plan.key_parts for plan in plans)}
    boxes = numbered(size, exchanges[0].nbytes)
    targets = [[torch.full((plan.key_parts * 2 * plan.real * row,), -1) for _ in (0, 1)] for plan in plans]
    exchanged(exchanges, boxes, targets)
    held = [{place: i for i, place in enumerate(buffer_of(at, rank))} for rank in range(size)]
    for rank, plan in enumerate(plans):
        written = [[0] for _ in range(plan.real)]
        for buffer in (0, 1):
            parts = targets[rank][buffer].view(plan.key_parts, 2, plan.real, row)
            assert (parts[0] == -1).all()  # own part
            for token in range(plan.real):
                seers = [p for p in range(size) if (rank, token) in held[p]]
                outboxes = [fields(boxes[p], (2, plans[p].seen), row)[buffer] for p in seers]
                expected = [outbox[:, held[p][rank, token]] for p, outbox in zip(seers, outboxes, strict=True)]
                came = [part for part in range(1, plan.key_parts) if (parts[part, :, token] != -1).any()]
                assert {tuple(parts[part, :, token].flatten().tolist()) for part in came} == {
                    tuple(gradient.flatten().tolist()) for gradient in expected
                }
                assert len(came) == len(seers)
                written[token] = [0, *came]
        hold_sums(plan.key_sums, plan.real, written)


def moved(exchange):
    return sum(move.target.nbytes for moves in exchange.receives for move in moves)


def test_halves_of_an_outbox_are_aligned():
    """Kernels write vectors of 16 bytes, and copies are fastest from whole sectors."""
    plan = make_gather_plan(*shapes(visibility("zigzag", Causal(), 3, 6), batch=1, kv_heads=1, head_dim=1), 1, 0)
    assert all(exchange.nbytes % 1024 == 0 for exchange, _ in (*plan.inbound, *plan.outbound))


def test_zigzag_moves_less_than_everything():
    """Rank r of P sees 2P - 1 - r chunks before its last; its first run's keys are among them."""
    for size in (2, 3, 4, 8):
        at = visibility("zigzag", Causal(), size, 8)
        for rank, plan in enumerate(plans_of(at)):
            chunks = 2 * size - 2 - rank
            assert plan.seen == 4 * chunks
            # tokens, K and V, batch, heads, dim, bytes
            assert moved(plan.inbound[0].exchange) == chunks * 4 * 2 * 2 * 3 * 2 * 4
            assert len(plan.forward) == len(plan.backward) == (1 if rank in (0, size - 1) else 2)
            assert all(tile.pattern == FULL for tile in (*plan.forward, *plan.backward)) and plan.apart
            assert len(plan.query_sums.rows) == len(plan.key_sums.rows) == (1 if rank == size - 1 else 2)
            assert not plan.query_sums.zeroed and not plan.key_sums.zeroed
            assert moved(plan.outbound[0].exchange) == (size - 1 + rank) * 4 * 2 * 2 * 3 * 2 * 4


def test_a_window_pulls_what_it_shows_and_no_more():
    """With 16 tokens a rank and a window of 5, the 4 keys before one's own."""
    at = visibility("contiguous", SlidingWindow(5), 4, 16)
    assert [plan.seen for plan in plans_of(at)] == [0, 4, 4, 4]
    assert most_seen(at) == 4
    assert all(moved(plan.inbound[0].exchange) == plan.seen * 2 * 2 * 3 * 2 * 4 for plan in plans_of(at))
    assert [pulled(at, 2)[0].owner, pulled(at, 2)[0].tokens] == [1, Span(12, 16)]
    both = visibility("contiguous", SlidingWindow(5, causal=False), 4, 16)
    assert [plan.seen for plan in plans_of(both)] == [4, 8, 8, 4]
    seam = plans_of(visibility("zigzag", SlidingWindow(5), 4, 16))  # the last rank's two chunks are neighbours
    assert [plan.seen for plan in seam] == [4, 8, 8, 4]


def test_blocks_that_nobody_sees_do_not_move():
    lengths = [16, 7, 9, 1, 15, 10, 6]
    blocks = BlockSparse(np.eye(8, dtype=bool), 8)
    prefixes = PrefixLM([n // 2 for n in lengths], lengths)
    for mask in (Documents(lengths), Documents(lengths, causal=False), prefixes, blocks):
        at = visibility("contiguous", mask, 4, 16)
        for plan in plans_of(at):
            assert (plan.seen, plan.most_seen, plan.forward, plan.backward, plan.key_parts) == (0, 0, (), (), 1)
            assert plan.own and plan.query_sums.rows == plan.key_sums.rows == (SummedTokens(Span(0, 16), 1),)
            assert not any(moved(exchange) for exchange, _ in (*plan.inbound, *plan.outbound))
    one = plans_of(visibility("contiguous", Documents([16, 24, 24]), 4, 16))  # the middle of three is on two ranks each
    assert [plan.seen for plan in one] == [0, 0, 16, 8]
    assert {plan.most_seen for plan in one} == {16}  # every rank takes part


@pytest.mark.parametrize(("early", "late"), [((4, 7), (5, 6)), ((4, 6), (5, 7)), ((4, 6), (6, 7)), ((5, 7), (4, 6))])
def test_what_several_runs_see_is_pulled_once(early, late):
    """Rank 0 has blocks 0 to 3 and 12 to 15, of 4 tokens; what both see may be nested, overlap or touch."""
    on = np.zeros((16, 16), dtype=bool)
    on[0, slice(*early)] = on[13, slice(*late)] = True
    at = visibility("zigzag", BlockSparse(on, 4), 2, 32)
    assert pulled(at, 0) == ((1, Span(0, 12), 0),)
    assert pulled(at, 1) == () and most_seen(at) == 12


def test_parts_of_those_who_see_most_come_first():
    """So nothing need be zero: rank 1 sees all keys of the last rank, and rank 0 the first three."""
    plan = plans_of(visibility("contiguous", SlidingWindow(20, causal=False), 3, 16))[2]
    assert plan.key_sums == GradientSumPlan((SummedTokens(Span(0, 3), 3), SummedTokens(Span(3, 16), 2)), zeroed=False)


def test_documents_are_a_call_of_segments():
    rng = random.Random(0)
    lengths = [rng.choice((1, 2, 5, 30)) for _ in range(300)]
    lengths.append(-sum(lengths) % 64 + 64)
    total = sum(lengths)
    for causal, name in product((True, False), ("contiguous", "zigzag", "balanced")):
        for plan in plans_of(visibility(name, Documents(lengths, causal), 4, total // 4)):
            assert [type(tile.pattern) for tile in plan.own] == [Segments]
            assert len(plan.forward) <= 2 and len(plan.backward) <= 2
