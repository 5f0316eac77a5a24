"""Reads and writes files of named tensors piece by piece, so that no process ever holds all tensors.

The format is safetensors: a length, a JSON header and the data
(https://github.com/huggingface/safetensors#format). Its library can only write from a dictionary of all tensors. Files
of `torch.save` are read too.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bmburst.comm.memory import bytes_of
from bmburst.config.git_lfs import require_content
from bmburst.errors import UserError, first_line
from bmburst.outputs import replacing

Announced = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_CODE_NAMES = {torch.uint8: "U8", torch.int64: "I64"}
"""Dtypes of quantized moments, in addition."""

_OLD_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
"""Number at the beginning of files of torch.save before torch 1.6 (torch.serialization.MAGIC_NUMBER)."""
_ZIP = b"PK"
"""Beginning of later ones."""
_OTHER_OBJECT = re.compile(r"GLOBAL ([\w.]+)")  # as torch.load names it where weights_only=True refuses it


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
        UserError: The file is missing, truncated, of another format, a pointer of Git LFS, or holds tensors that are
            not floating point.
    """
    try:
        is_there = path.is_file()
    except OSError:  # the name is too long
        is_there = False
    if not is_there:
        raise UserError(f"no file {path}\nfix: copy the missing file there, or name another directory")
    require_content(path)
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
            raise _unloaded(path, error) from error
        if not isinstance(tensors, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
        ):
            raise _no_tensors(path, tensors)
        # Detached: a dictionary of named_parameters() has parameters, whose parts cannot be written to others.
        self._tensors: Mapping[str, Tensor] = {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            _require_floating(path, name, str(tensor.dtype), tensor.dtype in _DTYPE_NAMES)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        return self._tensors[name].reshape(-1)[begin:end]


_BLOCK = 16 << 20  # bytes that are added to the checksum and written at once


class SafetensorsWriter:
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

    _file: BinaryIO
    _opened: contextlib.ExitStack

    def __init__(self, path: Path, tensors: Iterable[Announced], metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._expected = list(tensors)
        self._written = self._bytes = 0
        self._metadata = dict(metadata or {})
        self.checksum = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            partial = stack.enter_context(replacing(self._path, durable=True))
            self._file = stack.enter_context(partial.open("wb"))
            self._put_header()
            self._opened = stack.pop_all()
        return self

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor; ValueError unless it is the next announced one."""
        name, shape, dtype = self._expected[self._written]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or self._bytes:
            raise ValueError(f"{name} was announced as {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        self.write_run(tensor)

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
        self._put(bytes_of(numbers.detach().cpu().contiguous()).numpy().data)
        if self._bytes == whole:
            self._written, self._bytes = self._written + 1, 0

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        with self._opened:
            if value is not None or self._written < len(self._expected):  # the error keeps the file from its name
                counts = f"{self._written} of {len(self._expected)} tensors were written"
                raise value or ValueError(f"{self._path}: {counts}")

    def _put_header(self) -> None:
        header: dict[str, object] = {"__metadata__": self._metadata} if self._metadata else {}
        names, end = {**_DTYPE_NAMES, **_CODE_NAMES}, 0
        for name, shape, dtype in self._expected:
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data start at a multiple of 8 bytes
        self._put(memoryview(len(text).to_bytes(8, "little") + text))

    def _put(self, data: memoryview) -> None:
        for at in range(0, len(data), _BLOCK):
            block = data[at : at + _BLOCK]
            self.checksum = zlib.crc32(block, self.checksum)  # releases the GIL, as `write` does
            self._file.write(block)


def save_mapped(source: Path, path: Path) -> None:
    """Write the tensors of a safetensors file with `torch.save`. They are mapped, so that memory holds none of them.

    Raises:
        OSError: It cannot be written.
    """
    with source.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        # A storage of its own for each tensor: of a view, torch.save would write all of the file.
        data = np.memmap(source, np.uint8, "c", 8 + size + begin, (end - begin,))
        tensors[name] = torch.from_numpy(data).view(dtypes[entry["dtype"]]).view(entry["shape"])
    with replacing(path, durable=True) as partial, partial.open("wb") as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # torch's writer raises it in place of the file's own error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


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


def _unloaded(path: Path, error: Exception) -> UserError:
    """Return the error for a file that torch.load refuses."""
    with path.open("rb") as file:
        begin = file.read(16)
    if _OLD_MAGIC in begin:
        return UserError(
            f"{path} has the format that torch.save wrote before torch 1.6, which cannot be read in pieces\n"
            "fix: write it again: torch.save(torch.load(FILE, weights_only=True), FILE)"
        )
    if found := _OTHER_OBJECT.search(str(error)):
        return UserError(
            f"{path} holds an object of {found[1]}, not tensors alone, and reading it may run code\n"
            "fix: if you trust the file: torch.save(weights, FILE), with a dictionary of its tensors by name"
        )
    return _damaged(path, error if begin.startswith(_ZIP) else ValueError("torch.save did not write it"))


def _no_tensors(path: Path, held: Any) -> UserError:
    """Return the error for a file of torch.save that holds another thing than tensors by name."""
    named = held if isinstance(held, Mapping) else {}
    others = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    inner = next((name for name, value in others.items() if isinstance(value, Mapping)), None)
    if inner is not None:
        what, fix = f", but one in {inner!r}", f"torch.save(torch.load(FILE, weights_only=True)[{inner!r}], FILE)"
    else:
        what = "".join(f"; {name!r} is {type(value).__name__}" for name, value in list(others.items())[:1])
        fix = "a file of a Hugging Face model's weights"
    return UserError(f"{path} holds no dictionary of tensors{what}\nfix: {fix}")


def _require_floating(path: Path, name: str, dtype: str, known: bool) -> None:
    if not known:
        raise UserError(
            f"{name} in {path} is {dtype}\nallowed: {', '.join(sorted(_DTYPE_NAMES.values()))}\n"
            "fix: give the model's unquantized weights"
        )
