"""GPU memory that the ranks of a host share through CUDA IPC, and how streams copy and signal in it.

The functions of the CUDA driver for this, which torch does not expose, are called through ctypes: every machine with a
GPU has the driver, and a call takes 2 to 4 us.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst.comm.communicator import Communicator, gather_objects

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines rather than multiprocessors
_WAIT_32, _WRITE_32 = 1, 2
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_GRANULE = 2 << 20
_PER_CALL = 128  # operations that one cuStreamBatchMemOp may hold; the driver's limit is 256


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Copy(NamedTuple):
    """A copy of `rows` rows of `width` bytes; each side has an offset, and `pitch` bytes between rows."""

    target: int
    source: int
    width: int
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


class _MemoryOperation(ctypes.Structure):
    """`CUstreamBatchMemOpParams`, a union of 48 bytes; waiting and writing share this layout."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Operand(ctypes.Structure):
    """`CUmemcpy3DOperand` of a pointer; a row's length is in bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
        ("location", _Location),
    )


class _BatchedCopy(ctypes.Structure):
    """`CUDA_MEMCPY3D_BATCH_OP`."""

    _fields_ = (
        ("source", _Operand),
        ("target", _Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


_SIDE = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        *((f"{side}_{name}", kind) for side in ("source", "target") for name, kind in _SIDE),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")


def allocate(nbytes: int) -> int:
    """Return the address of new device memory for `export`. If memory is short, torch's cache is emptied first."""
    address = ctypes.c_uint64()
    try:
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    except DriverError:
        torch.cuda.empty_cache()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    return address.value


def free(address: int) -> None:
    """Free what `allocate` returned; waits for the device."""
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def export(address: int) -> bytes:
    """Return a handle with which another process of this host can open the memory."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(bytearray(handle))


def open_exported(handle: bytes) -> int:
    """Return the address, in this process and context, of memory that another process exported."""
    address = ctypes.c_uint64()
    opened = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def close_exported(address: int) -> None:
    """Undo `open_exported`."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def look_during_captures() -> None:
    """Let this thread query events while another thread captures a CUDA graph; otherwise the capture could fail."""
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))


@dataclass(frozen=True, slots=True)
class _ArrayInterface:
    """A range of device memory with the interface that torch reads."""

    __cuda_array_interface__: dict[str, object]


def as_tensor(address: int, nbytes: int, device: torch.device) -> Tensor:
    """Return device memory as uint8 `[nbytes]`; the memory must outlive the tensor."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(_ArrayInterface(interface), device=device)


class Signals:
    """Prepared writes and waits of 32-bit words, which a stream executes without a multiprocessor.

    Args:
        raised: Addresses on any device of the host, written after all earlier work of the stream is visible there.
        awaited: Addresses on this device. The stream waits until their words reach a value, in cyclic order.
    """

    def __init__(self, raised: Sequence[int] = (), awaited: Sequence[int] = ()) -> None:
        kinds = [(_WRITE_32, address) for address in raised] + [(_WAIT_32, address) for address in awaited]
        parts = [kinds[i : i + _PER_CALL] for i in range(0, len(kinds), _PER_CALL)]
        self._batches = [(_MemoryOperation * len(part))(*(_MemoryOperation(*each) for each in part)) for part in parts]

    def enqueue(self, stream: int, value: int) -> None:
        """Enqueue on a stream, given by its handle: write `value`, then wait until awaited words reach it."""
        for batch in self._batches:
            for operation in batch:
                operation.value = value & 0xFFFFFFFF
            _call("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint(len(batch)), batch, ctypes.c_uint(0))


class Copies:
    """Prepared copies of rectangles of bytes; the addresses of the buffers are given at each call.

    They are enqueued in one call and run in any order.

    Args:
        copies: Each with offsets into the buffers that `enqueue` gets.
        targets: For each copy, the number of its target buffer.
        sources: For each copy, the number of its source buffer.
    """

    def __init__(self, copies: Sequence[Copy], targets: Sequence[int], sources: Sequence[int]) -> None:
        self._batch = (_BatchedCopy * len(copies))()
        for operation, copy in zip(self._batch, copies, strict=True):
            operation.source.type = operation.target.type = _POINTER
            operation.source.pitch = copy.source_pitch or copy.width
            operation.target.pitch = copy.target_pitch or copy.width
            operation.source.rows = operation.target.rows = copy.rows
            operation.width, operation.height, operation.depth = copy.width, copy.rows, 1
            operation.order, operation.flags = _STREAM_ORDER, _OVERLAP_WITH_COMPUTE
        # All addresses are set in two vectorized steps, so that the host needs less time than the copy engines.
        words = np.ndarray((len(copies), _WORDS), dtype=np.uint64, buffer=memoryview(self._batch).cast("B"))
        self._addresses = tuple(
            (words[:, word], np.array(buffers, dtype=np.intp), np.array(offsets, dtype=np.uint64))
            for word, buffers, offsets in (
                (_WORD_OF_TARGET, targets, [copy.target for copy in copies]),
                (_WORD_OF_SOURCE, sources, [copy.source for copy in copies]),
            )
        )

    def __len__(self) -> int:
        return len(self._batch)

    def __sizeof__(self) -> int:
        buffers = (vector.nbytes for _, *vectors in self._addresses for vector in vectors)
        return super().__sizeof__() + ctypes.sizeof(self._batch) + sum(buffers)

    def enqueue(self, stream: int, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Enqueue them on a stream that is not the default one, given by its handle; buffers are addresses."""
        count = len(self._batch)
        if not count:
            return
        for (words, buffers, offsets), bases in zip(self._addresses, (targets, sources), strict=True):
            words[:] = np.array(bases, dtype=np.uint64)[buffers] + offsets
        if _has_batches():
            _call(
                "cuMemcpy3DBatchAsync_v2",
                *(ctypes.c_size_t(count), self._batch, ctypes.c_ulonglong(0), ctypes.c_void_p(stream)),
            )
            return
        for operation in self._batch:
            _call("cuMemcpy2DAsync_v2", ctypes.byref(_rectangle(operation)), ctypes.c_void_p(stream))


_WORDS = ctypes.sizeof(_BatchedCopy) // 8
_WORD_OF_SOURCE = (_BatchedCopy.source.offset + _Operand.address.offset) // 8
_WORD_OF_TARGET = (_BatchedCopy.target.offset + _Operand.address.offset) // 8


@cache
def _has_batches() -> bool:
    """Return whether the driver has batched copies (CUDA 13 or newer)."""
    return hasattr(_driver(), "cuMemcpy3DBatchAsync_v2")


def _rectangle(operation: Any) -> Any:
    """Convert a batched copy to a 2D copy, for older drivers."""
    return _Copy2D(
        source_type=_DEVICE,
        source_device=operation.source.address,
        source_pitch=operation.source.pitch,
        target_type=_DEVICE,
        target_device=operation.target.address,
        target_pitch=operation.target.pitch,
        width=operation.width,
        height=operation.height,
    )


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
            self.local = as_tensor(self._own, nbytes, self._device)

    def _share(self, nbytes: int) -> None:
        comm, problem, handle = self._comm, "", b""
        try:
            self._own = allocate(nbytes)
            handle = export(self._own)
        except (OSError, AttributeError, DriverError) as error:
            problem = f"rank {comm.rank} cannot share {nbytes / 2**20:.0f} MiB of device memory: {error}"
        handles = gather_or_raise(comm, problem, handle.hex())
        try:
            for rank, text in enumerate(handles):
                self._opened.append(self._own if rank == comm.rank else open_exported(bytes.fromhex(text)))
        except DriverError as error:
            problem = f"rank {comm.rank} cannot read the memory of rank {len(self._opened)}: {error}"
        gather_or_raise(comm, problem, "")

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
                close_exported(address)
        gather_objects(self._comm, None)  # no rank has this memory open any more
        if self._own:
            free(self._own)
        self._opened, self.nbytes, self._own = [], 0, 0


def gather_or_raise(comm: Communicator, problem: str, value: str) -> list[str]:
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
