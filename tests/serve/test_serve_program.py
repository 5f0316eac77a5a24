"""`bmburst serve` as a command: on one rank and on two, when a rank is lost, and at its end."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bmburst.inference.generator import Generator
from tests.distributed.started import Program, rank_of
from tests.refusals import says
from tests.serve.asked import ASK, FOREVER, conversation, crowd, expected, right_answers

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def program(model: Path, *words: str) -> Iterator[tuple[Program, str]]:
    """Start the command, and return it with its address."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    started = Program(
        ["serve", "--checkpoint", str(model), "--port", "0", *words],
        cwd=model,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        forked=True,
    )
    try:
        line = started.stdout.readline()
        assert line.startswith(f"serving {model.name} at http://127.0.0.1:"), line + started.stderr.read()
        yield started, line.split()[3].rstrip(",")
    finally:
        started.kill()
        started.wait()


def ask_at(url: str, messages: list[dict[str, str]], **options: Any) -> Any:
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=120)
    return client.chat.completions.create(messages=messages, **{**ASK, **options})


def test_two_ranks_answer_and_end_with_sigterm(model: Path, generator: Generator) -> None:
    messages, seeded = conversation(7), {"temperature": 0.8, "seed": 5}
    with program(model, "--nproc", "2", "--cache", "tokens", "--sessions", "1") as (server, url):
        for options in ({}, seeded):
            answer = ask_at(url, messages, **options)
            assert answer.choices[0].message.content == expected(generator, messages, **options)
        events = ask_at(url, messages, stream=True, **{k: v for k, v in FOREVER.items() if k not in ("model",)})
        next(events)
        server.terminate()
        with pytest.raises(openai.APIError, match="stopping"):
            list(events)
        out, err = server.communicate(timeout=60)
        assert (server.returncode, out, err) == (0, "", "")


def test_a_lost_rank_ends_the_server(model: Path) -> None:
    with program(model, "--nproc", "2") as (server, url):
        events = ask_at(url, conversation(1), stream=True, **{k: v for k, v in FOREVER.items() if k != "model"})
        next(events)
        os.kill(rank_of(server.pid, 1), signal.SIGKILL)
        finishes = []
        with contextlib.suppress(Exception):  # of the connection
            finishes += [event.choices[0].finish_reason for event in events]
        assert not any(finishes)  # never an answer that seems to be whole
        _, err = server.communicate(timeout=60)
        assert server.returncode == 1
        says(err, "rank 1 was killed by SIGKILL")


def test_ctrl_c_ends_one_rank(model: Path, generator: Generator) -> None:
    with program(model) as (server, url):
        assert ask_at(url, conversation(1)).choices[0].message.content == expected(generator, conversation(1))
        listening = {line.split()[1] for line in Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]}
        port = f"{int(url.split(':')[2].split('/')[0]):04X}"
        assert f"0100007F:{port}" in listening and f"00000000:{port}" not in listening
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
        assert (server.returncode, out, err) == (130, "", "")


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "seconds"), [("1", 5), ("2", 60)])
def test_no_answer_of_50_clients_is_lost_or_mixed(model: Path, generator: Generator, ranks: str, seconds: int) -> None:
    right = right_answers(generator)
    with program(model, "--nproc", ranks) as (server, url):
        end = time.monotonic() + seconds
        try:
            asyncio.run(crowd(url, right, 50, lambda count: count > 50 and time.monotonic() > end))
        except ExceptionGroup as errors:
            server.terminate()
            errors.add_note(f"the server says: {server.communicate(timeout=60)}")
            raise
        server.terminate()
        _, err = server.communicate(timeout=60)
        assert (server.returncode, err) == (0, "")
