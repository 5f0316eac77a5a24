"""Evaluation sees every token once, in order, whatever the length, the batch and the ranks."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.data import ByteTokenizer, PackedSequences, evaluation_batches
from bmburst_ops import IGNORE_INDEX
from tests import tiny
from tests.refusals import refused

EOS = ByteTokenizer.eos_id


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    texts = ["the first text", "héllo", "x" * 50, "the end"]
    return tiny.token_file(tmp_path_factory.mktemp("evaluation") / "x", texts)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 5), st.sampled_from([1, 2, 3]))
def test_every_token_once(file, length, rows, ranks):
    sequences = PackedSequences(file, split="all", sequence_length=length)
    per_rank = [
        list(evaluation_batches(sequences, batch_size=rows * ranks, data_rank=rank, data_parallel=ranks))
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    labels, inputs, total_bytes = [], [], 0
    for step in zip(*per_rank, strict=True):
        fed, seen = (np.concatenate(parts) for parts in zip(*(batch.whole() for batch in step), strict=True))
        assert seen.shape == fed.shape == (rows * ranks, length)
        assert seen.dtype == fed.dtype == np.int64
        assert {batch.label_count for batch in step} == {int((seen != IGNORE_INDEX).sum())}
        assert {batch.text_bytes for batch in step} == {int(((seen != IGNORE_INDEX) & (seen < 256)).sum())}
        assert (seen != IGNORE_INDEX).any()
        assert (fed[seen == IGNORE_INDEX] == EOS).all()
        # Padding is at the end of a row, so that no token attends to it.
        assert (np.diff((seen == IGNORE_INDEX).astype(int), axis=1) >= 0).all()
        labels += seen[seen != IGNORE_INDEX].tolist()
        inputs += fed[seen != IGNORE_INDEX].tolist()
        total_bytes += step[0].text_bytes
    assert labels == file.tokens.tolist()
    assert inputs == [EOS, *file.tokens.tolist()[:-1]]
    assert total_bytes == file.text_bytes


def test_ignore_index_is_what_torch_ignores():
    parameters = inspect.signature(torch.nn.functional.cross_entropy).parameters
    assert parameters["ignore_index"].default == IGNORE_INDEX


def test_length_beyond_the_file(file):
    (batch,) = evaluation_batches(PackedSequences(file, split="all", sequence_length=1000))
    inputs, labels = batch.whole()
    assert inputs.shape == (1, 1000)
    assert batch.label_count == file.token_count
    assert labels[0, : file.token_count].tolist() == file.tokens.tolist()
    assert (labels[0, file.token_count :] == IGNORE_INDEX).all()


@pytest.mark.parametrize(("limit", "rows", "expected"), [(1, 1, 10), (3, 2, 30), (100, 4, None), (None, 1, None)])
def test_limit_counts_sequences(file, limit, rows, expected):
    sequences = PackedSequences(file, split="all", sequence_length=10)
    batches = list(evaluation_batches(sequences, batch_size=rows, limit=limit))
    total = sum(int((batch.whole()[1] != IGNORE_INDEX).sum()) for batch in batches)
    assert total == sum(batch.label_count for batch in batches) == (expected or file.token_count)


def test_order_is_fixed(file):
    def run():
        sequences = PackedSequences(file, split="held_out", sequence_length=3, held_out_fraction=0.3)
        return [batch.whole()[1].tolist() for batch in evaluation_batches(sequences, batch_size=2)]

    assert run() == run() != []


def test_refusals(file):
    sequences = PackedSequences(file, split="all", sequence_length=10)
    with refused("limit is 0", "at least 1", "fix: "):
        evaluation_batches(sequences, limit=0)
    with refused("batch_size 3", "2 data ranks", "2 or 4"):
        evaluation_batches(sequences, batch_size=3, data_parallel=2)
