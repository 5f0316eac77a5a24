"""Reads and writes files of named tensors piece by piece, so that no process ever holds all tensors.

It reads and writes safetensors: a length, a JSON header and the data
(https://github.com/huggingface/safetensors#format), and files of `torch.save`: an uncompressed zip archive of a pickle
that rebuilds a dictionary, and one record per tensor (torch/serialization.py, `_save`). `torch.load` reads these, also
with `weights_only` and `mmap`. Both libraries themselves can only write from a dictionary of all tensors.
"""

import contextlib
import io
import json
import pickle
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from bmburst.comm.memory import bytes_of
from bmburst.errors import UserError, first_line
from bmburst.outputs import replacing

Announced = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


class TensorWriter(ABC):
    """Writes tensors one after another. The file gets its name only when it is complete.

    Args:
        path: File to create or replace.
        tensors: Name, shape and dtype of every tensor, in the order of writing.
    """

    _file: BinaryIO
    _opened: contextlib.ExitStack

    def __init__(self, path: Path, tensors: Iterable[Announced]) -> None:
        self._path = path
        self._expected = list(tensors)
        self._written = self._bytes = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            partial = stack.enter_context(replacing(self._path, durable=True))
            self._file = stack.enter_context(partial.open("wb"))
            self._begin()
            self._opened = stack.pop_all()
        return self

    def write_run(self, numbers: Tensor) -> None:
        """Append a contiguous piece of the next tensor, flattened. Several pieces make up a tensor.

        Raises:
            ValueError: The piece does not fit the announced tensor.
        """
        name, shape, dtype = self._expected[self._written]
        whole = prod(shape) * dtype.itemsize
        if numbers.dtype != dtype or self._bytes + numbers.nbytes > whole:
            raise ValueError(f"{name} was announced as {shape} {dtype}, got {numbers.numel()} more {numbers.dtype}")
        self._bytes += numbers.nbytes
        is_last = self._bytes == whole
        data = bytes_of(numbers.detach().cpu().contiguous()).numpy().data
        self._append(data, is_last=is_last)
        if is_last:
            self._written, self._bytes = self._written + 1, 0

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        whole = value is None and self._written == len(self._expected)
        with self._opened:
            self._end(whole=whole)
            if not whole:  # the error keeps the file from getting its name
                counts = f"{self._written} of {len(self._expected)} tensors were written"
                raise value or ValueError(f"{self._path}: {counts}")

    @abstractmethod
    def _begin(self) -> None:
        """Write the part of the file before all tensors."""

    @abstractmethod
    def _append(self, numbers: memoryview, *, is_last: bool) -> None:
        """Write bytes of tensor `self._written`; `is_last` marks the end of the tensor."""

    @abstractmethod
    def _end(self, *, whole: bool) -> None:
        """Write the part of the file after all tensors; for an incomplete file, only close open handles."""


_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_CODE_NAMES = {torch.uint8: "U8", torch.int64: "I64"}
"""Dtypes of quantized moments, in addition."""


class TensorFile(Protocol):
    """An open file of tensors, of floating point numbers unless it may hold codes."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        ...

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return the elements [begin, end) of the flattened tensor, on the CPU, in the file's dtype."""
        ...


def open_tensors(path: Path, *, with_codes: bool = False) -> TensorFile:
    """Open a file of tensors by its suffix.

    Args:
        path: The file.
        with_codes: Whether a safetensors file may hold uint8 and int64 too.

    Raises:
        UserError: The file is missing, truncated, of another format, or holds tensors that are not floating point.
    """
    try:
        is_there = path.is_file()
    except OSError:  # the name is too long
        is_there = False
    if not is_there:
        raise UserError(f"no file {path}\nfix: copy the missing file there, or name another directory")
    return _Safetensors(path, with_codes=with_codes) if path.suffix == ".safetensors" else _TorchFile(path)


class _Safetensors:
    def __init__(self, path: Path, *, with_codes: bool) -> None:
        known = {*_DTYPE_NAMES.values(), *(_CODE_NAMES.values() if with_codes else ())}
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")  # Any: its stub lacks most methods
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        self._file = file
        self.shapes = {name: tuple(cut.get_shape()) for name, cut in slices.items()}
        for name, cut in slices.items():
            _require_floating(path, name, cut.get_dtype(), cut.get_dtype() in known)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        shape = self.shapes[name]
        width = prod(shape[1:])  # the library slices along dimension 0: take the rows that contain the range
        first, last = begin // width, -(-end // width)
        rows: Tensor = self._file.get_slice(name)[first:last]
        return rows.reshape(-1)[begin - first * width : end - first * width]


class _TorchFile:
    def __init__(self, path: Path) -> None:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # unpickling may raise any error, depending on the bytes
            raise _damaged(path, error) from error
        if not isinstance(tensors, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
        ):
            raise UserError(f"{path} holds no dictionary of tensors\nfix: a file of a Hugging Face model's weights")
        self._tensors: Mapping[str, Tensor] = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            _require_floating(path, name, str(tensor.dtype), tensor.dtype in _DTYPE_NAMES)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        return self._tensors[name].reshape(-1)[begin:end]


_BLOCK = 16 << 20  # bytes that are added to the checksum and written at once


class SafetensorsWriter(TensorWriter):
    """Writes a safetensors file one tensor after another. The file gets its name only when it is complete.

    Example:
        >>> with SafetensorsWriter(path, [("a", (2, 3), torch.float32)]) as writer:
        ...     writer.write(torch.zeros(2, 3))

    Args:
        path: File to create or replace.
        tensors: Name, shape and dtype of every tensor, in the order of writing.
        metadata: Strings for the header.

    Attributes:
        checksum: CRC-32 of the bytes written so far; at the end, of the whole file.
    """

    def __init__(self, path: Path, tensors: Iterable[Announced], metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(path, tensors)
        self._metadata = dict(metadata or {})
        self.checksum = 0

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor.

        Raises:
            ValueError: It is not the next announced tensor.
        """
        name, shape, dtype = self._expected[self._written]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or self._bytes:
            raise ValueError(f"{name} was announced as {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        self.write_run(tensor)

    def _begin(self) -> None:
        header: dict[str, object] = {"__metadata__": self._metadata} if self._metadata else {}
        names, end = {**_DTYPE_NAMES, **_CODE_NAMES}, 0
        for name, shape, dtype in self._expected:
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data start at a multiple of 8 bytes
        self._put(memoryview(len(text).to_bytes(8, "little") + text))

    def _append(self, numbers: memoryview, *, is_last: bool) -> None:
        del is_last
        self._put(numbers)

    def _put(self, data: memoryview) -> None:
        for at in range(0, len(data), _BLOCK):
            block = data[at : at + _BLOCK]
            self.checksum = zlib.crc32(block, self.checksum)  # releases the GIL, as `write` does
            self._file.write(block)

    def _end(self, *, whole: bool) -> None:
        """Do nothing: no data follow the tensors."""


_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}
_ALIGNMENT = 64
# Bytes of a zip entry's header: fixed part, zip64 sizes, and header of the padding field.
_FIXED, _ZIP64, _FIELD = 30, 20, 4


class _Storage:
    def __init__(self, key: str, dtype: torch.dtype, numel: int) -> None:
        self.key, self.dtype, self.numel = key, dtype, numel


class _Planned:
    """Placeholder of a tensor in the pickle."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
        self.storage, self.shape = storage, shape


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", _STORAGES[obj.dtype], obj.key, "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Planned):
            strides = tuple(prod(obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
            return _rebuild_tensor_v2, (obj.storage, 0, obj.shape, strides, False, OrderedDict())
        return NotImplemented


class TorchFileWriter(TensorWriter):
    """Writes named tensors one after another, like `torch.save`. The file gets its name only when it is complete.

    Args:
        path: File to create or replace.
        tensors: Name, shape and dtype of every tensor, in the order of writing.
    """

    def __init__(self, path: Path, tensors: Iterable[Announced]) -> None:
        super().__init__(path, tensors)
        self._record: Any = None

    def _begin(self) -> None:
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
        planned = OrderedDict(
            (name, _Planned(_Storage(str(key), dtype, prod(shape)), shape))
            for key, (name, shape, dtype) in enumerate(self._expected)
        )
        text = io.BytesIO()
        _Pickler(text, protocol=2).dump(planned)
        self._put("data.pkl", text.getvalue())
        self._put("byteorder", b"little")

    def _append(self, numbers: memoryview, *, is_last: bool) -> None:
        if self._record is None:
            self._record = self._open(f"data/{self._written}")
        self._record.write(numbers)
        if is_last:
            self._record.close()
            self._record = None

    def _end(self, *, whole: bool) -> None:
        if whole:
            self._put("version", b"3\n")
            self._archive.close()
            return
        with contextlib.suppress(OSError):  # if the disk is full, closing fails too
            if self._record is not None:
                self._record.close()
            self._archive.close()

    def _put(self, name: str, content: bytes) -> None:
        with self._open(name) as record:
            record.write(content)

    def _open(self, name: str) -> Any:
        """Open an entry whose data start at a multiple of 64 bytes, as in torch's files, so that they can be mapped."""
        entry = zipfile.ZipInfo(f"archive/{name}")
        start = self._file.tell() + _FIXED + len(entry.filename) + _ZIP64 + _FIELD
        padding = -start % _ALIGNMENT
        entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        return self._archive.open(entry, "w", force_zip64=True)


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the contents of a JSON file."""
    return f"{json.dumps(values, indent=2)}\n".encode()


def write_json(path: Path, values: Mapping[str, Any]) -> int:
    """Write a JSON file that gets its name only when it is complete, and return its CRC-32."""
    data = json_bytes(values)
    with replacing(path) as partial:
        partial.write_bytes(data)
    return zlib.crc32(data)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"cannot read {path}: {first_line(error)[:160]}\nfix: the file is truncated or of another format; copy it again"
    )


def _require_floating(path: Path, name: str, dtype: str, known: bool) -> None:
    if not known:
        raise UserError(
            f"{name} in {path} is {dtype}\nallowed: {', '.join(sorted(_DTYPE_NAMES.values()))}\n"
            "fix: give the model's unquantized weights"
        )
