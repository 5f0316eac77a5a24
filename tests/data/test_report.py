"""The report on the data before training, samples as people check a template, and shares of a mixture by size."""

import pytest

from bmburst.cli import main
from bmburst.data import open_corpus
from bmburst.data.mixture import Source, read_mixture, shares_of
from bmburst.data.report import described
from bmburst.record_format import RecordFormat
from bmburst.train.config import DataConfig, TrainConfig
from bmburst.train.text import parts_of
from tests import chat, tiny
from tests.refusals import refused, says


def test_the_report_counts_what_is_in_a_file(tmp_path):
    lines = [
        {"prompt": "a" * 9, "completion": "b" * n, "id": n, "weight": w}
        for n, w in ((5, 1), (20, 2), (80, 0.5), (3, 0))
    ]
    file = open_corpus(chat.write(tmp_path / "x.jsonl", *lines), None, tmp_path / "cache")
    text = described("data: x.jsonl", file, 64)
    # each with an end of document, which is learned
    says(
        text,
        "data: x.jsonl: 3 records, 135 tokens, 108 (80.0%) learned | weights of records: 0.5 to 2",
        "left out: 1 record longer than sequence_length 64, 90 tokens | left out: 1 record, weight 0",
        "columns without effect: id | 8-15 | 16-31 | 64-127 | left out",
        lines=11,
    )
    counts = [line.split()[1] for line in text.splitlines() if "-" in line.split()[0]]
    assert counts == ["1", "1", "0", "1"]
    plain = described("data", tiny.token_file(tmp_path / "y", ["a" * 2**n for n in range(20)]), 64)
    says(plain, "20 documents | all learned", lines=10)
    assert "left out" not in plain and "repeated" not in plain


def test_the_report_counts_answers_that_repeat_their_prompt(tmp_path):
    """They are learned as they are, like TRL's, but a pair of texts often has the prompt in both answers by mistake."""
    asked = {"prompt": "Q: 2?\nA:"}
    plain, twice = " two", "Q: 2?\nA: two"
    for number, keys, right, wrong in (
        (2, ("chosen", "rejected"), (plain, "no"), (twice, f" {twice} or more")),
        (1, ("completion",), (plain,), (twice,)),
        (1, ("completions",), ([plain, "2"],), ([plain, twice],)),
    ):
        lines = [asked | dict(zip(keys, values, strict=True)) for values in (right, wrong)]
        path = chat.write(tmp_path / "x.jsonl", *lines)
        text = described("data", open_corpus(path, None, tmp_path / "cache"), 64)
        says(text, f"repeated: {number} answer | whole text of the prompt | twice", lines=len(text.splitlines()))
        path = chat.write(tmp_path / "x.jsonl", lines[0])
        assert "whole text" not in described("data", open_corpus(path, None, tmp_path / "cache"), 64)


def test_the_report_says_how_many_records_are_copies(tmp_path):
    text = described("data", tiny.token_file(tmp_path / "x", ["a", "b", "a", "a"]), 64)
    says(text, "repeated: 2 of 4 documents are copies of another", lines=4)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    group = {"prompt": "a", "completions": ["b", "c"]}
    for what, record in (("pairs", pair), ("records", group)):
        path = chat.write(tmp_path / f"{what}.jsonl", record, record | {"prompt": "x"}, record)
        says(described("data", open_corpus(path, None, tmp_path), 64), f"repeated: 1 of 3 {what} are", lines=6)


def test_samples_show_what_is_learned(tmp_path, capsys):
    folder = str(chat.directory(tmp_path / "t"))
    talk = chat.conversation("hi", "well", "more", "yes")
    path = str(chat.write(tmp_path / "x.jsonl", *[{"dialog": talk, "weight": 3}] * 5))
    options = ["--input", path, "--tokenizer", folder, "--show", "2"]
    assert main(["data", *options, "--messages-field", "dialog"]) == 0
    out = capsys.readouterr().out
    assert out.count("---") == 2 and ":1, weight 3:" in out and ":2, " in out
    assert "user\nhi<|im_end|>\n<|im_start|>assistant\n{+well<|im_end|>+}\n<|im_start|>user\nmore" in out
    pairs = str(chat.write(tmp_path / "y.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}))
    assert main(["data", "--input", pairs, "--show", "1"]) == 0
    says(capsys.readouterr().out, "chosen | rejected | a{+b<eos>+} | a{+c<eos>+}", lines=9)
    (tmp_path / "z.txt").write_text("plain")
    assert main(["data", "--input", str(tmp_path / "z.txt"), "--show", "1"]) == 0
    assert "{+plain<eos>+}" in capsys.readouterr().out
    chat.write(tmp_path / "none.jsonl", {"prompt": "a", "completion": "b", "weight": 0})
    for words, wrong in (
        ("empty | weight", ["--show", "1", "--input", str(tmp_path / "none.jsonl")]),
        ("--show 0", ["--show", "0"]),
        ("neither", []),
        ("names of columns", ["--show", "1", "--roles", "a=b"]),
        ("--text-field | rows", ["--show", "1", "--text-field", "body"]),
    ):
        assert main(["data", "--input", str(tmp_path / "z.txt"), *wrong]) == 2
        says(capsys.readouterr().err, words, "fix: ")


def test_a_temperature_makes_shares_of_sizes(tmp_path):
    sizes = (100, 400)
    files = [tiny.token_file(tmp_path / str(n), ["a" * (n - 1)]) for n in sizes]
    for temperature, wanted in ((1, 4), (2, 2), (1e9, 1)):
        small, large = shares_of([Source(str(n), None, temperature) for n in sizes], files)
        assert large / small == pytest.approx(wanted, rel=1e-4)
    assert shares_of([Source("a", 3.0), Source("b", 1.0)], files) == (3, 1)


def test_a_source_of_a_mixture_has_names_of_its_own(tmp_path):
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        "temperature: 2\nsources: [{path: a.jsonl, messages_field: dialog, roles: bot=assistant}, {path: b}]"
    )
    first, second = read_mixture(mix)
    assert first.form(RecordFormat(role_field="who")) == RecordFormat(
        messages_field="dialog", role_field="who", roles=("bot=assistant",)
    )
    assert second.form(RecordFormat()) == RecordFormat()
    parts = parts_of(TrainConfig(data=DataConfig(source=str(mix), tokenizer="bytes")))
    assert [part.data.messages_field for part in parts] == ["dialog", None]
    for text, words in (
        ("temperature: 0\nsources: [{path: a}]", "temperature is 0 | above 0"),
        ("temperature: 2\nsources: [{path: a, weight: 1}]", "source 1 | by size"),
        ("sources: [{path: a}]", "source 1 | weight"),
        ("sources: [{path: a, weight: 1, messages_feild: b}]", "source 1 | messages_field"),
        ("temprature: 1\nsources: [{path: a, weight: 1}]", "temprature | temperature"),
    ):
        mix.write_text(text)
        with refused(words, "fix: "):
            read_mixture(mix)
