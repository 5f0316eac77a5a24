"""Simulates nodes with slow links on one Linux machine: one network namespace per rank, rate-limited by the kernel."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Port = Literal["rank", "node"]
DEVICE = "eth0"
_FAST, _SLOW = "1:10", "1:20"
_BURST = "256k"  # bytes that may be sent at once
_TCP = {"congestion_control": "reno", "slow_start_after_idle": "0"}
"""Makes results independent of the machine's defaults, and keeps an idle connection's rate."""


def refusal() -> str | None:
    """Return why namespaces cannot be created on this machine, or None."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program '{program}' is missing (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(Shape(nodes=2, places=1, fast=100, slow=10)):
            return None
    except RuntimeError as error:
        return f"the kernel does not allow network namespaces with rate limits: {error}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a network. Each rank has a port to other nodes, as in GPU servers, or a node's ranks share one."""

    nodes: int  # number of nodes
    places: int  # ranks per node
    fast: float  # Mbit/s from a rank to its node
    slow: float  # Mbit/s from a port to other nodes
    port: Port = "rank"  # what has a port to other nodes

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.places


@dataclass(frozen=True, slots=True)
class Network:
    """A running network, with a namespace per rank."""

    prefix: str
    shape: Shape

    def address(self, rank: int) -> str:
        """Return a rank's IPv4 address."""
        return f"10.77.{rank // self.shape.places}.{1 + rank % self.shape.places}"

    def within(self, rank: int) -> list[str]:
        """Return the command prefix that runs a command in a rank's namespace."""
        return ["ip", "netns", "exec", self.namespace(rank)]

    def namespace(self, rank: int) -> str:
        """Return the name of a rank's namespace."""
        return f"{self.prefix}-{rank}"

    def set_link(self, rank: int, *, up: bool) -> None:
        """Enable or disable a rank's link."""
        _run("ip", "-n", self.namespace(rank), "link", "set", DEVICE, "up" if up else "down")

    def set_rate(self, rank: int, rate: float) -> None:
        """Set the rate from a rank to other nodes, in Mbit/s; only for `Shape.port` "rank"."""
        _classes(self.namespace(rank), DEVICE, {_SLOW: rate}, change=True)

    @property
    def ports(self) -> list[tuple[str, str]]:
        """Namespace and device of each port to other nodes."""
        if self.shape.port == "rank":
            return [(self.namespace(rank), DEVICE) for rank in range(self.shape.ranks)]
        return [(f"{self.prefix}-switch", f"up{node}") for node in range(self.shape.nodes)]


def sent(ports: list[tuple[str, str]]) -> list[int]:
    """Return the bytes that each port has sent to other nodes so far, including headers."""
    found = [_run("tc", "-n", name, "-s", "class", "show", "dev", device, "classid", _SLOW) for name, device in ports]
    return [int(match[1]) if (match := re.search(r"Sent (\d+) bytes", text)) else 0 for text in found]


@contextmanager
def network(shape: Shape) -> Iterator[Network]:
    """Create a network, and remove it after the `with` block; RuntimeError, with its output, if iproute2 fails."""
    made = Network(f"bmburst{os.getpid()}", shape)
    names = [f"{made.prefix}-switch", *map(made.namespace, range(shape.ranks))]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _wire(made)
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run_ranks(network: Network, program: Sequence[str], port: int, **setting: object) -> Any:
    """Run a program in the namespace of every rank, and return the last line of rank 0's output, parsed as JSON.

    `program` is the name of a module and its arguments. It gets `--rank JSON`, an object with `rank`, the `url` of the
    rendezvous at rank 0's `port`, and `setting`. `BMBURST_NODE` tells each rank its node.

    Raises:
        RuntimeError: A rank failed; the message is its output.
    """
    url, started = f"tcp://{network.address(0)}:{port}", []
    for rank in range(network.shape.ranks):
        command = [sys.executable, "-m", *program, "--rank", json.dumps({"rank": rank, "url": url, **setting})]
        own = {"BMBURST_NODE": f"node {rank // network.shape.places}", "GLOO_SOCKET_IFNAME": DEVICE}
        started.append(
            subprocess.Popen(
                [*network.within(rank), *command],
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=1800)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, process in enumerate(started):
        if process.returncode:
            raise RuntimeError(f"rank {rank}:\n{outputs[rank]}")
    return json.loads(outputs[0].splitlines()[-1])


def _wire(made: Network) -> None:
    """Connect the ranks of each node by a bridge, and the nodes by another bridge."""
    shape, switch = made.shape, f"{made.prefix}-switch"
    for bridge in ("core", *(f"node{node}" for node in range(shape.nodes))):
        _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", bridge, "up")
    for node in range(shape.nodes):
        up, down = f"up{node}", f"down{node}"
        _run("ip", "-n", switch, "link", "add", up, "type", "veth", "peer", "name", down)
        for device, bridge in ((up, f"node{node}"), (down, "core")):
            _run("ip", "-n", switch, "link", "set", device, "master", bridge, "up")
        if shape.port == "node":
            _shape(switch, up, {_SLOW: shape.slow}, default="20")
    for rank in range(shape.ranks):
        name, plug = made.namespace(rank), f"rank{rank}"
        _run("ip", "-n", switch, "link", "add", plug, "type", "veth", "peer", "name", DEVICE, "netns", name)
        _run("ip", "-n", switch, "link", "set", plug, "master", f"node{rank // shape.places}", "up")
        _run("ip", "-n", name, "address", "add", f"{made.address(rank)}/16", "dev", DEVICE)
        for setting, value in _TCP.items():
            _run(*made.within(rank), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/tcp_{setting}")
        for device in ("lo", DEVICE):
            _run("ip", "-n", name, "link", "set", device, "up")
        if shape.port == "node":
            _shape(name, DEVICE, {_FAST: shape.fast}, default="10")
            continue
        _shape(name, DEVICE, {_FAST: shape.fast, _SLOW: shape.slow}, default="20")
        own = f"10.77.{rank // shape.places}.0/24"
        match = ("u32", "match", "ip", "dst", own, "flowid", _FAST)
        _run("tc", "-n", name, "filter", "add", "dev", DEVICE, "parent", "1:", "protocol", "ip", *match)


def _shape(namespace: str, device: str, rates: dict[str, float], default: str) -> None:
    """Limit the outgoing rates of a device, in Mbit/s by HTB class."""
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", default)
    _classes(namespace, device, rates)


def _classes(namespace: str, device: str, rates: dict[str, float], *, change: bool = False) -> None:
    """Add or change the HTB classes of a device."""
    for name, rate in rates.items():
        limits = ("rate", f"{rate:g}mbit", "burst", _BURST, "cburst", _BURST, "quantum", "60000")
        at = ("dev", device, "parent", "1:", "classid", name)
        _run("tc", "-n", namespace, "class", "change" if change else "add", *at, "htb", *limits)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
