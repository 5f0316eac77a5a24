"""Preference pairs are read, tokenized and packed together, and bad lines are refused by number."""

import json
from itertools import pairwise

import numpy as np
import pytest

from bmburst.data import open_corpus
from bmburst.data.records import read_records
from bmburst.data.report import described
from bmburst.data.sources import find_sources
from bmburst.data.token_file import TokenFile
from bmburst.data.whole_documents import pack_sequences
from bmburst_ops import IGNORE_INDEX
from tests import chat
from tests.refusals import refused

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
USER, ANSWER, OTHER = ([{"role": r, "content": c}] for r, c in (("user", "q"), ("assistant", "yes"), ("assistant", "")))

NO = [{"role": "assistant", "content": "no"}]


def corpus(folder, *lines, tokenizer="bytes"):
    return open_corpus(chat.write(folder / "pairs.jsonl", *lines), tokenizer, folder)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "no rejected | prompt | fix: "),
        ({"prompt": "a", "rejected": "b"}, "no chosen | prompt | fix: "),
        ({"chosen": "a", "rejected": "b"}, "no prompt | same text | fix: "),
        ({"chosen": "", "rejected": "b"}, "no prompt | same text | fix: "),
        ({"chosen": " a", "rejected": " b"}, "no prompt | same text | fix: "),
        ({"chosen": ANSWER, "rejected": NO}, "no prompt | same message | fix: "),
        ({"prompt": "q", "chosen": ANSWER, "rejected": NO}, "no prompt | same message | fix: "),
        ({"prompt": None, "chosen": "a", "rejected": ANSWER}, "chosen | text, or in both | fix: "),
        ({"chosen": USER + ANSWER, "rejected": USER + OTHER}, "message 2 is empty | fix: "),
        ({"chosen": USER + ANSWER, "rejected": [{"content": "x"}]}, "rejected: message 1 | role | fix: "),
        ({"chosen": [], "rejected": ANSWER}, "chosen is [] | at least one | fix: "),
        (PAIR | {"chosen": ""}, "chosen answer is empty | at least one token | fix: "),
        (PAIR | {"rejected": ""}, "rejected answer is empty | at least one token | fix: "),
        (PAIR | {"rejected": "b"}, 'equal | "b" | different | fix: '),
        (PAIR | {"chosen": ANSWER}, "chosen | text, or in both | fix: "),
        ({"prompt": USER, "chosen": ANSWER, "rejected": OTHER}, "answer | is empty | fix: "),
        ({"prompt": USER, "chosen": USER + ANSWER, "rejected": USER + NO}, "chosen begins with | twice | fix: "),
        ({"prompt": "a", "completion": "b"}, "no preference pair | pairs.jsonl:1 | fix: "),
    ],
    ids=str,
)
def test_bad_lines_are_refused_by_file_and_line(tmp_path, line, words):
    with refused("pairs.jsonl:2", words):
        corpus(tmp_path, PAIR, line)
    if set(line) != {"prompt", "completion"}:
        with refused("pairs.jsonl:1"):  # also where it decides what the file holds
            corpus(tmp_path, line)


def test_answers_as_text_behind_messages_are_the_assistants(tmp_path):
    """So HelpSteer3 writes them, under other names of columns."""
    folder = str(chat.directory(tmp_path / "t"))
    lines = {"text": {"chosen": "yes", "rejected": "no"}, "messages": {"chosen": ANSWER, "rejected": NO}}
    made = []
    for name, answers in lines.items():
        (tmp_path / name).mkdir()
        file = corpus(tmp_path / name, {"prompt": USER} | answers, tokenizer=folder)
        made.append(
            [each.tolist() for each in (file.tokens, file.document_offsets, file.answers_in(range(len(file.tokens))))]
        )
    assert made[0] == made[1]


def test_a_pair_among_other_records_is_refused(tmp_path):
    with refused("pairs.jsonl:2", "a preference pair", "pairs.jsonl:1", "fix: "):
        corpus(tmp_path, {"prompt": "a", "completion": "b"}, PAIR)


def test_a_file_holds_both_answers_of_each_pair(tmp_path):
    file = corpus(tmp_path, PAIR, PAIR | {"prompt": "\u4e16", "rejected": "longer"})
    assert file.pairs
    assert file.document_count == 4
    assert file.document_keys[0] == file.document_keys[1] != file.document_keys[2]
    texts = [bytes(file.tokens[a:b][:-1].tolist()) for a, b in pairwise(file.document_offsets)]
    assert texts == [b"ab", b"ac", "\u4e16b".encode(), "\u4e16longer".encode()]
    assert np.diff(file.byte_offsets).tolist() == [1, 1, 1, 6]  # of answers
    answers = file.answers_in(range(file.token_count))
    assert answers.tolist() == [0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, *[1] * 7]
    assert TokenFile.open(file.path).fingerprint == file.fingerprint
    records = list(read_records(find_sources([tmp_path / "pairs.jsonl"])))
    assert [each.name for each in records] == [f"{tmp_path / 'pairs.jsonl'}:{n}" for n in (1, 2)]


def test_messages_are_a_prompt_with_each_answer(tmp_path):
    folder = chat.directory(tmp_path / "t", chat.MARKED)
    file = corpus(tmp_path, {"prompt": USER, "chosen": ANSWER, "rejected": NO}, tokenizer=str(folder))
    lines = [{"messages": USER + each} for each in (ANSWER, NO)]
    alone = open_corpus(chat.write(tmp_path / "chats.jsonl", *lines), str(folder), tmp_path)
    assert file.tokens.tolist() == alone.tokens.tolist()
    assert file.loss_mask.tolist() == alone.loss_mask.tolist()
    assert not alone.pairs


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (USER + ANSWER, USER + NO),
        (USER + NO + USER + ANSWER, USER + NO + USER + NO + USER + ANSWER),
        (USER + ANSWER, USER + ANSWER + USER + NO),  # one continues the other
        (USER + NO + USER + ANSWER, USER + NO),
        ("\n\nHuman: q\n\nAssistant: I do", "\n\nHuman: q\n\nAssistant: I can not"),
        ("q: yes", "q: yet"),
        ("q: yes", "q: yesterday"),
        ("ab", "ac"),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"prompt": None}, {"prompt": "q"}, {"prompt": "of another text"}], ids=str)
def test_a_prompt_that_both_answers_begin_with_is_found_as_in_trl(tmp_path, chosen, rejected, more):
    extract_prompt = pytest.importorskip("trl").extract_prompt
    if isinstance(chosen, str) and more.get("prompt") is not None:
        more = {}  # a prompt as text belongs to answers as text
    folder = str(chat.directory(tmp_path / "t"))
    implicit = corpus(tmp_path, more | {"chosen": chosen, "rejected": rejected}, tokenizer=folder)
    assert implicit.pairs
    assert implicit.notes.get("columns", []) == [key for key in more if more[key] == "of another text"]
    (tmp_path / "explicit").mkdir()
    explicit = corpus(tmp_path / "explicit", extract_prompt({"chosen": chosen, "rejected": rejected}), tokenizer=folder)
    assert implicit.tokens.tolist() == explicit.tokens.tolist()
    assert implicit.loss_mask.tolist() == explicit.loss_mask.tolist()
    assert implicit.fingerprint == explicit.fingerprint


def test_pairs_are_packed_and_held_out_whole(tmp_path):
    lines = [{"prompt": f"{n}", "chosen": "x" * (n % 7 + 1), "rejected": "y" * (n % 5 + 1)} for n in range(60)]
    file = corpus(tmp_path, *lines, *lines[:5])  # and some twice
    options = {"sequence_length": 40, "held_out_fraction": 0.3, "pack": "documents"}
    parts = {split: pack_sequences(file, split=split, **options) for split in ("train", "held_out")}
    seen = {split: [] for split in parts}
    for split, part in parts.items():
        for index in range(len(part)):
            inputs, labels = part.pairs(index, range(part.labels_in(index)))
            lengths = part.documents(index)
            assert sum(lengths) <= 40 and len(lengths) % 2 == 0
            ends = np.cumsum(lengths)
            texts = [bytes(inputs[a:b][:-1].tolist()).decode() for a, b in zip(ends - lengths, ends, strict=True)]
            for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
                number = int(chosen.rstrip("x"))
                assert (chosen, rejected) == (
                    f"{number}" + lines[number]["chosen"],
                    f"{number}" + lines[number]["rejected"],
                )
                seen[split].append(number)
            assert (labels != IGNORE_INDEX).sum() == part.counted_in(index)
    assert sorted(seen["train"] + seen["held_out"]) == sorted([*range(60), *range(5)])
    assert not set(seen["train"]) & set(seen["held_out"])


def test_pairs_too_long_are_left_out_together(tmp_path):
    file = corpus(tmp_path, PAIR, PAIR | {"chosen": "b" * 30}, PAIR | {"rejected": "d"})
    sequences = pack_sequences(file, split="all", sequence_length=32, pack="documents")
    assert sequences.left_out == 1
    assert sorted(n for index in range(len(sequences)) for n in sequences.records(index)) == [0, 2]
    # The report says the same as the sequences: of a long prompt, whether both answers share it.
    file = corpus(tmp_path, PAIR | {"prompt": "a" * 50})
    assert pack_sequences(file, split="all", sequence_length=64, pack="trees").left_out == 0
    assert "left out" not in described("data", file, 64, "trees")
    assert "left out: 1 pair longer than sequence_length 64" in described("data", file, 64, "documents")


def test_damage_of_a_header_is_seen(tmp_path):
    file = corpus(tmp_path, PAIR, PAIR | {"prompt": "b"})
    data = file.path.read_bytes()
    changed = data.replace(json.dumps({"version": 3})[1:-1].encode(), json.dumps({"version": 2})[1:-1].encode())
    assert changed != data
    file.path.write_bytes(changed)
    with refused("damaged"):
        TokenFile.open(file.path)
