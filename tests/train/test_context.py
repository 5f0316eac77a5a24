"""The report at the end of a run: losses by position and document length are those of each document alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bmburst import data
from bmburst.inference.passkey import PasskeyCell
from bmburst.outputs import blank_picture, is_picture
from bmburst.train.context import Context, measure_context
from bmburst.train.evaluate import PositionBin, draw_bins
from bmburst.train.sections import DataConfig
from bmburst.train.trainer import Trainer
from tests.distributed.programs import run_program
from tests.train import run_program as program
from tests.train.cases import losses_alone

LENGTH = 160  # bytes: enough for the question about a pass key
TEXTS = ["the quick brown fox " * 6, "jumps", "over the lazy dog, and back " * 3, "and so on. " * 9] * 3


def reported(folder: Path, name: str) -> None:
    """Measure a model of large weights, and write the report to a folder of this name."""
    source = DataConfig(source=str(folder / "text.jsonl"), held_out_fraction=0.5)
    model = replace(program.SHAPE, max_position_embeddings=LENGTH)
    config = program.config(folder, name, model=model, sequence_length=LENGTH, pack="documents", data=source)
    trainer = Trainer(config)
    program.sharpen(trainer)
    tokenizer = data.load_tokenizer("bytes")
    found = measure_context(
        trainer.model,
        trainer.mesh,
        trainer.cut,
        trainer._text.evaluated["held_out"],
        tokenizer,
        device=torch.device("cpu"),
        limit=None,
    )
    trainer.save()
    if trainer.is_main:
        found.write(trainer.folder)
        batches = data.evaluation_batches(trainer._text.evaluated["held_out"], limit=None)
        rows = [
            ([each.tolist() for each in batch.read(row, range(LENGTH))], list(batch.documents[row]))
            for batch in batches
            for row in range(len(batch))
        ]
        (trainer.folder / "rows.json").write_text(json.dumps(rows))


def test_it_is_that_of_documents_alone_on_one_rank_and_on_two(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{i} {t}"}) + "\n" for i, t in enumerate(TEXTS)))
    found: list[dict[str, Any]] = []
    for size in (1, 2):
        run_program(size, reported, tmp_path, f"run-{size}")
        found.append(json.loads((tmp_path / f"run-{size}" / "context.json").read_text()))
        assert is_picture(tmp_path / f"run-{size}" / "context.png")
    model = LlamaForCausalLM.from_pretrained(next((tmp_path / "run-1" / "checkpoints").iterdir()))
    sums: dict[str, dict[int, list[float]]] = {"by_position": {}, "by_length": {}}
    for (ids, labels), lengths in json.loads((tmp_path / "run-1" / "rows.json").read_text()):
        for place, length, loss in losses_alone(model, ids, labels, lengths):
            sums["by_position"].setdefault(place.bit_length(), []).append(loss)
            sums["by_length"].setdefault(length.bit_length(), []).append(loss)
    for report in found:
        for name, expected in sums.items():
            bins = {each["first"].bit_length(): each for each in report[name]}
            assert bins.keys() == expected.keys()
            for key, losses in expected.items():
                assert bins[key]["tokens"] == len(losses)
                assert bins[key]["loss"] == pytest.approx(sum(losses) / len(losses), rel=2e-5)
        assert [cell["depth"] for cell in report["passkeys"]] == [0, 0.5, 1]
        assert all(cell["asked"] == 1 and cell["length"] == LENGTH for cell in report["passkeys"])
        assert "a pass key in 160 tokens" in report["sentence"] and "nats behind" in report["sentence"]
    assert [each["answers"] for each in found[0]["passkeys"]] == [each["answers"] for each in found[1]["passkeys"]]


def test_the_sentence_says_what_was_measured() -> None:
    bins = [
        PositionBin(first=n // 2 + n % 2, last=n, nats=3.0 / (n + 1), tokens=10, loss=3.0 / (n + 1)) for n in (0, 1, 3)
    ]
    cells = [PasskeyCell(length=4096, depth=depth, right=int(depth > 0), asked=1) for depth in (0, 0.5, 1)]
    both = Context(by_position=bins, by_length=(), passkeys=cells).sentence()
    assert both == (
        "a token costs 0.750 nats behind 2 to 3 others, 3.000 behind 0; "
        "a pass key in 4,096 tokens is found at 2 of 3 depths"
    ).replace("4,096", "4K")
    assert Context(by_position=(), by_length=(), passkeys=()).sentence() == ""


def test_positions_of_a_plot_are_numbers_of_tokens_even_in_one_octave() -> None:
    for first, last, shown in ((16, 31, ["16", "32", "64"]), (1024, 2047, ["1K", "2K", "4K"])):
        figure = blank_picture(6, 4)
        axes = figure.subplots()
        draw_bins(axes, [PositionBin(first=first, last=last, nats=30.0, tokens=10, loss=3.0)], "tokens", "loss")
        figure.canvas.draw()
        low, high = axes.get_xlim()
        places = [(tick.get_position()[0], tick.get_text()) for tick in axes.get_xticklabels()]
        assert [text for place, text in places if low <= place <= high] == shown


def test_a_run_ends_with_it_if_asked_or_if_its_sequences_are_long(tmp_path: Path) -> None:
    run_program(2, _with_report, tmp_path)
    assert not (tmp_path / "run" / "context.json").exists()
    for name in ("asked", "long"):
        assert json.loads((tmp_path / name / "context.json").read_text())["by_position"], name


def _with_report(folder: Path) -> None:
    from bmburst.train import trainer

    for name, asked, long in (("run", None, 4096), ("asked", True, 4096), ("long", None, 48)):
        with patch.object(trainer, "LONG", long):  # tokens; the sequences of the test have 48
            program.train(folder, name, context_report=asked, steps=1, eval_every=0, checkpoint_every=0)
