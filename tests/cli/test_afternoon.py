"""A person's afternoon: from chats to an adapter, through a kill, to scores, a merged model and answers of a server."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from bmburst.inference.generator import Generator
from tests import chat, tiny
from tests.distributed.started import Program, run_bmburst
from tests.serve.test_serve import program

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
STEPS = 60
TRAIN = (
    *("train", "--init-from", "base", "--data", "chats.jsonl", "--lora.rank", "4", "--nproc", "2"),
    *("--sequence-length", "128", "--batch-size", "2", "--steps", str(STEPS), "--checkpoint-every", "5"),
    *("--eval-sequences", "2", "--sample-tokens", "0", "--context-report", "true", "--output", "tuned"),
)


def said(folder: Path, *words: object) -> str:
    """Run a command to its end, and return what it says: nothing that is no message to a person."""
    done = run_bmburst(*words, cwd=folder, env=ENVIRONMENT, timeout=300)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert not re.search(r"Traceback|Warning|\bnan\b", text), text
    return text


@pytest.mark.long
def test_from_chats_to_answers(tmp_path: Path) -> None:
    chat.directory(tiny.save(tmp_path / "base", vocab_size=chat.VOCAB, max_position_embeddings=4096, seed=3))
    chat.write(tmp_path / "chats.jsonl", *chat.records(60))
    training = Program(list(TRAIN), cwd=tmp_path, env=ENVIRONMENT)
    try:
        checkpoints, limit = tmp_path / "tuned" / "checkpoints", time.monotonic() + 300
        while not list(checkpoints.glob("step-*")):
            assert training.poll() is None and time.monotonic() < limit, training.communicate(timeout=60)
            time.sleep(0.02)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == -9
    assert "tuned" in said(tmp_path, "train", "--resume", "--output", "tuned", "--nproc", 2)
    steps = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert json.loads((tmp_path / "tuned" / "context.json").read_text())["sentence"]

    words = ("--tasks", "all", "--lengths", "1K,2K", "--samples", 2, "--nproc", 2)
    table = said(tmp_path, "eval", "--checkpoint", "base", "--compare", "tuned", *words).splitlines()
    assert [line.split()[:2] for line in table[1:5]] == [[n, m] for n in ("base", "tuned") for m in ("1K", "2K")]
    said(tmp_path, "convert", "tuned", "merged", "--to", "huggingface", "--merge", "--base", "base")
    merged = Generator(tmp_path / "merged")
    with program(tmp_path / "merged", "--nproc", "2") as (server, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        for question in ("0 one two", "3 two", "And what is 7?"):
            messages: list[Any] = chat.conversation(question)
            answer = client.chat.completions.create(model="merged", messages=messages, max_tokens=12, temperature=0)
            (expected,) = merged.generate([messages], max_new_tokens=12, temperature=0.0)
            assert answer.choices[0].message.content == expected.text
        server.terminate()
        out, err = server.communicate(timeout=60)
        assert (server.returncode, out, err) == (0, "", "")
