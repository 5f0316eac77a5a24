"""Streamed text is the text of all tokens, cut before a stop string, and nothing that was given out changes."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from bmburst.data import ByteTokenizer
from bmburst.data.tokenizer import HuggingFaceTokenizer
from bmburst.data.tokenizer_folder import TokenizerFolder
from bmburst.inference.answering import TextStream
from tests.data.test_tokenizer import train_bpe
from tests.refusals import refused

TEXT = "caf\u00e9 \u4f60\u597d \U0001f600\U0001f1e9\U0001f1ea def f(x):\n\treturn  x  "


def sentencepiece_like():
    """Return a tokenizer as LLaMA-2's: words begin with U+2581, unknown characters are tokens of a byte each."""
    words = ["\u2581", "\u2581the", "\u2581a", "b", "a", "\u2581\u2581", "c", ".", "\u4f60", "\ufffd", "o\ufffd"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HuggingFaceTokenizer("sentencepiece", TokenizerFolder(tokenizer=tokenizer))


def metaspace():
    tokenizer = sentencepiece_like()
    tokenizer._tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


BYTES, BPE, SPM, METASPACE = (
    ByteTokenizer(),
    HuggingFaceTokenizer("bpe", TokenizerFolder(tokenizer=train_bpe())),
    sentencepiece_like(),
    metaspace(),
)
FIRST_BYTE, FIRST_WORD = 3, 259


def stream(tokenizer, ids, stop=()):
    """Return the pieces: one a token, and the rest."""
    found = TextStream(tokenizer, stop)
    pieces = [found.push(int(token)) for token in ids]
    pieces.append(found.finish())
    assert found.text == "".join(pieces)
    return pieces, found.stop_string


def bytes_ids(tokenizer):
    return st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=40)


# Bytes that begin and continue characters of two to four bytes, some of them wrong.
UTF8 = st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 256]), max_size=30)


CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), st.sampled_from(" \U0001f600")
).map(lambda character: [FIRST_BYTE + byte for byte in character.encode()])
WORDS = st.integers(FIRST_WORD, SPM.vocab_size - 1).map(lambda word: [word])
SPECIAL = st.sampled_from([[1], [2], [-1], [SPM.vocab_size]])


def test_spaces_at_the_end_of_the_context_are_kept():
    """A space as a byte token alone decodes to nothing; the bytes after it must not be taken for wrong ones."""
    ids = [FIRST_WORD + 1, *(FIRST_BYTE + byte for byte in TEXT.encode())]
    assert "".join(stream(SPM, ids)[0]) == SPM.decode(ids) == f"the{TEXT}"


PARTS = st.lists(st.one_of(CHARACTERS, WORDS, SPECIAL), max_size=25).map(lambda parts: [*chain(*parts)])
IDS = {
    "bytes": (BYTES, st.one_of(bytes_ids(BYTES), UTF8, st.text().map(lambda text: BYTES.encode(text).tolist()))),
    "byte level": (BPE, st.one_of(bytes_ids(BPE), st.text().map(lambda text: BPE.encode(text).tolist()))),
    "sentencepiece with Strip": (SPM, PARTS),
    "sentencepiece with Metaspace": (METASPACE, PARTS),
}


@pytest.mark.parametrize("name", IDS)
def test_tokens_streamed_are_the_whole(name):
    tokenizer, drawn = IDS[name]

    @settings(deadline=None, max_examples=500 if "sentencepiece" in name else 300)
    @given(drawn)
    def check(ids):
        assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)

    check()


HIGH_BYTES = st.integers(FIRST_BYTE + 0x80, FIRST_BYTE + 0xFF).map(lambda token: [token])


@settings(deadline=None, max_examples=500)
@given(st.lists(st.one_of(HIGH_BYTES, CHARACTERS, WORDS, SPECIAL), max_size=30))
def test_wrong_byte_tokens_change_no_word(parts):
    ids = [token for part in parts for token in part if not FIRST_BYTE <= token < FIRST_BYTE + 0x80]
    pieces, _ = stream(SPM, ids)
    tokens = [SPM._tokenizer.id_to_token(token) or "" for token in ids if token not in (1, 2, -1)]
    words = "".join("\ufffd" if token.startswith("<0x") else token.replace("\u2581", " ") for token in tokens)
    assert _ascii("".join(pieces)) == _ascii(words.removeprefix(" "))


def _ascii(text):
    return text.encode("ascii", "ignore")


def test_a_run_of_byte_tokens_keeps_what_was_shown():
    ids = [FIRST_BYTE + byte for byte in "\u4f60".encode() + b"\xf0\x9f"] + [FIRST_WORD + 3]
    pieces, _ = stream(SPM, ids)
    assert pieces == ["", "", "\u4f60", "", "", "\ufffd\ufffdb", ""]


def test_wrong_bytes_after_a_space_or_before_an_unknown_character():
    space, begun, follows = FIRST_BYTE + 0x20, FIRST_BYTE + 0xC2, FIRST_BYTE + 0x80
    the, b, unknown = FIRST_WORD + 1, FIRST_WORD + 3, FIRST_WORD + 10
    assert stream(SPM, [the, space, begun, b])[0] == ["the", " ", "", "\ufffdb", ""]
    assert stream(SPM, [begun, follows, follows, unknown])[0] == ["", "\x80", "", "\ufffdo", "\ufffd"]


def test_an_emoji_is_never_cut():
    pieces, _ = stream(BYTES, BYTES.encode("a\U0001f600b"))
    assert pieces == ["a", "", "", "", "\U0001f600", "b", ""]
    pieces, _ = stream(BYTES, BYTES.encode("a\U0001f600")[:-1])
    assert pieces == ["a", "", "", "", "\ufffd"]


def test_text_comes_at_once():
    pieces, _ = stream(SPM, [FIRST_WORD + 1, FIRST_WORD + 2, FIRST_WORD + 3])
    assert pieces == ["the", " a", "b", ""]
    assert all(stream(BPE, BPE.encode("the return of"))[0][:-1])


@pytest.mark.parametrize(
    "ids",
    [[0x80], [0xF0], [256], [0x41], [65, 256], [0xE4, 256]],
    ids=["wrong", "begun", "special", "text", "text and special", "begun and special"],
)
def test_the_cost_of_a_token_does_not_grow(ids):
    longest = 0

    class Counting(ByteTokenizer):
        def decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    found = TextStream(Counting())
    for token in ids * 500:
        found.push(token)
    assert longest <= 8
    assert found.text + found.finish() == BYTES.decode(ids * 500)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, SPM], ids=["bytes", "bpe", "sentencepiece"])
def test_a_stop_string_cuts_over_token_borders(tokenizer):
    ids = tokenizer.encode(TEXT) if tokenizer is not SPM else [FIRST_WORD + 1, *(FIRST_BYTE + b for b in TEXT.encode())]
    whole = tokenizer.decode(ids)
    pieces, stop = stream(tokenizer, ids, ("\u597d \U0001f600", "nowhere"))
    assert stop == "\u597d \U0001f600"
    assert "".join(pieces) == whole[: whole.index(stop)]
    assert "".join(pieces).endswith("\u4f60")
    pieces, stop = stream(tokenizer, ids, ("returns", "nowhere"))
    assert stop is None and "".join(pieces) == whole


@pytest.mark.parametrize(
    ("stop", "data", "pieces", "rest", "found"),
    [
        # What may begin a stop string is held back, and nothing follows one; one may be in what was held back.
        (["END.", "\n\n"], b"xEEND\n?EN", ["x", "", "E", "", "", "END", "\n?", "", ""], "EN", None),
        (["ab"], b"xabyz", ["x", "", "", "", ""], "", "ab"),
        (["\ufffd"], b"a\xf0", ["a", ""], "", "\ufffd"),
    ],
)
def test_stop_strings_of_bytes(stop, data, pieces, rest, found):
    text = TextStream(BYTES, stop)
    assert [text.push(byte) for byte in data] == pieces
    assert (text.finish(), text.text, text.stop_string) == (rest, "".join(pieces) + rest, found)


@settings(deadline=None, max_examples=300)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
def test_stop_strings_do_not_depend_on_how_text_is_divided(text, stop, sizes):
    class Pieces(ByteTokenizer):
        vocabulary = tuple(text[a : a + n] for a, n in zip(np.cumsum([0, *sizes]), sizes, strict=False))

        def decode(self, ids):
            return "".join(self.vocabulary[i] for i in ids)

    # The definition: after each character, is there a stop string at the end?
    ends = [(n, each) for n in range(len(text) + 1) for each in stop if text[:n].endswith(each)]
    end, each = min(ends, key=lambda pair: (pair[0], -len(pair[1])), default=(len(text), ""))
    pieces, found = stream(Pieces(), range(len(Pieces.vocabulary)), stop)
    assert "".join(pieces) == text[: end - len(each)]
    assert found == (each or None)


def test_without_a_tokenizer_there_is_no_text():
    found = TextStream(None)
    assert (found.push(3), found.finish(), found.text) == ("", "", None)
    with refused("stop", "'END'", "tokenizer", "fix: "):
        TextStream(None, ["END"])
