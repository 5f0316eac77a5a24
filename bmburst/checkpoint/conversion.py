"""Converts a model directory to another family's format, reading and writing tensors piece by piece."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.dtypes import DTYPE_NAMES, dtype_of
from bmburst.checkpoint.adapter import is_adapter_directory, open_merged
from bmburst.checkpoint.files import STATE_FILE, require_whole
from bmburst.checkpoint.hugging_face import (
    CONFIG_FILE,
    HUGGING_FACE,
    MODEL_CENTER,
    MODEL_CENTER_FILE,
    Weights,
    open_weights,
)
from bmburst.checkpoint.model_center import ModelCenterConfig, model_center_name
from bmburst.checkpoint.sharded_files import part_names, write_index
from bmburst.checkpoint.tensor_files import SafetensorsWriter, save_mapped, write_json
from bmburst.config import read_json
from bmburst.data.tokenizer import GENERATION_CONFIG, TOKENIZER_FILES
from bmburst.data.tokenizer_folder import TOKENIZER_FILE, require_tokenizer
from bmburst.errors import UserError, require_known
from bmburst.outputs import replacing, write_fix
from bmburst_ops.dtypes import name_of

FAMILIES = (HUGGING_FACE, "bmburst", MODEL_CENTER)
PART_BYTES = 5 * 10**9
"""Largest size in bytes of one safetensors file, unless a single tensor is larger. It is Hugging Face's default."""
_ASIDE = {HUGGING_FACE: "config.huggingface.json", MODEL_CENTER: "config.model-center.json"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """Summary of a conversion.

    Attributes:
        family: Family of the source.
        tensors: Number of tensors.
        nbytes: Bytes of the tensors.
        files: All files, in the order of writing.
        tokenizer_elsewhere: Tokenizer that a checkpoint names outside its directory. It is copied only if the caller
            names it. "" if there is none.
    """

    family: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    tokenizer_elsewhere: str = ""


def convert(
    source: Path,
    output: Path,
    *,
    to: str,
    dtype: str | None = None,
    part_bytes: int = PART_BYTES,
    piece_bytes: int = 16 << 20,
    tokenizer: Path | None = None,
    on_total: Callable[[int], object] = lambda _: None,
    on_bytes: Callable[[int], object] = lambda _: None,
    is_verified: bool = False,
    merge: bool = False,
    base: Path | None = None,
) -> Converted:
    """Write a model's weights, configuration and tokenizer in the format of another family.

    Values are copied unchanged, or rounded once to `dtype`. Fields that the other family's config.json cannot express
    are stored in a file beside it, together with code that config.json names, so that converting back restores the
    original config.json. At most `piece_bytes` of a tensor are in memory, or twice that if the dtype changes. The
    output gets its name only when it is complete. A ModelCenter file is on the disk twice while it
    is written.

    Args:
        source: Directory of a Hugging Face model of `bmburst.blocks.families`, of a checkpoint of bmburst, or of a
            ModelCenter LLaMA.
        output: Directory to create; it may exist if it is empty.
        to: "huggingface", "bmburst" (the same format), or "model-center".
        dtype: "float32", "float16" or "bfloat16"; None: the dtype of each tensor.
        part_bytes: Size in bytes above which safetensors are split into several files.
        piece_bytes: Size in bytes of the pieces in which tensors are read and written.
        tokenizer: A tokenizer.json, or a directory of tokenizer files, to copy instead of the source's tokenizer.
        on_total: Called once, with the total number of bytes to write.
        on_bytes: Called with the number of bytes written since the last call.
        is_verified: Whether the checksums of a checkpoint of bmburst are already verified.
        merge: Whether the source is an adapter to merge into the weights of `base`.
        base: Directory of the base model; None: the one that the adapter names.

    Raises:
        UserError: The source is a damaged checkpoint (`require_whole`) or an incomplete model (`open_weights`), the
            target family does not support the model, a number is out of range for float16, a tokenizer file is not
            valid, or the output is not empty or cannot be written.
    """
    require_known("family", to, FAMILIES)
    if dtype is not None:
        require_known("dtype", dtype, DTYPE_NAMES)
    if not is_verified:
        require_whole(source)
    if not merge and is_adapter_directory(source):
        raise UserError(f"{source} is a LoRA adapter\nfix: --merge --base DIR writes the model with the adapter in it")
    if base is not None and not merge:
        raise UserError(f"--base {base} is for adapters\nfix: --merge too, or leave --base out")
    weights = open_merged(source, base) if merge else open_weights(source)
    target = MODEL_CENTER if to == MODEL_CENTER else HUGGING_FACE
    plan = _plan(weights, target, None if dtype is None else dtype_of(dtype))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not empty\nfix: give a new directory")
    on_total(sum(tensor.nbytes for tensor in plan))
    whole = output.resolve()  # a path with a name, also for "." and links: the temporary directory is beside it
    if merge and tokenizer is None and (source / TOKENIZER_FILE).is_file():  # the tokenizer of the adapter's training
        tokenizer = source
    carried, elsewhere = _to_carry(weights, target, tokenizer)
    try:
        with replacing(whole) as partial:
            partial.mkdir(parents=True)
            _write_weights(partial, weights, target, plan, part_bytes, piece_bytes, on_bytes)
            _write_config(partial, weights, target, plan)
            for name, path in carried.items():
                if not (partial / name).exists():
                    shutil.copyfile(path, partial / name)
    except OSError as error:
        fix = write_fix(error, output, "give a directory where you have write permission")
        raise UserError(f"cannot write {output}: {error.strerror}\nfix: {fix}") from error
    return Converted(
        family=weights.family,
        tensors=len(plan),
        nbytes=sum(tensor.nbytes for tensor in plan),
        files=tuple(sorted(path.name for path in whole.iterdir())),
        tokenizer_elsewhere=elsewhere,
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str  # name in Hugging Face's models
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _plan(weights: Weights, target: str, dtype: torch.dtype | None) -> list[_Tensor]:
    """Return all tensors to write, in order. A tensor that cannot be converted is refused here."""
    plan = []
    for name, (file, inside) in weights.places.items():
        named = model_center_name(name) if target == MODEL_CENTER else name
        plan.append(_Tensor(name, named, file.shapes[inside], dtype or weights.dtype_of(name)))
    if target == MODEL_CENTER:
        ModelCenterConfig.of(weights.config, _common_dtype(plan))
    return plan


def _write_weights(
    folder: Path,
    weights: Weights,
    target: str,
    plan: Sequence[_Tensor],
    part_bytes: int,
    piece_bytes: int,
    on_bytes: Callable[[int], object],
) -> None:
    parts = [list(plan)] if target == MODEL_CENTER else list(_parts(plan, part_bytes))
    names = part_names("model", len(parts))
    for name, part in zip(names, parts, strict=True):
        announced = [(tensor.target, tensor.shape, tensor.dtype) for tensor in part]
        with SafetensorsWriter(folder / name, announced, {"format": "pt"}) as writer:
            for tensor in part:
                for piece in _pieces(weights, tensor, piece_bytes):
                    writer.write_run(piece)
                    on_bytes(piece.nbytes)
    if target == MODEL_CENTER:
        save_mapped(folder / names[0], folder / MODEL_CENTER_FILE)
        (folder / names[0]).unlink()
    if len(parts) > 1:
        places = {tensor.target: name for name, part in zip(names, parts, strict=True) for tensor in part}
        write_index(folder, "model", places, sum(tensor.nbytes for tensor in plan))


def _parts(plan: Sequence[_Tensor], part_bytes: int) -> Iterator[list[_Tensor]]:
    part: list[_Tensor] = []
    for tensor in plan:
        if part and sum(other.nbytes for other in part) + tensor.nbytes > part_bytes:
            yield part
            part = []
        part.append(tensor)
    yield part


def _pieces(weights: Weights, tensor: _Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    total, step = prod(tensor.shape), max(nbytes // tensor.dtype.itemsize, 1)
    for begin in range(0, total, step):
        wide = torch.promote_types(tensor.dtype, torch.float32)  # an adapter is added in fp32 and rounded once
        read = weights.read(tensor.name, begin, min(begin + step, total), wide)
        piece = read.to(tensor.dtype)
        if tensor.dtype == torch.float16 and _is_beyond(read, piece):
            raise UserError(
                f"{tensor.name} has numbers beyond 65504, the largest of float16\nfix: give --dtype bfloat16 or float32"
            )
        yield piece


def _is_beyond(read: torch.Tensor, rounded: torch.Tensor) -> bool:
    infinite = rounded.isinf()
    return bool(infinite.any()) and bool((infinite & read.isfinite()).any())


def _write_config(folder: Path, weights: Weights, target: str, plan: Sequence[_Tensor]) -> None:
    dtype = _common_dtype(plan)
    if weights.family == target:
        values = dict(weights.values)
    else:
        values = _aside(weights, target) or _fresh(weights.config, target, dtype)
        write_json(folder / _ASIDE[weights.family], weights.values)
    write_json(folder / CONFIG_FILE, values | _dtype_fields(target, dtype, values))


def _fresh(config: LlamaConfig, target: str, dtype: Any) -> dict[str, Any]:
    if target == MODEL_CENTER:
        return ModelCenterConfig.of(config, dtype).to_values()
    return config.to_hugging_face() | {"torch_dtype": dtype, "dtype": dtype}  # transformers 4 and 5


def _dtype_fields(target: str, dtype: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtype fields that must change in a config.json; empty if they are correct or missing."""
    if target == HUGGING_FACE:
        return {key: dtype for key in ("torch_dtype", "dtype") if key in values}
    if ModelCenterConfig.from_values(values).dtype_name == dtype:
        return {}
    is_half: dict[str, Any] = {"half": dtype == "float16"}
    return is_half | ({"dtype": dtype} if "dtype" in values or dtype == "bfloat16" else {})


def _aside(weights: Weights, target: str) -> dict[str, Any] | None:
    """Return the target family's config.json that an earlier conversion stored, if it still describes these weights."""
    path = weights.directory / _ASIDE[target]
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        if target == MODEL_CENTER:
            config = ModelCenterConfig.from_values(values, str(path)).shape()
        else:
            config = LlamaConfig.from_hugging_face(values)
        return values if _in_common(config) == _in_common(weights.config) else None
    except UserError:  # it is of another model, which ModelCenter may not support
        return None


def _in_common(config: LlamaConfig) -> ModelCenterConfig:
    """Return the part of a configuration that both families can express."""
    values = ModelCenterConfig.of(config, "float32").to_values()
    return ModelCenterConfig.from_values(values | {"max_position_embeddings": 4096})


def _to_carry(weights: Weights, target: str, tokenizer: Path | None) -> tuple[dict[str, Path], str]:
    """Return the files to copy, by new name, and the tokenizer that a checkpoint names outside its directory.

    These are tokenizer files, a model's code, and configurations that an earlier conversion stored. Checkpoints are not
    trusted: a file that one names is copied only from inside its directory, and only if its content matches its name.

    Raises:
        UserError: The content of a file does not match its name.
    """
    elsewhere = ""
    names = (*TOKENIZER_FILES, *_ASIDE.values(), *_own_code(weights))
    found = {name: weights.directory / name for name in names}
    state = weights.directory / STATE_FILE
    if tokenizer is not None:
        if not tokenizer.exists():
            raise UserError(
                f"--tokenizer {tokenizer}: no such file or directory\n"
                "allowed: a tokenizer.json, or a directory with one\nfix: correct the path, or leave it out"
            )
        found |= _files_of(tokenizer)
    elif state.is_file() and not found[TOKENIZER_FILE].is_file():  # a checkpoint that only names its tokenizer
        root = os.path.abspath(weights.directory)
        named = str(read_json(state).get("tokenizer"))
        place = Path(os.path.normpath(os.path.join(root, named.replace("\0", "?"))))
        if place.is_relative_to(root) and place.exists():
            found |= _files_of(place)
        elif named.endswith(".json") or os.path.isdir(named):
            elsewhere = named
    there = {name: path for name, path in found.items() if path.is_file() and name != _ASIDE[target]}
    for name, path in there.items():
        _require_kind(name, path)
    return there, elsewhere


def _files_of(tokenizer: Path) -> dict[str, Path]:
    if tokenizer.is_dir():
        own = (tokenizer / GENERATION_CONFIG).is_file()  # else that of the model stays
        return {name: tokenizer / name for name in TOKENIZER_FILES if own or name != GENERATION_CONFIG}
    return {TOKENIZER_FILE: tokenizer}


def _require_kind(name: str, path: Path) -> None:
    """Check that the content of a file matches the name under which it is copied, if the name implies a format."""
    try:
        if name == TOKENIZER_FILE:
            require_tokenizer(path)
        elif name.endswith(".json"):
            read_json(path)
        elif not name.endswith(".model"):  # .model is sentencepiece's format; the package may not be installed
            path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be copied as {name}: {error}\nfix: repair the file, or move it out of the directory"
        ) from error


def _own_code(weights: Weights) -> Iterator[str]:
    """Yield the Python files that a Hugging Face config.json names, for a model that is not part of transformers."""
    aside = weights.directory / _ASIDE[HUGGING_FACE]
    for values in (weights.values, read_json(aside) if aside.is_file() else {}):
        named = values.get("auto_map")
        for reference in named.values() if isinstance(named, Mapping) else ():
            module = reference.partition(".")[0] if isinstance(reference, str) else ""
            if module.isidentifier():  # "owner/repository--module" is in another repository
                yield f"{module}.py"


def _common_dtype(plan: Sequence[_Tensor]) -> Any:
    """Return the name of the dtype with the most elements."""
    sizes: dict[str, int] = {}
    for tensor in plan:
        name = name_of(tensor.dtype)
        sizes[name] = sizes.get(name, 0) + prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name])
