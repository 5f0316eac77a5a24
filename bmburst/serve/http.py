"""The server of `bmburst serve`: OpenAI's chat completions over HTTP, in a thread of rank 0."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bmburst.errors import UserError
from bmburst.inference.prompts import PromptEncoder
from bmburst.inference.sampling import GenerationOptions
from bmburst.serve import protocol
from bmburst.serve.protocol import Question, Refusal
from bmburst.serve.worker import STOPPING, End, Event, Failure, Job, Text, drain

_KEEP_SECONDS = 65  # of an idle connection; clients close theirs after 5 s, and their requests must not meet the end
_MOST_BYTES = 64 << 20  # of a request's body: several million tokens of text
_HEADER_SECONDS = 30.0  # until the header of a request has arrived
_READ_SECONDS = 60.0  # until a request's body has arrived
_SEND_SECONDS = 5.0  # from the time-out of a request until its client has read what was sent
_START_SECONDS, _STOP_SECONDS = 30.0, 5.0
_T = TypeVar("_T")
_SERVED = (
    "allowed: POST /v1/chat/completions, GET /v1/models and GET /health, without a slash at the end; "
    "fix: chat completions, by a client whose base_url ends with /v1"
)
"""What to do about another path or method."""
_WRONG_HOST = (
    "the Host of the request is not this machine's loopback; allowed: localhost, 127.0.0.1 or [::1], as in "
    "http://localhost:8000/v1; fix: ask at such an address, or start the server with --api-key-file"
)
_FINISH = {"length": "length", "stop": "stop", "eos": "stop"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What is served, and its limits.

    Attributes:
        name: Name of the model.
        encoder: Encodes conversations.
        defaults: Options of fields that a request leaves out.
        own_limit: Most tokens of an answer that the model's directory sets, or None.
        max_tokens: Most tokens of prompt and answer.
        queue: Most questions that wait behind the one that is being answered.
        timeout: Seconds from a request to the end of its answer.
        key: The API key; None: anyone who reaches the server may ask.
    """

    name: str
    encoder: PromptEncoder
    defaults: GenerationOptions
    own_limit: int | None
    max_tokens: int
    queue: int
    timeout: float
    key: str | None


class Server:
    """Serves in a thread of its own, and puts questions into `jobs`.

    Args:
        service: What is served.
        listener: A bound socket. It is closed with the server.
    """

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self._app = _App(service, self.jobs)
        config = uvicorn.Config(
            self._app.routed(), log_level="error", access_log=False, lifespan="off", ws="none", loop="asyncio",
            http=_Protocol, server_header=False, timeout_keep_alive=_KEEP_SECONDS,
            timeout_graceful_shutdown=int(_STOP_SECONDS),
        )  # fmt: skip
        self._server, self._listener = uvicorn.Server(config), listener
        # A daemon: a rank whose communication has failed ends without waiting for clients.
        self._thread = threading.Thread(target=self._run, name="bmburst-serve", daemon=True)

    def start(self) -> None:
        """Start to listen; RuntimeError if the server does not start."""
        self._thread.start()
        until = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise RuntimeError("the HTTP server did not start")
            time.sleep(0.01)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def refuse(self) -> None:
        """Refuse new questions from now on."""
        self._app.is_stopping = True

    def stop(self) -> None:
        """Close the listener, send what remains, and end the thread."""
        self.refuse()
        self._server.should_exit = True
        until = time.monotonic() + 2 * _STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            drain(self.jobs)  # also what was being encoded
            self._thread.join(0.05)
        self._app.encoding.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))


class _Protocol(H11Protocol):
    """Closes a connection on which the header of a request does not arrive in time; uvicorn would wait for ever."""

    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # a part of a header
            self._wait_for_header()
        else:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:  # came with the request before it
            self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_header(self) -> None:
        if self._too_late is None:
            self._too_late = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None


class _Waiting:
    """The events of one job, for its request."""

    def __init__(self, prompt: Any, options: GenerationOptions, until: float) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop, self._until = asyncio.get_running_loop(), until
        self.job = Job(prompt=prompt, options=options, send=self._put)

    def _put(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the client is gone
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> Text | End:
        """Wait for the next event.

        Raises:
            Refusal: The model cannot answer, the server stops, or the time is over.
        """
        try:
            async with asyncio.timeout_at(self._until):
                event = await self._events.get()
        except TimeoutError:
            raise Refusal(504, "the time of the request is over (--timeout)", "timeout") from None
        if isinstance(event, Failure):
            is_stop = event.reason == STOPPING
            raise Refusal(503 if is_stop else 500, event.reason, "stopping" if is_stop else "cannot_answer")
        return event


class _App:
    def __init__(self, service: Service, jobs: "SimpleQueue[Job]") -> None:
        self._service, self._jobs = service, jobs
        self._created = int(time.time())
        self._open = self._answered = 0
        self.encoding = ThreadPoolExecutor(1)  # a long document takes seconds, in which others are served
        self.is_stopping = False

    def routed(self) -> Starlette:
        """Return the ASGI application."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", _Endpoint(self._chat), methods=["POST"]),
            ],
            exception_handlers={Refusal: _refused, HTTPException: _not_found, Exception: _failed},
        )
        app.router.redirect_slashes = False  # a redirect has no error that a client could show
        return app

    async def _health(self, request: Request) -> Response:
        del request
        state = "stopping" if self.is_stopping else "ok"
        facts = {"status": state, "open": self._open, "answered": self._answered}
        return _Json(facts, 503 if self.is_stopping else 200)

    async def _models(self, request: Request) -> Response:
        self._require_right(request)
        return _Json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._require_right(request)
        if (name := request.path_params["name"]) != self._service.name:
            raise Refusal(404, f"model {name!r} is not served; allowed: {self._service.name!r}", "model_not_found")
        return _Json(self._described())

    def _described(self) -> Mapping[str, Any]:
        return protocol.model_of(self._service.name, self._created, self._service.max_tokens)

    def _require_right(self, request: Request) -> None:
        """Check the key; without one, that the request names this machine.

        A page in a browser can send requests to loopback, with the name of its own host.
        """
        if self._service.key is None:
            if not _is_local_name(request.headers.get("host", "")):
                raise Refusal(403, _WRONG_HOST, "wrong_host")
            return
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self._service.key}".encode()):
            raise Refusal(401, "the API key is missing or wrong", "invalid_api_key")

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one question: while its client waits, it holds a place in the queue."""
        request = Request(scope, receive)
        self._require_right(request)
        until = asyncio.get_running_loop().time() + self._service.timeout
        with self._place():
            question = await self._read(request)
            waiting = await self._ask(question, until)
            try:
                respond = self._stream if question.stream else self._whole
                prepared = asyncio.ensure_future(respond(question, waiting))
                response = await _unless_gone(prepared, receive)
                if response is not None:
                    async with asyncio.timeout_at(until + _SEND_SECONDS):  # a client may never read
                        await response(scope, receive, send)
            finally:
                waiting.job.is_over = True

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if self.is_stopping:
            raise Refusal(503, STOPPING, "stopping")
        if self._open > self._service.queue:
            raise Refusal(429, f"{self._service.queue} questions wait already (--queue); try again", "queue_full")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _read(self, request: Request) -> Question:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, f"content-type: {kind!r}; allowed: application/json", "wrong_content_type")
        packed = request.headers.get("content-encoding", "").strip().lower()
        if packed not in ("", "identity"):
            raise Refusal(415, f"content-encoding: {packed!r}; allowed: identity", "wrong_content_encoding")
        body = bytearray()
        try:
            async with asyncio.timeout(_READ_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise Refusal(413, f"the body has more than {_MOST_BYTES} bytes", "too_large")
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {_READ_SECONDS:g} s", "timeout") from None
        return await self._apart(
            lambda: protocol.read_question(bytes(body), self._service.name, self._service.defaults)
        )

    async def _ask(self, question: Question, until: float) -> _Waiting:
        """Encode the conversation, and put the question into the queue.

        Raises:
            Refusal: The conversation is rejected, or there is no room for the answer.
        """
        service = self._service
        try:
            prompt = await self._apart(lambda: service.encoder.line(question.line, "request"))
        except UserError as error:
            raise protocol.refusal_of(error, "messages") from None
        room = service.max_tokens - len(prompt)
        options = question.options
        if room < 1 or (question.is_limited and options.max_new_tokens > room):
            new = options.max_new_tokens if question.is_limited else 1
            reason = (
                f"{len(prompt)} tokens of the prompt and {new} of the answer are too many; "
                f"allowed: {service.max_tokens} together"
            )
            raise Refusal(400, reason, "context_length_exceeded", "messages")
        if not question.is_limited:
            options = protocol.limited(options, min(room, service.own_limit or room))
        waiting = _Waiting(prompt.tokens, options, until)
        self._jobs.put(waiting.job)
        return waiting

    async def _apart(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self.encoding, work)

    async def _whole(self, _question: Question, waiting: _Waiting) -> Response:
        pieces = []
        while isinstance(event := await waiting.next(), Text):
            pieces.append(event.text)
        answer = protocol.Response(self._service.name)
        self._answered += 1
        return _Json(answer.whole("".join(pieces), _FINISH[event.finish], _usage(waiting, event)))

    async def _stream(self, question: Question, waiting: _Waiting) -> Response:
        first = await waiting.next()  # what is refused before the first token has a status of its own
        events = self._events(question, waiting, first)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(self, question: Question, waiting: _Waiting, event: Text | End) -> AsyncIterator[bytes]:
        answer = protocol.Response(self._service.name)
        more = {"usage": None} if question.include_usage else {}
        yield _line(answer.piece({"role": "assistant", "content": ""}, **more))
        try:
            while isinstance(event, Text):
                yield _line(answer.piece({"content": event.text}, **more))
                event = await waiting.next()
        except Refusal as refusal:
            yield _line(refusal.to_json())
            return
        yield _line(answer.piece({}, _FINISH[event.finish], **more))
        if question.include_usage:
            yield _line(answer.last(_usage(waiting, event)))
        self._answered += 1
        yield b"data: [DONE]\n\n"


class _Endpoint:
    """An endpoint that sends its response itself, so that it knows when that is over."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect, TimeoutError):
            await self._call(scope, receive, send)


async def _unless_gone(prepared: "asyncio.Future[Response]", receive: Receive) -> Response | None:
    """Return the response, or None if the client leaves before."""
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((prepared, gone), return_when=asyncio.FIRST_COMPLETED)
        return prepared.result() if prepared.done() else None
    finally:
        for task in (prepared, gone):
            task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _usage(waiting: _Waiting, end: End) -> dict[str, Any]:
    return protocol.usage_of(len(waiting.job.prompt), end.new, end.cached)


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encoded(content)


def _encoded(value: Mapping[str, Any]) -> bytes:
    """Return JSON. A name that a request gives may have an unpaired surrogate, which UTF-8 cannot encode."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _line(value: Mapping[str, Any]) -> bytes:
    return b"data: " + _encoded(value) + b"\n\n"


def _is_local_name(host: str) -> bool:
    """Return whether a Host header names loopback: `localhost`, `127.0.0.1:8000`, `[::1]:8000`."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    return _Json(error.to_json(), error.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path}: {error.detail}; {_SERVED}"
    return _Json(Refusal(error.status_code, reason).to_json(), error.status_code, error.headers)


async def _failed(_request: Request, error: Exception) -> Response:
    return _Json(Refusal(500, f"the server failed: {type(error).__name__}").to_json(), 500)
