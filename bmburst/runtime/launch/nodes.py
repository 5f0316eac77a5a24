"""Connects the launchers of several nodes: if a node fails or is lost, the run ends on all nodes.

Otherwise the ranks of the other nodes would wait in a collective for ever. Each launcher increments a key in the run's
store on node 0, its heartbeat, and node 0 checks that the keys change. Node 0 keeps the store until the other launchers
have left, because torch writes a stack trace for each connection that breaks. The store listens on node 0's loopback.
A relay lets the other launchers reach it.
"""

import hashlib
import json
import math
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from bmburst.errors import UserError
from bmburst.runtime.launch.spec import LaunchSpec, StoreAddress
from bmburst.runtime.rank import is_stopped, rank_pids
from bmburst.runtime.stores import LOOPBACK, TOKEN, Relay, address_of, dial, listen, serve, to_node_0, to_store

LEFT = -1  # instead of a number of heartbeats: the node has left the run
SILENT = 60.0  # seconds without a new heartbeat until a node is lost; a launcher sends two a second


def _secret_of(spec: LaunchSpec) -> bytes:
    """Return the key that the launchers of a run share. It is derived from the run's name and BMBURST_TOKEN, if set."""
    return hashlib.sha256(f"bmburst\0{spec.job}\0{os.environ.get(TOKEN, '')}".encode()).digest()


class Heartbeats:
    """Tracks which nodes are missing, which are running and which are lost, by their heartbeats.

    Args:
        nodes: The numbers of the nodes to track.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        self._counts = dict.fromkeys(nodes, 0)
        self._changed = dict.fromkeys(self._counts, 0.0)

    def hear(self, node: int, count: int, now: float) -> None:
        """Record a node's number of heartbeats at time `now` in seconds. The number is `LEFT` if the node has left."""
        if count != self._counts[node]:
            self._counts[node], self._changed[node] = count, now

    @property
    def missing(self) -> list[int]:
        """Nodes that have sent no heartbeat."""
        return [node for node, count in self._counts.items() if count == 0]

    @property
    def staying(self) -> list[int]:
        """Nodes that have joined and not left."""
        return [node for node, count in self._counts.items() if count > 0]

    def lost(self, now: float) -> list[int]:
        """Return the nodes of `staying` without a new heartbeat for more than `SILENT` seconds.

        Only this host's clock is read, when a new number is seen. So a launcher that was stopped for minutes and goes
        on finds that the numbers of the others have grown.
        """
        return [node for node in self.staying if now - self._changed[node] > SILENT]


JOIN_TIMEOUT = 900  # seconds that nodes wait for all nodes to join
_FAILED, _RUN, _SHAPE, _COMPLETE, _STOPPED = "failed", "run", "shape", "complete", "changes of stopped ranks"
_POLL = 0.5  # seconds
_LEAVE = 15.0  # seconds that node 0 waits after a failure for the others to end their ranks
_ANSWER = 2.0  # seconds that a node waits to send its last message to the store
_LATE = 10.0  # seconds after which a node prints which nodes it waits for


class NodeWatch(threading.Thread):
    """This node's connection to the other nodes of the run.

    Attributes:
        ended: Why the run ended: the message of a failed node, or that a node is lost. Empty while the run goes on.
        connected: Set when node 0's store is reached, or cannot be.
        complete: Set when all nodes have joined, or cannot.
        error: Why the store cannot be reached, or the nodes cannot join.
        store_address: Where the ranks of this node find the store. None until all nodes have joined.
        stopped_elsewhere: Ranks of other nodes that are stopped, for example by SIGSTOP, and the names of their hosts.
    """

    def __init__(self, spec: LaunchSpec, folder: Path) -> None:
        super().__init__(name="bmburst-nodes", daemon=True)
        self.ended = ""
        self.connected = threading.Event()
        self.complete = threading.Event()
        self.error: Exception | None = None
        self.store_address: StoreAddress | None = None
        self.stopped_elsewhere: dict[int, str] = {}
        self._spec, self._folder = spec, folder
        self._stopped, self._changes = "{}", 0
        self._served: Any = None
        self._secret = _secret_of(spec)
        self._unknown = ""
        self._others = Heartbeats(range(1, spec.nnodes) if spec.node_rank == 0 else ())
        self._rounds = 0
        self._over = threading.Event()
        self._status = 0

    def run(self) -> None:
        """Connect, exchange heartbeats until this node's part of the run has ended, and leave."""
        late = threading.Timer(_LATE, self._say_who_is_waited_for)
        late.daemon = True
        late.start()
        try:
            self._resolve()
            host, port = self._connect()
            store = self._store(host, port)
            self._join(store)
        except (RuntimeError, OSError, UserError) as error:  # torch's store errors are all RuntimeErrors
            self.error = error
            late.cancel()
            self.complete.set()
            return
        finally:
            self.connected.set()
        threading.Thread(target=self._miss_answers, name="bmburst-answers", daemon=True).start()
        try:
            if self._await_all(store):
                self.store_address = StoreAddress(host=host, port=port, run=store.get(_RUN).decode())
            self.complete.set()
            self._listen(store)
            self._depart(store)
        except (RuntimeError, OSError, UserError):
            if not self._over.is_set():
                self.ended = self.ended or "the launcher of node 0 is gone"
        finally:
            self.complete.set()

    def leave(self, status: int) -> None:
        """Announce that this node's part of the run has ended. Node 0 waits until the others have left or are lost.

        Args:
            status: Exit status of this node's launcher; the others end their ranks if it is not 0.
        """
        self._status = status
        self._over.set()
        if self.connected.is_set():
            self.join(_ANSWER if self._spec.node_rank else _LEAVE if status else None)

    def _resolve(self) -> None:
        """Wait until the name of node 0 resolves. If nodes start together, it may resolve only after some seconds."""
        (host, port), until = self._spec.endpoint, time.monotonic() + JOIN_TIMEOUT
        while True:
            try:
                socket.getaddrinfo(host, port)
                self._unknown = ""
                return
            except OSError as error:
                self._unknown = f"{host} to be known here as a host ({error.strerror})"
            if self._over.wait(1.0) or time.monotonic() > until:
                raise RuntimeError(f"waited for {self._unknown}")

    def _connect(self) -> tuple[str, int]:
        """Return this node's address of the store, on loopback: the store itself on node 0, else a relay to node 0.

        Raises:
            UserError: The port is taken, or the launcher of another run answers.
            RuntimeError: No launcher answers in time.
        """
        endpoint, until = self._spec.endpoint, time.monotonic() + JOIN_TIMEOUT
        if self._spec.node_rank == 0:
            listener = listen(address_of(endpoint[0]), endpoint[1])
            self._served = serve(LOOPBACK, 0, timedelta(seconds=JOIN_TIMEOUT))
            Relay(listener, to_store(self._served.port, self._secret)).start()
            return LOOPBACK, self._served.port
        while True:
            try:
                dial(endpoint, self._secret).close()
                break
            except OSError as error:  # node 0 has not started yet
                if self._over.wait(0.2) or time.monotonic() > until:
                    raise RuntimeError(f"nobody answered: {error}") from None
        relay = Relay(listen(LOOPBACK, 0), to_node_0(endpoint, self._secret))
        relay.start()
        return LOOPBACK, relay.port

    def _store(self, host: str, port: int) -> Any:
        """Return a client of the store for the messages between launchers."""
        import torch.distributed as dist

        stores: Any = dist  # torch does not list TCPStore among the names it exports
        store = stores.TCPStore(host, port, None, False, timedelta(seconds=JOIN_TIMEOUT), wait_for_workers=False)
        return stores.PrefixStore("bmburst/launchers", store)

    def _join(self, store: Any) -> None:
        """Register this node, and check that it belongs to this run.

        Raises:
            UserError: Another launcher has this node's number, or the nodes were started with different options.
        """
        spec, ours = self._spec, f"--nnodes {self._spec.nnodes} --nproc {self._spec.nproc}"
        if spec.node_rank == 0:
            store.set(_RUN, secrets.token_hex(8))
            store.set(_SHAPE, ours)
        theirs = store.get(_SHAPE).decode()
        if theirs != ours:
            raise UserError(
                f"node {spec.node_rank} was started with {ours}, node 0 with {theirs}\nfix: give every node the same"
            )
        if store.add(f"launchers of node {spec.node_rank}", 1) > 1:
            raise UserError(
                f"another launcher has joined as node {spec.node_rank}\n"
                f"allowed: 0 to {spec.nnodes - 1}, each on one node\nfix: give every node its own --node-rank"
            )
        store.add(_heartbeat(spec.node_rank), 1)  # before ranks start: node 0 waits for every node with a heartbeat

    def _await_all(self, store: Any) -> bool:
        """Wait until all nodes have joined; return whether they have."""
        until = time.monotonic() + JOIN_TIMEOUT
        while not self._over.wait(0.1):
            self._exchange(store)
            if self._spec.node_rank == 0 and not self._others.missing:
                store.set(_COMPLETE, "")
            if self.ended or store.check([_COMPLETE]):
                return not self.ended
            if time.monotonic() > until:
                self.error = RuntimeError(f"waited {JOIN_TIMEOUT} s for all nodes to start")
                return False
        return False

    def error_of_joining(self) -> Exception | None:
        """Wait until all nodes have joined or cannot; return the error if they cannot."""
        self.complete.wait()
        return self.error

    def _say_who_is_waited_for(self) -> None:
        host, port = self._spec.endpoint
        awaited = "" if self.connected.is_set() else self._unknown or f"node 0 at {host}:{port}"
        if not awaited and self._others.missing:
            awaited = f"node {_names(self._others.missing)} of {self._spec.nnodes} to start"
        if awaited and not self._over.is_set():
            sys.stderr.write(f"bmburst: node {self._spec.node_rank} waits for {awaited}\n")
            sys.stderr.flush()

    def _listen(self, store: Any) -> None:
        """Exchange heartbeats until this node's part of the run has ended.

        Raises:
            RuntimeError: The store does not answer.
            OSError: Node 0's launcher has ended.
        """
        line = self._line()
        while True:
            if select.select([line], [], [], 0)[0]:  # it was closed, perhaps by a firewall
                line.close()
                line = self._line()
            self._exchange(store)
            if self._over.wait(_POLL):
                line.close()
                return

    def _exchange(self, store: Any) -> None:
        store.add(_heartbeat(self._spec.node_rank), 1)
        self._hear(store)
        self._share_stopped(store)
        if not self.ended and store.check([_FAILED]):
            self.ended = store.get(_FAILED).decode()
        lost = self._others.lost(time.monotonic())
        if lost and not self.ended:
            self.ended = f"node {_names(lost)} is lost, nothing was heard of its launcher for {SILENT:g} s"
            store.set(_FAILED, self.ended)
        self._rounds += 1

    def _share_stopped(self, store: Any) -> None:
        """Publish which ranks of this node are stopped, and read those of the other nodes."""
        stopped = [self._spec.first_rank + rank for rank, pid in rank_pids(self._folder).items() if is_stopped(pid)]
        here = json.dumps(dict.fromkeys(stopped, socket.gethostname()))
        if here != self._stopped:
            self._stopped = here
            store.set(_stopped(self._spec.node_rank), self._stopped)
            store.add(_STOPPED, 1)
        changes = store.add(_STOPPED, 0)
        if changes != self._changes:
            nodes = [n for n in range(self._spec.nnodes) if n != self._spec.node_rank and store.check([_stopped(n)])]
            told = [json.loads(store.get(_stopped(node))) for node in nodes]
            self.stopped_elsewhere = {int(rank): host for ranks in told for rank, host in ranks.items()}
            self._changes = changes

    def _line(self) -> socket.socket:
        """Return an idle connection to node 0. It closes when the launcher there ends.

        It is checked before the store is used: the store's client writes a stack trace if its connection was closed.
        """
        if self._served is not None:
            return socket.create_connection((LOOPBACK, self._served.port))
        return dial(self._spec.endpoint, self._secret)

    def _miss_answers(self) -> None:
        """End the run if the store stops answering: a host that loses power does not close its connections.

        Seconds are counted and not read from a clock, so that a launcher that was stopped for minutes can go on.
        """
        rounds, seconds = -1, 0
        while not self._over.wait(1.0) and not self.ended:
            rounds, seconds = self._rounds, seconds + 1 if rounds == self._rounds else 0
            if seconds > SILENT:
                self.ended = f"node 0 is lost, its launcher gave no answer for {SILENT:g} s"

    def _depart(self, store: Any) -> None:
        if self._status and not self.ended:
            store.set(_FAILED, f"node {self._spec.node_rank} ended with status {self._status}")
        store.set(_heartbeat(self._spec.node_rank), str(LEFT))
        until = time.monotonic() + (_LEAVE if self._status else math.inf)
        self._hear(store)
        while self._others.staying != self._others.lost(time.monotonic()) and time.monotonic() < until:
            time.sleep(0.02)
            self._hear(store)

    def _hear(self, store: Any) -> None:
        for node in [*self._others.missing, *self._others.staying]:
            self._others.hear(node, store.add(_heartbeat(node), 0), time.monotonic())


def _heartbeat(node: int) -> str:
    return f"heartbeat of node {node}"


def _stopped(node: int) -> str:
    return f"stopped ranks of node {node}"


def _names(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes))
