"""The order of training is one order: of any number of ranks, resumed anywhere."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.data import Batches, PackedSequences
from bmburst.data.packing import Permutation
from tests import tiny
from tests.pairs import long
from tests.refusals import refused

LENGTH = 8


def make(folder, count=23, tag="", **options):
    """Return training sequences of which no two are equal."""
    rng = np.random.default_rng(1)
    texts = ["".join(map(chr, rng.integers(97, 123, 100))) + tag for _ in range(count * LENGTH // 90)]
    file = tiny.token_file(folder / f"x{tag}{count}", texts)
    return PackedSequences(file, split="train", sequence_length=LENGTH, **options)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    found = make(tmp_path_factory.mktemp("batches"), 230)
    assert len({found[i].tobytes() for i in range(len(found))}) == len(found) > 100
    return found


def read(samples):
    """Return all ids of a batch, `[rows, LENGTH + 1]`, read at once: labels stand one place behind their inputs."""
    inputs, labels = samples.whole()
    assert (inputs[:, 1:] == labels[:, :-1]).all()
    return np.concatenate([inputs, labels[:, -1:]], axis=1)


def take(batches, steps):
    return [read(next(batches)) for _ in range(steps)]


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(), st.integers(0, 10))
def test_permutation_is_one(size, seed, epoch):
    permutation = Permutation(size, seed, epoch)
    assert sorted(map(permutation, range(size))) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 10**15), st.data())
def test_permutation_of_a_huge_corpus(size, data):
    permutation = Permutation(size, 3, 4)
    some = data.draw(st.sets(st.integers(0, size - 1), max_size=30))
    images = [permutation(i) for i in some]
    assert len(set(images)) == len(some)
    assert all(0 <= i < size for i in images)
    for bad in (-1, size):
        with pytest.raises(IndexError):
            permutation(bad)


def test_permutation_looks_random():
    # Every image equally often at every place, over many keys: 30 * 30 cells of 3,000 / 30 = 100 expected.
    size, keys = 30, 3000
    counts = np.zeros((size, size))
    for key in range(keys):
        permutation = Permutation(size, 7, key)
        for i in range(size):
            counts[i, permutation(i)] += 1
    expected = keys / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5
    # Neighbours do not stay neighbours.
    permutation = Permutation(10_000, 1, 1)
    steps = np.diff([permutation(i) for i in range(10_000)])
    assert (np.abs(steps) == 1).mean() < 0.002


def test_an_epoch_has_every_sample_once(sequences):
    batches, count = Batches(sequences, batch_size=1, seed=5), len(sequences)
    epochs = [[batch.tobytes() for batch in take(batches, count)] for _ in range(3)]
    assert batches.epoch == 3
    every = Counter(sequences[i].tobytes() for i in range(count))
    assert all(Counter(epoch) == every for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3  # and each in another order
    in_order = [sequences[i].tobytes() for i in range(count)]
    assert in_order not in epochs


def test_order_is_of_the_seed(sequences):
    def order(seed):
        return np.concatenate(take(Batches(sequences, batch_size=4, seed=seed), 20))

    np.testing.assert_array_equal(order(1), order(1))
    assert (order(1) != order(2)).any()
    assert order(1).dtype == np.int64
    assert order(1).shape == (80, LENGTH + 1)


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
def test_batches_are_the_same_on_any_number_of_ranks(sequences, data_parallel):
    alone = Batches(sequences, batch_size=4, seed=3)
    ranks = [
        Batches(sequences, batch_size=4, seed=3, data_rank=rank, data_parallel=data_parallel)
        for rank in range(data_parallel)
    ]
    for _ in range(len(sequences)):  # several epochs, whose ends are inside batches
        np.testing.assert_array_equal(np.concatenate([read(next(rank)) for rank in ranks]), read(next(alone)))
        assert {rank.text_bytes for rank in ranks} == {alone.text_bytes}
        assert {json.dumps(rank.state_dict()) for rank in ranks} == {json.dumps(alone.state_dict())}


def test_text_bytes_are_of_the_whole_batch(sequences):
    batches = Batches(sequences, batch_size=6, seed=0)
    assert batches.text_bytes == 0
    batch = take(batches, 5)[-1]
    assert batches.text_bytes == (batch[:, 1:] < 256).sum()


@pytest.mark.parametrize("examples", [15, *long(100)])
def test_resume_goes_on_exactly(sequences, examples):
    @settings(deadline=None, max_examples=examples)
    @given(st.integers(0, 400), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
    def goes_on(steps, ranks_before, ranks_after):
        require_the_same(sequences, steps, ranks_before, ranks_after)

    goes_on()


def require_the_same(sequences, steps, ranks_before, ranks_after):
    uninterrupted = Batches(sequences, batch_size=4, seed=9)
    take(uninterrupted, steps)
    saved = Batches(sequences, batch_size=4, seed=9, data_rank=ranks_before - 1, data_parallel=ranks_before)
    take(saved, steps)
    state = json.loads(json.dumps(saved.state_dict()))
    resumed = [
        Batches(sequences, batch_size=4, seed=9, data_rank=rank, data_parallel=ranks_after)
        for rank in range(ranks_after)
    ]
    for rank in resumed:
        rank.load_state_dict(state)
    for _ in range(3):
        np.testing.assert_array_equal(np.concatenate([read(next(rank)) for rank in resumed]), read(next(uninterrupted)))
    assert resumed[0].state_dict() == uninterrupted.state_dict()


def test_resume_with_another_batch_size_misses_no_sample(sequences):
    first = Batches(sequences, batch_size=3, seed=0)
    taken = list(np.concatenate(take(first, 5)))
    second = Batches(sequences, batch_size=7, seed=0)
    second.load_state_dict(first.state_dict())
    taken += list(np.concatenate(take(second, 4)))
    straight = np.concatenate(take(Batches(sequences, batch_size=1, seed=0), len(taken)))
    np.testing.assert_array_equal(np.stack(taken), straight)


def refuse(batches, state, *words):
    before = batches.state_dict()
    with refused(*words):
        batches.load_state_dict(state)
    assert batches.state_dict() == before


def test_state_of_something_else_is_refused(tmp_path, sequences):
    state = Batches(sequences, batch_size=2, seed=0).state_dict()
    batches = Batches(sequences, batch_size=2, seed=0)
    next(batches)
    other = make(tmp_path, 230, tag="z")
    refuse(Batches(other, batch_size=2, seed=0), state, "corpus", "--init-from")
    refuse(Batches(sequences, batch_size=2, seed=1), state, "seed", "0", "1", "--init-from")
    longer = PackedSequences(sequences.token_file, split="train", sequence_length=9)
    refuse(Batches(longer, batch_size=2, seed=0), state, "sequence_length", "8", "9", "--init-from")
    more_held = PackedSequences(sequences.token_file, split="train", sequence_length=8, held_out_fraction=0.5)
    refuse(Batches(more_held, batch_size=2, seed=0), state, "held_out_fraction", "0.05", "0.5", "--init-from")
    for broken in ({}, {**state, "samples": "3"}, {**state, "samples": -1}, {**state, "version": 7}):
        refuse(batches, broken, "position", "resume", "another checkpoint")


@pytest.mark.parametrize(
    ("batch_size", "rank", "ranks", "words"),
    [
        (3, 0, 2, "batch_size 3 | 2 data ranks | fix: | 2 or 4"),
        (1, 0, 4, "batch_size 1 | 4 data ranks | give 4"),
        (0, 0, 1, "batch_size 0 | 1 data ranks | give 1"),
        (-4, 0, 2, "batch_size -4 | 2 data ranks | fix: give 2"),
        (4, 2, 2, "data_rank is 2 | data_parallel | fix: "),
        (4, -1, 2, "data_rank is -1 | data_parallel | fix: "),
    ],
)
def test_batch_size_and_ranks_that_do_not_fit(sequences, batch_size, rank, ranks, words):
    with refused(words):
        Batches(sequences, batch_size=batch_size, seed=0, data_rank=rank, data_parallel=ranks)


def test_a_single_sample_is_an_epoch(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["abcdefghij"])
    sequences = PackedSequences(file, split="train", sequence_length=9)
    batches = Batches(sequences, batch_size=3, seed=0)
    assert (len(sequences), len(np.unique(read(next(batches)), axis=0)), batches.epoch) == (1, 1, 3)
