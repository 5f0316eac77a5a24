"""A person's afternoon: from chats to an adapter, through a kill, to scores, a merged model and answers of a server.

The chats are parquet with other names of columns, fields and roles, beside a validation file.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bmburst.inference.generator import Generator
from tests import chat, tiny
from tests.distributed.started import Program, run_bmburst
from tests.serve.test_serve_program import program

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
CHATS, EPOCHS = 24, 2
NAMES = {
    "messages_field": "dialog",
    "role_field": "speaker",
    "content_field": "said",
    "roles": "client=user,bot=assistant",
}
TRAIN = (
    *("train", "--init-from", "base", "--data", "chats.parquet", "--data.validation", "later=later.parquet"),
    *(word for name, value in NAMES.items() for word in (f"--data.{name}", value)),
    *("--lora.rank", "4", "--lora.dropout", "0.1", "--epochs", str(EPOCHS), "--nproc", "2"),
    *("--sequence-length", "128", "--batch-size", "2", "--checkpoint-every", "3", "--eval-every", "4"),
    *("--eval-sequences", "2", "--sample-tokens", "0", "--context-report", "true", "--output", "tuned"),
)


def said(folder: Path, *words: object) -> str:
    """Run a command to its end, and return what it says: nothing that is no message to a person."""
    done = run_bmburst(*words, cwd=folder, env=ENVIRONMENT, timeout=300)
    text = done.stdout + done.stderr
    sys.stdout.write(f"{' '.join(map(str, words))}\n{text}\n")  # with a later failure
    assert done.returncode == 0, text
    assert not re.search(r"Traceback|Warning|\bnan\b", text), text
    return text


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    """Write chats under other names than those of OpenAI's messages."""
    roles = {"user": "client", "assistant": "bot"}
    dialogs = [
        [{"speaker": roles[each["role"]], "said": each["content"]} for each in record["messages"]] for record in records
    ]
    pq.write_table(pa.table({"dialog": dialogs}), path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_from_chats_to_answers(tmp_path: Path) -> None:
    chat.directory(tiny.save(tmp_path / "base", vocab_size=chat.VOCAB, max_position_embeddings=4096, seed=3))
    write_parquet(tmp_path / "chats.parquet", chat.records(CHATS))
    write_parquet(tmp_path / "later.parquet", chat.records(8, seed=1))
    names = [word for name, value in NAMES.items() for word in (f"--{name.replace('_', '-')}", value)]
    shown = said(tmp_path, "data", "--input", "chats.parquet", "--tokenizer", "base", "--show", 3, *names)
    assert shown.count("<|im_start|>assistant") >= 3
    training = Program(list(TRAIN), cwd=tmp_path, env=ENVIRONMENT, forked=True)
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
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert (config["epochs"], config["lora"]["dropout"]) == (EPOCHS, 0.1)
    steps, evals = lines(tmp_path / "tuned" / "metrics.jsonl"), lines(tmp_path / "tuned" / "evals.jsonl")
    assert [each["step"] for each in steps] == list(range(1, config["steps"] + 1))
    assert {each["data"] for each in evals} == {"later"} and evals[-1]["loss"] < evals[0]["loss"]
    assert json.loads((tmp_path / "tuned" / "context.json").read_text())["sentence"]

    words = ("--tasks", "all", "--lengths", "1K,2K", "--samples", 1, "--nproc", 2)
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
