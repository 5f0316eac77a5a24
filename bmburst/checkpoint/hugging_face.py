"""Loads weights from Hugging Face directories of the LLaMA family (`--init-from DIR`), and exports for transformers.

`open_weights` opens a directory of any known family, ModelCenter's too, as tensors with Hugging Face's names. Every
rank reads only its ZeRO shards from the files, and export gathers one tensor at a time, so that no process ever holds
the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import SCALES
from bmburst.blocks.lora import TARGETS
from bmburst.checkpoint.derived import (
    EMBEDDING,
    FREQUENCIES,
    HEAD,
    joined,
    require_frequencies,
    same_numbers,
    with_embedding,
    with_own_head,
)
from bmburst.checkpoint.four_bit import Dequantized, quantized_piece
from bmburst.checkpoint.model_center import ModelCenterConfig, is_model_center, model_center_name
from bmburst.checkpoint.sharded_files import (
    Contents,
    GatheredTensors,
    ShardedTensor,
    TensorGroup,
    on_every_rank,
    os_error_as_user_error,
    parts_of,
    require_same,
)
from bmburst.checkpoint.tensor_files import TensorFile, json_bytes, open_tensors
from bmburst.config import read_json
from bmburst.errors import OF_THE_MAKER, UserError, hub_fix
from bmburst_ops.dtypes import name_of

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint.adapter import Adapter

HUGGING_FACE, MODEL_CENTER = "huggingface", "model-center"
CONFIG_FILE, MODEL_CENTER_FILE = "config.json", "pytorch_model.pt"
_STEM = "model"
_INDEX = ".index.json"
_FILES = tuple(f"{file}{end}" for file in ("model.safetensors", "pytorch_model.bin") for end in ("", _INDEX))
# Fields that must agree, because they change the meaning of the weights. Rotary settings may differ, because continued
# pretraining changes them.
_FIXED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "norm_eps",
    "tie_embeddings",
    "sliding_window",
    "qkv_bias",
    "qk_norm",
    *SCALES,
)


def read_config(directory: str | Path) -> LlamaConfig:
    """Read the configuration of the model in a Hugging Face directory; `with_own_head` says when its head is untied.

    Raises:
        UserError: The directory is missing, has no valid config.json, or holds a model of another family; or a weight
            file is damaged.
    """
    directory = Path(directory)
    config = _described(directory)
    if config.tie_embeddings and _may_hold_head(directory):
        return with_own_head(config, _open(directory), directory)
    return config


def has_weights(directory: Path) -> bool:
    """Return whether a directory has a file of a model's weights, or an index of them."""
    return any((directory / name).exists() for name in _FILES)


def _may_hold_head(directory: Path) -> bool:
    """Return whether there are weight files with a head. An index says it without its files, which may not be there."""
    for name in _FILES:
        if (directory / name).exists():
            return not name.endswith(_INDEX) or HEAD in read_json(directory / name).get("weight_map", {})
    return False


def _described(directory: Path) -> LlamaConfig:
    """Return the configuration in a config.json."""
    if not directory.is_dir():
        raise UserError(
            f"no directory {directory}\nfix: a folder with config.json and model.safetensors{hub_fix(directory)}"
        )
    path = directory / CONFIG_FILE
    values = read_json(path)
    try:
        return LlamaConfig.from_hugging_face(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise UserError(f"{path} has a value of a wrong type: {error}\nfix: correct it") from error


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of the model."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q", query), ("k", kv), ("v", kv)):
        block[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if config.qkv_bias:
            block[f"self_attn.{name}_proj.bias"] = (rows,)
    block["self_attn.o_proj.weight"] = (hidden, query)
    if config.qk_norm:
        block |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    block |= {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def is_matrix(name: str) -> bool:
    """Return whether a weight is a matrix of a block, such as those that adapters are on."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.rpartition(".")[2] in TARGETS


def require_layers(source: Path, config: LlamaConfig, tensors: int) -> None:
    """Raise UserError unless there are as many tensors as layers, before the weights of a config.json are listed."""
    if config.num_layers > tensors:
        raise UserError(
            f"{source} has {tensors} tensors, its config.json says {config.num_layers} layers\n"
            "fix: weights and config.json must be of the same model"
        )


def check_weights(directory: str | Path, config: LlamaConfig) -> Mapping[str, TensorFile]:
    """Check that a directory's weights fit a model, without reading them. It can run before ranks start.

    Returns:
        Map from the name of each weight to the open file that holds it.

    Raises:
        UserError: A file is missing or damaged, the model is of another family or shape, or a tensor is missing, extra
            or has a wrong shape.
    """
    directory = Path(directory)
    said = _described(directory)
    files = _open(directory)
    theirs = with_own_head(said, files, directory)
    for name in _FIXED:
        ours, given = getattr(config, name), getattr(theirs, name)
        if name == "tie_embeddings" and ours and said.tie_embeddings and not given:
            raise UserError(
                f"{HEAD} in {directory} differs from {EMBEDDING}, but this model has one matrix for both\n"
                "fix: set the model's tie_embeddings to False"
            )
        if ours != given:
            raise UserError(
                f"{name} is {ours} in this model but {given} in {directory}\nfix: set the model's {name} to {given}"
            )
    require_layers(directory, config, len(files))
    files = with_embedding(config, files)
    expected = expected_shapes(config)
    compared = [HEAD] if config.tie_embeddings else []  # by `with_own_head`
    derived = _require_weights(directory, expected, {name: files[name].shapes[name] for name in files}, compared)
    require_frequencies(theirs, files, derived, directory)
    return {name: files[name] for name in expected}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's weights in opened files, read piece by piece.

    Attributes:
        directory: Directory of the files.
        family: `HUGGING_FACE` (also for bmburst's checkpoints) or `MODEL_CENTER`.
        values: Contents of config.json; tie_word_embeddings is false if the files hold a head of their own.
        config: Configuration of the model.
        places: For every weight, by Hugging Face's name: the open file, and the name in this file.
        adapter: Adapter that is merged into the weights as they are read, or None.
        base: Quantizes and dequantizes the matrices of blocks before that, as the adapter was trained on them; or None.
    """

    directory: Path
    family: str
    values: Mapping[str, Any]
    config: LlamaConfig
    places: Mapping[str, tuple[TensorFile, str]] = field(repr=False)
    adapter: "Adapter | None" = None
    base: Dequantized | None = None

    def sample(self) -> tuple[float, ...]:
        """Return some numbers of the weights, and of the adapter alone, which distinguish models of the same shape."""
        from bmburst.checkpoint.base_model import Base

        shapes = {name: file.shapes[inside] for name, (file, inside) in self.places.items()}
        own = Base.of(self.directory, shapes, self.read).sample
        if self.adapter is None:
            return own
        file = self.adapter.file
        return own + Base.of(self.directory, file.shapes, file.read).sample

    def read(self, name: str, begin: int, end: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the elements [begin, end) of the flattened weight, in the file's dtype.

        With an adapter, its product is added in fp32 or wider, and the sum is rounded once to `dtype` (default: the
        file's dtype). A matrix that was in 4 bits in the adapter's training is quantized and dequantized before.
        """
        file, inside = self.places[name]
        shape, read = file.shapes[inside], partial(file.read, inside)
        is_changed = self.adapter is not None and self.adapter.changes(name)
        if self.base is not None and is_matrix(name) and begin < end:
            numbers = self.base.read(name, prod(shape), read, begin, end)
        elif is_changed and begin < end:
            numbers = read(begin, end)
        else:
            return read(begin, end)
        if self.adapter is not None and is_changed:
            numbers = self.adapter.merged(name, numbers, begin, end, shape[-1])
        return numbers.to(dtype or self.dtype_of(name))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return a weight's dtype in the file."""
        file, inside = self.places[name]
        return file.read(inside, 0, 1).dtype


def open_weights(directory: str | Path) -> Weights:
    """Open a Hugging Face or ModelCenter directory or a checkpoint of bmburst, and check that it is complete.

    Raises:
        UserError: The directory is missing, the model is of another family, a file is missing or damaged, or a tensor
            is missing, extra or has a wrong shape.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(
            f"no directory {directory}\n"
            f"fix: give a directory with config.json and a model's weights{hub_fix(directory)}"
        )
    values = read_json(directory / CONFIG_FILE)
    if is_model_center(values):
        return _open_model_center(directory, values)
    config = read_config(directory)
    files = check_weights(directory, config)
    if _described(directory) != config:  # the files have a head of their own
        values = values | {"tie_word_embeddings": config.tie_embeddings}
    places = {name: (file, name) for name, file in files.items()}
    return Weights(directory=directory, family=HUGGING_FACE, values=values, config=config, places=places)


def _open_model_center(directory: Path, values: Mapping[str, Any]) -> Weights:
    config = ModelCenterConfig.from_values(values, str(directory / CONFIG_FILE)).shape()
    file = open_tensors(directory / MODEL_CENTER_FILE)
    require_layers(directory, config, len(file.shapes))
    expected = {name: (model_center_name(name), shape) for name, shape in expected_shapes(config).items()}
    head, embedding = (model_center_name(name) for name in (HEAD, EMBEDDING))
    if config.tie_embeddings and head in file.shapes and not same_numbers((file, head), (file, embedding)):
        raise UserError(
            f"{head} in {directory / MODEL_CENTER_FILE} differs from {embedding}; its config.json says that they are "
            "one (tied)\nfix: set tied to false, or remove the matrix that does not belong to the model"
        )
    derived = _require_weights(directory / MODEL_CENTER_FILE, dict(expected.values()), file.shapes, [head])
    require_frequencies(config, dict.fromkeys(derived, file), derived, directory)
    places = {name: (file, inside) for name, (inside, _) in expected.items()}
    return Weights(directory=directory, family=MODEL_CENTER, values=values, config=config, places=places)


def load(model: "Llama", directory: str | Path) -> None:
    """Load the weights of a Hugging Face directory into a model, converted to its dtype, or quantized from it.

    Every rank must call it. Each rank reads only its own shards, so the directory must be visible on every host.

    Raises:
        UserError: On all ranks, if `check_weights` fails on a rank, a rank's directory holds another model, or a number
            is out of range for fp16 weights.
    """
    from bmburst.blocks.layers import quantized_linears
    from bmburst.checkpoint.base_model import Base
    from bmburst.zero import named_shards, scatter_piece

    files: Mapping[str, TensorFile] = {}

    def open_files() -> str:
        nonlocal files
        files = check_weights(directory, model.config)
        return repr(Base.of_files(Path(directory), files, model.config).sample)  # NaN is not equal to itself

    require_same(f"weights of {directory}", open_files)
    shards, beyond, quantized = named_shards(model), "", quantized_linears(model)

    def read(name: str, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        nonlocal beyond
        numbers = files[name].read(name, begin, end)
        if dtype == torch.float16 and bool((numbers.abs() > torch.finfo(dtype).max).any()):
            beyond = name
        return numbers

    for shard in shards:
        if (linear := quantized.get(shard.name)) is not None:
            name, dtype = f"{shard.name.rpartition('.')[0]}.weight", linear.weight.dtype
            scatter_piece(shard, quantized_piece(shard, partial(read, name, dtype), linear.shape, dtype))
        elif shard.count and shard.name in files:  # adapters are in separate files
            scatter_piece(shard, shard.read(partial(read, shard.name, shard.dtype)))

    def require_range() -> None:
        if beyond:
            raise UserError(
                f"{directory}: {beyond} has numbers beyond 65504, the largest of float16\n"
                "fix: --dtype bfloat16 or float32"
            )

    if any(shard.dtype == torch.float16 for shard in shards):
        on_every_rank(require_range)


def contents(model: "Llama", *, part_bytes: int | None = None) -> Contents:
    """Return what `save` writes: `model.safetensors`, or its parts, and `config.json`.

    Args:
        model: The model.
        part_bytes: See `TensorGroup`.
    """
    from bmburst.zero import named_shards

    shards = named_shards(model)
    dtype = name_of(shards[0].dtype)
    values = model.config.to_hugging_face() | {"torch_dtype": dtype, "dtype": dtype}  # transformers 4 and 5
    tensors = tuple(ShardedTensor.of_weights(shard.name, shard) for shard in shards)
    group = TensorGroup(_STEM, tensors, {"format": "pt"}, part_bytes)
    return Contents((group,), {CONFIG_FILE: json_bytes(values)})


def save(model: "Llama", directory: str | Path, *, part_bytes: int | None = None) -> dict[str, int]:
    """Write `model.safetensors`, or its parts, and `config.json`, for transformers' `from_pretrained(directory)`.

    Every rank must call it. Ranks of the first host write (see `bmburst.checkpoint.sharded_files`). Each file gets its
    name only when it is complete.

    Returns:
        On every rank, the CRC-32 of each file by its name.

    Raises:
        UserError: On all ranks, if a rank cannot write.
    """
    with os_error_as_user_error(Path(directory)):
        return contents(model, part_bytes=part_bytes).write(Path(directory), GatheredTensors())


def _require_weights(
    source: Path, expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]], compared: Sequence[str]
) -> list[str]:
    """Check names and shapes of weights, and return the rotary frequencies, which may be there like those compared."""
    if missing := [name for name in expected if name not in found]:
        raise UserError(f"{source} lacks {_some(missing)}{_instead(missing[0], found)}")
    derived = [name for name in found if name.endswith(FREQUENCIES)]
    if extra := [name for name in found if name not in expected and name not in (*derived, *compared)]:
        raise UserError(
            f"{source} has weights that the model has not: {_some(extra)}\nfix: give a plain model of its family"
        )
    for name, shape in expected.items():
        if not prod(found[name]):
            raise UserError(
                f"{name} in {source} has no numbers, as files of ZeRO-3 or FSDP that were saved without gathering\n"
                "fix: save the model again with gathered weights (stage3_gather_16bit_weights_on_model_save, "
                "FULL_STATE_DICT), or convert its shards: zero_to_fp32.py, accelerate merge-weights"
            )
        if found[name] != shape:
            raise UserError(
                f"{name} in {source} has shape {list(found[name])}, its config.json says {list(shape)}\n"
                "fix: weights and config.json must be of the same model"
            )
    return derived


def _open(directory: Path) -> dict[str, TensorFile]:
    """Open the weight files of a directory, and return a map from tensor name to open file.

    transformers reads model.safetensors where an index lists other files too, other programs read those of the index:
    so both must hold the same.
    """
    for name in _FILES:  # safetensors first: it needs no pickle
        path = directory / name
        if not path.exists():
            continue
        parts = sorted(parts_of(path)) if name.endswith(_INDEX) else [name]
        if (index := directory / f"{name}{_INDEX}").exists():
            parts += sorted(part for part in parts_of(index) - {name} if (directory / part).exists())
        return joined(directory, {part: open_tensors(directory / part) for part in parts})
    if parts := sorted(path.name for path in directory.glob("*-of-*") if path.suffix in (".safetensors", ".bin")):
        raise UserError(
            f"{directory} has {_some(parts)}, and no index that says which file has which tensor\n"
            f"fix: copy {_FILES[1]} or {_FILES[3]} of the same model there too"
        )
    if others := sorted(path.name for path in directory.glob("*.gguf")):
        raise UserError(
            f"{directory} has {_some(others)}, and GGUF is not read\nallowed: {', '.join(_FILES)}\n"
            "fix: give the model from which it was made, in 16 or 32 bits"
        )
    if others := sorted(path.name for path in directory.glob("consolidated.*")):
        raise UserError(
            f"{directory} has {_some(others)}, which is not read\nallowed: {', '.join(_FILES)}\n"
            f"fix: it is {OF_THE_MAKER}"
        )
    raise UserError(
        f"no weights in {directory}\nallowed: {', '.join(_FILES)}\nfix: give the directory that has one of them"
    )


def _instead(name: str, files: Iterable[str]) -> str:
    """Return what a directory has in the place of a weight, and what to do."""
    if adapters := [each for each in files if ".base_layer." in each or ".lora_A" in each]:
        return f", and has {_some(adapters)}: adapters that are not merged\nfix: merge them in PEFT (merge_and_unload)"
    end = name.removeprefix("model.")
    if like := [each for each in files if each == end or each.endswith(f".{end}")]:
        there, here = like[0].removesuffix(end), name.removesuffix(end)
        return (
            f", and has {like[0]} in its place\nfix: save the model without its wrapper, or as a causal LM of text "
            f"alone; or rename its tensors: '{here}' for '{there}' at the beginning"
        )
    return "\nfix: the complete weights of the causal LM"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
