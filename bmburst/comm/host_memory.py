"""Pinned host memory that a thread prepares while the program does other work.

Allocation of pinned memory is slow: 8 GiB took 3.5 s on a host of 16 cores. To touch 8 GiB with all cores took 0.4 s
and to register them with CUDA 0.8 s. So blocks are mapped, touched and registered, in the order in which they will be
needed, from the start of the program on.
"""

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor


class HostMemory:
    """Blocks of pinned memory. Where there is no GPU they are ordinary memory.

    Attributes:
        nbytes: Bytes of all blocks, those included that are being prepared.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._prepared: dict[int, deque[Future[Tensor]]] = defaultdict(deque)
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, sizes: Iterable[int]) -> None:
        """Begin to prepare blocks, in this order, behind those that were asked for before.

        Args:
            sizes: Bytes of each block.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-memory")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        for size in sizes:
            self.nbytes += size
            self._prepared[size].append(self._thread.submit(_block, size, device))

    def wait(self) -> None:
        """Wait until all blocks that nobody has taken are there; `take` raises what failed."""
        wait([block for blocks in list(self._prepared.values()) for block in list(blocks)])

    def take(self, size: int) -> Tensor:
        """Return a block, uint8 `[size]` with any content; one that is prepared, or else a new one.

        Raises:
            RuntimeError: The memory cannot be had, or CUDA cannot register it.
        """
        if prepared := self._prepared[size]:
            block = prepared.popleft()
            if not block.cancel():
                return block.result()
            # Others stand before it: who needs it now makes it now.
        else:
            self.nbytes += size
        return _block(size, torch.cuda.current_device() if torch.cuda.is_available() else None)

    def tensor(self, like: Tensor) -> Tensor:
        """Return a tensor of a tensor's shape and dtype in a block of its own."""
        return self.take(like.nbytes).view(like.dtype).view(like.shape)


def host_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros in ordinary host memory whose pages are there, in huge pages where the system has them.

    Raises:
        RuntimeError: The memory cannot be had.
    """
    return _block(shape.numel() * dtype.itemsize, None).view(dtype).view(shape)


def _block(size: int, device: int | None) -> Tensor:
    """Return mapped memory whose pages are there, all zero; pinned if a GPU is given."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size)
    except OSError as error:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    block[:: mmap.PAGESIZE].zero_()  # by all threads of torch
    if device is not None:
        torch.cuda.set_device(device)
        runtime, address = torch.cuda.cudart(), block.data_ptr()
        if code := int(runtime.cudaHostRegister(address, size, 0)):
            raise RuntimeError(f"CUDA cannot register {size} bytes of host memory: error {code}\nfix: raise ulimit -l")
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return block
