"""Serves key-value stores of torch.distributed at one address only.

torch's TCPStore listens on every interface unless it gets a listening socket, and accepts every connection. Other
machines cannot reach a store on loopback. Later stores with the same port in the same process share it.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
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


def require_interfaces() -> None:
    """Raise UserError unless this host has the network interfaces that GLOO_SOCKET_IFNAME names."""
    known = [name for _, name in socket.if_nameindex()]
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if gone := [name for name in named if name and name not in known]:
        raise UserError(
            f"GLOO_SOCKET_IFNAME names {gone[0]!r}, but host {socket.gethostname()} has no such network interface\n"
            f"allowed: {', '.join(known)}\nfix: name one that connects the hosts, or unset it"
        )


def serve(address: str, port: int, timeout: timedelta) -> Any:
    """Return a TCPStore of torch.distributed that this process serves at one address.

    Args:
        address: An IP address of this host.
        port: TCP port; 0 for any free one, which is then the store's `port`.
        timeout: How long calls wait for a key.

    Raises:
        UserError: The port is taken, or the address does not belong to this host.
    """
    with listen(address, port) as listener:
        return serve_at(listener, timeout)


def serve_at(listener: socket.socket, timeout: timedelta) -> Any:
    """Return a TCPStore as `serve` does, at a socket of `listen`, which it takes over. Clients may be waiting there."""
    import torch.distributed as dist

    stores: Any = dist  # torch does not list TCPStore among the names it exports
    address, port = listener.getsockname()[:2]
    # multi_tenant: BMTrain's rank 0 serves a store at the same port, and must get this one.
    return stores.TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address of this host.

    Raises:
        UserError: The port is taken or invalid, the address does not belong to this host, or it is a loopback that is
            not up.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} is not a TCP port\nallowed: 1 to 65535\nfix: give another MASTER_PORT")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of an earlier run
        listener.bind((address, port))
        listener.listen(4096)
        if is_loopback(address):
            _require_route(family, listener.getsockname())
    except UserError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is taken by {owner_of(port)}\nfix: give another MASTER_PORT, the same on every node"
            ) from None
        raise UserError(
            f"cannot listen at {address}:{port}: {error.strerror}\n"
            "allowed: an address of rank 0's host itself, and a port of at least 1024\n"
            "fix: correct MASTER_ADDR or MASTER_PORT"
        ) from None
    return listener


def _require_route(family: socket.AddressFamily, to: tuple[Any, ...]) -> None:
    """Check that this host reaches its own loopback: torch's store would try for 15 minutes, deaf to signals.

    Raises:
        UserError: It does not, as in a new network namespace.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(to)  # for UDP this only asks the routing table
        except OSError as error:
            raise UserError(
                f"this host cannot reach its own address {to[0]}: {error.strerror}\n"
                "fix: bring its loopback interface up: ip link set lo up"
            ) from None


def address_of(host: str, network: Any = socket) -> str:
    """Return the IP address of this host that other hosts reach under the name `host`.

    If the name resolves to loopback only on this host, as the host name does on Debian, it is the address of the
    default route.

    Args:
        host: The name.
        network: Resolves names and opens sockets, as the module `socket`.

    Raises:
        OSError: The name cannot be resolved.
    """
    found = [str(entry[4][0]) for entry in network.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    reachable = [address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if reachable or is_loopback(host):
        return (reachable or sorted(found, key=lambda address: ":" in address))[0]
    with network.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
