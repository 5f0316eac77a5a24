"""Serves key-value stores of torch.distributed at one address only, and relays connections from other nodes to them.

torch's TCPStore listens on every interface unless it gets a listening socket, and accepts every connection. Other
machines cannot reach a store on loopback. Later stores with the same port in the same process share it.

With several nodes, node 0's launcher listens at --master-addr. Every other launcher listens on its own loopback, where
its ranks find the store. At the start of a connection each launcher proves that it knows the run's secret, which is
derived from the --job name and BMBURST_TOKEN. Without the proof there is no connection to the store. The data is
neither encrypted nor signed.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bmburst.errors import UserError

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = MappingProxyType({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"})
"""Variables that keep the sockets of gloo and of NCCL's bootstrap on loopback, for ranks of one host.

On one host, NCCL transfers data over NVLink, PCIe and shared memory. These variables do not affect InfiniBand, which
NCCL_IB_HCA selects. "=" selects exactly this interface, not all interfaces with this prefix.
"""
_ELSEWHERE = "192.0.2.1"  # TEST-NET-1 of RFC 5737: routed like any other address, but not in use
TOKEN = "BMBURST_TOKEN"
_HELLO = b"bmburst launcher 1\n"
_NONCE = 32  # bytes, as a proof has
_PATIENCE = 20.0  # seconds for a handshake, on a busy host
_STRANGERS = 512  # connections that may be in their handshake at once

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def serve(address: str, port: int, timeout: timedelta) -> Any:
    """Return a TCPStore of torch.distributed that this process serves at one address.

    Args:
        address: An IP address of this host.
        port: TCP port; 0 for any free one, which is then the store's `port`.
        timeout: How long calls wait for a key.

    Raises:
        UserError: The port is taken, or the address does not belong to this host.
    """
    import torch.distributed as dist

    stores: Any = dist  # torch does not list TCPStore among the names it exports
    with listen(address, port) as listener:
        port = int(listener.getsockname()[1])
        # multi_tenant: BMTrain's rank 0 serves a store at the same port, and must get this one.
        return stores.TCPStore(
            address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address of this host.

    Raises:
        UserError: The port is taken or invalid, or the address does not belong to this host.
    """
    if not 0 <= port <= 65535:
        raise UserError(
            f"port {port} is not a TCP port\nallowed: 1 to 65535\nfix: give another --master-port (MASTER_PORT)"
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of an earlier run
        listener.bind((address, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is taken by {owner_of(port)}\n"
                "fix: give another --master-port, the same on every node; with one node leave it out to get a free port"
            ) from None
        raise UserError(
            f"cannot listen at {address}:{port}: {error.strerror}\n"
            "allowed: an address of node 0 itself, and a port of at least 1024\n"
            "fix: correct --master-addr (MASTER_ADDR) or --master-port (MASTER_PORT)"
        ) from None
    return listener


def address_of(host: str) -> str:
    """Return the IP address of this host that other hosts reach under the name `host`.

    If the name resolves to loopback only on this host, as the host name does on Debian, it is the address of the
    default route.

    Raises:
        OSError: The name cannot be resolved.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    reachable = [address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if reachable or is_loopback(host):
        return (reachable or sorted(found, key=lambda address: ":" in address))[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))  # for UDP this only asks the routing table
        except OSError:
            return found[0]
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address means loopback on any host."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def owner_of(port: int) -> str:
    """Return the owner of a TCP port of this host, in words: process id and command, if /proc shows them."""
    inodes = _inodes(port)
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(fd) in inodes:
                command = fd.parents[1].joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {fd.parts[2]} ({command.strip()[:100].strip()})"
        except OSError:  # the process has ended, or belongs to another user
            continue
    return "a process of another user or container"


def _inodes(port: int) -> set[str]:
    """Return the /proc links of the port's listening sockets, or of all its sockets if none listens."""
    sockets = [entry for entry in tcp_sockets() if entry[0] == port]
    listening = [inode for _, inode, is_listening in sockets if is_listening]
    return {f"socket:[{inode}]" for inode in listening or [inode for _, inode, _ in sockets]}


def tcp_sockets() -> Iterator[tuple[int, str, bool]]:
    """Yield for every TCP socket of this network namespace its local port, inode, and whether it listens."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            yield int(words[1].rpartition(":")[2], 16), words[9], words[3] == "0A"


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
        connect: Opens the connection to forward an accepted one to, or raises OSError or UserError.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[_Ends], Awaitable[_Ends]]) -> None:
        super().__init__(name="bmburst-relay", daemon=True)
        self.port = int(listener.getsockname()[1])
        self._listener, self._connect = listener, connect
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
                there, back = await asyncio.wait_for(self._connect((reader, writer)), _PATIENCE)
            finally:
                self._greeting -= 1
            with contextlib.closing(back):
                both = [asyncio.create_task(_pass(reader, back)), asyncio.create_task(_pass(there, writer))]
                _, rest = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in rest:
                    task.cancel()


def to_store(port: int, secret: bytes) -> Callable[[_Ends], Awaitable[_Ends]]:
    """Return the `connect` of node 0's relay: to the store on loopback, for clients that know the secret."""

    async def connect(ends: _Ends) -> _Ends:
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

    return connect


def to_node_0(endpoint: tuple[str, int], secret: bytes) -> Callable[[_Ends], Awaitable[_Ends]]:
    """Return the `connect` of another node's relay: to node 0's launcher."""

    async def connect(_: _Ends) -> _Ends:
        return await asyncio.open_connection(sock=await asyncio.to_thread(dial, endpoint, secret))

    return connect


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
