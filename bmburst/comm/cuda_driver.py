"""Of the CUDA driver what torch does not offer: memory that processes share, copies in batches, signals in streams.

Called through ctypes: the driver is there wherever a GPU is, and a call costs 2 to 4 us.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_ANY_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines rather than multiprocessors
_WAIT_32, _WRITE_32 = 1, 2
_UNTIL_EQUAL = 1
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_PER_CALL = 128  # operations that one cuStreamBatchMemOp may hold; the driver's limit is 256


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class Copy(NamedTuple):
    """Bytes to move: `rows` runs of `width` bytes, `pitch` bytes apart on either side, from offset to offset."""

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


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
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
    """Return the address of new device memory that `export` takes. torch's cache gives way where memory is short."""
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
    """Return a handle by which another process of this host opens the memory."""
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


@dataclass(frozen=True, slots=True)
class _ArrayInterface:
    """A range of device memory, as torch takes it."""

    __cuda_array_interface__: dict[str, object]


def as_tensor(address: int, nbytes: int, device: torch.device) -> Tensor:
    """Return device memory as uint8 `[nbytes]`; the memory must outlive the tensor."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(_ArrayInterface(interface), device=device)


class Signals:
    """Writes and waits of 32-bit words, prepared once: what a stream does without a multiprocessor.

    Args:
        raised: Addresses, on any device of the host, set to 1 once all before it in the stream is visible there.
        awaited: Addresses on this device, then awaited until they are 1, and set back to 0.
    """

    def __init__(self, raised: Sequence[int] = (), awaited: Sequence[int] = ()) -> None:
        operations = [(_WRITE_32, address, 1, 0) for address in raised]
        operations += [(_WAIT_32, address, 1, _UNTIL_EQUAL) for address in awaited]
        operations += [(_WRITE_32, address, 0, 0) for address in awaited]
        parts = [operations[i : i + _PER_CALL] for i in range(0, len(operations), _PER_CALL)]
        self._batches = [(_MemoryOperation * len(part))(*(_MemoryOperation(*each) for each in part)) for part in parts]

    def enqueue(self, stream: int) -> None:
        """Enqueue them on a stream, given by its handle."""
        for batch in self._batches:
            _call("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint(len(batch)), batch, ctypes.c_uint(0))


class Copies:
    """Copies into this device, prepared once for whatever addresses the buffers have. In any order among themselves.

    Args:
        copies: Each with addresses relative to the buffers that `enqueue` gets.
        targets: For each copy, the number of its target buffer.
        sources: For each copy, the number of its source buffer.
    """

    def __init__(self, copies: Sequence[Copy], targets: Sequence[int], sources: Sequence[int]) -> None:
        numbered = list(zip(copies, targets, sources, strict=True))
        flat = [entry for entry in numbered if entry[0].rows == 1]
        self._targets = _Addresses([(copy.target, buffer) for copy, buffer, _ in flat])
        self._sources = _Addresses([(copy.source, buffer) for copy, _, buffer in flat])
        self._sizes = np.array([copy.width for copy, _, _ in flat], dtype=np.uint64)
        self._rectangles = [(_rectangle(entry[0]), *entry) for entry in numbered if entry[0].rows > 1]
        self._attributes = _CopyAttributes(order=_ANY_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)

    def enqueue(self, stream: int, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Enqueue them on a stream that is not the default one, given by its handle; buffers are addresses."""
        if self._sizes.size:
            self._enqueue_flat(stream, self._targets.over(targets), self._sources.over(sources))
        for rectangle, copy, target, source in self._rectangles:
            rectangle.target_device, rectangle.source_device = (
                targets[target] + copy.target,
                sources[source] + copy.source,
            )
            _call("cuMemcpy2DAsync_v2", ctypes.byref(rectangle), ctypes.c_void_p(stream))

    def _enqueue_flat(self, stream: int, targets: NDArray[np.uint64], sources: NDArray[np.uint64]) -> None:
        if not _has_batches():  # before CUDA 13
            for target, source, size in zip(targets.tolist(), sources.tolist(), self._sizes.tolist(), strict=True):
                _call("cuMemcpyAsync", *map(ctypes.c_uint64, (target, source, size)), ctypes.c_void_p(stream))
            return
        addresses = (ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, self._sizes))
        first = ctypes.c_size_t(0)  # the attributes hold from the first copy on
        _call(
            "cuMemcpyBatchAsync_v2",
            *(*addresses, ctypes.c_size_t(self._sizes.size)),
            *(ctypes.byref(self._attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(stream)),
        )


class _Addresses:
    """Offsets into numbered buffers, turned into addresses in one step."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self._offsets = np.array([offset for offset, _ in places], dtype=np.uint64)
        self._buffers = np.array([buffer for _, buffer in places], dtype=np.intp)

    def over(self, bases: Sequence[int]) -> NDArray[np.uint64]:
        """Return the addresses, uint64, over buffers that start at `bases`."""
        return np.array(bases, dtype=np.uint64)[self._buffers] + self._offsets


@cache
def _has_batches() -> bool:
    return hasattr(_driver(), "cuMemcpyBatchAsync_v2")


def _rectangle(copy: Copy) -> Any:
    return _Copy2D(
        source_type=_DEVICE,
        source_pitch=copy.source_pitch,
        target_type=_DEVICE,
        target_pitch=copy.target_pitch,
        width=copy.width,
        height=copy.rows,
    )
