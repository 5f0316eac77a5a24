"""Key-value stores of torch.distributed that listen at one address only; and the owner of a taken port.

torch's TCPStore listens on every interface unless it is given a listening socket, and speaks to whoever connects. A
store on loopback is out of reach for other machines; in one process, torch shares it with later stores of its port.
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
"""What keeps the sockets of gloo and of NCCL's bootstrap on loopback, for ranks of one host.

NCCL's data goes over NVLink, PCIe and shared memory there. InfiniBand is chosen by NCCL_IB_HCA alone. The "=" asks for
this name and no other that begins so.
"""
_ELSEWHERE = "192.0.2.1"  # TEST-NET-1 of RFC 5737: routed as any foreign address, and nobody's


def serve(address: str, port: int, timeout: timedelta) -> Any:
    """Return a TCPStore of torch.distributed that this process serves at one address.

    Args:
        address: An IP address of this host.
        port: TCP port; 0 for any free one, which is then the store's `port`.
        timeout: How long its calls wait for a key.

    Raises:
        UserError: The port is taken, or the address is not of this host.
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
        UserError: The port is taken or is none, or the address is not of this host.
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
    """Return the IP address of this host at which it serves others that know it as `host`.

    Where the name means loopback here alone, as a Debian host's own name does, it is the address of the default route.

    Raises:
        OSError: The name is not known.
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
    """Return whether a host name or an address is loopback by its own words, on any host."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def owner_of(port: int) -> str:
    """Return who has a TCP port of this host, in words: process id and command, where /proc tells this user."""
    inodes = _inodes(port)
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(fd) in inodes:
                command = fd.parents[1].joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {fd.parts[2]} ({command.strip()[:100].strip()})"
        except OSError:  # it has ended, or is another user's
            continue
    return "a process of another user or container"


def _inodes(port: int) -> set[str]:
    """Return the links that open files of the port's sockets are in /proc: of listening ones, else of any."""
    sockets = [entry for entry in tcp_sockets() if entry[0] == port]
    listening = [inode for _, inode, is_listening in sockets if is_listening]
    return {f"socket:[{inode}]" for inode in listening or [inode for _, inode, _ in sockets]}


def tcp_sockets() -> Iterator[tuple[int, str, bool]]:
    """Yield local port, inode and whether it listens, of every TCP socket of this network namespace."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            yield int(words[1].rpartition(":")[2], 16), words[9], words[3] == "0A"
