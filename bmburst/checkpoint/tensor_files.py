"""Files of named tensors, read run by run and written tensor by tensor: no process ever holds them all.

Reading knows safetensors and, as a courtesy, what `torch.save` wrote. Writing is safetensors, whose format is a length,
a JSON header and the numbers (https://github.com/huggingface/safetensors#format); its own library writes only from a
dictionary of everything.
"""

import contextlib
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bmburst.comm.memory import bytes_of
from bmburst.errors import UserError, first_line
from bmburst.outputs import replacing

Announced = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


class TensorWriter(ABC):
    """Writes tensors one after the other; the file appears under its name only when it is whole.

    Args:
        path: The file to make or replace.
        tensors: Every tensor, in the order in which they will be written.
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
        """Append a run of the next tensor's flattened numbers; several make it up.

        Raises:
            ValueError: It is not of the tensor announced.
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
            if not whole:  # an error keeps the file from taking its name
                counts = f"{self._written} of {len(self._expected)} tensors were written"
                raise value or ValueError(f"{self._path}: {counts}")

    @abstractmethod
    def _begin(self) -> None:
        """Write what comes before all numbers."""

    @abstractmethod
    def _append(self, numbers: memoryview, *, is_last: bool) -> None:
        """Write bytes of tensor `self._written`, which may be its last ones."""

    @abstractmethod
    def _end(self, *, whole: bool) -> None:
        """Write what comes behind all numbers, or close what is open of a file that goes."""


_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TensorFile(Protocol):
    """An open file of floating point tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by name."""
        ...

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return the numbers [begin, end) of the flattened tensor, on the CPU, in the file's dtype."""
        ...


def open_tensors(path: Path) -> TensorFile:
    """Open a file of tensors by its suffix.

    Raises:
        UserError: It is missing, truncated, of another format, or holds other than floating point numbers.
    """
    try:
        is_there = path.is_file()
    except OSError:  # a name that is too long
        is_there = False
    if not is_there:
        raise UserError(f"no file {path}\nfix: copy the missing file there, or name another directory")
    return _Safetensors(path) if path.suffix == ".safetensors" else _TorchFile(path)


class _Safetensors:
    def __init__(self, path: Path) -> None:
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")  # Any: its stub lacks most methods
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        self._file = file
        self.shapes = {name: tuple(cut.get_shape()) for name, cut in slices.items()}
        for name, cut in slices.items():
            _require_floating(path, name, cut.get_dtype(), cut.get_dtype() in _DTYPE_NAMES.values())

    def read(self, name: str, begin: int, end: int) -> Tensor:
        shape = self.shapes[name]
        width = prod(shape[1:])  # the library cuts along the first dimension: take the rows that contain the run
        first, last = begin // width, -(-end // width)
        rows: Tensor = self._file.get_slice(name)[first:last]
        return rows.reshape(-1)[begin - first * width : end - first * width]


class _TorchFile:
    def __init__(self, path: Path) -> None:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # what unpickling raises hangs on the bytes it is given
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


class SafetensorsWriter(TensorWriter):
    """Writes a safetensors file one tensor after the other; it appears under its name only when it is whole.

    Example:
        >>> with SafetensorsWriter(path, [("a", (2, 3), torch.float32)]) as writer:
        ...     writer.write(torch.zeros(2, 3))

    Args:
        path: The file to make or replace.
        tensors: Every tensor, in the order in which they will be written.
        metadata: Strings to keep in the header.

    Attributes:
        checksum: CRC-32 of what was written so far; of the file once it is whole.
    """

    def __init__(self, path: Path, tensors: Iterable[Announced], metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(path, tensors)
        self._metadata = dict(metadata or {})
        self.checksum = 0

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor.

        Raises:
            ValueError: It is not the next one announced.
        """
        name, shape, dtype = self._expected[self._written]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or self._bytes:
            raise ValueError(f"{name} was announced as {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        self.write_run(tensor)

    def _begin(self) -> None:
        header: dict[str, object] = {"__metadata__": self._metadata} if self._metadata else {}
        end = 0
        for name, shape, dtype in self._expected:
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8 bytes
        self._put(memoryview(len(text).to_bytes(8, "little") + text))

    def _append(self, numbers: memoryview, *, is_last: bool) -> None:
        del is_last
        self._put(numbers)

    def _put(self, data: memoryview) -> None:
        self.checksum = zlib.crc32(data, self.checksum)
        self._file.write(data)

    def _end(self, *, whole: bool) -> None:
        """Nothing follows the numbers."""


def write_text(path: Path, text: str) -> int:
    """Write a small file that appears under its name only when it is whole, and return its CRC-32."""
    with replacing(path) as partial:
        partial.write_bytes(data := text.encode())
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
