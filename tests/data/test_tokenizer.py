"""Text survives a round trip, special tokens in it stay text, and a bad tokenizer is one clear message."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmburst.data import ByteTokenizer, load_tokenizer
from bmburst.data.tokenizer import load_from_hub
from tests.refusals import refused

TEXT = "def f(x):\n\treturn '</s>' + x  # héllo, 世界 🙂\n"


def train_bpe(special=("<pad>", "</s>")):
    """Return a byte-level BPE tokenizer, as GPT-2's and LLaMA-3's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT, "the return of the function"] * 5, trainer)
    return tokenizer


def without_unknown(folder):
    """Write a tokenizer of two words, with no token for another one."""
    folder.mkdir()
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def bpe_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_bpe().save(str(path))
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    valid = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(valid.encode())
    assert tokenizer.decode(ids) == valid


@settings(deadline=None)
@given(st.binary())
def test_bytes_decode_as_python_does(data):
    assert ByteTokenizer().decode(list(data)) == data.decode("utf-8", "replace")


def test_bytes_decode_leaves_out_what_is_no_byte():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([-100, 72, 256, 105, 257, 258, 319]) == "Hi"
    assert 255 < tokenizer.eos_id < tokenizer.vocab_size
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("whole", [False, True], ids=["file", "directory"])
def test_huggingface_round_trip(bpe_file, whole):
    tokenizer = load_tokenizer(str(bpe_file.parent if whole else bpe_file))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert tokenizer.eos_id == 1
    # The text spells the end of a document. It must not become one.
    assert tokenizer.eos_id not in ids
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode([*ids, tokenizer.eos_id, 10**6, 2**40, -100]) == TEXT


def test_huggingface_batch_is_each_alone(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    texts = [TEXT, "", "a", TEXT * 3, "\ud800x"]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    original = train_bpe()
    original.enable_truncation(4)
    original.enable_padding(length=16, pad_token="<pad>")
    original.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert 0 not in tokenizer.encode("a")


@pytest.mark.parametrize("value", ["<stop>", {"content": "<stop>", "special": True}])
def test_configuration_names_the_end_token(tmp_path, value):
    train_bpe(special=("</s>", "<stop>")).save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    configured = load_tokenizer(str(tmp_path))
    # transformers states a length of 10**30 where it knows none: beyond 64 bits
    stated = json.dumps({"eos_token": value, "model_max_length": 10**30})
    (tmp_path / "tokenizer_config.json").write_text(stated)
    assert load_tokenizer(str(tmp_path)).eos_id == 1
    assert (plain.eos_id, configured.eos_id) == (0, 1)
    assert plain.identity != configured.identity


def test_identity_is_of_the_content(tmp_path, bpe_file):
    copy = tmp_path / "copy.json"
    copy.write_bytes(bpe_file.read_bytes())
    other = tmp_path / "other.json"
    train_bpe(special=("<pad>", "</s>", "<more>")).save(str(other))
    first, same, different = (load_tokenizer(str(path)).identity for path in (bpe_file, copy, other))
    assert first == same != different


def refuse(name, *words):
    with refused(*words):
        load_tokenizer(str(name))


def test_refuses_what_is_no_tokenizer(tmp_path):
    refuse("byte", "'byte'", "'bytes'")
    refuse(tmp_path / "missing.json", "missing.json", "tokenizer.json")
    refuse("./missing", "./missing")
    refuse(tmp_path, tmp_path, "tokenizer.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    refuse(broken, "cannot read", broken)
    refuse("a name with spaces", "a name with spaces")
    train_bpe(special=("<pad>",)).save(str(tmp_path / "noend.json"))
    refuse(tmp_path / "noend.json", "end-of-document", "eos_token")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "noend.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    refuse(tmp_path, "tokenizer_config.json")


def test_refuses_a_text_that_has_no_tokens(tmp_path):
    tokenizer = load_tokenizer(str(without_unknown(tmp_path / "words")))
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_with_ends):
        with refused("words", "cannot encode", "unknown words", "fix: "):
            encode("a c")
    assert tokenizer.encode("b a").tolist() == [1, 0]


def test_tokens_without_merges_have_ends(tmp_path):
    """As in LLaMA-3's tokenizer; up to tokenizers 0.20.0 their offsets are empty, so setup.py requires a later one."""
    words = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(words | {"</s>": 256, "hello": 257}, [], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    ids, ends = load_tokenizer(str(tmp_path)).encode_with_ends("hello hi")
    assert ids[0] == 257
    assert ends.tolist() == [5, 6, 7, 8]
    (least,) = re.findall(r'"tokenizers>=(\d+)\.(\d+)"', (Path(__file__).parents[2] / "setup.py").read_text())
    assert tuple(map(int, least)) > (0, 20)


def hub(metadata, cached=lambda *_: None):
    """Stand in for huggingface_hub, whose package tries a download for half a minute."""
    download = lambda *_: pytest.fail("a download was tried")  # noqa: E731
    return SimpleNamespace(try_to_load_from_cache=cached, get_hf_file_metadata=metadata, hf_hub_download=download)


def test_hub_without_network_is_one_message():
    def unreachable(url):
        assert url.startswith("https://huggingface.co/someone/model/") and url.endswith("/tokenizer.json")
        raise RuntimeError("no connection\nsecond line")  # as the HTTP package's, which derive from Exception

    with refused("someone/model", "cannot be reached: no connection", "without a network"):
        load_from_hub("someone/model", hub(unreachable))


def test_what_the_hub_answers_is_said():
    def answers(url):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is on")

    with refused("offline mode is on"):
        load_from_hub("someone/model", hub(answers))


def test_hub_uses_the_local_cache(bpe_file):
    def cached(name, file):
        return str(bpe_file.parent / file) if file == "tokenizer.json" else None

    def unreachable(url):
        raise RuntimeError("no connection")

    tokenizer = load_from_hub("someone/model", hub(unreachable, cached))
    assert tokenizer.name == "someone/model"
    assert tokenizer.identity == load_tokenizer(str(bpe_file)).identity
