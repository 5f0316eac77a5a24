"""A file as `torch.save` writes it, made piece by piece: `torch.save` itself takes a dictionary of everything.

The format is a zip archive, uncompressed, of a pickle that rebuilds the dictionary and of one record a tensor
(torch/serialization.py, `_save`; the file is read back by `torch.load`, `weights_only` and `mmap` included).
"""

import contextlib
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from bmburst.checkpoint.tensor_files import Announced, TensorWriter

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}
_ALIGNMENT = 64
# Of an entry's header: fixed part, zip64's sizes, and the head of the field that pads.
_FIXED, _ZIP64, _FIELD = 30, 20, 4


class _Storage:
    def __init__(self, key: str, dtype: torch.dtype, numel: int) -> None:
        self.key, self.dtype, self.numel = key, dtype, numel


class _Planned:
    """Stands for a tensor in the pickle."""

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
    """Writes named tensors one after the other; the file appears under its name only when it is whole.

    Args:
        path: The file to make or replace.
        tensors: Every tensor, in the order in which they will be written.
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
        with contextlib.suppress(OSError):  # where the disk is full, closing fails too
            if self._record is not None:
                self._record.close()
            self._archive.close()

    def _put(self, name: str, content: bytes) -> None:
        with self._open(name) as record:
            record.write(content)

    def _open(self, name: str) -> Any:
        """Open an entry whose numbers start at a multiple of 64 bytes, as torch's own do: it maps them as they are."""
        entry = zipfile.ZipInfo(f"archive/{name}")
        start = self._file.tell() + _FIXED + len(entry.filename) + _ZIP64 + _FIELD
        padding = -start % _ALIGNMENT
        entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        return self._archive.open(entry, "w", force_zip64=True)
