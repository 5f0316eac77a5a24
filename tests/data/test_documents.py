"""Documents kept apart in packed sequences: the same samples, and what of each belongs together."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.data import Batches, ByteTokenizer, PackedSequences, evaluation_batches
from bmburst.data.packing import split_documents
from bmburst_ops import IGNORE_INDEX
from tests import tiny
from tests.refusals import refused

EOS = ByteTokenizer.eos_id


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny.token_file(tmp_path_factory.mktemp("documents") / "x", tiny.random_texts(40, seed=3))


@settings(deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=20),
    st.integers(1, 70),
    st.sampled_from(["train", "held_out", "all"]),
)
def test_documents_are_where_the_texts_are(tmp_path_factory, texts, length, split):
    """By walking through every token: a new document begins with a text, with a sample, and after what is left out."""
    file = tiny.token_file(tmp_path_factory.mktemp("d") / "x", [*texts, "abcd" * 20])
    parts = split_documents(file, 0.3)
    spans = {"train": parts.train, "held_out": parts.held_out, "all": np.array([[0, file.token_count]])}[split]
    options = {"split": split, "sequence_length": length, "held_out_fraction": 0.3}
    if split == "train" and sum(int(stop - start) for start, stop in spans) < length:
        return
    packed = PackedSequences(file, pack="documents", **options)
    stream = PackedSequences(file, **options)
    places = [at for start, stop in spans.tolist() for at in range(start, stop)]
    starts = set(file.document_offsets.tolist()) | set(spans[:, 0].tolist())
    for index, first in enumerate(range(0, len(places), length)):
        mine = places[first : first + length]
        begins = [i for i, at in enumerate(mine) if i == 0 or at in starts]
        expected = np.diff([*begins, len(mine)]).tolist()
        assert packed.documents(index) == tuple(expected)
        assert packed[index].tolist() == stream[index].tolist()
        assert stream.documents(index) is None
    for index in (-1, -(-len(places) // length)):
        with pytest.raises(IndexError):
            packed.documents(index)


def test_a_documents_inputs_are_an_end_and_its_text_and_its_labels_its_text_and_its_end(file):
    sequences = PackedSequences(file, split="all", sequence_length=50, pack="documents")
    seen = []
    for index in range(len(sequences) + 1):
        ids, at = sequences[index], 0
        for number, count in enumerate(sequences.documents(index)):
            inputs, labels = ids[at : at + count], ids[at + 1 : at + count + 1]
            is_rest = number == 0 and index > 0 and seen[-1][-1] != EOS
            assert is_rest or inputs[0] == EOS
            assert EOS not in inputs[1:]  # nothing of another document
            seen.append(labels.tolist())
            at += count
    assert list(itertools.chain(*seen)) == file.tokens.tolist()
    assert (
        max(len(labels) for labels in seen) == 50 < np.diff(file.document_offsets).max()
    )  # a document longer than a sequence


def test_batches_bring_their_documents_on_any_ranks_and_after_a_resume(file):
    sequences = PackedSequences(file, split="train", sequence_length=16, pack="documents")
    alone = Batches(sequences, batch_size=4, seed=3)
    ranks = [Batches(sequences, batch_size=4, seed=3, data_rank=rank, data_parallel=2) for rank in range(2)]
    by_sample = {sequences[i].tobytes(): sequences.documents(i) for i in range(len(sequences))}
    assert len(by_sample) == len(sequences)
    for _ in range(2 * len(sequences) // 4):
        batch = next(alone)
        inputs, labels = batch.whole()
        ids = np.concatenate([inputs, labels[:, -1:]], axis=1)
        assert batch.documents == tuple(by_sample[row.tobytes()] for row in ids)
        assert batch.documents == sum((next(rank).documents for rank in ranks), ())
    resumed = Batches(sequences, batch_size=4, seed=3)
    resumed.load_state_dict(alone.state_dict())
    assert next(resumed) == next(alone)
    stream = Batches(PackedSequences(file, split="train", sequence_length=16), batch_size=4, seed=3)
    assert next(stream).documents is None
    assert stream.state_dict().keys() == alone.state_dict().keys()


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_evaluation_batches_bring_their_documents(file, length, rows, ranks):
    sequences = PackedSequences(file, split="all", sequence_length=length, pack="documents")
    per_rank = [
        list(evaluation_batches(sequences, batch_size=rows * ranks, data_rank=rank, data_parallel=ranks))
        for rank in range(ranks)
    ]
    index, count = 0, len(sequences) + (sequences.partial_labels > 0)
    for step in zip(*per_rank, strict=True):
        for batch in step:
            text = (batch.whole()[1] != IGNORE_INDEX).sum(1).tolist()
            assert len(batch.documents) == rows
            for lengths, labels in zip(batch.documents, text, strict=True):
                assert lengths == (sequences.documents(index) if labels else (1,))
                assert sum(lengths) == max(1, labels)
                index += labels > 0
    assert index == count


def test_a_rank_without_text_and_a_stream(file):
    sequences = PackedSequences(file, split="all", sequence_length=10**4, pack="documents")
    *_, last = evaluation_batches(sequences, batch_size=2, data_rank=1, data_parallel=2)
    assert last.documents == ((1,),)
    stream = PackedSequences(file, split="all", sequence_length=10**4)
    assert [batch.documents for batch in evaluation_batches(stream)] == [None]


def test_unknown_pack(file):
    with refused("pack", "'document'", "'documents'", "stream"):
        PackedSequences(file, split="all", sequence_length=4, pack="document")
