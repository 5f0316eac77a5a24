"""Relays connections from other nodes to node 0's store, which listens on loopback only, and authenticates them.

Node 0's launcher listens at --master-addr. Every other launcher listens on its own loopback, where its ranks find the
store. At the start of a connection each launcher proves that it knows the run's secret, which is derived from the --job
name and BMBURST_TOKEN. Without the proof there is no connection to the store. The data is neither encrypted nor signed.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable

from bmburst.errors import UserError
from bmburst.runtime.launch.spec import LaunchSpec
from bmburst.runtime.stores import LOOPBACK

TOKEN = "BMBURST_TOKEN"
_HELLO = b"bmburst launcher 1\n"
_NONCE = 32  # bytes, as a proof has
_PATIENCE = 20.0  # seconds for a handshake, on a busy host
_STRANGERS = 512  # connections that may be in their handshake at once

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def secret_of(spec: LaunchSpec) -> bytes:
    """Return the key that the launchers of a run share. It is derived from the run's name and BMBURST_TOKEN, if set."""
    return hashlib.sha256(f"bmburst\0{spec.job}\0{os.environ.get(TOKEN, '')}".encode()).digest()


def dial(endpoint: tuple[str, int], secret: bytes) -> socket.socket:
    """Return a connection to node 0's store through its launcher.

    Raises:
        OSError: Nothing answers at the endpoint.
        UserError: The process that answers is not a launcher of this run.
    """
    host, port = endpoint
    line = socket.create_connection(endpoint, timeout=_PATIENCE)
    try:
        with line.makefile("rb", buffering=0) as answers:
            greeting = _read(answers.read, len(_HELLO) + _NONCE)
            if not greeting.startswith(_HELLO):
                raise _stranger(host, port, "is not a bmburst launcher")
            theirs, ours = greeting[len(_HELLO) :], secrets.token_bytes(_NONCE)
            line.sendall(ours + _proof(secret, b"joins", theirs, ours))
            answer = _read(answers.read, _NONCE)
            if not hmac.compare_digest(answer, _proof(secret, b"serves", theirs, ours)):
                raise _stranger(host, port, f"is the launcher of another run, or has another {TOKEN}")
    except TimeoutError:
        line.close()
        raise _stranger(host, port, "does not answer as a bmburst launcher does") from None
    except BaseException:
        line.close()
        raise
    line.settimeout(None)
    return line


class Relay(threading.Thread):
    """Forwards the connections that a socket accepts, in both directions, until the process ends.

    Args:
        listener: The socket. The relay owns it from now on.
        way: Opens the connection to forward an accepted one to, or raises OSError or UserError.
    """

    def __init__(self, listener: socket.socket, way: Callable[[_Ends], Awaitable[_Ends]]) -> None:
        super().__init__(name="bmburst-relay", daemon=True)
        self.port = int(listener.getsockname()[1])
        self._listener, self._way = listener, way
        self._greeting = 0

    def run(self) -> None:
        """Serve until the process ends."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._listener, backlog=4096)
        async with server:
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, UserError, EOFError, TimeoutError), contextlib.closing(writer):
            if self._greeting >= _STRANGERS:
                return
            self._greeting += 1
            try:
                there, back = await asyncio.wait_for(self._way((reader, writer)), _PATIENCE)
            finally:
                self._greeting -= 1
            with contextlib.closing(back):
                both = [asyncio.create_task(_pass(reader, back)), asyncio.create_task(_pass(there, writer))]
                _, rest = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in rest:
                    task.cancel()


def to_store(port: int, secret: bytes) -> Callable[[_Ends], Awaitable[_Ends]]:
    """Return the `way` of node 0's relay: to the store on loopback, for clients that know the secret."""

    async def way(ends: _Ends) -> _Ends:
        reader, writer = ends
        nonce = secrets.token_bytes(_NONCE)
        writer.write(_HELLO + nonce)
        theirs, proof = await reader.readexactly(_NONCE), await reader.readexactly(_NONCE)
        if not hmac.compare_digest(proof, _proof(secret, b"joins", nonce, theirs)):
            writer.write(bytes(_NONCE))
            await writer.drain()
            raise PermissionError
        writer.write(_proof(secret, b"serves", nonce, theirs))
        return await asyncio.open_connection(LOOPBACK, port)

    return way


def to_node_0(endpoint: tuple[str, int], secret: bytes) -> Callable[[_Ends], Awaitable[_Ends]]:
    """Return the `way` of another node's relay: to node 0's launcher."""

    async def way(_: _Ends) -> _Ends:
        return await asyncio.open_connection(sock=await asyncio.to_thread(dial, endpoint, secret))

    return way


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the other end is closed, and this one is closed next
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def _read(read: Callable[[int], bytes | None], count: int) -> bytes:
    """Read `count` bytes.

    Raises:
        ConnectionError: The stream ends before.
    """
    found = b""
    while len(found) < count:
        more = read(count - len(found))
        if not more:
            raise ConnectionResetError("the launcher there has ended")
        found += more
    return found


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(nonces), "sha256")


def _stranger(host: str, port: int, what: str) -> UserError:
    return UserError(
        f"the process that listens at {host}:{port} {what}\n"
        f"fix: give all nodes of one run, and no other run, the same --master-addr, --master-port and {TOKEN}"
    )
