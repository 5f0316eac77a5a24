"""Chains against brute force over tokens: every token in one piece, the order of links, and what continues what."""

import numpy as np
import pytest

from bmburst.schedule.chain import make_chain
from bmburst.schedule.cost import LinearCost
from bmburst.schedule.documents import Documents
from bmburst.schedule.hardware import hardware_like
from bmburst.schedule.layout import make_layout, padded_layout
from tests.refusals import refused

LAYOUTS = ("zigzag", "contiguous", "balanced")


def documents(length, seed):
    """Return starts of random documents, many of one token; every fifth seed has one document."""
    rng = np.random.default_rng(seed)
    cuts = np.flatnonzero(rng.random(length) < 0.2) if seed % 5 else np.array([], int)
    return tuple(sorted({0, *cuts.tolist()}))


def positions(layout, rank):
    """Return the global position of each local token."""
    found = np.empty(layout.tokens, np.int64)
    for run in layout.runs(rank):
        found[run.offset : run.offset + run.tokens] = run.start + np.arange(run.tokens)
    return found


def check(name, size, length, seed, has_initial, has_final):
    """The second sample is shorter where no final state is used."""
    lengths = (length, length if has_final else max(1, length - seed - 1))
    starts = (documents(length, seed), documents(lengths[1], seed + 1))
    masks = [Documents(np.diff([*each, length]).tolist()) for each in starts[:1]]
    layout = padded_layout(name, size, length, masks[0])
    chain = make_chain(layout, lengths, starts, has_initial=has_initial, has_final=has_final)
    document = [np.searchsorted(each, np.arange(length), side="right") for each in starts]
    states = {}  # piece that holds a token
    for rank in range(size):
        here, end = positions(layout, rank), 0
        for number, piece in enumerate(chain.pieces(rank)):
            assert (piece.sample * layout.tokens + piece.offset, piece.tokens > 0) == (end, True)
            end += piece.tokens
            of_piece = here[piece.offset : piece.offset + piece.tokens]
            assert ((of_piece < lengths[piece.sample]) == (piece.link >= 0)).all()
            assert piece.link >= 0 or not (piece.waits or piece.exports)
            if piece.link < 0:
                continue
            assert len(set(document[piece.sample][of_piece])) == 1 and (np.diff(of_piece) == 1).all()
            for position in of_piece:
                states[piece.sample, position] = rank, number, piece
        assert end == 2 * layout.tokens
    for sample in range(2):
        for position in range(lengths[sample]):
            _, _, piece = states[sample, position]
            before, after = states.get((sample, position - 1)), states.get((sample, position + 1))
            begins = position in starts[sample] and not (position == 0 and has_initial)
            if before is None or before[2] is not piece:
                assert piece.waits == (not begins)
            if after is None:
                assert piece.exports == has_final
            elif after[2] is not piece:
                assert piece.exports == (position + 1 not in starts[sample])
    flat = [link.start for link in chain.links]
    assert flat == sorted(flat) and sum(link.tokens for link in chain.links) == length
    for k, link in enumerate(chain.links):
        inside = set(range(link.start, link.start + link.tokens))
        for sample in range(2):
            begin = {each for each in starts[sample] if not (each == 0 and has_initial)} | {lengths[sample]}
            if chain.continues[k][sample]:
                assert chain.through[k][sample] == (not inside & begin)
    check_halos(chain, starts, has_initial, lengths)


def check_halos(chain, starts, has_initial, lengths, width=3):
    """The rows that halos name hold the tokens just before a link, of the same document."""
    rows = np.full((chain.size, chain.slots, 2, width), -1)
    for link in chain.links:
        have = min(width, link.tokens)
        stop = link.start + link.tokens
        rows[link.rank, link.slot, :, width - have :] = np.arange(stop - have, stop)
    initial = np.tile(np.arange(-width, 0) - 100, (2, 1)) if has_initial else np.empty((0,))
    values = np.concatenate([rows.reshape(-1), initial.reshape(-1), [-1]])
    found = [(chain.halos(width), [link.start for link in chain.links])]
    found += [(chain.final_halo(width), lengths[:1])] if chain.has_final else []
    for places, ends in found:
        for each, end in zip(places.reshape(-1, 2, width), ends, strict=True):
            for sample in range(2):
                begin = max((s for s in starts[sample] if s < end and (s or not has_initial)), default=-width)
                if end >= lengths[sample] and not chain.has_final:
                    begin = end
                if end in starts[sample] and not (end == 0 and has_initial):
                    begin = end
                wanted = [p if p >= begin else -1 for p in range(end - width, end)]
                wanted = [p - 100 if has_initial and begin <= p < 0 else p for p in wanted]
                assert values[each[sample]].tolist() == wanted


@pytest.mark.parametrize("name", LAYOUTS)
def test_against_all_tokens(name):
    for size in (1, 2, 3):
        for length in (*range(size, 9), 23):
            for seed in (0, 1):
                check(name, size, length, seed, seed == 1, length % 2 == 1)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_lengths(name, size):
    for length in range(size, 71):
        for seed in (0, 1, 2):
            check(name, size, length, seed, seed == 1, length % 2 == 1)


def test_runs_that_follow_each_other_are_one_link():
    """A zigzag's last rank has the two chunks in the middle."""
    chain = make_chain(make_layout("zigzag", 2, 8), (16,), ((),), has_initial=False, has_final=False)
    assert [(link.rank, link.start, link.tokens) for link in chain.links] == [(0, 0, 4), (1, 4, 8), (0, 12, 4)]
    assert chain.exchanges and chain.passes
    alone = make_chain(make_layout("zigzag", 2, 8), (16,), ((0, 4, 12),), has_initial=True, has_final=False)
    assert not alone.exchanges


def test_striped_is_refused():
    with refused("layout 'striped' | different ranks | zigzag, contiguous, balanced | fix: layout='zigzag'"):
        make_chain(make_layout("striped", 2, 4), (8,), ((),), has_initial=False, has_final=False)
    with refused("final states | samples of 7 to 8 tokens"):
        make_chain(make_layout("zigzag", 2, 4), (8, 7), ((), ()), has_initial=False, has_final=True)


def test_many_ranks_fold_heads_and_few_gather():
    """Forward, over many ranks, a rank receives as much with two hops however many they are."""
    state = 32 * 128 * 128 * 4
    cost = {size: LinearCost(size=size, links=2, transition=state, state=state) for size in (2, 8, 64)}
    assert cost[8].forward_bytes(1) == 7 * 2 * 2 * state and cost[8].forward_bytes(2) == 7 * 2 * 3 * state // 8
    assert cost[64].forward_bytes(2) < 1.2 * cost[8].forward_bytes(2)
    hardware = hardware_like("NVIDIA H200")
    for hops, received, bandwidth in (
        (1, 7 * 2 * (2 + 1), hardware.collective_bandwidth),
        (2, 7 * 2 * (3 + 2) / 8, hardware.all_to_all_bandwidth),
    ):
        wanted = 2 * hops * hardware.nccl_latency + received * state / bandwidth
        assert cost[8].seconds(hops, hardware) == pytest.approx(wanted)
    assert cost[8].hops(hardware) == cost[64].hops(hardware) == 2
    assert LinearCost(size=2, links=2, transition=4, state=64).hops(hardware) == 1
