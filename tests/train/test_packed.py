"""Training on packed documents is training on each document alone, added up: on any ranks, layout and microbatches.

The reference is Hugging Face's LLaMA in one process, a document at a time, with torch's AdamW.
"""

import json
import math
from functools import partial

import pytest
import torch

from bmburst.data import Batches, PackedSequences, open_corpus
from tests import tiny
from tests.pairs import long, selected
from tests.train import packed_program as program
from tests.train.cases import as_configured, reference_steps, require_near, result, run_cases

CASES = pytest.mark.parametrize("case", [*program.CASES, *long(*zip(program.MORE))], ids=str)
cross_entropy = partial(torch.nn.functional.cross_entropy, reduction="sum")


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A model with random weights, a text of short and long documents, and what ranks make of them."""
    folder = tmp_path_factory.mktemp("packed")
    prepare(folder)
    run_cases(program.train, folder, selected(request, "case"))
    return folder


def prepare(folder):
    """Write the model and the text."""
    texts = [f"{i}: " + "the quick brown fox " * (i * i % 7) + "." * (i % 5) for i in range(24)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tiny.save(folder / "model", program.SHAPE)


def sum_over_documents(model, inputs, labels, lengths):
    """Return the sum of token losses of each document of a sequence alone."""
    pairs = zip(inputs.split(lengths), labels.split(lengths), strict=True)
    return sum(cross_entropy(model(ids[None]).logits[0], wanted) for ids, wanted in pairs)


@pytest.fixture(scope="module")
def reference(folder):
    model, config = tiny.load(folder / "model"), program.config(folder, program.CASES[0])

    def loss(step):
        inputs, labels = program.batch(step)
        rows = zip(inputs, labels, program.lengths(step), strict=True)
        return sum(sum_over_documents(model, *row) for row in rows) / (labels != -100).sum()

    steps, clip = map(loss, range(program.STEPS)), config.optimizer.clip_norm
    found = reference_steps(model, steps, clip=clip, **as_configured(model, config))
    found["parameters"] = found["parameters"][-1]
    samples = next(Batches(packed(folder, config, "train"), batch_size=config.batch_size, seed=config.seed))
    found["text"] = *map(torch.from_numpy, samples.whole()), samples.documents
    return found


@CASES
def test_equals_documents_alone(folder, reference, case):
    ours = result(folder, case)
    for what in ("gradients", "parameters"):
        require_near(ours[what], reference[what], 1e-5)
    for what in ("losses", "norms"):
        assert ours[what] == pytest.approx(reference[what], rel=1e-5)


@CASES
def test_a_step_on_text(folder, reference, case):
    """The first step's samples, with the documents they are of, on the parameters after the steps above."""
    model, (inputs, labels, documents) = tiny.load(folder / "model"), reference["text"]
    model.load_state_dict(reference["parameters"])
    with torch.no_grad():
        nats = sum(sum_over_documents(model, *row) for row in zip(inputs, labels, documents, strict=True))
    assert max(map(len, documents)) > 1
    assert result(folder, case)["text loss"] == pytest.approx(nats.item() / labels.numel(), rel=1e-5)


def packed(folder, config, split):
    """Return sequences of the text."""
    return PackedSequences(
        open_corpus(config.data.source, None, folder),
        split=split,
        sequence_length=program.TOKENS,
        held_out_fraction=config.data.held_out_fraction,
        pack="documents",
    )


@pytest.fixture(scope="module")
def evaluated(folder):
    """Loss and bits per byte of the held-out part, its partial sample too."""
    model, config = tiny.load(folder / "model"), program.config(folder, program.CASES[0])
    sequences = packed(folder, config, "held_out")
    assert len(sequences) >= 2
    assert sequences.partial_labels > 0
    nats, count, size = 0.0, len(sequences) + 1, 0
    with torch.no_grad():
        for index in range(count):
            ids = torch.from_numpy(sequences[index])
            nats += sum_over_documents(model, ids[:-1], ids[1:], sequences.documents(index)).item()
            size += sequences.text_bytes(index)
    return [nats / sequences.label_count, nats / math.log(2) / size]


@CASES
def test_evaluation_equals_documents_alone(folder, evaluated, case):
    assert result(folder, case)["evaluated"] == pytest.approx(evaluated, rel=1e-5)
