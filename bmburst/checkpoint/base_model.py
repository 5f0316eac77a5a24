"""A model that a checkpoint needs but does not hold: the base of adapters, or the reference of preference training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.dtypes import dtype_of
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.tensor_files import TensorFile

_MATRICES, _NUMBERS = 16, 4  # matrices in a sample, and numbers per matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The base model of adapters.

    Attributes:
        directory: Directory of the weights.
        sample: Some numbers of the weights, which distinguish models of the same shape.
    """

    directory: Path
    sample: tuple[float, ...]

    @classmethod
    def of(
        cls, directory: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str, int, int], Tensor]
    ) -> "Base":
        """Take the sample of a model's weights.

        Args:
            directory: Directory of the weights.
            shapes: Shapes of the weights, by Hugging Face's names.
            read: Returns the elements [begin, end) of a flattened weight, given its name.
        """
        names = sorted(name for name, shape in shapes.items() if len(shape) == 2)
        places = ((name, prod(shapes[name])) for name in names[:: -(-len(names) // _MATRICES)])
        runs = ((name, total * part // _NUMBERS) for name, total in places for part in range(_NUMBERS))
        return cls(directory=directory, sample=tuple(read(name, at, at + 1).item() for name, at in runs))

    @classmethod
    def open(cls, directory: Path, config: LlamaConfig) -> "Base":
        """Sample the weights of a Hugging Face directory; errors as `bmburst.checkpoint.hugging_face.check_weights`."""
        return cls.of_files(directory, hugging_face.check_weights(directory, config), config)

    @classmethod
    def of_files(cls, directory: Path, files: Mapping[str, TensorFile], config: LlamaConfig) -> "Base":
        """Take the sample of the weights in open files, given the file of each."""
        shapes = hugging_face.expected_shapes(config)
        return cls.of(directory, shapes, lambda name, begin, end: files[name].read(name, begin, end))

    def text(self, dtype: str) -> str:
        """Return the sample as text, rounded as a model of a dtype holds it: equal only for weights that compute alike.

        It is text because a checkpoint's JSON holds neither NaN nor infinity.
        """
        numbers = torch.tensor(self.sample, dtype=torch.float64).to(dtype_of(dtype)).tolist()
        return " ".join(map(repr, numbers))
