"""Opens a directory of weights of any known family as named tensors, with Hugging Face's names for every family."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.adapter import Adapter, Base, adapter_shapes, open_adapter, peft_name
from bmburst.checkpoint.model_center import ModelCenterConfig, is_model_center, model_center_name
from bmburst.checkpoint.tensor_files import TensorFile, open_tensors
from bmburst.config import read_json
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
