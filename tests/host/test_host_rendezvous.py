"""Ranks of a communicator find each other."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from bmburst.comm.groups import in_group
from bmburst.errors import UserError
from bmburst.host import stores
from bmburst.host.nccl import UNIQUE_ID_BYTES, Rendezvous, reachable_address
from tests.refusals import refused


def address(unique_id: bytes) -> list[str]:
    return unique_id.rstrip(b"\0").decode().split(" ")


def test_ids_name_different_stores_of_one_server() -> None:
    server, client = Rendezvous({}), Rendezvous({})
    first, second = server.unique_id(), server.unique_id()
    assert len(first) == len(second) == UNIQUE_ID_BYTES
    assert address(first)[:2] == address(second)[:2]
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(lambda: [client.open(i).get("key") for i in (second, first)])
        for unique_id, value in ((first, "1"), (second, "2")):
            server.open(unique_id).set("key", value)
        assert got.result(timeout=30) == [b"2", b"1"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
        {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    ],
)
def test_one_host_needs_no_name(environment: dict[str, str]) -> None:
    assert address(Rendezvous(environment).unique_id())[0] == "127.0.0.1"


def test_several_hosts_are_given_an_address_they_can_reach() -> None:
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    routes = {"10.0.0.1": "10.0.0.7", "127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.9"}

    class Probe(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            self.to = address[0]

        def getsockname(self) -> tuple[str, int]:
            return routes[self.to], 1

    for resolved, expected in (("10.0.0.1", "10.0.0.7"), ("127.0.1.1", "10.0.0.9")):  # the name is loopback here
        found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (resolved, 29500))]
        network = SimpleNamespace(getaddrinfo=lambda *_, found=found, **__: found, socket=Probe)
        assert reachable_address(environment, network) == expected


def test_ids_cannot_be_guessed() -> None:
    ids = [Rendezvous({}).unique_id() for _ in range(2)]
    tokens = {address(unique_id)[3] for unique_id in ids}
    assert len(tokens) == 2 and all(len(token) == 32 for token in tokens)


def test_foreign_ids_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not made by the host runtime"):
        Rendezvous({}).open(b"\x01\x02" * 64)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_time_limit_is_a_number_of_seconds(value: str) -> None:
    with pytest.raises(UserError, match=rf"BMBURST_TIMEOUT is '{value}'"):
        Rendezvous({"BMBURST_TIMEOUT": value})


def test_interfaces_that_a_host_has_not_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of another cluster name its interfaces; gloo ended in a traceback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    with refused("GLOO_SOCKET_IFNAME | 'eth99' | lo | fix: name one"):
        in_group(lambda: 0)
    for names in ("lo", "lo,", ""):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        stores.require_interfaces()
