"""What files of tensors that are written piece by piece have in common: they are whole, or not there."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

from bmburst.comm.memory import bytes_of

Announced = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


class TensorWriter(ABC):
    """Writes tensors one after the other; the file appears under its name only when it is whole.

    Args:
        path: The file to make or replace.
        tensors: Every tensor, in the order in which they will be written.
    """

    _file: BinaryIO

    def __init__(self, path: Path, tensors: Iterable[Announced]) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._expected = list(tensors)
        self._written = self._bytes = 0

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb")
        self._begin()
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
        whole = kind is None and self._written == len(self._expected)
        try:
            with self._file:
                self._end(whole=whole)
                if whole:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if whole:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)
        if kind is None and not whole:
            raise ValueError(f"{self._path}: {self._written} of {len(self._expected)} tensors were written")

    @abstractmethod
    def _begin(self) -> None:
        """Write what comes before all numbers."""

    @abstractmethod
    def _append(self, numbers: memoryview, *, is_last: bool) -> None:
        """Write bytes of tensor `self._written`, which may be its last ones."""

    @abstractmethod
    def _end(self, *, whole: bool) -> None:
        """Write what comes behind all numbers, or close what is open of a file that goes."""
