"""Telling the other nodes' launchers that this node's part of the run has ended, and hearing it from them.

torchrun's agents know nothing of each other once the ranks run: without this, one node's error, or its loss, leaves the
ranks of the others waiting in a collective for ever. A store on node 0, the agents' own, carries the word; its loss is
word too. Node 0 keeps it until nobody needs it: its agent alone would take it away while others still read their last
answer, and torch writes a stack for each connection that breaks.
"""

import math
import select
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from bmburst.runtime.launch.pulses import LEFT, SILENT, Pulses
from bmburst.runtime.launch.spec import LaunchSpec

JOIN_TIMEOUT = 900  # seconds that nodes wait for each other to start
_FAILED = "failed"
_POLL = 0.5  # seconds
_LEAVE = 15.0  # seconds that node 0, after a failure, lets the others take to end their ranks
_ANSWER = 2.0  # seconds for the store to take a node's last word
_LATE = 10.0  # seconds after which a node that waits for others to start says so


class NodeWatch(threading.Thread):
    """This node's line to the others, from its start to its end.

    Attributes:
        ended: Why the run is over, as another node said it or its silence does; empty while it is not.
        connected: Set when node 0's store is reached, or is not to be.
        error: Why it is not.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(name="bmburst-nodes", daemon=True)
        self.ended = ""
        self.connected = threading.Event()
        self.error: RuntimeError | None = None
        self._spec = spec
        self._unknown = ""
        self._others = Pulses(range(1, spec.nnodes) if spec.node_rank == 0 else ())
        self._rounds = 0
        self._over = threading.Event()
        self._status = 0

    def run(self) -> None:
        """Connect, listen until this node's part is over, and leave."""
        late = threading.Timer(_LATE, self._say_who_is_waited_for)
        late.daemon = True
        late.start()
        try:
            self._resolve()
            store = self._connect()
            store.add(_pulse(self._spec.node_rank), 1)  # before ranks start: node 0 waits for whoever it has heard of
        except RuntimeError as error:  # what all of torch's store errors are
            self.error = error
            late.cancel()
            return
        finally:
            self.connected.set()
        threading.Thread(target=self._miss_answers, name="bmburst-answers", daemon=True).start()
        try:
            self._listen(store)
            self._depart(store)
        except (RuntimeError, OSError):
            if not self._over.is_set():
                self.ended = self.ended or "the launcher of node 0 is gone"

    def leave(self, status: int) -> None:
        """Say that this node's part is over. On node 0 this waits until the others have said so too, or are lost.

        Args:
            status: Exit status of this node's launcher; the others end their ranks if it is not 0.
        """
        self._status = status
        self._over.set()
        if self.connected.is_set():
            self.join(_ANSWER if self._spec.node_rank else _LEAVE if status else None)

    def _resolve(self) -> None:
        """Wait until the name of node 0 is known here: where nodes start together it may become so a little later."""
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

    def _connect(self) -> Any:
        """Return a client of node 0's store; on node 0 it is also a share in the store, which lives as long as any."""
        import torch.distributed as dist

        stores: Any = dist  # torch does not list TCPStore among the names it exports
        (host, port), owner, timeout = self._spec.endpoint, self._spec.node_rank == 0, timedelta(seconds=JOIN_TIMEOUT)
        store = stores.TCPStore(host, port, is_master=owner, timeout=timeout, wait_for_workers=False, multi_tenant=True)
        return stores.PrefixStore(f"bmburst/{self._spec.job}", store)

    def _say_who_is_waited_for(self) -> None:
        host, port = self._spec.endpoint
        awaited = "" if self.connected.is_set() else self._unknown or f"node 0 at {host}:{port}"
        if not awaited and self._others.missing:
            awaited = f"node {_names(self._others.missing)} of {self._spec.nnodes} to start"
        if awaited and not self._over.is_set():
            sys.stderr.write(f"bmburst: node {self._spec.node_rank} waits for {awaited}\n")
            sys.stderr.flush()

    def _listen(self, store: Any) -> None:
        """Exchange signs of life until this node's part is over.

        Raises:
            RuntimeError: The store answers no more.
            OSError: Node 0's launcher is gone.
        """
        line = self._line()
        while True:
            if select.select([line], [], [], 0)[0]:  # it has ended, perhaps by a firewall
                line.close()
                line = self._line()
            store.add(_pulse(self._spec.node_rank), 1)
            self._hear(store)
            if not self.ended and store.check([_FAILED]):
                self.ended = store.get(_FAILED).decode()
            lost = self._others.lost(time.monotonic())
            if lost and not self.ended:
                self.ended = f"node {_names(lost)} is lost, nothing was heard of its launcher for {SILENT:g} s"
                store.set(_FAILED, self.ended)
            self._rounds += 1
            if self._over.wait(_POLL):
                line.close()
                return

    def _line(self) -> socket.socket:
        """Return a connection to node 0 on which nothing is ever said: it ends with the launcher there.

        It is asked before the store is, whose client writes a stack where its own connection has ended.
        """
        return socket.create_connection(self._spec.endpoint, timeout=SILENT)

    def _miss_answers(self) -> None:
        """Notice that the store answers no more: a host that has lost its power closes no connection.

        Seconds are counted, not read from a clock, so that a launcher that was stopped for minutes can go on.
        """
        rounds, seconds = -1, 0
        while not self._over.wait(1.0) and not self.ended:
            rounds, seconds = self._rounds, seconds + 1 if rounds == self._rounds else 0
            if seconds > SILENT:
                self.ended = f"node 0 is lost, its launcher gave no answer for {SILENT:g} s"

    def _depart(self, store: Any) -> None:
        if self._status and not self.ended:
            store.set(_FAILED, f"node {self._spec.node_rank} ended with status {self._status}")
        store.set(_pulse(self._spec.node_rank), str(LEFT))
        until = time.monotonic() + (_LEAVE if self._status else math.inf)
        self._hear(store)
        while self._others.staying != self._others.lost(time.monotonic()) and time.monotonic() < until:
            time.sleep(0.02)
            self._hear(store)

    def _hear(self, store: Any) -> None:
        for node in [*self._others.missing, *self._others.staying]:
            self._others.hear(node, store.add(_pulse(node), 0), time.monotonic())


def _pulse(node: int) -> str:
    return f"pulse of node {node}"


def _names(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes))
