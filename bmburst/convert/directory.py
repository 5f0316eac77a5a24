"""A directory of weights of any family that we know, as named tensors under Hugging Face's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.tensor_files import TensorFile, open_tensors
from bmburst.config import read_json
from bmburst.convert.model_center import ModelCenterConfig, is_model_center, model_center_name
from bmburst.errors import UserError

HUGGING_FACE, MODEL_CENTER = "huggingface", "model-center"
CONFIG_FILE, MODEL_CENTER_FILE = "config.json", "pytorch_model.pt"
# Buffers that ModelCenter and old exports of Hugging Face keep beside the weights: they follow from the configuration.
_DERIVED = "inv_freq"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's weights in files, read run by run.

    Attributes:
        directory: Where they are.
        family: `HUGGING_FACE`, which bmburst's checkpoints are too, or `MODEL_CENTER`.
        values: What its config.json holds.
        config: The model.
        places: For every weight, by Hugging Face's name, the open file and the name in it.
    """

    directory: Path
    family: str
    values: Mapping[str, Any]
    config: LlamaConfig
    places: Mapping[str, tuple[TensorFile, str]] = field(repr=False)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return the numbers [begin, end) of the flattened weight, in the file's dtype."""
        file, inside = self.places[name]
        return file.read(inside, begin, end)


def open_weights(directory: str | Path) -> Weights:
    """Open a directory of Hugging Face, of a checkpoint of bmburst or of ModelCenter, and check that it is complete.

    Raises:
        UserError: There is no such directory, its model is of another family, a file is missing or damaged, or a tensor
            is missing, extra or of a wrong shape.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"no directory {directory}\nfix: a folder with config.json and a model's weights")
    values = read_json(directory / CONFIG_FILE)
    if is_model_center(values):
        return _open_model_center(directory, values)
    config = hugging_face.read_config(directory)
    files = hugging_face.check(directory, config)
    places = {name: (file, name) for name, file in files.items()}
    return Weights(directory=directory, family=HUGGING_FACE, values=values, config=config, places=places)


def _open_model_center(directory: Path, values: Mapping[str, Any]) -> Weights:
    config = ModelCenterConfig.from_values(values, str(directory / CONFIG_FILE)).shape()
    file = open_tensors(directory / MODEL_CENTER_FILE)
    hugging_face.require_layers(directory, config, len(file.shapes))
    expected = {name: (model_center_name(name), shape) for name, shape in hugging_face.expected_shapes(config).items()}
    for inside, shape in expected.values():
        if inside not in file.shapes:
            raise UserError(f"{directory / MODEL_CENTER_FILE} lacks {inside}\nfix: the complete weights of its Llama")
        if file.shapes[inside] != shape:
            raise UserError(
                f"{inside} in {directory / MODEL_CENTER_FILE} has shape {list(file.shapes[inside])}, its config.json "
                f"says {list(shape)}\nfix: weights and config.json must be of the same model"
            )
    known = {inside for inside, _ in expected.values()}
    extra = [name for name in file.shapes if name not in known and not name.endswith(_DERIVED)]
    if extra:
        raise UserError(
            f"{directory / MODEL_CENTER_FILE} has {extra[0]}, which its config.json does not\n"
            "fix: weights and config.json must be of the same model"
        )
    places = {name: (file, inside) for name, (inside, _) in expected.items()}
    return Weights(directory=directory, family=MODEL_CENTER, values=values, config=config, places=places)
