"""A part of a sample is what is there in the whole, and reading it touches nothing else of the file."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.data import Batches, ByteTokenizer, PackedSequences, Samples
from bmburst_ops import IGNORE_INDEX
from tests import tiny

EOS = ByteTokenizer.eos_id


class Counted:
    """Stands in for the tokens of a file, and counts those that are taken of them."""

    def __init__(self, tokens):
        self.tokens, self.taken = tokens, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, at):
        found = self.tokens[at]
        self.taken += found.size
        return found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny.token_file(tmp_path_factory.mktemp("samples") / "x", tiny.random_texts(60, seed=3))


@settings(deadline=None)
@given(st.sampled_from(["train", "held_out", "all"]), st.integers(1, 90), st.data())
def test_ids_at_places(file, split, length, data):
    sequences = PackedSequences(file, split=split, sequence_length=length, held_out_fraction=0.3)
    index = data.draw(st.integers(0, len(sequences) - (not sequences.partial_labels)))
    whole = sequences[index]
    start = data.draw(st.integers(0, len(whole)))
    places = range(start, data.draw(st.integers(start, len(whole))), data.draw(st.integers(1, 9)))
    counted = Counted(file.tokens)
    sequences.token_file = dataclasses.replace(file, tokens=counted)
    ids = sequences.read(index, places)
    assert ids.dtype == np.int64
    assert ids.tolist() == whole[list(places)].tolist()
    assert counted.taken == len(places) - (index == 0 and 0 in places)  # before the first token there is none


def test_places_that_are_not_there(file):
    sequences = PackedSequences(file, split="all", sequence_length=10)
    last = len(sequences)
    assert len(sequences.read(0, range(11))) == 11
    assert sequences.labels_in(last) == sequences.partial_labels > 0
    for index, places in (
        (0, range(12)),
        (0, range(-1, 3)),
        (0, range(5, 1, -1)),
        (last, range(sequences.partial_labels + 2)),
        (last + 1, range(1)),
    ):
        with pytest.raises(IndexError, match=r"no (places|sample)"):
            sequences.read(index, places)


@settings(deadline=None)
@given(st.integers(1, 120), st.integers(0, 20), st.integers(1, 7), st.sampled_from(["stream", "documents"]))
def test_rows_at_places(file, length, first, step, pack):
    """The last sample is partial, and a row beyond it has no text."""
    sequences = PackedSequences(file, split="all", sequence_length=length, pack=pack)
    last = len(sequences) - (not sequences.partial_labels)
    samples = Samples(sequences, (last,), (0, 1))
    places = range(min(first, length), length, step)
    ids = sequences[last].tolist()
    padding = [EOS] * (length - len(ids) + 1)
    inputs, labels = samples.read(0, places)
    assert inputs.tolist() == [(ids[:-1] + padding)[i] for i in places]
    assert labels.tolist() == [(ids[1:] + [IGNORE_INDEX] * len(padding))[i] for i in places]
    for found, fill in zip(samples.read(1, places), (EOS, IGNORE_INDEX), strict=True):
        assert found.dtype == np.int64
        assert found.tolist() == [fill] * len(places)
    assert samples.label_count == len(ids) - 1
    expected = None if pack == "stream" else (sequences.documents(last), (1,))
    assert samples.documents == expected


def test_what_is_coming_is_what_comes(file):
    """Also across the end of an epoch, and looking does not move on."""
    sequences = PackedSequences(file, split="train", sequence_length=50)
    batches = Batches(sequences, batch_size=4, seed=1, data_rank=1, data_parallel=2)
    for _ in range(len(sequences)):
        state, size, coming = batches.state_dict(), batches.text_bytes, [batches.coming(steps) for steps in range(3)]
        assert (batches.state_dict(), batches.text_bytes) == (state, size)
        assert next(batches) == coming[0]
        assert [batches.coming(), batches.coming(1)] == coming[1:]
        assert coming[0] != coming[1]
    assert batches.epoch > 2
