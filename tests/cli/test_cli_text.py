"""Whether a text has a sequence to train on is known before ranks start, where that is in doubt."""

import errno
import json
import os
import re
import types
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bmburst.cli import main
from bmburst.data import Text, documents, open_corpus, tokenize
from bmburst.data import tokenizer as tokenizers_of_data
from bmburst.data.corpus import has_tokens
from bmburst.data.packing import PackedSequences
from bmburst.data.sources import find_sources
from bmburst.data.tokenizer import ByteTokenizer
from bmburst.errors import UserError
from bmburst.train import evaluate
from bmburst.train.config import EvalConfig
from bmburst.train.resolve import resolve
from bmburst.train.text import bytes_of_tokens, check_text
from tests import chat, refusals, tiny
from tests.cli.commands import refused
from tests.pairs import long
from tests.refusals import refusal_of, says


def config(source, length=64, **options):
    named = {name.replace("__", "."): value for name, value in options.items()}
    return resolve((), {"data.source": str(source), "sequence_length": length, **named})


def refusal(source, length=64, **options):
    return refusal_of(check_text, config(source, length, **options))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, *long(300)])
@pytest.mark.parametrize("fraction", [0.05, 0.9])
@pytest.mark.parametrize("made", [True, False])
def test_the_longest_sequence_that_a_text_has_is_taken_and_no_longer_one(tmp_path, size, fraction, made):
    source = tmp_path / "a.txt"
    source.write_text("x" * size)
    corpus = tokenize(Text(ByteTokenizer(), find_sources([source])), tmp_path / "a.tokens")
    if made:
        source = corpus.path
    taken = 0
    for length in range(1, size + 2):
        try:
            PackedSequences(corpus, split="train", sequence_length=length, held_out_fraction=fraction)
        except UserError:
            break
        check_text(config(source, length, data__held_out_fraction=fraction))
        taken = length
    told = refusal(source, taken + 1, data__held_out_fraction=fraction)
    if corpus.token_count < 4:
        says(told, f"data {source}", f"{size + 1} tokens", "too few", "fix: ", "more text", f"{size} bytes")
    else:
        says(told, f"data {source}", f"{taken} tokens", f"one sequence of {taken + 1}")
        says(told, "fix: ", "more text", f"{size} bytes", "sequence_length")
    named = replace(corpus, path=source)
    with pytest.raises(UserError) as own:
        PackedSequences(named, split="train", sequence_length=taken + 1, held_out_fraction=fraction)
    assert str(own.value) == told, "the ranks would say the same"


def test_no_text_at_all_and_what_was_left_out(tmp_path, capsys):
    (tmp_path / "blank.jsonl").write_text("\n" * 9)
    says(refusal(tmp_path / "blank.jsonl"), "corpus", "empty")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_bytes(b"\xff")
    says(refusal(tmp_path / "folder"), "corpus", "empty")
    (tmp_path / "folder" / "a.json").write_bytes(b"x")
    capsys.readouterr()
    says(refusal(tmp_path / "folder"), "corpus", "empty")
    says(capsys.readouterr().err, "folder/a.txt", "not a text file", "1 .json")
    (tmp_path / "folder" / "b.txt").write_text("b" * 200)
    check_text(config(tmp_path / "folder"))
    assert capsys.readouterr().err == "", "the ranks say what they leave out"


def test_records_are_tokenized_once_into_the_cache_of_the_ranks(tmp_path):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("".join(json.dumps({"prompt": f"{i} upon ", "completion": "a time"}) + "\n" for i in range(99)))
    given = config(path)
    text = check_text(given, cache)
    assert has_tokens(cache, text)
    check_text(given)  # without a cache


def test_a_long_array_is_checked_once_and_not_where_its_tokens_are_cached(tmp_path, monkeypatch):
    path, whole = tmp_path / "a.json", []
    path.write_text(json.dumps([{"text": "once upon a time. " * 9}] * 99))
    given = config(path)
    parse = documents.parse_json
    monkeypatch.setattr(documents, "parse_json", lambda text: whole.append(len(text) > 9999) or parse(text))
    check_text(given, tmp_path / "cache")
    assert sum(whole) == 1
    open_corpus(path, None, tmp_path / "cache")
    assert sum(whole) == 2
    check_text(config(path), tmp_path / "cache")
    open_corpus(path, None, tmp_path / "cache")
    assert sum(whole) == 2
    path.write_text(path.read_text()[:-1])
    says(refusal(path), path, "not valid JSON", "fix: ")


@pytest.fixture
def words(tmp_path):
    """The file of a tokenizer that knows two words."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 319, "b": 320}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("repeats", [200, 5000], ids=["short", "left to the ranks"])
def test_the_tokenizer_of_a_text_is_read_once_before_ranks_start(tmp_path, monkeypatch, launches, words, repeats):
    read = []
    load = tokenizers_of_data.load_huggingface_tokenizer
    monkeypatch.setattr(tokenizers_of_data, "load_huggingface_tokenizer", lambda name: read.append(name) or load(name))
    (tmp_path / "a.txt").write_text("a " * repeats)
    options = ("--sequence-length", "64", "--model.vocab_size", "400")
    assert main(["train", "--data", "a.txt", "--data.tokenizer", words, *options]) == 0
    assert len(launches) == 1
    assert read == [words]


def test_a_sample_needs_the_tokenizer_of_a_token_file(tmp_path, words):
    (tmp_path / "a.txt").write_text("a " * 200)
    source = open_corpus(tmp_path / "a.txt", words, tmp_path).path
    check_text(config(source))
    hint = (f"'{words}'", f"'{source}'", "fix: --data.tokenizer", "--sample-tokens 0")
    moved = Path(words).rename(tmp_path / "moved.json")
    for told in (refusal(source), refusal(source, data__tokenizer=words)):
        says(told, "no tokenizer", *hint)
    check_text(config(source, sample_tokens=0))
    check_text(config(source, data__tokenizer=str(moved)))
    Path(words).write_text(moved.read_text().replace("319", "318"))
    says(refusal(source), "is not the one", *hint)


def test_a_chat_template_that_neither_records_nor_checkpoints_take_is_refused(tmp_path, words):
    (tmp_path / "a.txt").write_text("a " * 200)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    for name in ("a.txt", "a.jsonl"):
        told = refusal(tmp_path / name, data__chat_template="chatml")
        says(told, "template chatml has no effect | 'bytes' | allowed: a Hugging Face tokenizer | fix: ")
    check_text(config(tmp_path / "a.txt", data__tokenizer=words, data__chat_template="chatml", model__vocab_size=400))


def test_names_that_no_data_of_a_run_have_are_refused(tmp_path, monkeypatch):
    """A field of text had no effect on plain text, arrays of texts and token files."""
    rows, texts, plain = (tmp_path / name for name in ("rows.jsonl", "texts.json", "plain.txt"))
    rows.write_text(json.dumps({"body": "a" * 200}))
    texts.write_text(json.dumps(["a" * 200]))
    plain.write_text("a" * 200)
    tokens = open_corpus(plain, "bytes", tmp_path / "cache").path
    named = {"data__text_field": "body"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    check_text(config(rows, **named))
    check_text(config(plain, data__validation=[str(rows)], **named))
    check_text(config(rows, data__validation=[str(plain)], **named))
    for source in (plain, texts, tokens, tmp_path / "mix.yaml"):
        (tmp_path / "mix.yaml").write_text("temperature: 1\nsources: [{path: rows.jsonl}, {path: plain.txt}]")
        says(refusal(source, **named), "fields | text field | fix: | --data.text_field | at the source")
    says(refusal(plain, data__validation=[str(texts)], **named), f"data {plain} | --data.text_field")
    (tmp_path / "mix.yaml").write_text(
        "temperature: 1\nsources: [{path: rows.jsonl, text_field: body}, {path: plain.txt}]"
    )
    check_text(config(tmp_path / "mix.yaml"))
    model = tiny.save(tmp_path / "model", vocab_size=tiny.BYTES)
    for source, is_named in ((rows, True), (plain, False)):
        with nullcontext() if is_named else refusals.refused(plain, "no such rows", "fields"):
            evaluate.check_inputs(EvalConfig(checkpoint=model, data=str(source), text_field="body", tokenizer="bytes"))


def test_text_of_a_model_without_a_tokenizer_is_noted_to_be_bytes(tmp_path, launches, capsys):
    model, text, own = tmp_path / "model", tmp_path / "a.txt", tmp_path / "own"
    tiny.save(model, vocab_size=chat.VOCAB)
    chat.directory(tiny.save(own, vocab_size=chat.VOCAB))
    text.write_text("a " * 400)
    tokens = open_corpus(text, "bytes", tmp_path / "cache").path

    def noted(folder, data, name):
        train = [f"--data.tokenizer={name}"] if name else []
        given = ["--data", str(data), "--sequence-length", "64", "--steps", "1", "--output", f"{next(number)}"]
        assert main(["train", "--init-from", str(folder), *given, *train]) == 0
        evaluate.check_inputs(EvalConfig(checkpoint=folder, data=str(data), tokenizer=name))
        return [line for line in capsys.readouterr().err.splitlines() if "comes without" in line]

    number = count()
    assert launches is not None
    for note, option in zip(noted(model, text, None), ("--data.tokenizer", "--tokenizer"), strict=True):
        says(note, f"note: | {model} | read as bytes | {option} bytes | tokenizer.json | {option} DIR")
    assert not (noted(model, text, "bytes") or noted(model, tokens, None) or noted(own, text, None))


def test_a_check_needs_no_tokenizer_of_a_token_file(tmp_path, launches, words):
    (tmp_path / "a.txt").write_text("a " * 200)
    source = open_corpus(tmp_path / "a.txt", words, tmp_path).path
    Path(words).unlink()
    options = ("--data", str(source), "--sequence-length", "64", "--model.vocab_size", "400", "--nproc", "2")
    assert main(["train", *options]) == 2
    assert not launches
    main(["check", *options])
    assert launches


def test_tokens_that_the_model_does_not_know(tmp_path, words):
    source = tmp_path / "a.txt"
    source.write_text("a " * 200)
    check_text(config(source, data__tokenizer=words, model__vocab_size=400))
    source.write_text("a " * 200 + "b")
    told = refusal(source, data__tokenizer=words, model__vocab_size=320)
    says(told, f"'{source}'", "token id ", "vocab_size is 320", "fix: ")
    assert re.search(r"token id 32\d\D", told)


def test_a_long_text_is_left_to_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a" * 5000)
    monkeypatch.setattr("bmburst.train.text.tokenize", None)
    check_text(config(tmp_path / "a.txt"))
    check_text(config("stdlib", 4096))


def test_tokens_that_a_cache_has_are_taken_where_nothing_can_be_written(tmp_path, monkeypatch):
    source, cache = tmp_path / "a.txt", tmp_path / "cache"
    source.write_text("a" * 200)
    open_corpus(source, "bytes", cache)
    monkeypatch.setattr("bmburst.outputs.tempfile", types.SimpleNamespace(TemporaryFile=full_disk))
    made = config(source)
    check_text(made, cache)
    source.write_text("b" * 200)
    with refusals.refused("data.cache", cache, "written", "No space left"):
        check_text(made, cache)
    with refusals.refused("data.cache", tmp_path / "other", "written", "No space left"):
        check_text(made, tmp_path / "other")


def test_tokens_of_a_mixture_take_the_room_of_those_of_its_sources(tmp_path):
    for name, size in (("a", 200), ("b", 300)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    (tmp_path / "mix.yaml").write_text("sources: [{path: a.txt, weight: 1}, {path: b.txt, weight: 1}]")
    given, cache = config(tmp_path / "mix.yaml"), tmp_path / "cache"
    text = check_text(given)
    assert bytes_of_tokens(given, cache, text) == 2 * (200 + 300)  # a byte is a token of 16 bits
    open_corpus(tmp_path / "a.txt", "bytes", cache)
    assert bytes_of_tokens(given, cache, text) == 2 * 300


def full_disk(**_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_token_file_needs_no_cache(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 200)
    corpus = open_corpus(tmp_path / "a.txt", "bytes", tmp_path)
    check_text(config(corpus.path), Path("/proc/none"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data.cache", "a.txt/cache"], "data.cache a.txt/cache | written | Not a directory | fix: "),
        (["--data", "a.txt", "--sequence-length", "64"], "data a.txt | 9 tokens | sequence of 64 | fix: "),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_commands_refuse_before_ranks_start(tmp_path, launches, capsys, command, argv, words):
    (tmp_path / "a.txt").write_text("too short")
    says(refused(capsys, command, *argv), f"bmburst {command}: ", words)
    assert not launches
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
