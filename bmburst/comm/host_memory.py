"""Pinned host memory, prepared by a background thread, and the ZeRO shards offloaded to it (arXiv:2101.06840).

Allocating pinned memory is slow: 8 GiB took 3.5 s on a host of 16 cores. Touching 8 GiB with all cores took 0.4 s, and
registering it with CUDA 0.8 s. So a thread maps, touches and registers blocks from the start of the program, in the
order in which they will be needed. It touches each block with several threads: torch alone takes one for 128 MiB,
because it counts the numbers that it writes, not the pages. The memory is private, because shared memory has no huge
pages by default (`shmem_enabled`): on 2 cores, touching takes 0.6 s per GiB of shared memory and 0.1 s of huge pages,
and the kernel pins huge pages in a twentieth of the time.

The shards of a block are copied to one of two device buffers before BMTrain gathers them: while a block computes, those
of the next block are in flight. The gradient of a block is copied to the host as soon as BMTrain has reduced it. Copies
have one stream for each direction, and the host waits for them only when it reads the gradient.
"""

import contextlib
import mmap
import os
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.square_sums import square_sums

_TOUCHING = 16  # threads, at most: more of them wait for each other in the kernel
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which Python does not name
_BUFFERS = 2
"""Number of blocks with shards on the GPU: BMTrain gathers from one while the other is copied."""


def host_block(size: int, device: int | None) -> Tensor:
    """Return mapped memory that is already paged in, all zero; pinned if a GPU is given.

    It is all zero in a forked process: a fork would copy what is pinned, and later writes would copy the rest.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes") from error
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the kernel is older
            memory.madvise(_WIPE_ON_FORK)
    return paged_in(memory, device)


def paged_in(memory: mmap.mmap, device: int | None, offset: int = 0) -> Tensor:
    """Return new mapped memory as uint8 after touching every page; pinned if a GPU is given.

    Args:
        memory: The memory, all zero.
        device: The GPU whose process the memory is pinned for.
        offset: First byte, a multiple of the page size; the memory before it is left out.

    Raises:
        RuntimeError: CUDA cannot register it.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8, offset=offset)
    _touch(block)
    if device is not None:
        torch.cuda.set_device(device)
        runtime, address = torch.cuda.cudart(), block.data_ptr()
        if code := int(runtime.cudaHostRegister(address, len(block), 0)):
            raise RuntimeError(
                f"CUDA cannot register {len(block)} bytes of host memory: error {code}\nfix: raise ulimit -l"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return block


def page_slices(size: int, count: int) -> list[slice]:
    """Return at most `count` slices that together have the first byte of every page of `size` bytes."""
    each = max(1, -(-size // (count * mmap.PAGESIZE))) * mmap.PAGESIZE
    return [slice(start, min(start + each, size), mmap.PAGESIZE) for start in range(0, size, each)]


def _touch(block: Tensor) -> None:
    """Write to every page of a block that begins at one."""
    count = min(_TOUCHING, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda pages: block[pages].zero_(), page_slices(len(block), count)))


class HostMemory:
    """Blocks of pinned memory; without a GPU, blocks of ordinary memory.

    Args:
        make: Allocates a block of so many bytes, pinned for a GPU unless that is None.

    Attributes:
        nbytes: Bytes of all blocks, including those still being prepared.
    """

    def __init__(self, make: Callable[[int, int | None], Tensor] = host_block) -> None:
        self.nbytes = 0
        self._make = make
        self._prepared: dict[int, deque[Future[Tensor]]] = defaultdict(deque)
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, sizes: Iterable[int]) -> None:
        """Start to prepare blocks in this order, after the blocks of earlier calls."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-memory")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        for size in sizes:
            self.nbytes += size
            self._prepared[size].append(self._thread.submit(self._make, size, device))

    def wait(self) -> None:
        """Wait until all blocks that were not taken are prepared; `take` raises their errors."""
        wait([block for blocks in list(self._prepared.values()) for block in list(blocks)])

    def take(self, size: int) -> Tensor:
        """Return a block, uint8 `[size]` with any content: a prepared one, or else a new one.

        Raises:
            RuntimeError: The memory cannot be allocated, or CUDA cannot register it.
        """
        if prepared := self._prepared[size]:
            block = prepared.popleft()
            if not block.cancel():
                return block.result()
            # The thread still has other blocks to prepare before this one: make it here instead.
        else:
            self.nbytes += size
        return self._make(size, torch.cuda.current_device() if torch.cuda.is_available() else None)

    def tensor(self, like: Tensor) -> Tensor:
        """Return a new tensor with the shape and dtype of `like`, in its own block."""
        return self.take(like.nbytes).view(like.dtype).view(like.shape)


def host_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros in ordinary host memory that is already paged in, in huge pages where the system has them.

    Raises:
        RuntimeError: The memory cannot be allocated.
    """
    return host_block(shape.numel() * dtype.itemsize, None).view(dtype).view(shape)


class HostShard:
    """A BMTrain storage whose weights and gradient live in pinned host memory.

    `parameter.host_shard` is this object. Between uses `parameter.data` and `parameter.grad` are the host tensors.

    Args:
        parameter: The storage's parameter, on the GPU.
        order: The index of its block in the order of the forward pass.
        memory: The source of pinned memory.
        is_written: Whether the parameter has its numbers, which are then copied.

    Attributes:
        parameter: As above.
        order: As above.
        device: The GPU of the parameter and of its copies.
        weights: The weights in host memory.
        version: Counts changes of `weights`.
        pieces: Parts of the gradient that have a sum of squares each; by default all of it is one part.
        squares: Sums of squares of these parts of this rank's gradient, fp64 on `device`; valid after `left`.
        left: The event after the copy of the gradient to host memory.
    """

    def __init__(
        self, parameter: torch.nn.Parameter, order: int, memory: HostMemory, *, is_written: bool = True
    ) -> None:
        self.parameter, self.order, self.device, self.version = parameter, order, parameter.device, 0
        self._memory = memory
        self.weights = memory.tensor(parameter.data)
        if is_written:
            self.weights.copy_(parameter.data)
        self.pieces: tuple[slice, ...] = (slice(None),)
        self.squares: Tensor | None = None
        self._gradient: Tensor | None = None
        self.left: Any = None
        self._update: Future[None] | None = None
        parameter.data = self.weights
        parameter.host_shard = self  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Wait for a pending update of the weights; an error in it is raised here, once."""
        if self._update is not None:
            update, self._update = self._update, None
            self.version += 1
            update.result()

    def update_with(self, update: "Future[None]") -> None:
        """Register a pending update of the weights in another thread; readers wait for it."""
        self.settle()
        self._update = update

    def wait_for_gradient(self) -> None:
        """Block until the gradient is in host memory."""
        if self.left is not None:
            self.left.synchronize()

    def squares_on(self, stream: Any) -> Tensor:
        """Return `squares` for use on a stream, which waits for them; zeros before the first backward."""
        if self.squares is None:
            return torch.zeros(len(self.pieces), dtype=torch.float64, device=self.device)
        stream.wait_event(self.left)
        return self.squares

    def receive(self, gradient: Tensor, stream: Any) -> Any:
        """Copy the gradient to host memory on a stream and add its squares; return the event after both."""
        if self._gradient is None:
            self._gradient = self._memory.tensor(gradient)
        self.left = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._gradient.copy_(gradient, non_blocking=True)
            self.squares = square_sums([gradient[at] for at in self.pieces])
            self.left.record(stream)
        self.parameter.grad = self._gradient
        return self.left


class _Buffer:
    """Device memory for the shards of a block."""

    def __init__(self, shards: Sequence[HostShard]) -> None:
        self.tensors = [torch.empty(len(each.weights), dtype=each.weights.dtype, device=each.device) for each in shards]
        self.holds: tuple[tuple[HostShard, int], ...] = ()
        self.ready, self.free = torch.cuda.Event(), torch.cuda.Event()

    def fits(self, shards: Sequence[HostShard]) -> bool:
        """Return whether the shards have the sizes and dtypes of this memory."""
        kinds = [(len(each.weights), each.weights.dtype) for each in shards]
        return kinds == [(len(each), each.dtype) for each in self.tensors]


class ShardCopies:
    """Copies of a model's blocks between host and GPU, with shared buffers and streams.

    Args:
        memory: The source of pinned memory.
    """

    def __init__(self, memory: HostMemory | None = None) -> None:
        self.memory = memory or HostMemory()
        self._buffers: list[_Buffer] = []  # in the order of use, the most recent one last
        self._inward: Any = None
        self._outward: Any = None
        self._leaving: list[tuple[Tensor, Any]] = []

    def prefetch(self, shards: Sequence[HostShard]) -> _Buffer:
        """Start to copy a block's weights to the GPU, unless they are already there; return their memory."""
        if self._inward is None:
            self._inward, self._outward = torch.cuda.Stream(), torch.cuda.Stream()
        for each in shards:
            each.settle()
        wanted = tuple((each, each.version) for each in shards)
        for buffer in self._buffers:
            if buffer.holds == wanted:
                self._buffers.remove(buffer)
                break
        else:
            buffer = self._free_buffer(shards)
            self._inward.wait_event(buffer.free)
            with torch.cuda.stream(self._inward):
                for each, weights in zip(shards, buffer.tensors, strict=True):
                    weights.copy_(each.weights, non_blocking=True)
                buffer.ready.record(self._inward)
            buffer.holds = wanted
        self._buffers.append(buffer)
        return buffer

    def show(self, shards: Sequence[HostShard], reader: Any) -> None:
        """Set `parameter.data` to the weights on the GPU, for later work of stream `reader`; undo with `hide`."""
        buffer = self.prefetch(shards)
        reader.wait_event(buffer.ready)
        for each, weights in zip(shards, buffer.tensors, strict=True):
            each.parameter.data = weights

    def hide(self, shards: Sequence[HostShard], reader: Any) -> None:
        """Set `parameter.data` back to the host weights; the buffer is free after the work of stream `reader`."""
        for each in shards:
            each.parameter.data = each.weights
        buffer = self._buffers[-1]
        buffer.holds = ()
        buffer.free.record(reader)

    def bring_gradients(self, shards: Sequence[HostShard]) -> None:
        """Copy existing gradients to the GPU, since BMTrain accumulates into `parameter.grad`.

        `parameter.data` becomes device memory of the same size with any content. End with `send_gradients`.
        """
        buffer = self._buffers[-1]
        memories = (buffer if buffer.fits(shards) else _Buffer(shards)).tensors
        for each, memory in zip(shards, memories, strict=True):
            gradient, each.parameter.grad = each.parameter.grad, None
            each.parameter.data = memory
            if gradient is not None:
                torch.cuda.current_stream().wait_event(each.left)
                each.parameter.grad = torch.empty_like(memory).copy_(gradient, non_blocking=True)

    def send_gradients(self, shards: Sequence[HostShard], writer: Any) -> None:
        """Copy gradients to host memory after the work of stream `writer`; parameters get their host tensors back."""
        current = torch.cuda.current_stream()
        for _, left in self._leaving:
            current.wait_event(left)  # the gradient's memory may be reused from here on
        self._leaving.clear()
        self._outward.wait_stream(writer)
        for each in shards:
            each.settle()
            gradient, each.parameter.grad = each.parameter.grad, None
            each.parameter.data = each.weights
            if gradient is not None:
                self._leaving.append((gradient, each.receive(gradient, self._outward)))

    def _free_buffer(self, shards: Sequence[HostShard]) -> _Buffer:
        """Remove the least recently used buffer from the list and return it, or a new one."""
        if len(self._buffers) == _BUFFERS:
            buffer = self._buffers.pop(0)
            if buffer.fits(shards):
                return buffer
            torch.cuda.current_stream().wait_event(buffer.free)
        made = _Buffer(shards)
        made.free.record(torch.cuda.current_stream())  # after the previous user of this memory
        return made


def host_shard(parameter: Tensor) -> HostShard | None:
    """Return the `HostShard` of a BMTrain storage in host memory; None if the storage is on the GPU."""
    found: HostShard | None = getattr(parameter, "host_shard", None)
    return found
