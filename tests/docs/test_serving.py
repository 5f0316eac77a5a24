"""Serving in docs/inference.md: its server starts, its script asks it, and its table has every status of an answer."""

import os
import re
from pathlib import Path

from bmburst.serve import http, protocol
from tests import chat, tiny
from tests.distributed.started import run_python
from tests.docs.blocks import read_blocks, text_of
from tests.serve.test_serve_program import program

PAGE = "inference.md#serving"
BLOCKS = read_blocks(PAGE)


def test_the_page_is_what_happens(tmp_path: Path) -> None:
    shell, script = BLOCKS
    (command,) = (line for line in shell.commands() if line.startswith("bmburst serve"))
    model = tmp_path / "runs" / "chat"
    tiny.save(model, vocab_size=chat.VOCAB, max_position_embeddings=4096, seed=3)
    chat.directory(model)
    words = command.split()[2:]
    assert words[:2] == ["--checkpoint", "runs/chat"]
    with program(model, *words[2:]) as (_, url):
        code = script.text.replace("http://127.0.0.1:8000/v1", url)
        done = run_python("-c", code, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    counts = [tuple(map(int, found)) for found in re.findall(r"^(\d+) tokens, (\d+) of them", done.stdout, re.M)]
    assert len(counts) == 2 and counts[0][1] == 0 and counts[1][1] > 1500


def test_every_status_is_told() -> None:
    table = text_of(PAGE).partition("### Limits and errors")[2].partition("###")[0]
    told = set(re.findall(r"\b[45]\d\d\b", table))
    code = "".join(Path(module.__file__ or "").read_text() for module in (http, protocol))
    assert told == set(re.findall(r"Refusal\((\d+)", code)) | {"503", "500", "405"}
