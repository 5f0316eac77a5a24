"""Tensors of a file that repeat others or the configuration: tied heads and rotary frequencies. Each is compared.

Files of torch hold a tied head beside the embedding, and old exports hold rotary frequencies. They are left out only if
they say what the model computes anyway. A head that differs from the embedding is a head of its own, whatever
tie_word_embeddings says, as in transformers 5 (`PreTrainedModel.tie_weights`): adapters that were merged into one of
two tied matrices, or a vocabulary that was extended, leave such files behind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.rope import rotary_frequencies
from bmburst.checkpoint.tensor_files import TensorFile
from bmburst.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FREQUENCIES = "inv_freq"
"""End of the names of rotary frequencies."""
_PIECE = 1 << 24  # elements that are compared at once
_ROUNDED = 0.01, 1e-6  # relative and absolute rounding of frequencies in float16


def same_numbers(one: tuple[TensorFile, str], other: tuple[TensorFile, str]) -> bool:
    """Return whether two tensors, each a file and a name in it, have the same shape and equal numbers."""
    (here, name), (there, named) = one, other
    if here.shapes[name] != there.shapes[named]:
        return False
    total = prod(here.shapes[name])
    spans = ((begin, min(begin + _PIECE, total)) for begin in range(0, total, _PIECE))
    return all(_equal(here.read(name, *span), there.read(named, *span)) for span in spans)


def _equal(one: Tensor, other: Tensor) -> bool:
    wide = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(wide), other.to(wide))


def joined(directory: Path, parts: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """Return the file of each tensor.

    Args:
        directory: Directory of the files, for messages.
        parts: Opened files by name.

    Raises:
        UserError: Two files hold tensors of the same name that differ.
    """
    found: dict[str, TensorFile] = {}
    places: dict[str, str] = {}
    for part, file in parts.items():
        for name in file.shapes:
            if name in found and not same_numbers((found[name], name), (file, name)):
                raise UserError(
                    f"{name} in {places[name]} differs from {name} in {part}, both in {directory}\n"
                    "fix: remove the file that does not belong to the model"
                )
            found[name], places[name] = file, part
    return found


def with_own_head(config: LlamaConfig, files: Mapping[str, TensorFile], directory: Path) -> LlamaConfig:
    """Return the configuration with an untied head if it is tied, but the files hold another head than the embedding.

    Raises:
        UserError: Head and embedding have different shapes.
    """
    if not config.tie_embeddings or HEAD not in files or EMBEDDING not in files:
        return config
    head, embedding = (list(files[name].shapes[name]) for name in (HEAD, EMBEDDING))
    if head != embedding:
        raise UserError(
            f"{HEAD} in {directory} has shape {head}, but {EMBEDDING} {embedding}; its config.json says that they are "
            "one (tie_word_embeddings)\nfix: weights and config.json must be of the same model"
        )
    is_one = same_numbers((files[HEAD], HEAD), (files[EMBEDDING], EMBEDDING))
    return config if is_one else replace(config, tie_embeddings=False)


def with_embedding(config: LlamaConfig, files: dict[str, TensorFile]) -> dict[str, TensorFile]:
    """Return the files of a model's tensors, where a tied head also serves as the embedding that is not there."""
    if config.tie_embeddings and EMBEDDING not in files and HEAD in files:
        return {**files, EMBEDDING: _Renamed(files[HEAD], EMBEDDING, HEAD)}
    return files


class _Renamed:
    """One tensor of a file under another name. A `TensorFile`."""

    def __init__(self, file: TensorFile, name: str, inside: str) -> None:
        self._file, self._inside = file, inside
        self.shapes: Mapping[str, tuple[int, ...]] = {name: file.shapes[inside]}

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """See `TensorFile.read`."""
        assert name in self.shapes
        return self._file.read(self._inside, begin, end)


def require_frequencies(
    config: LlamaConfig, files: Mapping[str, TensorFile], names: Iterable[str], directory: Path
) -> None:
    """Raise UserError unless stored rotary frequencies are those of the model, with or without their scaling."""
    plain, _ = rotary_frequencies(replace(config, rope_scaling=None), None)
    scaled, _ = rotary_frequencies(config, config.max_position_embeddings)
    relative, absolute = _ROUNDED
    for name in names:
        numbers = files[name].read(name, 0, prod(files[name].shapes[name])).float()
        if not any(
            numbers.shape == wanted.shape and torch.allclose(numbers, wanted, rtol=relative, atol=absolute)
            for wanted in (plain, scaled)
        ):
            raise UserError(
                f"{name} in {directory} differs from the rotary frequencies of its config.json: rope_theta "
                f"{config.rope_theta:g}, head_dim {config.head_dim}\n"
                "fix: correct rope_theta or rope_scaling in config.json, or remove the tensor"
            )
