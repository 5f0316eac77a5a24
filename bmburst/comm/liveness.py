"""Ends a rank that waits for the memory of a rank that has died: no signal of it will ever come."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from bmburst.comm import cuda_driver
from bmburst.comm.objects import gather_objects
from bmburst.comm.protocol import Communicator

_LOOK_EVERY = 1.0  # seconds
_PATIENCE = 10.0  # a peer that ended in order has signalled all there was to signal


class PeerWatch:
    """A thread that looks whether the other processes of a group on this host live while this one waits for them.

    A rank whose peer is gone while its own work does not end says so in one line and ends, with exit status 1. Peers in
    another PID namespace cannot be seen and are not watched.

    Args:
        inner: The group; every rank makes its watch at the same point.
        device: This rank's GPU.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._device = device
        mine = (os.readlink("/proc/self/ns/pid"), os.getpid(), birth(os.getpid()))
        self._peers = {
            rank: (pid, born)
            for rank, (namespace, pid, born) in enumerate(gather_objects(inner, mine))
            if rank != inner.rank and namespace == mine[0]
        }
        self._expected: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bmburst-peer-watch", daemon=True)
        self._thread.start()

    def expect(self, event: Any) -> None:
        """Watch over the work before `event`, a CUDA event, which needs the other ranks."""
        self._expected = event

    def close(self) -> None:
        """End the watch. A thread that is inside of CUDA when Python ends would abort the process."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        torch.cuda.set_device(self._device)
        cuda_driver.look_during_captures()
        missed = 0.0
        while not self._over.wait(_LOOK_EVERY):
            gone = self._gone() if self._is_waiting() else None
            missed = missed + _LOOK_EVERY if gone else 0.0
            if gone and missed >= _PATIENCE:
                rank, pid = gone
                sys.stderr.write(
                    f"bmburst: rank {rank} (process {pid}) of this host has ended, and this rank waits for its memory: "
                    "this rank ends too; the cause is in that rank's output\n"
                )
                sys.stderr.flush()
                os._exit(1)

    def _is_waiting(self) -> bool:
        """Return whether the work is still under way."""
        expected = self._expected
        if expected is not None and expected.query() and self._expected is expected:
            self._expected = None
        return self._expected is not None

    def _gone(self) -> tuple[int, int] | None:
        """Return rank and process id of the first peer that has ended."""
        for rank, (pid, born) in self._peers.items():
            if birth(pid) != born:
                return rank, pid
        return None


def birth(pid: int) -> str | None:
    """Return when the process was started, in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else fields[18]
