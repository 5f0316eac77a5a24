"""Host memory that all ranks of a host map, into which they copy what a checkpoint will hold.

Each rank of the first ZeRO group copies its own shards, without communication. A rank that writes a file reads the
pieces of its tensors from the memory of these ranks. So copying and writing need no collective of BMTrain, and a thread
can do both while the next steps run. The memory is anonymous (`memfd_create`), so nothing of it remains when the ranks
have ended.
"""

import errno
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from bmburst.amounts import bytes_text
from bmburst.checkpoint.sharded_files import Result, ShardedTensor, on_every_rank
from bmburst.checkpoint.tensor_files import SafetensorsWriter
from bmburst.comm.host_memory import paged_in
from bmburst.plan.memory import HOST_SHARE

_ALIGNMENT = 64  # bytes: the start of each piece
_HEADER = struct.Struct("<QQI")  # number, length and CRC-32 of a message
_SLOT = 64 << 20  # bytes of address space for a message; memory is used only for the pages that are written
_MESSAGES = 2 * _SLOT
_POLL = 0.005  # seconds between two looks at the messages of other ranks


class AbandonedError(Exception):
    """The process ends, and no longer waits for other ranks."""


def places_of(tensors: Sequence[ShardedTensor], rank: int) -> tuple[list[int], int]:
    """Return where each tensor's piece begins in a rank's memory, and the bytes of all pieces."""
    places, end = [], 0
    for tensor in tensors:
        begin, stop = tensor.shard.once(rank)
        places.append(end)
        end += -(-(stop - begin) * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end


class Staging:
    """The memory of all ranks of a host, for one set of tensors. Make it with `open`.

    It also carries messages between threads of the ranks: a rank writes a message into its own memory, and the others
    look for it. A message carries its checksum, so that an incomplete one is not read.

    Attributes:
        abandoned: Set to end threads that wait for other ranks.
    """

    def __init__(self, memories: Sequence[mmap.mmap], rank: int, device: int | None) -> None:
        self._memories, self._rank, self._number = memories, rank, 0
        self.abandoned = threading.Event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="bmburst-staging")
        self._data: Future[Tensor] = thread.submit(paged_in, memories[rank], device, _MESSAGES)
        thread.shutdown(wait=False)

    @classmethod
    def open(cls, tensors: Sequence[ShardedTensor], available: int | None) -> "Staging | str":
        """Map memory for tensors on every rank, or return why there is none. Every rank must call it.

        A thread prepares the memory; `wait` waits for it.

        Args:
            tensors: The tensors, the same on all ranks.
            available: Free bytes of this host; None if unknown.
        """
        import bmtrain as bmt

        rank, sizes = bmt.rank(), [places_of(tensors, each)[1] for each in range(bmt.world_size())]
        gathered = on_every_rank(lambda: (socket.gethostname(), available))
        if len({host for host, _ in gathered}) > 1:
            return "the ranks are on several hosts"
        free = min((each for _, each in gathered if each is not None), default=0)
        if sum(sizes) > HOST_SHARE * free:
            return f"a copy takes {bytes_text(sum(sizes))} of host memory, and {bytes_text(free)} are free"
        try:
            memories = _mapped(rank, sizes)
        except OSError as error:
            return f"the ranks cannot share host memory: {error.strerror}"
        device = torch.cuda.current_device() if tensors[0].shard.device.type == "cuda" else None
        return cls(memories, rank, device)

    def wait(self) -> None:
        """Wait until the memory is prepared; OSError if it cannot be allocated or pinned."""
        try:
            self._data.result()
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, str(error)) from error

    def copy(self, tensors: Sequence[ShardedTensor]) -> None:
        """Copy this rank's pieces into its memory; on a GPU, enqueue the copies on the current stream."""
        memory = self._data.result()
        for tensor, begin in zip(tensors, places_of(tensors, self._rank)[0], strict=True):
            if tensor.shard.count and not tensor.shard.is_copy:
                piece = tensor.piece()
                memory[begin : begin + piece.nbytes].view(tensor.dtype).copy_(piece, non_blocking=True)

    def source(self, tensors: Sequence[ShardedTensor]) -> "StagedTensors":
        """Return the whole tensors, for a thread of every rank that has called `copy`."""
        places = [places_of(tensors, rank)[0] for rank in range(len(self._memories))]
        return StagedTensors(self, {tensor.name: at for tensor, *at in zip(tensors, *places, strict=True)})

    def piece(self, tensor: ShardedTensor, rank: int, at: int) -> Tensor:
        """Return a rank's piece of a tensor, flat, which begins at a byte of that rank's memory."""
        begin, end = tensor.shard.ranges[rank]
        return torch.frombuffer(self._memories[rank], dtype=tensor.dtype, count=end - begin, offset=_MESSAGES + at)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, which JSON can carry. A thread of every rank must call it.

        Raises:
            AbandonedError: `abandoned` was set.
        """
        self._number += 1
        data = json.dumps(value).encode()
        # A rank sends a message only after it has all messages before it. So two slots suffice.
        own, at = self._memories[self._rank], self._number % 2 * _SLOT
        own[at + _HEADER.size : at + _HEADER.size + len(data)] = data
        own[at : at + _HEADER.size] = _HEADER.pack(self._number, len(data), zlib.crc32(data))
        return [self._message(memory, at) for memory in self._memories]

    def _message(self, memory: mmap.mmap, at: int) -> Any:
        while not self.abandoned.is_set():
            number, length, checksum = _HEADER.unpack_from(memory, at)
            if number == self._number:
                data = memory[at + _HEADER.size : at + _HEADER.size + length]
                if zlib.crc32(data) == checksum:  # otherwise it has not arrived completely
                    return json.loads(data)
            time.sleep(_POLL)
        raise AbandonedError


class StagedTensors:
    """A `TensorSource` that reads a `Staging`. Its calls are made by a thread of every rank.

    Args:
        staging: The memory.
        places: For each tensor by its name, where its piece begins in the memory of each rank.
    """

    def __init__(self, staging: Staging, places: Mapping[str, Sequence[int]]) -> None:
        self._staging, self._places = staging, places

    def on_every_rank(self, action: Callable[[], Result]) -> list[Result]:
        """See `TensorSource`."""
        return on_every_rank(action, self._staging.all_gather)

    def fill(
        self, file: SafetensorsWriter | None, tensors: Sequence[ShardedTensor], owners: Sequence[int], rank: int
    ) -> None:
        """See `TensorSource`."""
        if file is None:
            return
        with file:
            for tensor, owner in zip(tensors, owners, strict=True):
                if owner == rank:
                    self._write(file, tensor)

    def _write(self, file: SafetensorsWriter, tensor: ShardedTensor) -> None:
        shard = tensor.shard
        pieces = [
            (begin, self._staging.piece(tensor, rank, self._places[tensor.name][rank]))
            for rank in shard.groups[0]
            for begin, end in [shard.ranges[rank]]
            if begin < end
        ]
        pieces.sort(key=lambda each: each[0])  # in shard order
        if shard.split:  # the order of the file is another
            ordered = torch.cat([piece for _, piece in pieces])
            file.write(shard.whole(ordered))
            return
        for _, piece in pieces:
            file.write_run(piece)


def _mapped(rank: int, sizes: Sequence[int]) -> list[mmap.mmap]:
    """Return new memory of every rank, mapped by all of them, with room for messages before `sizes` bytes of data.

    Raises:
        OSError: On all ranks, if a rank cannot map it.
    """
    token = secrets.token_hex(16)
    descriptors: list[int] = []

    def create() -> tuple[str, str]:
        descriptors.append(os.memfd_create("bmburst-checkpoint"))
        os.ftruncate(descriptors[0], _MESSAGES + max(sizes[rank], mmap.PAGESIZE))
        with mmap.mmap(descriptors[0], len(token)) as start:
            start[:] = token.encode()
        return f"/proc/{os.getpid()}/fd/{descriptors[0]}", token

    def map_all(known: Sequence[tuple[str, str]]) -> list[mmap.mmap]:
        memories = []
        for (path, wanted), size in zip(known, sizes, strict=True):
            with open(path, "r+b", buffering=0) as file:
                memories.append(mmap.mmap(file.fileno(), _MESSAGES + max(size, mmap.PAGESIZE)))
            if memories[-1][: len(wanted)] != wanted.encode():  # the process of another container
                raise OSError(errno.ESRCH, "they do not see each other's processes")
        return memories

    try:
        known = on_every_rank(create)
        memories: list[mmap.mmap] = []
        on_every_rank(lambda: memories.extend(map_all(known)))
        return memories
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
