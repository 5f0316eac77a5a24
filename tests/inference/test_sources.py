"""Models from every kind of directory, and runs that are ended while they generate."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from bmburst.checkpoint.conversion import convert
from bmburst.inference.generator import Generator, Source
from tests.distributed.started import Program, rank_of
from tests.inference.models import VOCAB, directory, greedy, prompt
from tests.launch.launcher import alive
from tests.refusals import refuse


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "model-center"), ("minicpm", "model-center"), ("qwen3", "bmburst")]
)
def test_a_converted_model_answers_alike(tmp_path: Path, family: str, kind: str) -> None:
    convert(directory(family), tmp_path / "model", to=kind)
    (answer,) = Generator(tmp_path / "model", dtype="float32").generate(
        [prompt(21)], max_new_tokens=8, eos_ids=(VOCAB + 1,)
    )
    assert list(answer.tokens) == greedy(family, prompt(21), 8)


def test_weights_in_several_files_and_another_dtype(tmp_path: Path) -> None:
    convert(directory("llama"), tmp_path / "model", to="huggingface", dtype="bfloat16", part_bytes=9000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    made = Generator(tmp_path / "model")
    assert made._engine.weights.dtype == torch.bfloat16  # as stored
    exact = Generator(tmp_path / "model", dtype="float32").session(40)
    exact.prefill(prompt(21))
    rounded = made.session(40)
    rounded.prefill(prompt(21))
    assert exact._batch.logits is not None and rounded._batch.logits is not None
    torch.testing.assert_close(rounded._batch.logits, exact._batch.logits, rtol=0.05, atol=0.05)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    for path in directory("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"x")
    refuse(lambda: Source.open(tmp_path), "model.safetensors")
    (tmp_path / "state.json").write_text("{}")
    refuse(lambda: Source.open(tmp_path), "state.json")


@pytest.mark.parametrize("kind", [pytest.param("interrupt", marks=pytest.mark.long), "lost rank"])
def test_an_ended_run_ends_all_ranks(tmp_path: Path, kind: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"tokens": list(prompt(9))}))
    words = ["--checkpoint", str(directory("llama")), "--prompts", "p.jsonl", "--output", "a.jsonl", "--nproc", "2"]
    words += ["--max-new-tokens", "9000000"]
    run = Program(["generate", *words], cwd=tmp_path, env=os.environ, forked=True)
    try:
        # The file is opened when the model has been read; that it can be is tried before there are ranks.
        while not (tmp_path / "a.jsonl").exists():
            assert run.poll() is None, run.communicate(60)[1]
            time.sleep(0.02)
        ranks = [rank_of(run.pid, rank) for rank in range(2)]
        if kind == "interrupt":
            run.send_signal(signal.SIGINT)
        else:
            os.kill(ranks[-1], signal.SIGKILL)
        _, said = run.communicate(timeout=60)
        assert run.returncode == (130 if kind == "interrupt" else 1), said
        assert kind == "interrupt" or "rank" in said
        assert not any(map(alive, ranks))
    finally:
        run.close()
