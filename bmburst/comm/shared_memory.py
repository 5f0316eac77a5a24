"""GPU memory that the ranks of a host share through CUDA IPC, and a thread that watches the processes that share it."""

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
    """The ranks of a group cannot share memory. Every rank raises it with the same text."""


class SharedMemory:
    """One allocation of the same size on every rank, each readable and writable by all ranks.

    Construction, `grow` and `close` are collective and wait for the device. The memory is outside of torch's caching
    allocator: it reduces the driver's free memory and is not counted by `torch.cuda.max_memory_allocated`.

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
        with torch.inference_mode(False):  # the caller may be in inference mode, later users may not be
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
        """The address of each rank's memory in this process."""
        return self._opened

    def grow(self, nbytes: int) -> None:
        """Reallocate it with at least `nbytes` bytes; the content is lost. Every rank must call it with the same size.

        Raises:
            SharedMemoryError: As above.
        """
        self.close()
        self._open(nbytes)

    def close(self) -> None:
        """Free the memory when no rank uses it any more. Every rank must call it."""
        torch.cuda.synchronize(self._device)
        gather_objects(self._comm, None)  # no rank reads this memory any more
        for rank, address in enumerate(self._opened):
            if rank != self._comm.rank:
                cuda_driver.close_exported(address)
        gather_objects(self._comm, None)  # no rank has this memory open any more
        if self._own:
            cuda_driver.free(self._own)
        self._opened, self.nbytes, self._own = [], 0, 0


def agreed(comm: Communicator, problem: str, value: str) -> list[str]:
    """Return every rank's value. If any rank has a problem, raise the first one on all ranks."""
    answers: Sequence[tuple[str, str]] = gather_objects(comm, (problem, value))
    for text, _ in answers:
        if text:
            raise SharedMemoryError(text)
    return [answer for _, answer in answers]


def host_identity() -> str:
    """Return a text that is equal for two processes if and only if they run on one host since one boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{os.uname().nodename} {file.read().strip()}"


_LOOK_EVERY = 1.0  # seconds
_PATIENCE = 10.0  # seconds: a peer that ended normally has sent all its signals before


class PeerWatch:
    """A thread that checks whether the other processes of a group are alive while this process waits for them.

    If a peer has ended and the work of this rank does not finish, it prints one line and exits with status 1. Peers in
    another PID namespace are not visible and not watched.

    Args:
        inner: The group; construction is collective.
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
        """Watch the work before a CUDA event, which needs the other ranks."""
        self._expected = event

    def close(self) -> None:
        """End the thread: one that is inside a CUDA call when Python exits would abort the process."""
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
        """Return whether the watched work is unfinished."""
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
    """Return the start time of a process in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return None if state in "ZX" else fields[18]
