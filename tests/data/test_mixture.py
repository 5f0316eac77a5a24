"""A mixture takes each source as often as its weight says, exactly, on any ranks, and through every epoch."""

from collections import Counter

import numpy as np
import pytest

from bmburst.data import Batches, evaluation_batches
from bmburst.data.mixture import Mixture, read_mixture
from bmburst.data.packing import PackedSequences
from bmburst.data.whole_documents import WholeDocuments
from tests import tiny
from tests.data.test_records import masked_file
from tests.refusals import refused


@pytest.fixture
def parts(tmp_path):
    """Sequences of records and of text."""
    records = masked_file(tmp_path / "x", [(n % 9 + 2, [1]) for n in range(60)])
    text = tiny.token_file(tmp_path / "y", tiny.random_texts(30, seed=0, mean=3.0))
    options = {"sequence_length": 16, "held_out_fraction": 0.3, "pack": "documents"}
    return [
        [WholeDocuments(records, split=split, **options), PackedSequences(text, split=split, **options)]
        for split in ("train", "held_out")
    ]


def source_of(mixture, parts, index):
    """Return a source and the number in it, by what is read there."""
    for number, part in enumerate(parts):
        for own in part.evaluated():
            if part.labels_in(own) != mixture.labels_in(index):
                continue
            places = range(part.labels_in(own))
            if all((a == b).all() for a, b in zip(part.pairs(own, places), mixture.pairs(index, places), strict=True)):
                return number, own
    raise AssertionError(index)


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (0.7, 0.1), (1, 2.5)])
def test_shares_are_the_weights(parts, weights):
    mixture, steps = Mixture(parts[0], weights), 400
    taken = [mixture.drawn(position, 5) for position in range(steps)]
    found = [source_of(mixture, parts[0], index) for index in taken]
    counts = Counter(number for number, _ in found)
    for number, weight in enumerate(weights):
        assert abs(counts[number] - steps * weight / sum(weights)) <= 1
        for end in range(1, steps):  # and at every moment
            before = sum(each == number for each, _ in found[:end])
            assert abs(before - end * weight / sum(weights)) <= 1.5
        own, size = [each for source, each in found if source == number], len(parts[0][number])
        assert sorted(own[:size]) == list(range(min(size, len(own))))[: len(own)] or len(own) < size
        if len(own) >= 2 * size:
            assert sorted(own[size : 2 * size]) == list(range(size))
            assert own[:size] != own[size : 2 * size]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resume_on_any_ranks(parts, ranks):
    def new(rank=0, of=1, weights=(3, 1)):
        return Batches(Mixture(parts[0], weights), batch_size=4, seed=3, data_rank=rank, data_parallel=of)

    whole, begun = new(), new()
    wanted = [next(whole).taken for _ in range(20)]
    for _ in range(7):
        next(begun)
    for rank in range(ranks):
        resumed = new(rank, ranks)
        resumed.load_state_dict(begun.state_dict())
        assert [next(resumed).taken for _ in range(13)] == wanted[7:]
    with refused("corpus", "fix: "):
        new(weights=(3, 2)).load_state_dict(begun.state_dict())


def test_an_evaluation_begins_by_weights_and_takes_all(parts):
    mixture = Mixture(parts[1], (3, 1))
    batches = list(evaluation_batches(mixture, batch_size=2))
    taken = [index for batch in batches for index in batch.taken]
    assert len(set(taken)) == len(taken) == sum(len(part.evaluated()) for part in parts[1])
    assert sum(batch.label_count for batch in batches) == sum(
        part.counted_in(own) for part in parts[1] for own in part.evaluated()
    )
    limited = [index for batch in evaluation_batches(mixture, limit=4) for index in batch.taken]
    owns = [source_of(mixture, parts[1], index) for index in limited]  # of each source, evenly spread
    assert [number for number, _ in owns] == [source_of(mixture, parts[1], index)[0] for index in taken[:4]]
    assert Counter(source_of(mixture, parts[1], index)[0] for index in limited) == {0: 3, 1: 1}
    assert np.concatenate([batch.whole()[0] for batch in batches]).shape[1] == 16
    for outside in (-1, len(taken)):
        with pytest.raises(IndexError, match="no sample"):
            mixture.labels_in(outside)


def test_a_file_of_sources(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text("sources:\n- {path: a.jsonl, weight: 3}\n- {path: books, weight: 0.5}\n")
    first, second = read_mixture(path)
    assert (first.path, first.weight, second.weight) == (str(tmp_path / "a.jsonl"), 3, 0.5)
    assert read_mixture("stdlib") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("datasets:\n- path: a.jsonl\n  type: chat_template\nval_set_size: 0.05\n", "keys datasets, val_set_size"),
        ("source:\n- {path: a.jsonl, weight: 1}\n", "keys source | sources: ["),
        ("- {path: a.jsonl, weight: 1}\n", "holds a list"),
        ("sources:\n\t- {path: a.jsonl, weight: 1}\n", "line 2"),
        ("", "empty"),
    ],
    ids=["another program's", "misspelled", "a list", "a tab", "empty"],
)
def test_another_yaml_file_is_not_trained_on_as_text(tmp_path, text, words):
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    with refused(path, words, "fix: list the data under sources", ".txt"):
        read_mixture(path)


@pytest.mark.parametrize("weight", ["0", "-1", ".inf", ".nan", "a", "true"])
def test_a_weight_that_is_not_positive(tmp_path, weight):
    path = tmp_path / "mix.yaml"
    path.write_text(f"sources:\n- {{path: a, weight: 1}}\n- {{path: b, weight: {weight}}}\n")
    with refused(path, "source 2", "weight", "above 0", "fix: "):
        read_mixture(path)
    path.write_text("sources: []\n")
    with refused(path, "no sources", "fix: "):
        read_mixture(path)
    path.write_text("sources: [a]\n")
    with refused(path, "source 1", "path", "weight", "fix: "):
        read_mixture(path)
