"""Telling the other nodes' launchers that this node's part of the run has failed, and hearing it from them.

torchrun's agents know nothing of each other once the ranks run: without this, one node's error leaves the ranks of
the others waiting in a collective for ever. The agents' own store on node 0 carries the word; its loss is word too.
"""

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

from bmburst.runtime.launch.spec import LaunchSpec

_KEY = "bmburst/ended"
_POLL = 0.5  # seconds
_LATE = 15.0  # seconds: while node 0 was not up, connecting was tried at growing intervals
_CONNECT = timedelta(seconds=900)  # as long as the agents wait for each other


class NodeWatch(threading.Thread):
    """Listens, from the moment node 0's store is up, for the failure of another node's part of a run."""

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(name="bmburst-nodes", daemon=True)
        self.ended = ""
        self._spec = spec
        self._store: Any = None
        self._connected = threading.Event()
        self._done = threading.Event()

    def run(self) -> None:
        """Wait for word until `close`. Sets `ended` to what another node said."""
        import torch.distributed as dist

        host, port = self._spec.endpoint
        stores: Any = dist  # torch does not list TCPStore among the names it exports
        try:
            self._store = stores.TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
            self._connected.set()
            while not self._done.wait(_POLL):
                if self._store.check([_KEY]):
                    self.ended = self._store.get(_KEY).decode()
                    return
        except RuntimeError:  # what all of torch's store errors are
            if not self._done.is_set():
                self.ended = "the launcher of node 0 is gone"

    def tell(self, status: int) -> None:
        """Say that this node's part has ended with an error, and let the others hear it before a store here goes."""
        self.close()
        if not self._connected.wait(_LATE):
            return
        with contextlib.suppress(RuntimeError):  # node 0 is gone: the others see that for themselves
            self._store.set(_KEY, f"node {self._spec.node_rank} ended with status {status}")
            time.sleep(3 * _POLL if self._spec.node_rank == 0 else 0)

    def close(self) -> None:
        """Stop listening: the run is over here."""
        self._done.set()
