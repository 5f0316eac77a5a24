"""Where the ranks of a communicator meet: an address that every one of them can reach."""

import itertools
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bmburst.errors import UserError

UNIQUE_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES in nccl.h
_C10D: Any = dist  # torch gives its C++ classes no types
_LOOPBACK = "127.0.0.1"
_DEFAULT_TIMEOUT = 1800.0  # seconds, as torch.distributed's


class Rendezvous:
    """Makes unique ids and opens what they name. A store is served by each process that made an id.

    One connection a process and server: to connect costs a reverse DNS query, which may take seconds.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._address = ""
        self._stores: dict[str, Any] = {}  # torch.distributed TCPStores, by "host port"
        self._numbers = itertools.count()
        self.timeout = _timeout(environment)

    def unique_id(self) -> bytes:
        """Return 128 bytes that name a meeting point in this process: `host port number`."""
        if not self._address:
            # Port 0: the system picks a free one. It listens on every interface.
            server = _C10D.TCPStore(_LOOPBACK, 0, None, True, self.timeout, wait_for_workers=False)
            host = _LOOPBACK if self._on_one_host() else _reachable_address(self._environment)
            self._address = f"{host} {server.port}"
            self._stores[self._address] = server
        return f"{self._address} {next(self._numbers)}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def open(self, unique_id: bytes) -> object:
        """Return the store that `unique_id` names, a `torch.distributed.Store`.

        Raises:
            RuntimeError: These are not bytes from `unique_id`.
        """
        parts = unique_id.rstrip(b"\0").decode(errors="replace").split(" ")
        if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise RuntimeError("ncclCommInitRank: this unique id was not made by the host runtime's ncclGetUniqueId")
        host, port, number = parts
        address = f"{host} {port}"
        if address not in self._stores:
            client = _C10D.TCPStore(host, int(port), None, False, self.timeout, wait_for_workers=False)
            self._stores[address] = client
        return _C10D.PrefixStore(f"communicator/{number}", self._stores[address])

    def options(self) -> object:
        """Return gloo's options: loopback on one host, else the interface that the system or the user picks."""
        gloo = _C10D.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self.timeout
        interfaces = [name for name in self._environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if interfaces:
            options._devices = [gloo.create_device(interface=name) for name in interfaces]
        elif self._on_one_host():
            # The host's own name may resolve to nothing, or to an interface behind a firewall.
            options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        else:
            options._devices = [gloo.create_default_device()]
        return options

    def _on_one_host(self) -> bool:
        ranks, here = self._environment.get("WORLD_SIZE", "1"), self._environment.get("LOCAL_WORLD_SIZE")
        if here is not None:
            return here == ranks
        return ranks == "1" or _is_loopback(self._environment.get("MASTER_ADDR", "localhost"))


def _timeout(environment: Mapping[str, str]) -> timedelta:
    given = environment.get("BMBURST_TIMEOUT", "")
    try:
        seconds = float(given or _DEFAULT_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UserError(f"BMBURST_TIMEOUT is '{given}'\nset seconds, above 0; unset means {_DEFAULT_TIMEOUT:g}")
    return timedelta(seconds=seconds)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _reachable_address(environment: Mapping[str, str]) -> str:
    """Return an address of this host that the hosts of the other ranks can reach.

    It is the one from which this host reaches MASTER_ADDR. Where that is a loopback address, this host is the
    master's, and the others know it as MASTER_ADDR.
    """
    master = environment.get("MASTER_ADDR", "localhost")
    port = int(environment.get("MASTER_PORT", "0")) or 9  # discard; nothing is sent
    for family, kind, protocol, _, address in socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # for UDP this only asks the routing table
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            return master if _is_loopback(own) else own
    raise RuntimeError(f"this host has no route to MASTER_ADDR '{master}'")
