"""Where the ranks of a communicator meet: an address that every one of them can reach."""

import itertools
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bmburst.errors import UserError
from bmburst.runtime.stores import LOOPBACK, address_of, is_loopback, serve

UNIQUE_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES in nccl.h
_C10D: Any = dist  # torch gives its C++ classes no types
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
        """Return 128 bytes that name a meeting point in this process: `address port number token`."""
        if not self._address:
            address = LOOPBACK if self._on_one_host() else _reachable_address(self._environment)
            server = serve(address, 0, self.timeout)
            self._address = f"{address} {server.port}"
            self._stores[self._address] = server
        # The token keeps whoever was not given this id from the keys of its ranks.
        token = secrets.token_hex(16)
        return f"{self._address} {next(self._numbers)} {token}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def open(self, unique_id: bytes) -> object:
        """Return the store that `unique_id` names, a `torch.distributed.Store`.

        Raises:
            RuntimeError: These are not bytes from `unique_id`.
        """
        parts = unique_id.rstrip(b"\0").decode(errors="replace").split(" ")
        if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise RuntimeError("ncclCommInitRank: this unique id was not made by the host runtime's ncclGetUniqueId")
        host, port, number, token = parts
        address = f"{host} {port}"
        if address not in self._stores:
            client = _C10D.TCPStore(host, int(port), None, False, self.timeout, wait_for_workers=False)
            self._stores[address] = client
        return _C10D.PrefixStore(f"communicator/{number}/{token}", self._stores[address])

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
            options._devices = [gloo.create_device(hostname=LOOPBACK)]
        else:
            options._devices = [gloo.create_default_device()]
        return options

    def _on_one_host(self) -> bool:
        ranks, here = self._environment.get("WORLD_SIZE", "1"), self._environment.get("LOCAL_WORLD_SIZE")
        if here is not None:
            return here == ranks
        return ranks == "1" or is_loopback(_node_0(self._environment))


def _timeout(environment: Mapping[str, str]) -> timedelta:
    given = environment.get("BMBURST_TIMEOUT", "")
    try:
        seconds = float(given or _DEFAULT_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UserError(f"BMBURST_TIMEOUT is '{given}'\nset seconds, above 0; unset means {_DEFAULT_TIMEOUT:g}")
    return timedelta(seconds=seconds)


def _node_0(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0 as other hosts know it: MASTER_ADDR, unless a launcher passes its store on."""
    return environment.get("BMBURST_NODE_0") or environment.get("MASTER_ADDR", "localhost")


def _reachable_address(environment: Mapping[str, str]) -> str:
    """Return an address of this host that the hosts of the other ranks can reach.

    It is the one from which this host reaches node 0. Where that is a loopback address, this host is node 0, and it is
    the one that the others know it by.
    """
    master = _node_0(environment)
    port = int(environment.get("MASTER_PORT", "0")) or 9  # discard; nothing is sent
    for family, kind, protocol, _, address in socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # for UDP this only asks the routing table
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            return address_of(master) if is_loopback(own) else own
    raise RuntimeError(f"this host has no route to node 0, '{master}'")
