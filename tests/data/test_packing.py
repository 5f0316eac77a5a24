"""Held-out text is never trained on, every token is a label once, and bytes are counted as they are."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bmburst.data import ByteTokenizer, PackedSequences
from bmburst.data.packing import held_out_documents, split_documents
from tests import tiny
from tests.refusals import refused

EOS = ByteTokenizer.eos_id


class PairTokenizer(ByteTokenizer):
    """Ids are pairs of characters, so that tokens and bytes are not the same number."""

    name = identity = "pairs"
    vocab_size, eos_id = 1 << 17, 65_536

    def encode(self, text):
        return np.array([sum(map(ord, text[i : i + 2])) % 65_536 for i in range(0, len(text), 2)], np.int64)


def covered(spans):
    """Return every token position of some ranges."""
    return [i for start, stop in spans.tolist() for i in range(start, stop)]


def key_of(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def all_samples(sequences):
    count = len(sequences) + (sequences.partial_labels > 0)
    return [sequences[i] for i in range(count)]


# A small alphabet makes documents of equal text.
corpora = st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=30)
fractions = st.floats(0.001, 0.999)


@settings(deadline=None)
@given(corpora, fractions)
@example(["aaaa", "bbbb", "abab", "baba"], 0.4)  # two of five texts are just what is asked for
def test_split_is_the_rule(tmp_path_factory, texts, fraction):
    """So that equal texts are on one side, but for one that may be cut, and every token is on one."""
    texts = [*texts, "abcd"]
    file = tiny.token_file(tmp_path_factory.mktemp("s") / "x", texts)
    target = max(1, int(file.token_count * fraction))
    held_texts, held, cut, tail = set(), 0, None, 0
    for text in sorted(set(texts), key=key_of):
        copies = texts.count(text)
        size = copies * (len(text) + 1)
        if held + size <= target:
            held_texts.add(text)
            held += size
            continue
        if held < target / 2:
            cut, tail = text, min(max((target - held) // copies, 1), len(text))
        break
    expected = []
    for d, text in enumerate(texts):
        begin, end = file.document_offsets[d : d + 2].tolist()
        expected += range(begin if text in held_texts else end - tail if text == cut else end, end)
    split = split_documents(file, fraction)
    assert covered(split.held_out) == expected and covered(split.train)
    assert sorted(covered(split.train) + expected) == list(range(file.token_count))
    for spans in (split.train, split.held_out):  # neighbours are joined
        assert (spans[1:, 0] > spans[:-1, 1]).all()


def test_split_is_of_the_texts_not_of_their_order(tmp_path):
    rng = np.random.default_rng(0)
    texts = [f"{i}: " + "x" * rng.integers(1, 200) for i in range(300)]

    def held_texts(order):
        file = tiny.token_file(tmp_path / "x", [texts[i] for i in order])
        spans = split_documents(file, 0.1).held_out
        ids = np.concatenate([file.tokens[a:b] for a, b in spans])
        return sorted(ByteTokenizer().decode(part[:-1]) for part in np.split(ids, np.flatnonzero(ids == EOS) + 1)[:-1])

    first = held_texts(range(300))
    assert first == held_texts(rng.permutation(300))
    assert set(first) <= set(texts)
    assert 10 < len(first) < 60


def test_split_does_not_change_between_versions(tmp_path):
    # A run that is resumed by a later version must not train on what was held out.
    file = tiny.token_file(tmp_path / "x", [f"document {i}" for i in range(20)])
    assert split_documents(file, 0.25).held_out.tolist() == [[0, 11], [33, 44], [66, 77], [194, 218]]


def test_whole_records_are_held_out_up_to_just_what_is_asked_for(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["aaaa", "bbbb", "abab", "baba"])
    assert held_out_documents(file, 0.5).sum() == 2


def test_one_document_holds_out_its_end(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["x" * 999])
    split = split_documents(file, 0.1)
    assert split.train.tolist() == [[0, 900]]
    assert split.held_out.tolist() == [[900, 1000]]


@pytest.mark.parametrize("fraction", [1, -0.5, 2, float("nan")])
def test_fraction_out_of_range(tmp_path, fraction):
    file = tiny.token_file(tmp_path / "x", ["some text"])
    with refused("held_out_fraction", "allowed: above 0", "below 1", "fix: ", fraction):
        PackedSequences(file, split="train", sequence_length=2, held_out_fraction=fraction)


def test_nothing_held_out(tmp_path):
    """A run with validation files of its own trains on all of its text."""
    file = tiny.token_file(tmp_path / "x", ["some text"])
    everything = PackedSequences(file, split="train", sequence_length=2, held_out_fraction=0)
    assert everything.label_count == PackedSequences(file, split="all", sequence_length=2).label_count
    with refused("held_out_fraction", "allowed: above 0", "below 1", "fix: ", 0):
        PackedSequences(file, split="held_out", sequence_length=2, held_out_fraction=0)


@settings(deadline=None)
@given(corpora, st.integers(1, 70), st.sampled_from(["train", "held_out", "all"]))
def test_every_token_is_a_label_once_after_the_one_before_it(tmp_path_factory, texts, length, split):
    file = tiny.token_file(tmp_path_factory.mktemp("s") / "x", [*texts, "abcd"])
    parts = split_documents(file, 0.3)
    spans = {"train": parts.train, "held_out": parts.held_out, "all": np.array([[0, file.token_count]])}[split]
    stream = [EOS, *(int(file.tokens[i]) for i in covered(spans))]
    if split == "train" and len(stream) <= length:
        with refused(f"{len(stream) - 1} tokens", f"sequence of {length}", "fix: ", "more text", "sequence_length"):
            PackedSequences(file, split=split, sequence_length=length, held_out_fraction=0.3)
        return
    sequences = PackedSequences(file, split=split, sequence_length=length, held_out_fraction=0.3)
    samples = all_samples(sequences)
    assert len(sequences) == (len(stream) - 1) // length
    for i, ids in enumerate(samples):
        assert ids.dtype == np.int64
        assert ids.tolist() == stream[i * length : (i + 1) * length + 1]
        assert len(ids) == length + 1 or i == len(sequences)
    assert [int(i) for ids in samples for i in ids[1:]] == stream[1:]
    for i in (-1, len(samples)):
        with pytest.raises(IndexError):
            sequences[i]
    # The byte tokenizer's bytes, by counting them.
    for i, ids in enumerate(samples):
        assert sequences.text_bytes(i) == sum(id_ < 256 for id_ in ids[1:].tolist())


@pytest.mark.parametrize("length", [1, 3, 7, 10_000])
def test_bytes_of_any_tokenizer_add_up(tmp_path, length):
    texts = [f"héllo wörld {i}" * (i % 5 + 1) for i in range(40)]
    file = tiny.token_file(tmp_path / "x", texts, PairTokenizer())
    total = 0
    for split in ("train", "held_out"):
        sequences = PackedSequences(file, split=split, sequence_length=min(length, 500), held_out_fraction=0.2)
        total += sum(sequences.text_bytes(i) for i in range(len(all_samples(sequences))))
    assert total == sum(len(text.encode()) for text in texts)
    whole = PackedSequences(file, split="all", sequence_length=length)
    assert sum(whole.text_bytes(i) for i in range(len(all_samples(whole)))) == total


def test_a_sample_does_not_read_the_file(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["y" * 20_000_000])
    sequences = PackedSequences(file, split="train", sequence_length=1_000_000)
    tracemalloc.start()
    ids = sequences[17]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (ids == ord("y")).all()
    assert peak < ids.nbytes + 1_000_000


@pytest.mark.parametrize("length", [0, -5])
def test_sequence_length_out_of_range(tmp_path, length):
    file = tiny.token_file(tmp_path / "x", ["some text"])
    with refused("sequence_length", "at least 1", length):
        PackedSequences(file, split="all", sequence_length=length)


def test_too_small_and_unknown(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["some text"])
    with refused("3 tokens", "too few", "fix: ", "more text"):
        split_documents(tiny.token_file(tmp_path / "y", ["ab"]), 0.5)
    with refused("split", "'heldout'", "'held_out'", "all"):
        PackedSequences(file, split="heldout", sequence_length=4)
