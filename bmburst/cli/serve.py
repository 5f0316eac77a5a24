"""`bmburst serve`: a server of OpenAI's chat completions, on one rank or on several ranks that share every prompt."""

import argparse
import importlib.util
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.amounts import tokens
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli.model import (
    add_model_options,
    load_generator,
    model_request,
    note_ignored,
    open_source,
    reopen_source,
    settle_ranks,
)
from bmburst.cli.program import INTERRUPTED, any_text
from bmburst.errors import UserError, first_line
from bmburst.launch.handover import Request, run_command
from bmburst.launch.spec import LaunchSpec
from bmburst.launch.watchdog import handle_signals

if TYPE_CHECKING:
    from bmburst.comm.checks import CheckedCommunicator
    from bmburst.inference.generator import Generator, Source
    from bmburst.serve.http import Server

HELP = (
    "Answer questions with a model through OpenAI's API: /v1/chat/completions, /v1/models and /health. The tokens of a "
    "prompt and the KV cache are split over the ranks. One question is answered at a time; the start of a prompt that "
    "an earlier one had is not computed again."
)
_USAGE = (
    "bmburst serve --checkpoint DIR [--nproc N] [--port PORT] [OPTIONS]\n"
    "       bmburst serve --checkpoint DIR --host ADDRESS --api-key-file FILE [OPTIONS]"
)
_EPILOG = (
    "Defaults of sampling come from the model's generation_config.json. The server listens on loopback; on another "
    "address it needs a key, in --api-key-file or the environment variable BMBURST_API_KEY. Connections are not "
    "encrypted. Exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 after an error in a rank, 2 for bad input."
)
_KEY = "BMBURST_API_KEY"
_MOST_SESSIONS, _MOST_QUEUE = 64, 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    add_model_options(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="PORT", help="TCP port; 0: a free one (default: 8000)")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key that requests must have")
    add("--name", type=any_text, metavar="NAME", help="name of the model (default: that of its folder)")
    add(
        "--max-tokens",
        type=tokens,
        metavar="N",
        help="most tokens of prompt and answer (default: max_position_embeddings, or what fits into memory)",
    )
    add("--sessions", type=int, default=2, metavar="N", help="texts whose KV cache is kept (default: 2)")
    add("--queue", type=int, default=64, metavar="N", help="questions that wait; more are refused (default: 64)")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time from a request to the end of its answer (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit status."""
    return run_command(
        __name__, partial(settle, args), lambda request: INTERRUPTED if _serve(request) == signal.SIGINT else 0
    )


def run_rank(request: Request) -> int:
    """Serve in one rank, as `settle` has decided, and return the exit status."""
    os.environ[VERIFIED] = request["verified"]
    from bmburst.comm.groups import in_group

    return in_group(lambda: 0 * _serve(request))  # the launcher reports the signal


@contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request, LaunchSpec]]:
    """Read and check model and options, once. No weights are read yet."""
    ranks, spec = settle_ranks(args, world_size)
    _require_libraries()
    for option, value, least, most in (
        ("--port", args.port, 0, 65535),
        ("--sessions", args.sessions, 1, _MOST_SESSIONS),
        ("--queue", args.queue, 0, _MOST_QUEUE),
    ):
        if not least <= value <= most:
            raise UserError(f"{option} {value}\nallowed: {least} to {most}\nfix: leave {option} out for its default")
    if not 0 < args.timeout < 1e9:
        raise UserError(f"--timeout {args.timeout:g}\nallowed: seconds above 0\nfix: --timeout 600")
    if args.name is not None and not (args.name and args.name.isprintable()):
        raise UserError(f"--name {args.name!r}\nallowed: printable text\nfix: leave --name out")
    from bmburst.inference.sampling import generation_options
    from bmburst.plan.inference import require_tokens

    source = open_source(args, ranks)
    if args.max_tokens is not None:
        require_tokens("--max-tokens", args.max_tokens, source.weights.config.max_position_embeddings)
    generation_options(source.defaults)
    _require_template(source)
    if not is_loopback(args.host) and read_key(args.api_key_file) is None:
        raise UserError(
            f"--host {args.host} is not loopback, and there is no API key: anyone who reaches it could ask\n"
            f"allowed: 127.0.0.1, or another address with a key\nfix: --api-key-file FILE, or set {_KEY}"
        )
    read_key(args.api_key_file)
    listen(args.host, args.port).close()
    names = ("host", "port", "api_key_file", "max_tokens", "sessions", "queue", "timeout")
    yield model_request(args, source, *names) | {"name": args.name or args.checkpoint.resolve().name}, spec


def _require_libraries() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"bmburst serve needs {' and '.join(missing)}, not installed\nfix: pip install 'bmburst[serve]'"
        )


def _require_template(source: "Source") -> None:
    from bmburst.data.chat import ChatTemplate

    if source.tokenizer is None:
        raise UserError(
            "the model comes without a tokenizer, and questions are text\nallowed: a directory with tokenizer.json\n"
            "fix: --tokenizer DIR, of a tokenizer with a chat template"
        )
    try:
        ChatTemplate(source.tokenizer)
    except UserError as error:
        raise UserError(
            f"{first_line(error)}\nallowed: a model with a chat template, by which questions are written\n"
            "fix: add chat_template.jinja to its directory, or --tokenizer DIR of another with one"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether every address of a host is a loopback address; UserError for a name without one."""
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in _addresses(host, 0))


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, int, int, str, tuple[str, int]]]:
    try:
        if not host:
            raise OSError(0, "an empty name")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--host {host!r}: {reason}\nallowed: an address or a name of this machine\nfix: --host 127.0.0.1"
        ) from None
    return found  # type: ignore[return-value]


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; UserError if the port is taken, or may not be used."""
    family, kind, protocol, _, address = _addresses(host, port)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise UserError(
            f"--host {host} --port {port}: {error.strerror}\nallowed: a free port of this machine\nfix: --port 0"
        ) from None
    return found


def read_key(path: Path | None) -> str | None:
    """Return the API key of a file, else of the environment; None without one.

    Raises:
        UserError: The file cannot be read, or a key is empty or has spaces.
    """
    name = _KEY if path is None else f"--api-key-file {path}"
    try:
        key = os.environ.get(_KEY) if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(f"{name}: {reason}\nallowed: a file with one line\nfix: give a file with the key") from None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{name}: not a key\nallowed: ASCII characters without spaces\nfix: openssl rand -hex 16")
    return key


def _serve(request: Request) -> int:
    """Serve in this rank until rank 0 gets a signal; return its number, 0 on a rank without one."""
    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import memory_beside_weights
    from bmburst.serve.worker import Worker

    comm = communicator(None)
    listener = listen(request["host"], request["port"]) if comm.rank == 0 else None
    source = reopen_source(request)
    memory, available = memory_beside_weights(source, comm, request["cache"], request["dtype"], request["chunk_tokens"])
    fitting = memory.longest(available, request["sessions"])
    asked = request["max_tokens"] or min(source.weights.config.max_position_embeddings, fitting)
    if asked > fitting:
        raise UserError(
            f"--max-tokens {asked} of {request['sessions']} sessions do not fit into memory\n"
            f"allowed: at most {fitting}\nfix: fewer tokens, --sessions 1, or more ranks (--nproc)"
        )
    generator = load_generator(source, request, is_main=comm.rank == 0)
    worker, signum = Worker(generator, _control(comm), request["sessions"], asked), 0

    def note(number: int, _frame: object) -> None:
        nonlocal signum
        signum = number

    with handle_signals((signal.SIGINT, signal.SIGTERM), note):
        if listener is None:
            worker.run(None)
            return signum
        server = _start(request, source, generator, asked, listener)
        try:
            worker.run(server.jobs, lambda: signum != 0 or not server.is_alive)
        finally:
            server.stop()
    if not signum:
        raise RuntimeError("the HTTP server has ended")
    return signum


def _start(
    request: Request, source: "Source", generator: "Generator", max_tokens: int, listener: socket.socket
) -> "Server":
    from bmburst.inference.sampling import own_max_new_tokens
    from bmburst.serve.http import Server, Service

    path = request["api_key_file"]
    service = Service(
        name=request["name"],
        encoder=generator.encoder(chat=True),
        defaults=generator.options(),
        own_limit=own_max_new_tokens(source.defaults),
        max_tokens=max_tokens,
        queue=request["queue"],
        timeout=request["timeout"],
        key=read_key(None if path is None else Path(path)),
    )
    note_ignored(source.defaults, max_tokens)
    server = Server(service, listener)
    host, port = listener.getsockname()[:2]
    server.start()
    at = f"[{host}]" if ":" in host else host
    print(f"serving {service.name} at http://{at}:{port}/v1, up to {max_tokens:,} tokens", flush=True)
    return server


def _control(comm: "CheckedCommunicator") -> "CheckedCommunicator":
    """Return a group of all ranks on CPUs: waiting for a question there does not occupy a GPU."""
    import torch.distributed as dist

    from bmburst.comm.groups import communicator

    return comm if comm.size == 1 else communicator(dist.new_group(backend="gloo"))
