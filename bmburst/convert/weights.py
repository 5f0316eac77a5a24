"""Opens a directory of weights of any known family as named tensors, and writes files in the format of `torch.save`.

Tensors have Hugging Face's names for every family. `TorchFileWriter` writes piece by piece, while `torch.save` needs a
dictionary of whole tensors. The format is an uncompressed zip archive of a pickle that rebuilds the dictionary, and one
record per tensor (torch/serialization.py, `_save`). `torch.load` reads it, also with `weights_only` and `mmap`.
"""

import contextlib
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from bmburst.blocks.config import LlamaConfig
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.adapter import Adapter, Base, adapter_shapes, open_adapter, peft_name
from bmburst.checkpoint.tensor_files import Announced, TensorFile, TensorWriter, open_tensors
from bmburst.config import read_json
from bmburst.convert.model_center import ModelCenterConfig, is_model_center, model_center_name
from bmburst.errors import UserError

HUGGING_FACE, MODEL_CENTER = "huggingface", "model-center"
CONFIG_FILE, MODEL_CENTER_FILE = "config.json", "pytorch_model.pt"
# Buffers that ModelCenter and old Hugging Face exports store with the weights. The configuration determines them.
_DERIVED = "inv_freq"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's weights in opened files, read piece by piece.

    Attributes:
        directory: Directory of the files.
        family: `HUGGING_FACE` (also for bmburst's checkpoints) or `MODEL_CENTER`.
        values: Contents of config.json.
        config: Configuration of the model.
        places: For every weight, by Hugging Face's name: the open file, and the name in this file.
        adapter: Adapter that is merged into the weights as they are read, or None.
    """

    directory: Path
    family: str
    values: Mapping[str, Any]
    config: LlamaConfig
    places: Mapping[str, tuple[TensorFile, str]] = field(repr=False)
    adapter: Adapter | None = None

    def read(self, name: str, begin: int, end: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the elements [begin, end) of the flattened weight, in the file's dtype.

        With an adapter, its product is added in fp32 or wider, and the sum is rounded once to `dtype` (default: the
        file's dtype).
        """
        file, inside = self.places[name]
        numbers = file.read(inside, begin, end)
        stem = name.removesuffix(".weight")
        if self.adapter is None or peft_name(f"{stem}.lora_A") not in self.adapter.file.shapes or begin == end:
            return numbers
        return self._merged(stem, numbers, begin, end, file.shapes[inside][1]).to(dtype or numbers.dtype)

    def _merged(self, stem: str, numbers: Tensor, begin: int, end: int, width: int) -> Tensor:
        """Return elements of W + scale * B A, in fp32 or wider."""
        assert self.adapter is not None
        file, rank = self.adapter.file, self.adapter.lora.rank
        names = [peft_name(f"{stem}.lora_{letter}") for letter in "AB"]
        first, last = begin // width, -(-end // width)
        a = file.read(names[0], 0, rank * width).view(rank, width)
        b = file.read(names[1], first * rank, last * rank).view(-1, rank)
        wide = torch.promote_types(numbers.dtype, torch.float32)
        term = (b.to(wide) @ a.to(wide)).view(-1)[begin - first * width :][: end - begin]
        return numbers.to(wide) + self.adapter.lora.scale * term


def open_weights(directory: str | Path) -> Weights:
    """Open a Hugging Face or ModelCenter directory or a checkpoint of bmburst, and check that it is complete.

    Raises:
        UserError: The directory is missing, the model is of another family, a file is missing or damaged, or a tensor
            is missing, extra or has a wrong shape.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"no directory {directory}\nfix: give a directory with config.json and a model's weights")
    values = read_json(directory / CONFIG_FILE)
    if is_model_center(values):
        return _open_model_center(directory, values)
    config = hugging_face.read_config(directory)
    files = hugging_face.check_weights(directory, config)
    places = {name: (file, name) for name, file in files.items()}
    return Weights(directory=directory, family=HUGGING_FACE, values=values, config=config, places=places)


def _open_model_center(directory: Path, values: Mapping[str, Any]) -> Weights:
    config = ModelCenterConfig.from_values(values, str(directory / CONFIG_FILE)).shape()
    file = open_tensors(directory / MODEL_CENTER_FILE)
    hugging_face.require_layers(directory, config, len(file.shapes))
    expected = {name: (model_center_name(name), shape) for name, shape in hugging_face.expected_shapes(config).items()}
    for inside, shape in expected.values():
        if inside not in file.shapes:
            raise UserError(
                f"{directory / MODEL_CENTER_FILE} lacks {inside}\nfix: give the complete weights of the model"
            )
        if file.shapes[inside] != shape:
            raise UserError(
                f"{inside} in {directory / MODEL_CENTER_FILE} has shape {list(file.shapes[inside])}, its config.json "
                f"says {list(shape)}\nfix: give weights and config.json of the same model"
            )
    known = {inside for inside, _ in expected.values()}
    extra = [name for name in file.shapes if name not in known and not name.endswith(_DERIVED)]
    if extra:
        raise UserError(
            f"{directory / MODEL_CENTER_FILE} has {extra[0]}, which the model of its config.json does not have\n"
            "fix: give weights and config.json of the same model"
        )
    places = {name: (file, inside) for name, (inside, _) in expected.items()}
    return Weights(directory=directory, family=MODEL_CENTER, values=values, config=config, places=places)


def open_merged(adapter: Path, base: Path | None, option: str = "--base DIR") -> Weights:
    """Open a model's weights with an adapter merged into them.

    Args:
        adapter: Directory of the adapter.
        base: Directory of the base model; None: the one that the adapter names.
        option: Option that gives the base model, for messages.

    Raises:
        UserError: As in `open_weights` and `open_adapter`; or no base model is named, or it is the wrong one.
    """
    found = open_adapter(adapter)
    weights = open_weights(found.find_base(base, option))
    shapes = {name: file.shapes[inside] for name, (file, inside) in weights.places.items()}
    found.require_shapes(adapter_shapes(found.lora, shapes))
    found.require_base(Base.of(weights.directory, shapes, weights.read))
    return replace(weights, adapter=found)


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
