"""Training on packed conversations is training on each alone, with loss on its answers: on any ranks and microbatches.

The reference is transformers in one process: its template, its mask, its model, one conversation at a time, and
the sum of the answer tokens' losses, each times the weight of its record, over the sum of these weights in the whole
batch. An evaluation counts each token once.
"""

import json
from functools import cache

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from bmburst.data import Batches, open_corpus
from bmburst.data.whole_documents import pack_sequences
from tests import chat, tiny
from tests.distributed.programs import run_program
from tests.pairs import long, selected
from tests.train import answers_program as program
from tests.train.cases import as_configured, labelled, reference_steps, require_near, result, run_cases

CASES = pytest.mark.parametrize("case", [*program.CASES, *long(*zip(program.MORE))], ids=str)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A model with random weights, conversations, and what ranks make of them."""
    folder = tmp_path_factory.mktemp("answers")
    tiny.save(folder / "model", program.SHAPE, std=0.1)
    chat.directory(folder / "model", chat.MARKED)
    chat.directory(folder / "peer", chat.LEAVES_OUT)
    records = chat.records(40)
    for number, record in enumerate(records):
        record["weight"] = (1, 0.25, 3)[number % 3]
    for record in records[::2]:  # the first of two answers is not learned
        if len(record["messages"]) > 2:
            record["messages"][1]["weight"] = 0
    chat.write(folder / "chats.jsonl", *records)
    chat.write(folder / "groups.jsonl", *groups())
    run_cases(program.train, folder, selected(request, "case"))
    return folder


def groups():
    """Return conversations with 1 to 5 answers, some twice or one the beginning of another, and some without group."""
    found = []
    for n in range(25):
        asked = [{"role": "user", "content": f"{n}: " + "one two " * (n % 4)}]
        if n % 3 == 0:  # an earlier answer, which is not learned again
            asked = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, *asked]
        answers = ["one", "one two", "one", "two" * 3, "x"][n % 2 : n % 2 + 1 + n % 5]
        found.append({"messages": asked, "completions": answers, "weight": 1 + n % 3})
    return found


@cache
def tokenizer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


def conversations(folder, numbers, source="chats.jsonl"):
    """Return ids, labels and weights of documents of the file, as transformers has them."""
    peer = tokenizer(folder / "peer")
    alone = []
    for line in map(json.loads, (folder / source).read_text().splitlines()):
        before = [{**each, "weight": 0} if "completions" in line else each for each in line["messages"]]
        answers = [[{"role": "assistant", "content": text}] for text in line.get("completions", ())]
        alone += [(before + answer, line["weight"]) for answer in answers or [[]]]
    for number in numbers:
        messages, weight = alone[number]
        messages = [{**each, "out": each.get("weight") == 0} for each in messages]
        yield *labelled(peer, messages), weight


def summed(model, found, *, weighted=True):
    """Return the sum of answer losses, that of the weights of answer tokens, and how many tokens there are."""
    total, weights, count = 0.0, 0.0, 0
    for ids, labels, weight in found:
        logits, factor = model(ids[None]).logits[0, :-1], weight if weighted else 1
        total = total + factor * torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        here = int((labels[1:] != -100).sum())
        weights, count = weights + factor * here, count + here
    return total, weights, count


@pytest.fixture(scope="module")
def references(folder):
    return {case.pack: reference_of(folder, case) for case in program.CASES[::-1]}


def reference_of(folder, case):
    model, config = tiny.load(folder / "model"), program.config(folder, case)
    corpus = open_corpus(folder / case.source, str(folder / "model"), folder)
    options = {"sequence_length": program.TOKENS, "held_out_fraction": 0.2, "pack": case.pack}
    sequences = pack_sequences(corpus, split="train", **options)
    held = pack_sequences(corpus, split="held_out", **options)

    def summed_of(packed, taken, **options):
        units = [int(n) for index in taken for n in packed.records(index)]
        starts, counts = packed._units.first, packed._units.count
        numbers = [int(starts[n]) + i for n in units for i in range(counts[n])]
        return summed(model, conversations(folder, numbers, case.source), **options)

    with torch.no_grad():
        total, _, count = summed_of(held, range(len(held)), weighted=False)
    evaluated, tokens = total.item() / count, []
    batches = Batches(sequences, batch_size=config.batch_size, seed=config.seed)

    def loss(_):
        taken = next(batches).taken
        assert any(map(sequences.parents, taken)) == (case.pack == "trees")
        total, weights, count = summed_of(sequences, taken)
        tokens.append(count)
        return total / weights

    found = reference_steps(model, map(loss, range(program.STEPS)), **as_configured(model, config))
    return found | {"evaluated": evaluated, "tokens": tokens}


@CASES
def test_equals_transformers_on_each_conversation(folder, references, case):
    ours, reference = result(folder, case), references[case.pack]
    assert ours["tokens"] == reference["tokens"]
    assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert ours["evaluated"] == pytest.approx(reference["evaluated"], rel=1e-6)
    require_near(ours["gradients"], reference["gradients"], 3e-6)


@CASES
def test_a_batch_without_answers_changes_nothing(folder, case):
    assert result(folder, case)["of nothing"] == [0.0, 0.0, 0.0]


def test_eval_counts_answers_alone_also_in_a_mixture(folder):
    """Of records packed apart, of text, and of both: every sequence once, whatever the weights."""
    (folder / "book.txt").write_text("once upon a time. " * 30)
    (folder / "mix.yaml").write_text("sources: [{path: book.txt, weight: 1}, {path: chats.jsonl, weight: 5}]\n")
    run_program(2, program.evaluate, folder)
    records, text, both = json.loads((folder / "evaluated.json").read_text())
    with torch.no_grad():
        total, _, count = summed(tiny.load(folder / "model"), conversations(folder, range(40)), weighted=False)
    assert records == [pytest.approx(total.item() / count, rel=1e-6), count]
    assert both[1] == count + text[1] and text[1] >= 18 * 30
    assert both[0] == pytest.approx((records[0] * count + text[0] * text[1]) / both[1], rel=1e-6)
