"""Samples of a step are dealt to data groups by cost: none is lost, and no order of one sample at a time is faster."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.data import Batches
from bmburst.data.dealing import contiguous, deal_samples, slowest
from bmburst.data.whole_documents import pack_sequences
from bmburst.sequence import SequenceShard
from bmburst.train.loading import LocalBatch, sample_cost
from tests import chat, tiny

COSTS = st.lists(st.integers(1, 9), min_size=6, max_size=6)


@settings(deadline=None, max_examples=30)
@given(COSTS, st.sampled_from([2, 3]))
def test_no_order_is_faster(costs, groups):
    """Of all ways to give each group one sample at a time."""
    shares = deal_samples(costs, groups, 1)
    best = min(slowest(costs, np.array(order).reshape(groups, -1), 1) for order in permutations(range(6)))
    assert slowest(costs, shares, 1) == pytest.approx(best)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_each_sample_is_dealt_once(groups, rounds, together, data):
    count = groups * rounds * together
    costs = data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    shares = deal_samples(costs, groups, together)
    assert sorted(place for share in shares for place in share) == list(range(count))
    assert {len(share) for share in shares} == {rounds * together}
    sums = np.array(costs)[np.array(shares)].sum(1)
    assert sums.max() - sums.min() <= max(costs) - min(costs)
    assert deal_samples([1e20 * cost for cost in costs], groups, together) == shares
    assert slowest(costs, shares, together) >= 1 - 1e-9
    if len(set(costs)) == 1 or groups == 1:
        assert shares == contiguous(count, groups)
    elif together == 1:  # groups meet with like samples, the dearest first
        met = np.array(costs)[np.array(shares)]
        assert (met[:, :-1].min(0) >= met[:, 1:].max(0)).all()


def test_a_step_has_the_same_samples_and_dropout_on_any_number_of_groups(tmp_path):
    """Also where a run is resumed with other groups, and in the last step, which is padded."""
    folder = tmp_path / "model"
    tiny.save(folder, tiny.config(vocab_size=chat.VOCAB))
    chat.directory(folder, chat.MARKED)
    chat.write(tmp_path / "chats.jsonl", *chat.records(60))
    from bmburst.data import open_corpus

    corpus = open_corpus(tmp_path / "chats.jsonl", str(folder), tmp_path / "tokens")
    found = pack_sequences(corpus, split="train", sequence_length=160, held_out_fraction=0.0, pack="documents")
    cost = sample_cost(found, tiny.config(vocab_size=chat.VOCAB), "none")
    batch, total = 12, len(found) - len(found) % 12 + 7
    steps = -(-total // batch)
    assert steps > 1 and len({cost(i) for i in range(len(found))}) > 10

    def groups(count, state=None):
        made = [
            Batches(found, batch_size=batch, seed=1, data_rank=rank, data_parallel=count, total=total, cost=cost)
            for rank in range(count)
        ]
        for each in made if state else ():
            each.load_state_dict(state)
        return made

    def numbered(samples):
        cut = SequenceShard.cut(160, layout="zigzag", size=1, rank=0, mask="causal")
        numbers = LocalBatch.read(cut, samples, numbered=True).numbers
        return dict(zip(samples.places, numbers[:, 0].tolist(), strict=True))

    alone = groups(1)
    drawn = [next(alone[0]) for _ in range(steps)]
    assert alone[0].balance is None
    for count, other in ((2, 3), (3, 2), (4, 6)):
        parts, waited = groups(count), []
        for step in range(steps):
            if step == 1:
                parts = groups(other, parts[0].state_dict())
            taken = [next(part) for part in parts]
            assert {each.taken for each in taken} == {drawn[step].taken}
            assert len({each.balance for each in taken}) == 1
            waited.append(taken[0].balance)
            of_places = {place: row for each in taken for place, row in zip(each.places, each.rows, strict=True)}
            assert [of_places[place] for place in range(batch)] == list(drawn[step].rows)
            numbers = {place: number for each in taken for place, number in numbered(each).items()}
            assert numbers == numbered(drawn[step])
        assert all(each.dealt <= each.drawn + 1e-9 for each in waited)
        assert sum(each.drawn - each.dealt for each in waited) > 0.01
