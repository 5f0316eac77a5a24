"""Epochs, validation files and a run that is resumed inside an epoch: each sequence is taken as often as asked.

The reference for validation is transformers in one process, one record at a time.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from bmburst.data import Batches, open_corpus
from bmburst.data.whole_documents import pack_sequences
from bmburst.train.config import DataConfig, ParallelConfig, TrainConfig
from bmburst.train.resolve import resolve
from bmburst.train.text import steps_of_epochs
from bmburst.train.trainer import run
from tests import chat, tiny
from tests.distributed.programs import on_program, run_program
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import labelled

LENGTH, BATCH, EPOCHS = 97, 10, 2
SHAPE = tiny.config(vocab_size=chat.VOCAB, max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, records to train on, two validation files, and the run of two epochs on 1 and on 2 data ranks."""
    folder = tmp_path_factory.mktemp("epochs")
    tiny.save(folder / "model", SHAPE, std=0.1)
    chat.directory(folder / "model", chat.MARKED)
    records = chat.records(60)
    chat.write(folder / "train.jsonl", *records[:40])
    chat.write(folder / "math.jsonl", *records[40:50])
    chat.write(folder / "other.jsonl", *({"dialog": each["messages"], "kind": 1} for each in records[50:]))
    (folder / "mix.yaml").write_text("sources: [{path: other.jsonl, weight: 1, messages_field: dialog}]")
    for size in (1, 2):
        run_program(size, _train, folder, f"run-{size}", size)
    return folder


def config(folder, name, data_parallel=1, **changes):
    given = {
        "model": SHAPE,
        "sequence_length": LENGTH,
        "pack": "documents",
        "batch_size": BATCH,
        "init_from": folder / "model",
        "eval_every": 3,
        "eval_sequences": 100,
        "epochs": EPOCHS,
        "data": DataConfig(
            source=str(folder / "train.jsonl"),
            tokenizer=str(folder / "model"),
            validation=(str(folder / "math.jsonl"), f"chats={folder / 'mix.yaml'}"),
        ),
        "parallel": ParallelConfig(data_parallel=data_parallel),
    }
    made = program.config(folder, name, **{**given, **changes})
    return made.replace(steps=steps_of_epochs(made, folder / "tokens"))


def _train(folder, name, data_parallel, resume=False):
    run(config(folder, name, data_parallel, resume=resume))


def sequences(folder):
    corpus = open_corpus(folder / "train.jsonl", str(folder / "model"), folder / "tokens")
    return pack_sequences(corpus, split="train", sequence_length=LENGTH, held_out_fraction=0.0, pack="documents")


def test_each_sequence_is_taken_once_an_epoch_on_any_number_of_ranks(folder):
    """In another order in each epoch; the last step has what is left, and a run goes on inside an epoch."""
    found = sequences(folder)
    total = EPOCHS * len(found)
    assert total % BATCH, "the last step is to be a part of one"
    orders = []
    for ranks in (1, 2, 5):
        parts = [
            Batches(found, batch_size=BATCH, seed=3, data_rank=r, data_parallel=ranks, total=total)
            for r in range(ranks)
        ]
        taken = []
        for step in range(-(-total // BATCH)):
            if step == 2:
                state = parts[0].state_dict()
                parts[0] = Batches(found, batch_size=BATCH, seed=3, data_parallel=ranks, total=total)
                parts[0].load_state_dict(state)
            batch = [next(part) for part in parts]
            assert {len(each) for each in batch} == {BATCH // ranks}
            taken += [row for each in batch for row in each.rows if row is not None]
        assert parts[0].samples == total
        assert next(parts[0]).rows == (None,) * (BATCH // ranks)
        orders.append(taken)
    assert orders[0] == orders[1] == orders[2]
    first, second = orders[0][: len(found)], orders[0][len(found) :]
    assert sorted(first) == sorted(second) == list(range(len(found)))
    assert first != second


def test_a_run_of_epochs_is_the_same_on_one_and_two_ranks(folder):
    one, two = program.lines(folder / "run-1"), program.lines(folder / "run-2")
    assert len(one) == -(-EPOCHS * len(sequences(folder)) // BATCH)
    assert [each["loss"] for each in two] == pytest.approx([each["loss"] for each in one], rel=1e-5)
    # Samples differ in their documents, so they are dealt: groups wait less for each other.
    assert all("data_balance" not in each for each in one)
    assert all(1 <= each["data_balance"] <= each["data_balance_drawn"] for each in two)
    assert sum(each["data_balance_drawn"] - each["data_balance"] for each in two) > 0


def test_validation_files_have_their_names_and_losses(folder):
    """Nothing is held out beside them; every token of theirs is evaluated."""
    for size in (1, 2):
        evals = program.lines(folder / f"run-{size}", "evals.jsonl")
        assert {each["data"] for each in evals} == {"math", "chats"}
        assert [each["data"] for each in evals[:2]] == ["math", "chats"]
    newest = max((folder / "run-1" / "checkpoints").iterdir())
    model, peer = tiny.load(newest), PreTrainedTokenizerFast.from_pretrained(folder / "model")
    for name, file, key in (("math", "math.jsonl", "messages"), ("chats", "other.jsonl", "dialog")):
        total, count = 0.0, 0
        for line in (folder / file).read_text().splitlines():
            ids, labels = labelled(peer, json.loads(line)[key])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").item()
            count += int((labels[1:] != -100).sum())
        last = [each for each in program.lines(folder / "run-1", "evals.jsonl") if each["data"] == name][-1]
        assert (last["tokens"], last["loss"]) == (count, pytest.approx(total / count, rel=1e-5))


def test_a_run_goes_on_inside_an_epoch(folder):
    whole = folder / "again"
    shutil.copytree(folder / "run-2", whole)
    newest = max((whole / "checkpoints").iterdir())
    shutil.rmtree(newest)
    before = program.lines(folder / "again")
    run_program(2, _train, folder, "again", 2, True)
    after = program.lines(folder / "again")
    assert [each["loss"] for each in after] == [each["loss"] for each in before]


@on_program(1)
def test_steps_that_are_not_those_of_the_epochs_are_refused(folder):
    given = config(folder, "refused")
    with refused("epochs 2", given.steps, given.steps + 1, "fix: "):
        run(given.replace(steps=given.steps + 1))


def test_steps_left_after_a_change_of_the_batch_size(folder):
    given = config(folder, "left")
    total = EPOCHS * len(sequences(folder))
    assert steps_of_epochs(given.replace(batch_size=2), folder / "tokens", (3, 3 * BATCH)) == 3 + -(-(total - 30) // 2)
    assert steps_of_epochs(given.replace(epochs=0.5), folder / "tokens", (99, 99 * BATCH)) == 99


def test_both_held_out_text_and_validation_files():
    data = DataConfig(validation=("a.jsonl",))
    assert (data.held_out_fraction, DataConfig().held_out_fraction) == (0.0, 0.05)
    both = DataConfig(validation=("a.jsonl", "b=c.jsonl"), held_out_fraction=0.1)
    assert (both.held_out_fraction, both.validation_files) == (0.1, {"a": "a.jsonl", "b": "c.jsonl"})
    for changes, words in (
        ({"held_out_fraction": 0.0}, "held_out_fraction 0 | data.validation"),
        ({"validation": ("x/a.jsonl", "y/a.jsonl")}, "x/a.jsonl | y/a.jsonl | same name a"),
        ({"validation": ("held_out=a.jsonl",)}, "'held_out' | letters"),
        ({"validation": ("a b.jsonl",)}, "'a b' | NAME="),
    ):
        with refused(words, "fix: "):
            replace(DataConfig(), **changes)


def test_steps_of_an_option_replace_the_epochs_of_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 3\n")
    assert resolve((tmp_path / "c.yaml",)).epochs == 3
    assert resolve((tmp_path / "c.yaml",), {"steps": "7"}) == TrainConfig(steps=7)
