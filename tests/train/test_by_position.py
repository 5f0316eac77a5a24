"""`bmburst eval --by-position`: sums over all ranks and sequences are those of transformers on one process."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from bmburst.data import PackedSequences, evaluation_batches, open_corpus
from bmburst.outputs import is_picture
from bmburst.train import evaluate
from bmburst.train.config import EvalConfig
from tests.cli.commands import refused
from tests.distributed.programs import on_program
from tests.distributed.started import run_bmburst
from tests.refusals import says
from tests.train import run_program as program
from tests.train.cases import losses_alone

MODEL = Path(__file__).parents[1] / "inference" / "passkey"


@pytest.mark.parametrize("pack", ["stream", "documents"])
@on_program(3)
def test_bins_equal_transformers(pack, tmp_path):
    from transformers import LlamaForCausalLM

    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    trainer = program.trainer(tmp_path, "run")
    program.sharpen(trainer)
    saved = trainer.save()
    texts = ["the quick brown fox " * 4, "jumps", "over the lazy dog, and back " * 2]
    source = tmp_path / "text.jsonl"
    if trainer.mesh.sequence_rank == 0:
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trainer.mesh.sum(0.0)  # all wait for the file
    config = EvalConfig(checkpoint=saved, data=str(source), sequence_length=43, pack=pack)
    plain, none = evaluate.evaluate_checkpoint(config)
    assert none == []
    measured, bins = evaluate.evaluate_checkpoint(
        EvalConfig(checkpoint=saved, data=str(source), sequence_length=43, pack=pack, by_position=True)
    )

    model = LlamaForCausalLM.from_pretrained(saved)
    corpus = open_corpus(str(source), "bytes", tmp_path)
    sequences = PackedSequences(corpus, split="all", sequence_length=43, pack=pack)
    sums: dict[int, list[float]] = {}
    for batch in evaluation_batches(sequences, limit=None):
        for row in range(len(batch)):
            lengths = (43,) if batch.documents is None else batch.documents[row]
            for place, _, loss in losses_alone(model, *batch.read(row, range(43)), lengths):
                sums.setdefault(place.bit_length(), []).append(loss)
    assert len(sums) == 7
    assert [each.first for each in bins] == [0, 1, 2, 4, 8, 16, 32]
    assert [each.last for each in bins] == [0, 1, 3, 7, 15, 31, 42]
    for index, each in enumerate(bins):
        assert each.tokens == len(sums[index])
        assert each.nats == pytest.approx(sum(sums[index]), rel=1e-5)
        assert each.loss == pytest.approx(sum(sums[index]) / len(sums[index]), rel=1e-5)
    assert sum(each.tokens for each in bins) == measured.tokens == plain.tokens
    assert sum(each.nats for each in bins) == pytest.approx(measured.loss * measured.tokens, rel=1e-12)
    assert measured.loss == pytest.approx(plain.loss, rel=1e-6)


@on_program(1)
def test_a_text_beyond_the_model_is_noted(tmp_path):
    """The loss there is no fault of the weights; documents of a packed sequence have positions of their own."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    saved = program.trainer(tmp_path, "run").save()
    most = program.SHAPE.max_position_embeddings
    for text, pack, length, longest in (
        ("jumps " * 5, "stream", most, None),
        ("jumps " * 5, "documents", 2 * most, None),
        ("jumps " * 5, "stream", 2 * most, 2 * most),
        ("jumps " * 25, "documents", 2 * most, 2 * most),
        ("jumps " * 13, "documents", 2 * most, 79),  # with the token that ends it
    ):
        source = tmp_path / f"{len(text)}.jsonl"
        source.write_text(f"{json.dumps({'text': text})}\n" * 5)
        given = EvalConfig(checkpoint=saved, data=str(source), sequence_length=length, pack=pack)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            evaluate.evaluate_checkpoint(given)
        notes = [line for line in said.getvalue().splitlines() if "made for" in line]
        words = f"note: | {longest} tokens | made for {most} | --sequence-length {most}"
        assert len(notes) == (longest is not None) and all(says(note, words) for note in notes)


def test_the_command_writes_bins_and_a_picture(tmp_path):
    (tmp_path / "text.txt").write_text("The grass is green. The sky is blue. " * 20)
    given = ["--checkpoint", str(MODEL), "--data", "text.txt", "--sequence-length", "300", "--by-position"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = run_bmburst("eval", *given, "--nproc", "2", cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "by_position.json").read_text())
    assert sum(each["tokens"] for each in found["bins"]) == found["measured"]["tokens"] == 741
    assert [each["first"] for each in found["bins"]] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found["bins"][-1]["last"] == 299
    assert found["model"] == str(MODEL)
    assert is_picture(tmp_path / "by_position.png")
    assert f"{found['bins'][-1]['loss']:.4f}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--by-position", "--output", "x.txt"), "--output x.txt | .json"),
        (("--by-position", "--output", "other.json"), "other.json | exists | by position"),
        (("--output", "x.json"), "--output x.json | no effect | --by-position"),
        (("--by-position", "maybe"), "by_position | maybe | true or false"),
    ],
)
def test_bad_input_is_refused(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"format": "bmburst-passkey-1"}')
    Path("text.txt").write_text("some text")
    says(refused(capsys, "eval", "--checkpoint", str(MODEL), "--data", "text.txt", *options), words)
