"""What a trainer says of its model on several ranks, a sample and an evaluation, is what transformers makes of it."""

import dataclasses
import math
import os
from unittest.mock import Mock

import pytest
import torch

from bmburst.blocks.families import RopeScaling
from bmburst.data import PackedSequences, evaluation_batches, open_corpus
from bmburst.data.tokenizer import ByteTokenizer
from bmburst.inference.answering import generate
from bmburst.train import evaluate
from bmburst.train.config import EvalConfig
from tests import tiny
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import losses_alone


class Ninety(ByteTokenizer):
    vocab_size = 90


@on_program(3)
def test_equal_transformers(tmp_path):
    from transformers import LlamaForCausalLM

    trainer = program.trainer(tmp_path, "run")
    program.sharpen(trainer)
    saved = trainer.save()
    reference = LlamaForCausalLM.from_pretrained(saved)

    # One token is fewer than there are ranks.
    shown = []
    ids = generate(trainer.model, trainer.mesh, [65], 8, Ninety(), 3, shown.append)
    assert "".join(shown) == ByteTokenizer().decode(ids)
    generator = torch.Generator().manual_seed(3)
    expected = [65]
    for _ in range(8):
        logits = reference(torch.tensor([expected])).logits[0, -1, :90]
        expected.append(int(torch.multinomial(torch.softmax(logits / 0.7, 0), 1, generator=generator)))
    assert ids == expected[1:]

    measured = trainer.evaluate()
    held_out = PackedSequences(trainer.corpus, split="held_out", sequence_length=48, held_out_fraction=0.2)
    counts = []
    report = Mock(begin=lambda _shape, found, *_: counts.extend(found))
    trainer._introduce(report)
    if trainer.is_main:
        assert counts == [len(trainer.batches.sequences), len(held_out) + 1]  # the last has fewer tokens
    samples = torch.stack([torch.from_numpy(held_out[index]) for index in range(3)])
    labels = samples[:, 1:]
    logits = reference(samples[:, :-1]).logits
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    assert measured.tokens == labels.numel()
    assert measured.loss == pytest.approx(nats / labels.numel(), rel=1e-5)
    assert measured.perplexity == pytest.approx(math.exp(nats / labels.numel()), rel=1e-4)
    assert measured.bits_per_byte == pytest.approx(nats / math.log(2) / int((labels < 256).sum()), rel=1e-5)


@on_program(3)
def test_a_sequence_longer_than_the_text_is_as_long_as_the_text(tmp_path):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    saved = program.trainer(tmp_path, "run").save()
    for text, whole in (("the quick brown fox", 20), ("x", 3)):  # 20 and 2 tokens, on 3 ranks
        source = tmp_path / "text.md"
        source.write_text(text)
        expected, measured = (
            evaluate.evaluate_checkpoint(EvalConfig(checkpoint=saved, data=str(source), sequence_length=length))[0]
            for length in (whole, 10**12)  # of which no part could be held
        )
        assert measured == expected
        assert measured.tokens == len(text) + 1


@pytest.mark.parametrize(("layout", "last"), [("zigzag", 15), ("contiguous", 2)])
@on_program(3)
def test_a_last_part_has_its_own_length_under_dynamic_scaling(layout, last, tmp_path):
    """Sequences of 43 tokens leave one of 15, or of fewer than the ranks; the scaling begins at 8."""
    from bmburst.checkpoint import hugging_face

    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    scaling = RopeScaling(kind="dynamic", factor=4.0)
    model = tiny.config(vocab_size=tiny.BYTES, max_position_embeddings=8, rope_scaling=scaling)
    saved = tiny.save(tmp_path / f"model-{os.environ['RANK']}", model)
    source = tmp_path / "text.md"
    source.write_text(("the quick brown fox " * 5)[: 85 + last])
    given = EvalConfig(checkpoint=saved, data=str(source), sequence_length=43, layout=layout, by_position=True)
    read, calls = hugging_face.check_weights, []

    def check_weights(*asked):
        calls.append(asked)
        return read(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "check_weights", check_weights)
        measured, bins = evaluate.evaluate_checkpoint(given, evaluate.EvaluatedModel(saved, "bytes", model))
    assert len(calls) == 1  # the headers of weights are read where the weights are

    sequences = PackedSequences(open_corpus(str(source), "bytes", tmp_path), split="all", sequence_length=43)
    sums, counts = [0.0] * 7, []
    for batch in evaluation_batches(sequences):
        ids, labels = (each[0] for each in batch.whole())
        counts.append(int((labels >= 0).sum()))
        reference = tiny.load(saved)  # each time anew: it keeps the frequencies of longer sequences
        for place, _, loss in losses_alone(reference, ids, labels, counts[-1:]):
            sums[place.bit_length()] += loss
    assert counts == [43, 43, last]
    assert measured.tokens == sum(counts) and measured.loss == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    assert [each.nats for each in bins] == pytest.approx(sums, rel=1e-5)


@on_program(2)
def test_data_and_losses_that_cannot_be_are_refused_on_every_rank(tmp_path):
    from tokenizers import Tokenizer, models

    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    trainer = program.trainer(tmp_path, "run")
    trainer.optimizer.param_groups[0]["params"][0].data.fill_(math.nan)
    (tmp_path / "text.md").write_text("the quick brown fox")
    Tokenizer(models.WordLevel({"fox": 5000, "</s>": 1}, unk_token="fox")).save(str(tmp_path / "words.json"))
    given = EvalConfig(checkpoint=trainer.save(), data=str(tmp_path / "text.md"), sequence_length=20)
    with refused("loss is NaN", "bfloat16", "checkpoint"):
        evaluate.evaluate_checkpoint(given)
    with refused(f"'{given.data}' has token id 5000", "fix: the model's own tokenizer"):  # no file of the cache
        evaluate.evaluate_checkpoint(dataclasses.replace(given, tokenizer=str(tmp_path / "words.json")))
