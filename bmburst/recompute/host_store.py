"""Offloads tensors to host memory between forward and backward, overlapped with kernels (arXiv:2104.07857, 5.1.1).

The tensors of one call form an `OffloadGroup`. A side stream copies them to pinned memory. When the next group is
created, the caller's stream waits for the copies, and the GPU memory is freed. In backward, fetching a group prefetches
the group created before it: at most two groups are on the GPU, one in use and one being copied.

Groups that are created at different moments of a block are in different chains: a group frees and prefetches groups of
its own chain only. The outputs of a block's MLP are made at its end: the next block frees them before its own MLP.

Pinned memory is divided into pieces of `PIECE` bytes. A piece is reused as soon as backward has read it or its group is
deleted. So nothing is allocated after the first step, and tensors of different sizes share the pieces. (torch rounds
pinned allocations up to powers of two: whole tensors would take up to twice their size.)
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.host_memory import HostMemory
from bmburst.comm.memory import bytes_of

PIECE = 1 << 26
"""Bytes of a piece of pinned memory. Its copy takes 1.3 ms, far longer than the launch of the copy."""
AT_ONCE = 4
"""Pieces of pinned memory that are allocated at once."""
BLOCK_INPUTS, MLP_OUTPUTS = "block inputs", "MLP outputs"
"""Chains of the groups that a block creates. The first also has attention's results."""
_LEAST = 1 << 12


class HostStore:
    """Host memory for offloaded tensors. The blocks of a model share one, so that a block can prefetch for the next.

    Args:
        memory: Allocator of pinned memory.
        piece: Bytes of a piece.

    Attributes:
        nbytes: Bytes of host memory allocated so far.
    """

    def __init__(self, memory: HostMemory | None = None, piece: int = PIECE) -> None:
        self.nbytes, self.piece = 0, piece
        self._memory = memory or HostMemory()
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._latest: dict[str, weakref.ref[OffloadGroup]] = {}
        self._ahead: dict[str, weakref.ref[OffloadGroup]] = {}
        self._stream: Any = None

    def new_group(self, chain: str = BLOCK_INPUTS) -> "OffloadGroup":
        """Return a new group of a chain, and free the GPU memory of the chain's previous group."""
        before = _alive(self._latest, chain)
        for held in (before, _alive(self._ahead, chain)):
            if held is not None:
                held.release()
        made = OffloadGroup(self, chain, before)
        self._latest[chain] = weakref.ref(made)
        return made

    def settle(self, chain: str = BLOCK_INPUTS) -> None:
        """Free the GPU memory of a chain's latest group after its copies; for groups that no others follow."""
        latest = _alive(self._latest, chain)
        if latest is not None:
            latest.release()

    def prefetcher(self) -> Callable[[Tensor], None]:
        """Return a hook for the gradient of a block's output: it prefetches each chain's group that is the latest now.

        For a block that has no groups, and so does not prefetch those of the block before it.
        """
        latest = dict(self._latest)

        def prefetch(_grad: Tensor) -> None:
            for chain, held in latest.items():
                if (group := held()) is not None:
                    group.start_fetch()
                    self._ahead[chain] = held

        return prefetch

    def fetch(self, group: "OffloadGroup", *, ahead: bool) -> None:
        """Start to copy a group's tensors to the GPU; `ahead`: also prefetch the chain's group before it."""
        fetched = _alive(self._ahead, group.chain)
        if fetched is not None and fetched is not group:
            fetched.release()  # another group than this one was prefetched
        group.start_fetch()
        before = group.before if ahead else None
        if before is not None:
            before.start_fetch()
            self._ahead[group.chain] = weakref.ref(before)
        else:
            self._ahead.pop(group.chain, None)

    def side(self, like: Tensor) -> Any:
        """Return the stream of copies, or None if the tensor is a CPU tensor."""
        if not like.is_cuda:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)
        assert self._stream.device == like.device, "a store copies on one stream of one device"
        return self._stream

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """Return a piece of `size` bytes of host memory: pinned for GPU tensors, pageable for CPU tensors.

        Both have separate pools, because a CPU copy does not wait for pending copies of the side stream.
        """
        free = self._free.setdefault((size, pinned), [])
        if not free and pinned and size == self.piece:
            self.nbytes += AT_ONCE * self.piece
            free.extend(self._memory.take(AT_ONCE * self.piece).split(self.piece))
        if free:
            return free.pop()
        self.nbytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give_back(self, pieces: list[Tensor], *, pinned: bool) -> None:
        """Free pieces for reuse. The side stream orders later uses after pending reads and writes."""
        for piece in pieces:
            self._free.setdefault((len(piece), pinned), []).append(piece)


class OffloadGroup:
    """Tensors that one call offloads, numbered in the order of `put`."""

    def __init__(self, store: HostStore, chain: str, before: "OffloadGroup | None") -> None:
        self._store, self.chain = store, chain
        self._before = None if before is None else weakref.ref(before)
        self._tensors: list[_HostTensor] = []

    @property
    def before(self) -> "OffloadGroup | None":
        """The chain's group created before this one, if it is still alive."""
        return self._before() if self._before is not None else None

    def put(self, tensor: Tensor) -> int:
        """Offload a tensor and return its number. The tensor must not be changed from now on."""
        self._tensors.append(_HostTensor(self._store, tensor.detach()))
        return len(self._tensors) - 1

    def begin(self, *, ahead: bool = True) -> None:
        """Start to copy the tensors to the GPU; `ahead`: also prefetch the group created before."""
        self._store.fetch(self, ahead=ahead)

    def get(self, number: int) -> Tensor:
        """Return a tensor on its device and drop the reference to it. Call it once after each `begin`."""
        return self._tensors[number].take()

    def release(self) -> None:
        """Free the GPU memory after the copies."""
        for item in self._tensors:
            item.release()

    def start_fetch(self) -> None:
        """Start to copy all tensors that are not on the GPU."""
        for item in self._tensors:
            item.start_fetch()


class _HostTensor:
    """One offloaded tensor: in host memory, and for part of the time also on its device.

    Its device memory is freed after the stream that allocated it has waited for the copy, so that torch can reuse the
    memory immediately on that stream. `record_stream` would hold the memory until the host has observed the end of the
    copy; a host that runs ahead would then allocate new memory for every block.
    """

    def __init__(self, store: HostStore, tensor: Tensor) -> None:
        self._store, self._shape, self._dtype, self._device = store, tensor.shape, tensor.dtype, tensor.device
        self._side: Any = store.side(tensor)
        self._done: Any = None
        source = tensor.contiguous()
        self._here: Tensor | None = source
        self._version = source._version
        flat = bytes_of(source)
        self._pieces = [store.take(size, pinned=tensor.is_cuda) for size in _sizes(len(flat), store.piece)]
        self._launch(flat, lambda piece, part: piece[: len(part)].copy_(part, non_blocking=True))
        self._give_back = weakref.finalize(self, store.give_back, self._pieces, pinned=tensor.is_cuda)
        self._give_back.atexit = False

    def start_fetch(self) -> None:
        """Start the copy to the device, unless the tensor is there or its host memory was freed."""
        if self._here is not None or not self._give_back.alive:
            return
        self._here = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._launch(bytes_of(self._here), lambda piece, part: part.copy_(piece[: len(part)], non_blocking=True))
        self._version = self._here._version

    def take(self) -> Tensor:
        """Return the tensor and drop the reference to it. Without retain_graph, also free its host memory.

        The host memory is freed here because a caller may hold the loss, and so the graph, during the next forward.
        """
        tensor = self._here
        assert tensor is not None, "taken twice, or before begin()"
        self.release()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._give_back()
        return tensor

    def release(self) -> None:
        """Free the device memory after the copies.

        Raises:
            RuntimeError: The tensor was changed in place, so the copy may mix old and new values.
        """
        if self._here is not None and self._here._version != self._version:
            raise RuntimeError(
                "a tensor was changed in place while it was copied to host memory\n"
                "change a copy, or use a recompute policy without '+offload'"
            )
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._here, self._done = None, None

    def _launch(self, flat: Tensor, copy: Callable[[Tensor, Tensor], Tensor]) -> None:
        parts = list(zip(self._pieces, flat.split(self._store.piece), strict=True)) if len(flat) else []
        if self._side is None:
            for piece, part in parts:
                copy(piece, part)
            return
        # Wait for the kernels that write the source, and for earlier uses of the destination.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for piece, part in parts:
                copy(piece, part)
            self._done = torch.cuda.Event()
            self._done.record(self._side)

    def __del__(self) -> None:
        if self._done is not None and self._here is not None:  # after an exception, or without a backward
            self._here.record_stream(self._side)


def _alive(groups: Mapping[str, "weakref.ref[OffloadGroup]"], chain: str) -> "OffloadGroup | None":
    found = groups.get(chain)
    return None if found is None else found()


def _sizes(nbytes: int, piece: int) -> Iterator[int]:
    """Yield the sizes of the pieces for `nbytes` bytes; all but the last have `piece` bytes."""
    for start in range(0, nbytes, piece):
        rest = min(piece, nbytes - start)
        yield piece if rest == piece else max(_LEAST, 1 << (rest - 1).bit_length())
