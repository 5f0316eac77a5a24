"""A token file holds exactly the documents it was given, and a damaged one is refused."""

import json
import os
import random
import re
import resource
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.data import ByteTokenizer, TokenFile
from bmburst.data.documents import Document
from bmburst.data.token_file import MAGIC, PREAMBLE, is_token_file
from bmburst.data.token_writer import write_token_file
from tests import tiny
from tests.refusals import refused


class WordTokenizer:
    """Ids are lengths of words: many bytes a token, and more of them than two bytes can count."""

    name, identity, vocab_size, eos_id = "words", "words-1", 100_000, 99_999

    def encode(self, text):
        return np.array([len(word) for word in re.findall(r"\S+|\s+", text)], np.int64)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return " ".join("x" * i for i in ids)


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1).filter(any))
def test_every_document_comes_back(tmp_path_factory, texts):
    file = tiny.token_file(tmp_path_factory.mktemp("f") / "x.tokens", texts)
    kept = [text for text in texts if text]
    offsets = file.document_offsets
    found = [file.tokens[a:b] for a, b in pairwise(offsets)]
    assert [ByteTokenizer().decode(ids[:-1]) for ids in found] == kept
    assert all(ids[-1] == file.eos_id and file.eos_id not in ids[:-1] for ids in found)
    assert np.diff(file.byte_offsets).tolist() == [len(text.encode()) for text in kept]
    assert file.text_bytes == sum(len(text.encode()) for text in kept)
    assert (file.document_count, file.token_count) == (len(kept), file.text_bytes + len(kept))
    same = [[a == b for a in kept] for b in kept]
    assert (file.document_keys[:, None] == file.document_keys[None]).tolist() == same


def test_pieces_make_one_document_with_the_same_key(tmp_path):
    pieces = ["one\n", "", "two\n", "three"]
    split = write_token_file(tmp_path / "a", [Document(name="a", pieces=iter(pieces))], ByteTokenizer())
    whole = tiny.token_file(tmp_path / "b", ["".join(pieces)])
    assert split.document_count == 1
    assert split.fingerprint == whole.fingerprint
    assert split.document_keys[0] == whole.document_keys[0]


def test_many_batches_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr("bmburst.data.token_writer._ROWS_AT_A_TIME", 7)
    texts = [f"line {i}\n" * (i % 13) for i in range(100)]
    in_pieces = (Document(name=str(i), pieces=text.splitlines(keepends=True)) for i, text in enumerate(texts))
    cut = write_token_file(tmp_path / "cut", in_pieces, ByteTokenizer(), batch=50)
    monkeypatch.undo()
    whole = tiny.token_file(tmp_path / "whole", texts)
    assert cut.path.read_bytes() == whole.path.read_bytes()


def test_large_vocabulary_takes_four_bytes(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["a bb", "y" * 70_000], WordTokenizer())
    assert file.tokens.dtype == np.uint32
    assert file.tokens.tolist() == [1, 1, 2, 99_999, 70_000, 99_999]
    assert (file.max_id, file.vocab_size, file.tokenizer_name) == (99_999, 100_000, "words")
    assert tiny.token_file(tmp_path / "y", ["a"]).tokens.dtype == np.uint16


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer()], ids=["bytes", "words"])
def test_bytes_between_adds_up(tmp_path, tokenizer):
    texts = ["a", "bb cc  dddd", "héé 世界", "x" * 17 + " y"]
    file = tiny.token_file(tmp_path / "x", texts, tokenizer)
    offsets = file.document_offsets.tolist()
    for d, text in enumerate(texts):
        assert file.bytes_between(offsets[d], offsets[d + 1]) == len(text.encode())
        assert file.bytes_between(offsets[d + 1] - 1, offsets[d + 1]) == 0  # the end-of-document id
    for cut in range(file.token_count + 1):
        assert file.bytes_between(0, cut) + file.bytes_between(cut, file.token_count) == file.text_bytes
    each = [file.bytes_between(i, i + 1) for i in range(file.token_count)]
    assert min(each) >= 0
    assert sum(each) == file.text_bytes
    if isinstance(tokenizer, ByteTokenizer):
        assert each == (np.asarray(file.tokens) < 256).astype(int).tolist()


def test_slice_reads_only_itself(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["x" * 8_000_000])
    tracemalloc.start()
    part = np.array(file.tokens[5_000_000:5_001_000], np.int64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.tolist() == [ord("x")] * 1000
    assert peak < 100_000


def test_streaming_keeps_memory_bounded(tmp_path):
    piece = "some text of a line\n" * 50_000  # 1 MB
    stream = [Document(name="large", pieces=(piece for _ in range(100)))]
    tracemalloc.start()
    file = write_token_file(tmp_path / "x", stream, ByteTokenizer())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.text_bytes == 100_000_000
    assert peak < 80_000_000


def refuse(path, *words):
    with refused(*words, "bmburst data"):
        TokenFile.open(path)


def test_truncated_at_any_byte(tmp_path):
    data = tiny.token_file(tmp_path / "x", ["hello", "world"]).path.read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        refuse(tmp_path / "cut", "cut", "not a token file" if size < len(MAGIC) else "damaged")
    (tmp_path / "cut").write_bytes(data + b"x")
    refuse(tmp_path / "cut", "damaged", len(data), len(data) + 1)


def test_foreign_missing_and_lying_files(tmp_path):
    (tmp_path / "foreign").write_bytes(b"PK\3\4" * 100)
    refuse(tmp_path / "foreign", "not a token file")
    assert not is_token_file(tmp_path / "foreign")
    refuse(tmp_path / "gone", "gone")
    refuse(tmp_path, tmp_path)

    good = tiny.token_file(tmp_path / "x", ["hello", "world"]).path
    assert is_token_file(good)
    data = good.read_bytes()
    _, at, _ = PREAMBLE.unpack(data[: PREAMBLE.size])
    header = json.loads(data[at:])
    refuse_without_seal = json.dumps(header)
    for key in ("checksums", "checksum"):  # of an earlier version: what is read is checked as far as it can be
        del header[key]

    def with_header(text):
        (tmp_path / "y").write_bytes(PREAMBLE.pack(MAGIC, at, len(text)) + data[PREAMBLE.size : at] + text)
        return tmp_path / "y"

    TokenFile.open(with_header(json.dumps(header).encode())).verify()
    refuse(with_header(refuse_without_seal.encode()), "damaged", "checksum")
    refuse(with_header(json.dumps({**header, "checksums": {}}).encode()), "damaged", "checksum")
    for number in (float("inf"), float("nan"), -1, 1.5, 10**400, None):
        for key in ("tokens", "documents", "max_id", "text_bytes"):
            refuse(with_header(json.dumps({**header, key: number}).encode()), "damaged")
    refuse(with_header(b'{"version": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "damaged", "JSON")
    refuse(with_header(json.dumps({**header, "tokenizer": []}).encode()), "damaged")
    refuse(with_header(b"not json"), "damaged", "JSON")
    refuse(with_header(json.dumps({**header, "version": 99}).encode()), "version")
    refuse(with_header(b"[]"), "version")
    refuse(with_header(json.dumps({**header, "tokens": 1_000_000}).encode()), "damaged")
    refuse(with_header(json.dumps({**header, "tokens": header["tokens"] - 4}).encode()), "damaged")
    refuse(with_header(json.dumps({**header, "dtype": "int16"}).encode()), "damaged")
    refuse(with_header(json.dumps({**header, "dtype": "float64"}).encode()), "damaged")
    refuse(with_header(json.dumps({**header, "dtype": "nonsense"}).encode()), "damaged")
    refuse(with_header(json.dumps({**header, "tokens": "many"}).encode()), "damaged")
    del header["tokenizer"]
    refuse(with_header(json.dumps(header).encode()), "damaged", "tokenizer")


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    old = tiny.token_file(tmp_path / "x", ["old"]).path.read_bytes()

    def failing():
        yield Document(name="a", pieces=["new text"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_file(tmp_path / "x", failing(), ByteTokenizer())
    assert (tmp_path / "x").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_empty_corpus(tmp_path, texts):
    with refused("corpus", "empty", "files"):
        tiny.token_file(tmp_path / "sub" / "x", texts)
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_limit_of_a_files_size_is_not_taken_for_a_full_disk(tmp_path):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        with refused("File too large", "ulimit -f"):
            tiny.token_file(tmp_path / "a.tokens", ["a" * 1000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_unwritable_output(tmp_path):
    with refused(str(tmp_path), "directory", "file"):
        tiny.token_file(tmp_path, ["a"])
    (tmp_path / "file").write_text("")
    with refused("cannot write", "file/x", "--output", "--data.cache"):
        tiny.token_file(tmp_path / "file" / "x", ["a"])


def test_tokenizer_that_breaks_its_word(tmp_path):
    class Liar(ByteTokenizer):
        vocab_size = 100

    with refused("tokenizer", "bytes", "allowed: 0 to 99", "122", "fix: "):
        tiny.token_file(tmp_path / "x", ["zzz"], Liar())


def test_require_vocab(tmp_path):
    file = tiny.token_file(tmp_path / "x", ["abc"])
    file.require_vocab(257)  # the end-of-document id is the largest there is
    with refused("token id 256", "vocab_size is 256", "fix: ", "resize_token_embeddings(259)"):
        file.require_vocab(256)


def test_fingerprint_is_of_tokens_and_documents(tmp_path):
    def fingerprint(texts, tokenizer=None):
        return tiny.token_file(tmp_path / "x", texts, tokenizer).fingerprint

    first = fingerprint(["ab", "c"])
    assert first == fingerprint(["ab", "", "c"])
    others = [fingerprint(texts) for texts in (["a", "bc"], ["c", "ab"], ["ab"], ["abc"])]
    assert len({first, *others, fingerprint(["ab", "c"], WordTokenizer())}) == 6

    class OtherLibrary(ByteTokenizer):
        def encode(self, text):
            return super().encode(text)[::-1]

    # The same name and texts but other tokens; and other texts, which are held out otherwise, but the same tokens.
    assert fingerprint(["ab", "c"], OtherLibrary()) != first
    assert fingerprint(["ab", "c"], WordTokenizer()) != fingerprint(["xy", "z"], WordTokenizer())


def test_what_is_no_file_is_not_replaced(tmp_path):
    """By its owner a device or a pipe could be: the finished file is renamed to the name that was given."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with refused("pipe", "fix: "):
        write_token_file(pipe, tiny.documents("text"), ByteTokenizer())
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_no_flipped_bit_goes_unseen(tmp_path):
    good = tiny.token_file(tmp_path / "x.tokens", ["hello", "a world", "of text"], WordTokenizer()).path
    data = good.read_bytes()
    flips = random.Random(18)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << flips.randrange(8)
        good.write_bytes(flipped)
        with refused("x.tokens", "bmburst data"):
            TokenFile.open(good).verify()
    good.write_bytes(data)
    TokenFile.open(good).verify()
