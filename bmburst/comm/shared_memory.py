"""GPU memory that all ranks of a host open through CUDA IPC, and a watch over the processes that share it."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmburst.comm import cuda_driver
from bmburst.comm.protocol import Communicator, gather_objects

_GRANULE = 2 << 20


class SharedMemoryError(RuntimeError):
    """Memory cannot be shared between the ranks of a group; every rank raises it, with the same text."""


class SharedMemory:
    """One allocation of the same size on every rank, each readable and writable by all ranks.

    Making, growing and closing it are collective and wait for the device. It lies outside of torch's cache: it counts
    in the driver's free memory, not in `torch.cuda.max_memory_allocated`.

    Args:
        comm: Exchanges the handles.
        nbytes: Size on every rank.
        device: This rank's GPU.

    Raises:
        SharedMemoryError: On every rank, if any rank cannot allocate it or open another's.
    """

    def __init__(self, comm: Communicator, nbytes: int, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._open(nbytes)

    def _open(self, nbytes: int) -> None:
        nbytes = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        self.nbytes, self._own = 0, 0
        self._opened: list[int] = []
        self.local: Tensor = torch.empty(0, dtype=torch.uint8)
        """This rank's memory, uint8 `[nbytes]`."""
        try:
            self._share(nbytes)
        except SharedMemoryError:
            self.close()
            raise
        self.nbytes = nbytes
        with torch.inference_mode(False):  # whoever asked for it may be in it, and who uses it next not
            self.local = cuda_driver.as_tensor(self._own, nbytes, self._device)

    def _share(self, nbytes: int) -> None:
        comm, problem, handle = self._comm, "", b""
        try:
            self._own = cuda_driver.allocate(nbytes)
            handle = cuda_driver.export(self._own)
        except (OSError, AttributeError, cuda_driver.DriverError) as error:
            problem = f"rank {comm.rank} cannot share {nbytes / 2**20:.0f} MiB of device memory: {error}"
        handles = agreed(comm, problem, handle.hex())
        try:
            for rank, text in enumerate(handles):
                self._opened.append(self._own if rank == comm.rank else cuda_driver.open_exported(bytes.fromhex(text)))
        except cuda_driver.DriverError as error:
            problem = f"rank {comm.rank} cannot read the memory of rank {len(self._opened)}: {error}"
        agreed(comm, problem, "")

    @property
    def addresses(self) -> Sequence[int]:
        """Where each rank's memory lies in this process."""
        return self._opened

    def grow(self, nbytes: int) -> None:
        """Make it at least that large; what it held is lost. Every rank must call it with the same size.

        Raises:
            SharedMemoryError: As above.
        """
        self.close()
        self._open(nbytes)

    def close(self) -> None:
        """Give the memory back, when no rank uses it any more. Every rank must call it."""
        torch.cuda.synchronize(self._device)
        gather_objects(self._comm, None)  # nobody reads ours any more
        for rank, address in enumerate(self._opened):
            if rank != self._comm.rank:
                cuda_driver.close_exported(address)
        gather_objects(self._comm, None)  # nobody has ours open any more
        if self._own:
            cuda_driver.free(self._own)
        self._opened, self.nbytes, self._own = [], 0, 0


def agreed(comm: Communicator, problem: str, value: str) -> list[str]:
    """Return every rank's value, or raise the first problem of any rank on all of them."""
    answers: Sequence[tuple[str, str]] = gather_objects(comm, (problem, value))
    for text, _ in answers:
        if text:
            raise SharedMemoryError(text)
    return [answer for _, answer in answers]


def host_identity() -> str:
    """Return what is equal exactly for processes of one running host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{os.uname().nodename} {file.read().strip()}"


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
