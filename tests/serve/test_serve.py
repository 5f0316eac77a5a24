"""`bmburst serve` through OpenAI's own client: its answers and its limits. The command is in test_serve_program.py."""

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import openai
import pytest
from openai._constants import DEFAULT_CONNECTION_LIMITS

from bmburst.cli import CommandParser, find_command, serve
from bmburst.comm.groups import communicator
from bmburst.inference.generator import Generator, Source
from bmburst.inference.session import Session
from bmburst.serve import http as http_server
from bmburst.serve.http import Server
from bmburst.serve.protocol import FIELDS
from bmburst.serve.worker import Failure, Job, Worker
from tests import chat
from tests.cli.commands import refused
from tests.refusals import says
from tests.serve.asked import ASK, FOREVER, LONG, conversation, crowd, expected, right_answers

KEY = "secret-of-the-test"


@dataclass(frozen=True)
class Served:
    """A server in this process, whose questions a thread answers."""

    server: Server
    port: int
    questions: SimpleQueue[Any]

    def client(self, key: str = "any", timeout: float = 60.0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=timeout)

    def health(self) -> dict[str, Any]:
        status, _, facts = self.raw("GET", "/health")
        assert status == 200
        return facts

    def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"content-type": "application/json", **named})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), json.loads(response.read())


@contextlib.contextmanager
def served(model: Path, generator: Generator, *words: str, answers: bool = True) -> Iterator[Served]:
    """Serve without ranks of its own; without `answers`, questions wait for ever."""
    parser, command = CommandParser(prog="serve", description=""), find_command("serve")
    command.configure(parser)
    args: Namespace = parser.read(["--checkpoint", str(model), "--port", "0", "--sessions", "2", *words])
    with serve.settle(args) as (request, _):
        listener = serve.listen(request["host"], request["port"])
        source = Source(model, model, None, generator.tokenizer)  # type: ignore[arg-type]
        server = serve._start(request, source, generator, request["max_tokens"] or LONG, listener)
    over = threading.Event()
    worker = Worker(generator, communicator(None), request["sessions"], request["max_tokens"] or LONG)
    thread = threading.Thread(target=worker.run, args=(server.jobs, over.is_set))
    if answers:
        thread.start()
    try:
        yield Served(server, listener.getsockname()[1], server.jobs)
    finally:
        over.set()
        server.refuse()
        if answers:
            thread.join(60)
        server.stop()
        assert not thread.is_alive() and not server.is_alive


@pytest.fixture(scope="module")
def running(model: Path, generator: Generator) -> Iterator[Served]:
    with served(model, generator) as found:
        yield found


def until(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_answers_are_those_of_generate(running: Served, generator: Generator) -> None:
    client, messages = running.client(), conversation(1)
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    more = {"top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1}
    whole = expected(generator, messages, max_new_tokens=20)
    for options, extra in (
        ({}, {}),
        ({"max_completion_tokens": 9}, {"max_new_tokens": 9}),
        (seeded, seeded),
        ({**seeded, "extra_body": more}, {**seeded, **more}),
        ({**seeded, "extra_body": {"top_k": -1}}, {**seeded, "top_k": 0}),
        ({"max_tokens": 20, "stop": [whole[3:5], "never"]}, {"max_new_tokens": 20, "stop": (whole[3:5], "never")}),
    ):
        given: Any = {"messages": messages, "model": "tiny", **({} if "max_completion_tokens" in options else ASK)}
        answer = client.chat.completions.create(**{**given, **options})
        assert answer.choices[0].message.content == expected(generator, messages, **extra)
        assert answer.choices[0].finish_reason == ("stop" if "stop" in options else "length")
        assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    (model,) = client.models.list().data
    assert model.id == answer.model == client.models.retrieve("tiny").id == "tiny"


def test_a_stream_is_the_same_answer(running: Served, generator: Generator) -> None:
    messages = conversation(2)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = list(running.client().chat.completions.create(messages=messages, stream=True, **ASK, **options))
        pieces = [choice for event in events for choice in event.choices]
        assert "".join(each.delta.content or "" for each in pieces) == expected(generator, messages)
        assert pieces[0].delta.role == "assistant" and pieces[-1].finish_reason == "length"
        assert len({event.id for event in events}) == 1
        assert (events[-1].usage is not None) == bool(options)
    assert events[-1].usage.completion_tokens == 6 and not events[-1].choices


def test_the_start_of_a_document_is_computed_once(running: Served, generator: Generator) -> None:
    """Two documents in turn keep their caches, and an answer that goes on in a further turn too."""
    client, cached = running.client(), {}
    texts = {name: f"{name} " * 80 for name in "XY"}
    for question in ("who?", "what?", "why?"):
        for name, text in texts.items():
            messages = chat.conversation(text + question)
            answer = client.chat.completions.create(messages=messages, **ASK)
            assert answer.choices[0].message.content == expected(generator, messages)
            assert answer.usage and answer.usage.prompt_tokens_details
            cached.setdefault(name, []).append(answer.usage.prompt_tokens_details.cached_tokens or 0)
            assert answer.usage.prompt_tokens == len(generator.encoder().messages(messages, ""))
    for counts in cached.values():
        assert counts[0] < 160 <= min(counts[1:])
    messages = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]
    messages = [*messages, {"role": "user", "content": "and?"}]
    more = client.chat.completions.create(messages=messages, **ASK)
    assert more.choices[0].message.content == expected(generator, messages)
    assert more.usage and more.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens


def test_what_is_not_understood_is_refused_by_name(running: Served) -> None:
    right = {**ASK, "messages": conversation(0)}
    long = chat.conversation("x" * LONG)
    for change, status, words in (
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty | 0.5 | 0"),
        ({"n": 2}, 400, "n: 2 | 1"),
        ({"n": True}, 400, "n: | 1"),
        ({"logprobs": True}, 400, "logprobs | false"),
        ({"tools": [{"type": "function"}]}, 400, "tools | []"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format | text"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias | {}"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"temprature": 1}, 400, "temprature | did you mean 'temperature'?"),
        ({"temperature": "1"}, 400, "temperature | number"),
        ({"temperature": -1}, 400, "temperature | -1 | at least 0"),
        ({"seed": -1}, 400, "seed | -1"),
        ({"top_p": 2}, 400, "top_p | 2"),
        ({"top_k": -2}, 400, "top_k | -2 | at least 0"),
        ({"max_tokens": 0}, 400, "max_tokens | 0 | at least 1"),
        ({"max_completion_tokens": 7}, 400, "max_completion_tokens | 7 | 6"),
        ({"stop": [""]}, 400, "stop | not empty"),
        ({"stream": 1}, 400, "stream | true or false"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options | stream"),
        ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options | include_usage"),
        ({"messages": []}, 400, "messages | at least one"),
        ({"messages": None}, 400, "messages | missing"),
        ({"messages": [{"role": "User", "content": "a"}]}, 400, "the role 'User' | write it as 'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url | text"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "a"}}]}, 400, "audio"),
        ({"chat_template_kwargs": {"tokenize": False}}, 400, "tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "messages | apply_chat_template"),
        ({"\ud800": 1}, 400, "ud800 | leave it out"),
        ({"messages": long}, 400, f"{LONG} together"),
        ({"max_tokens": LONG}, 400, f"{LONG} of the answer | {LONG} together"),
        ({"model": "gpt"}, 404, "gpt | tiny"),
    ):
        found, _, answer = running.raw("POST", "/v1/chat/completions", json.dumps({**right, **change}).encode())
        assert found == status, (change, answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert "that line" not in says(answer["error"]["message"], words)
    long_number = b'{"seed": ' + b"9" * 5000 + b"}"
    for body, words in (
        *((b"", "Expecting value"), (b"{", "Expecting property"), (b"[]", "object"), (b"\xff", "UTF-8 at byte 0")),
        *((b"[" * 100_000, "too deeply"), (b'{"n": 1, "n": 1}', "twice"), (b"{'a': 1}", "line 1 column 2")),
        *((b'{"top_p": NaN}', "NaN"), (long_number, "no float can hold")),
    ):
        found, _, answer = running.raw("POST", "/v1/chat/completions", body)
        assert found == 400 and answer["error"]["code"] == "invalid_json", (body[:9], answer)
        assert "sys." not in says(answer["error"]["message"], "the body", words)
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/completions", 404),
        ("POST", "/chat/completions", 404),  # base_url without /v1
        ("GET", "/health/", 404),
    ):
        found, _, answer = running.raw(method, path, json.dumps(right).encode())
        assert found == status
        says(answer["error"]["message"], f"{method} {path}: | POST /v1/chat/completions | base_url ends with /v1")
    with pytest.raises(openai.BadRequestError, match="together") as caught:
        running.client().chat.completions.create(**{**right, "messages": long})
    assert caught.value.code == "context_length_exceeded"
    nothing = dict.fromkeys(FIELDS) | {"user": "me", "frequency_penalty": 0.0, "n": 1, "tools": []}
    assert running.raw("POST", "/v1/chat/completions", json.dumps({**nothing, **right}).encode())[0] == 200
    assert running.raw("POST", "/v1/chat/completions", b"{}", content_type="text/plain")[0] == 415
    found, _, answer = running.raw("POST", "/v1/chat/completions", b"\x1f\x8b", content_encoding="gzip")
    assert found == 415
    says(answer["error"]["message"], "content-encoding | 'gzip' | allowed: identity")
    assert running.health()["open"] == 0


def test_pages_of_other_hosts_do_not_ask_by_a_browser(running: Served) -> None:
    for host in ("127.0.0.1:1", "localhost", "[::1]:80", "LocalHost:1", "localhost.:1"):
        assert running.raw("GET", "/v1/models", host=host)[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "[::2]", ""):
        assert running.raw("GET", "/v1/models", host=host)[0] in (403, 400)
    message = running.raw("GET", "/v1/models", host="my-machine:8000")[2]["error"]["message"]
    says(message, "Host | allowed: localhost | fix: | --api-key-file")


def test_parts_of_a_content_are_one_text(running: Served, generator: Generator) -> None:
    """The template of the model takes text; one that takes parts gets them (tests/data/test_messages.py)."""
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    made = running.client().chat.completions.create(messages=[{"role": "user", "content": parts}], **ASK)
    assert made.choices[0].message.content == expected(generator, chat.conversation("one\ntwo"))


def test_half_a_header_holds_no_connection(model: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as the first of a connection nor after a request that was answered. A body may take longer."""
    monkeypatch.setattr("bmburst.serve.http._HEADER_SECONDS", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with served(model, generator) as found:
        slow = socket.create_connection(("127.0.0.1", found.port), timeout=60)
        body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
        header = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        for sent in (b"", whole[:20], whole + whole[:20]):
            with socket.create_connection(("127.0.0.1", found.port), timeout=60) as client:
                client.sendall(sent)
                answer = b"".join(iter(lambda client=client: client.recv(4096), b""))  # ends with the connection
                assert answer.count(b"HTTP/1.1 200 OK") == sent.count(whole)
        slow.sendall(body[5:])
        assert slow.recv(4096).startswith(b"HTTP/1.1 200 OK")
        slow.close()
        until(lambda: found.health()["open"] == 0)


def test_clients_close_idle_connections_before_the_server_does(running: Served) -> None:
    """A request that arrives while the server closes its connection is lost."""
    expiry = DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert expiry and running.server._server.config.timeout_keep_alive > 2 * expiry


def test_a_client_that_leaves_frees_the_slot(running: Served, generator: Generator) -> None:
    client = running.client()
    for stream in (True, False):
        before = running.health()["answered"]
        if stream:
            with client.chat.completions.create(messages=conversation(3), stream=True, **FOREVER) as events:
                next(iter(events))
        else:
            with pytest.raises(openai.APITimeoutError):
                running.client(timeout=0.5).chat.completions.create(messages=conversation(3), **FOREVER)
        answer = client.chat.completions.create(messages=conversation(4), **ASK)
        assert answer.choices[0].message.content == expected(generator, conversation(4))
        until(lambda: running.health()["open"] == 0)
        assert running.health()["answered"] == before + 1


def test_a_client_that_does_not_read_frees_the_slot(
    model: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_SEND_SECONDS", 0.2)
    body = json.dumps({**FOREVER, "messages": conversation(3), "stream": True}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    sent: list[str] = []

    async def ask(app: Any) -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message["type"])
            if len(sent) > 1:  # the buffer of the connection is full
                await asyncio.Event().wait()

        async with asyncio.timeout(60):
            await app(scope, receive, send)

    with served(model, generator, "--timeout", "2") as found:
        asyncio.run(ask(found.server._app.routed()))
        assert sent == ["http.response.start", "http.response.body"] and found.health()["open"] == 0


def test_limits_of_questions_that_wait(model: Path, generator: Generator) -> None:
    """No thread answers here: what waits, waits until its client leaves, its time is over, or the server stops."""
    with served(model, generator, "--queue", "1", answers=False) as waiting, ThreadPoolExecutor(4) as pool:

        def ask(timeout: float) -> type[BaseException]:
            with pytest.raises(openai.OpenAIError) as caught:
                waiting.client(timeout=timeout).chat.completions.create(messages=conversation(0), **ASK)
            return caught.type

        leaving, staying = pool.submit(ask, 3.0), pool.submit(ask, 60.0)
        until(lambda: waiting.health()["open"] == 2)
        status, headers, answer = waiting.raw(
            "POST", "/v1/chat/completions", json.dumps({**ASK, "messages": conversation(0)}).encode()
        )
        assert (status, headers["retry-after"]) == (429, "1")
        says(answer["error"]["message"], "1 questions wait | --queue")
        assert ask(60.0) is openai.RateLimitError
        assert leaving.result() is openai.APITimeoutError
        until(lambda: waiting.health()["open"] == 1)
        last = pool.submit(ask, 60.0)
        until(lambda: waiting.health()["open"] == 2)
        waiting.server.refuse()
        assert waiting.raw("GET", "/health")[0] == 503
        with pytest.raises(openai.InternalServerError, match="stopping") as caught:
            waiting.client().chat.completions.create(messages=conversation(0), **ASK)
        assert caught.value.status_code == 503
        waiting.server.stop()
        assert staying.result() is last.result() is openai.InternalServerError
    with served(model, generator, "--timeout", "0.3", answers=False) as waiting:
        for stream in (True, False):
            with pytest.raises(openai.InternalServerError, match="--timeout") as caught:
                waiting.client().chat.completions.create(messages=conversation(0), stream=stream, **ASK)
            assert caught.value.status_code == 504


def test_a_key_is_asked_for(model: Path, generator: Generator, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    words = ("--api-key-file", str(tmp_path / "key"), "--name", "mine", "--max-tokens", "200")
    with served(model, generator, *words) as found:
        for wrong in ("wrong", KEY[:-1], f"{KEY}x"):
            for call in (lambda c: c.models.list(), lambda c: c.chat.completions.create(model="mine", messages=[])):
                with pytest.raises(openai.AuthenticationError, match="key"):
                    call(found.client(wrong))
        assert found.raw("GET", "/v1/models")[0] == 401 and found.health()["status"] == "ok"
        assert found.client(KEY).models.list().data[0].max_model_len == 200  # type: ignore[attr-defined]
        # Without a limit, an answer may take the room that is left.
        answer = found.client(KEY).chat.completions.create(model="mine", messages=conversation(0))
        assert answer.usage and answer.usage.total_tokens == 200 and answer.choices[0].finish_reason == "length"


def test_starts_that_are_refused(model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("serve", "--checkpoint", str(model), "--port", "0")
    (tmp_path / "empty").write_text("\n")
    for words, said in (
        (("--host", "0.0.0.0"), "0.0.0.0 | API key | --api-key-file | BMBURST_API_KEY"),
        (("--host", "::"), ":: | API key"),
        (("--host", ""), "--host"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--api-key-file", str(tmp_path / "gone")), "gone | No such file"),
        (("--host", "0.0.0.0", "--api-key-file", str(tmp_path / "empty")), "not a key"),
        (("--port", "70000"), "--port 70000 | 65535"),
        (("--sessions", "0"), "--sessions 0 | 1"),
        (("--queue", "-1"), "--queue -1 | 0"),
        (("--timeout", "0"), "--timeout 0"),
        (("--max-tokens", "0"), "--max-tokens 0 | at least 1"),
        (("--tokenizer", "bytes"), "chat template"),
    ):
        says(refused(capsys, *given, *words), said)
    says(refused(capsys, *given, "--max-tokens", "1000000000000"), "--max-tokens | do not fit | --sessions 1")
    with serve.listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        says(refused(capsys, *given[:-1], port), f"--port {port} | in use")
    for package in ("starlette", "uvicorn"):
        monkeypatch.setitem(sys.modules, package, None)
    says(refused(capsys, *given), "starlette and uvicorn | pip install 'bmburst[serve]'", lines=2)


def test_a_model_that_fails_ends_the_server_and_its_client_is_told(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    events: list[object] = []
    jobs: SimpleQueue[Job] = SimpleQueue()
    jobs.put(Job(prompt=np.arange(5), options=generator.options(max_new_tokens=2), send=events.append))
    monkeypatch.setattr(Session, "prefill", fail)
    with pytest.raises(MemoryError):
        Worker(generator, communicator(None), 1, LONG).run(jobs)
    assert events == [Failure("the model has failed: MemoryError")]


def test_no_answer_of_some_clients_is_lost_or_mixed(running: Served, generator: Generator) -> None:
    url = f"http://127.0.0.1:{running.port}/v1"
    assert asyncio.run(crowd(url, right_answers(generator), 12, lambda count: count >= 40)) >= 40
