"""Several answers to one prompt are read, tokenized and packed as trees; each is learned as if it had its own line."""

import json

import numpy as np
import pytest

from bmburst.data import open_corpus
from bmburst.data.report import LengthReport
from bmburst.data.token_file import TokenFile
from bmburst.data.token_writer import Masked
from bmburst.data.whole_documents import LEAST_SHARED, pack_sequences
from bmburst.train.resolve import resolve
from bmburst_ops import IGNORE_INDEX
from tests import chat
from tests.refusals import refused

PROMPT = "What is the largest number that you know of? "
ANSWERS = ["one", "one hundred", "two", "one"]
USER = [{"role": "user", "content": PROMPT}]


def corpus(folder, *lines, tokenizer="bytes", name="group"):
    return open_corpus(chat.write(folder / f"{name}.jsonl", *lines), tokenizer, folder)


def spans(file):
    """Return tokens and mask of each document."""
    for start, stop in zip(file.document_offsets, file.document_offsets[1:], strict=False):
        yield file.tokens[start:stop].tolist(), file.answers_in(range(start, stop)).tolist()


MESSAGES = [[{"role": "assistant", "content": each}] for each in ANSWERS]
LEFT_OUT = [{"role": "assistant", "content": "hm", "weight": 0}, *USER, *MESSAGES[0]]


@pytest.mark.parametrize(
    ("line", "alone", "tokenizer"),
    [
        ({"prompt": PROMPT, "completions": ANSWERS}, [{"prompt": PROMPT, "completion": a} for a in ANSWERS], None),
        (
            {"prompt": USER, "completions": [*MESSAGES, LEFT_OUT]},
            [{"prompt": USER, "completion": each} for each in [*MESSAGES, LEFT_OUT]],
            chat.MARKED,
        ),
        (  # as text, as one message, as a turn of ShareGPT; the answer in the conversation is not learned
            {
                "messages": USER + MESSAGES[0] + USER,
                "completions": [ANSWERS[0], *MESSAGES[1], {"from": "gpt", "value": ANSWERS[2]}],
            },
            [{"prompt": USER + MESSAGES[0] + USER, "completion": each} for each in MESSAGES[:3]],
            chat.MARKED,
        ),
    ],
)
def test_each_answer_has_the_tokens_and_labels_of_a_line_of_its_own(tmp_path, line, alone, tokenizer):
    folder = "bytes" if tokenizer is None else str(chat.directory(tmp_path / "t", tokenizer))
    ours, theirs = corpus(tmp_path, line, line, tokenizer=folder), corpus(tmp_path, *alone, tokenizer=folder, name="a")
    assert list(spans(ours)) == [*spans(theirs)] * 2
    assert ours.groups and not ours.pairs and not theirs.groups
    assert ours.record_starts.tolist() == [0, len(alone), 2 * len(alone)]
    assert np.diff(ours.byte_offsets).tolist() == np.diff(theirs.byte_offsets).tolist() * 2
    assert len(set(ours.document_keys.tolist())) == 1
    assert TokenFile.open(ours.path).fingerprint == ours.fingerprint
    ours.verify()


def test_files_without_several_answers_are_written_as_before(tmp_path):
    plain, one = ({"prompt": PROMPT, "completion": "x"}, {"prompt": PROMPT, "completions": ["x"]})
    files = [corpus(tmp_path, line, {"text": "y"}, name=name) for line, name in ((plain, "a"), (one, "b"))]
    assert files[0].path.read_bytes() == files[1].path.read_bytes() and not files[1].groups


def test_records_are_left_out_by_their_longest_answer():
    report = LengthReport(10)
    sizes = [((4, 1), (9, 1), (10, 1)), ((4, 1), (11, 1)), ((4, 1),) * 3]
    records = [
        Masked(np.zeros(sum(n for n, _ in each), np.int64), np.ones(sum(n for n, _ in each), bool), 1, 0, each)
        for each in sizes
    ]
    assert [report.keep(record) for record in records] == [True, False, True]
    assert "2 records, 35 of 35 tokens" in report.text()


def labels_of(packed):
    """Return the counted labels of a packing with the tokens that each sees, over all samples."""
    found = []
    for index in range(len(packed)):
        tokens, labels = packed.pairs(index, range(packed.labels_in(index)))
        lengths = packed.documents(index)
        parents = packed.parents(index) or (-1,) * len(lengths)
        seen, at = [], 0
        for length, parent in zip(lengths, parents, strict=True):
            own = tokens[at : at + length].tolist()
            before = seen[parent] if parent >= 0 else []
            seen.append(before + own)
            found += [
                (*seen[-1][: len(before) + i + 1], label)
                for i, label in enumerate(labels[at : at + length].tolist())
                if label != IGNORE_INDEX
            ]
            at += length
        assert at == packed.labels_in(index) <= packed.sequence_length
        assert packed.counted_in(index) == int((labels != IGNORE_INDEX).sum())
    return sorted(found)


@pytest.mark.parametrize("length", [60, 75, 80, 100, 1000])
def test_trees_have_the_labels_of_documents_each_behind_its_own_prompt(tmp_path, length):
    lines = [
        {"prompt": f"{n} {PROMPT}"[: 20 * n + 1], "completions": [*ANSWERS, "x" * (20 * n + 1)][n % 3 :]}
        for n in range(4)
    ]
    file = corpus(tmp_path, *lines)
    trees, plain = (
        pack_sequences(file, split="all", sequence_length=length, pack=pack) for pack in ("trees", "documents")
    )
    assert labels_of(trees) == labels_of(plain)
    assert trees.left_out == plain.left_out == (length < 109) + (length < 83)
    assert all(plain.parents(i) is None for i in range(len(plain)))
    tokens = [sum(packed.labels_in(i) for i in range(len(packed))) for packed in (trees, plain)]
    saved = tokens[1] - tokens[0]
    shared = [trees.parents(i) for i in range(len(trees))]
    assert (saved >= LEAST_SHARED) == any(shared)
    if length == 1000:  # prompts of 21, 41 and 47 tokens with 4, 3 and 5 answers; the last token is not shared
        assert saved == 20 * 3 + 40 * 2 + 46 * 4 and trees.prompt(4) == list(b"of? ")


REFUSED = [
    ({"completions": ["a"]}, "prompt | completions"),
    ({"prompt": "a", "completions": []}, "completions is [] | at least one"),
    ({"prompt": "a", "completions": "b"}, "completions | a list of answers"),
    ({"prompt": "a", "completions": ["b", ""]}, "completion 2 is empty"),
    ({"prompt": "a", "completions": ["b", 3]}, "completion 2 is 3 | text"),
    ({"prompt": "a", "completions": ["b"], "completion": "c"}, "completions and completion | fix: remove"),
    ({"messages": USER, "completions": ["b"], "loss_mask": [0]}, "completions and loss_mask"),
    ({"messages": USER, "completions": ["b"], "prompt": "a"}, "prompt beside messages"),
    ({"messages": USER, "completions": [["b"]]}, "completion 1: message 1 | role"),
    ({"prompt": USER, "completions": [USER]}, "no answer to learn"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=str)
def test_bad_lines_are_refused_by_file_and_line(tmp_path, line, words):
    folder = str(chat.directory(tmp_path / "t", chat.MARKED))
    with refused("group.jsonl:2", words):
        corpus(tmp_path, {"prompt": "a", "completions": ["b", "c"]}, line, tokenizer=folder)


def test_the_packing_follows_the_data(tmp_path):
    chat.write(tmp_path / "x.jsonl", {"prompt": "a", "completions": ["b", "c"]})
    chat.write(tmp_path / "y.jsonl", {"prompt": "a", "completion": "b"})
    (tmp_path / "mix.yaml").write_text(json.dumps({"sources": [{"path": f"{n}.jsonl", "weight": 1} for n in "yx"]}))
    written = corpus(tmp_path, {"prompt": "a", "completions": ["b", "c"]}).path

    def chosen(name, **options):
        return resolve(options={"data.source": str(tmp_path / name), **options}).pack

    assert [chosen(n) for n in ("x.jsonl", "y.jsonl", "mix.yaml", written)] == ["trees", "documents", "trees", "trees"]
    assert chosen("x.jsonl", **{"model.sliding_window": "64"}) == "documents"
    assert chosen("x.jsonl", pack="stream") == "stream"
    with refused("pack trees | sliding_window 64 | --pack documents"):
        chosen("x.jsonl", **{"model.sliding_window": "64", "pack": "trees"})
