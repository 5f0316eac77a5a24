"""Reads and writes LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from bmburst.blocks.dtypes import dtype_of
from bmburst.blocks.lora import ALL, SAVABLE, TARGETS, LoRAConfig, in_words
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint.base_model import Base
from bmburst.checkpoint.files import newest_complete
from bmburst.checkpoint.four_bit import Dequantized
from bmburst.checkpoint.model_center import ATTENTION_PLACES
from bmburst.checkpoint.sharded_files import Contents, ShardedTensor, TensorGroup, require_same
from bmburst.checkpoint.tensor_files import TensorFile, json_bytes, open_tensors
from bmburst.config import read_json
from bmburst.config.fields import shown
from bmburst.config.foreign import Key, keys, require_keys
from bmburst.errors import UserError
from bmburst_ops.dtypes import name_of

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig
    from bmburst.blocks.model import Llama

CONFIG_FILE, STEM = "adapter_config.json", "adapter_model"
WEIGHTS_FILE = f"{STEM}.safetensors"
_OLD_FILE = f"{STEM}.bin"  # read where there is no other: of PEFT before 0.6, and safe_serialization=False
_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A", ".lora_B")
_ONE_FILE = 1 << 62  # bytes per part, so that there is one file: PEFT does not read an index
_TRAINING = "no effect on a trained adapter"
_NONE: tuple[Any, ...] = (None, False, {}, [])
KEYS: Mapping[str, Key] = {
    "peft_type": Key("read", ("LORA",)),
    "task_type": Key("read", (None, "CAUSAL_LM")),
    "r": Key("read: lora.rank"),
    "lora_alpha": Key("read: lora.alpha"),
    "target_modules": Key("read: names of modules, their ends, or a regular expression; adapters are on all layers"),
    "base_model_name_or_path": Key("read: the directory of the model, unless another is given"),
    "init_lora_weights": Key(
        "read: the other values change the weights of the model too",
        (None, True, False, "gaussian", "orthogonal", "eva"),
    ),
    "eva_config": Key(f"{_TRAINING}: how eva finds the first numbers"),
    "bias": Key("read", (None, "none")),
    "use_rslora": Key("read: lora.rslora", (None, False, True)),
    "lora_dropout": Key("read: lora.dropout, for training that starts from the adapter"),
    "rank_pattern": Key("read: lora.rank_pattern; a pattern that fits no adapter has no effect"),
    "alpha_pattern": Key("read: lora.alpha_pattern, in the same way"),
    "modules_to_save": Key(f"read: lora.modules_to_save; of {', '.join(SAVABLE)}"),
    **keys(("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"), "read", *_NONE),
    **keys(("trainable_token_indices", "target_parameters", "exclude_modules"), "read", *_NONE),
    **keys(("layers_to_transform", "layers_pattern"), "read", *_NONE),
    **keys(("layer_replication", "loftq_config", "corda_config", "lora_ga_config"), "read", *_NONE),
    **keys(("velora_config", "monteclora_config", "arrow_config", "kasa_config"), "read", *_NONE),
    **keys(("alora_invocation_tokens", "ensure_weight_tying", "enable_lora", "megatron_config"), "read", *_NONE),
    **keys(("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"), _TRAINING),
    "qalora_group_size": Key("no effect without use_qalora"),
    "megatron_core": Key("no effect without megatron_config"),
    "merge_weights": Key("no effect: how old versions of PEFT run the model"),
    "runtime_config": Key("no effect: how PEFT runs the model"),
    **keys(("inference_mode", "auto_mapping", "peft_version", "revision"), "no effect: a note about the adapter"),
}
"""Keys of adapter_config.json that are understood (PEFT's `LoraConfig`)."""
_PARTS = tuple(f"{'self_attn' if name in ATTENTION_PLACES else 'mlp'}.{name}" for name in TARGETS)
_INSTEAD = "merge the adapter in PEFT (merge_and_unload), and give the merged model"
_RENAME = "save it again with PEFT's save_pretrained, of the model without its wrapper, or rename its tensors"
_MATRIX = re.compile(re.escape(_PREFIX) + r"(?P<module>(?:.+\.)?(?P<name>\w+))\.lora_[AB]\.weight")
_SAMPLE = "base_sample"  # key in the metadata of our files; PEFT ignores it
_FOUR_BIT = "base_4bit"  # as _SAMPLE: the dtype of a base that was in 4 bits
_ROUNDING = 0.01  # limit: the same weights in another dtype differ by less, those of another model by more


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(_SUFFIXES)


def _is_trained(name: str, lora: LoRAConfig | None) -> bool:
    """Return whether a parameter of a model with adapters is trained, so that the adapter's file holds it."""
    return is_adapter(name) or (lora is not None and lora.is_saved(name))


def is_adapter_directory(directory: Path) -> bool:
    """Return whether a directory holds an adapter."""
    return (directory / CONFIG_FILE).is_file()


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An opened adapter.

    Attributes:
        directory: Directory of the adapter.
        lora: Its settings.
        base: Directory or name of its base model; None if the adapter does not name one.
        file: Tensors of the adapter, by PEFT's names.
        sample: `Base.sample` of the model that it was trained on; None in files of PEFT.
        four_bit: dtype of the base that was quantized to 4 bits in training; None: it was not, or PEFT's file does not
            say so.
    """

    directory: Path
    lora: LoRAConfig
    base: str | None
    file: TensorFile = field(repr=False)
    sample: tuple[float, ...] | None = None
    four_bit: torch.dtype | None = None

    def find_base(self, given: Path | None, option: str) -> Path:
        """Return the directory of the base model.

        Args:
            given: Directory that the user gives; None: the one that the adapter names.
            option: Option that gives the directory, for the message.

        Raises:
            UserError: The adapter names no model or a missing one, or another one than lies in its own directory, which
                transformers takes. Or `given` is an adapter too.
        """
        if given is not None and is_adapter_directory(given):
            raise UserError(f"{given} is a LoRA adapter, not a model\nfix: {option}, the model it was trained on")
        if given is None and (self.base is None or not Path(self.base).is_dir()):
            named = "names no model" if self.base is None else f"names the model {self.base}, which is not here"
            raise UserError(f"{self.directory} {named}\nfix: {option}, the model it was trained on")
        base = given or Path(self.base or "")
        if given is None and hugging_face.has_weights(self.directory):
            here, there = (hugging_face.open_weights(each).sample() for each in (self.directory, base))
            if here != there:
                raise UserError(
                    f"{self.directory} has the weights of a model, and its adapter names another one, {base}\n"
                    f"fix: {option} for the one that it names; of the weights, move the adapter's files elsewhere"
                )
        return base

    def require_model(self, model: "LlamaConfig") -> None:
        """Check that the settings apply to a model: `LoRAConfig.require_model`, with what to do about an adapter.

        Raises:
            UserError: They do not.
        """
        try:
            self.lora.require_model(model)
        except UserError as error:
            found = str(error).rpartition("\nfix: ")[0]
            fix = f"give the model that it was trained on, or {_INSTEAD}"
            raise UserError(f"{self.directory / CONFIG_FILE}: {found}\nfix: {fix}") from None

    def require_base(self, base: Base) -> None:
        """Raise UserError unless the adapter was trained on a model, by the sample of weights; PEFT's have none."""
        if self.sample is None:
            return
        size = sqrt(sum(number**2 for number in self.sample) / max(len(self.sample), 1))
        pairs = zip(self.sample, base.sample, strict=False)
        near = all(abs(a - b) <= _ROUNDING * max(abs(a), abs(b), _ROUNDING * size) for a, b in pairs)
        if len(self.sample) != len(base.sample) or not near:
            named = "" if self.base is None else f", {self.base}"
            raise UserError(
                f"{self.directory} is an adapter of another model than {base.directory}: their weights differ\n"
                f"fix: the model that the adapter was trained on{named}"
            )

    def require_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the adapter fits a model.

        Args:
            shapes: Shapes of the parameters of the model's adapters, by our names.

        Raises:
            UserError: A tensor is missing, extra or has a wrong shape.
        """
        wanted = {peft_name(name): shape for name, shape in shapes.items()}
        found = self.file.shapes
        different = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        if missing := [name for name in different if name not in found and len(different) < len(wanted)]:
            raise UserError(
                f"{self.directory} has no {missing[0].removeprefix(_PREFIX)}: it is an adapter of another model, or of "
                "some layers\nallowed: adapters on the same matrices of all layers\n"
                f"fix: the model that the adapter was trained on; or {_INSTEAD}"
            )
        if different:
            name = different[0]
            layers = name[name.find("layers.") :]
            if name not in wanted and (same := [each for each in wanted if each.endswith(f".{layers}")]):
                raise UserError(
                    f"{self.directory} holds {name}, for this model {same[0]}: it was saved from a wrapped model, or "
                    f"from one with other modalities\nfix: {_RENAME}"
                )
            said = [list(shape) if (shape := each.get(name)) else "not there" for each in (found, wanted)]
            raise UserError(
                f"{self.directory} is an adapter of another model: {name} is {said[0]}, for this model {said[1]}\n"
                "fix: the model that the adapter was trained on, with the same lora.rank and lora.targets"
            )

    def require_like(self, lora: LoRAConfig, model: "LlamaConfig") -> None:
        """Raise UserError unless settings on which the meaning of the weights depends are those of a model's adapters.

        Other patterns are the same settings if each module has the same number by them. Files of PEFT do not say
        whether the base was in 4 bits, so for them both are accepted.
        """
        names = ("rank", "alpha", "matrices", "rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
        for name in (*names, *(() if self.sample is None else ("base",))):
            here, there = (getattr(each, name) for each in (lora, self.lora))
            if here == there or (name == "modules_to_save" and set(here) == set(there)):
                continue
            if name.endswith("_pattern") and lora.of_modules(name, model) == self.lora.of_modules(name, model):
                continue
            here, there, option = in_words(here), in_words(there), "targets" if name == "matrices" else name
            fix = f"--lora.{option} {there}, as it was" if there else f"leave lora.{option} out, as it was"
            raise UserError(
                f"lora.{option} is {here or 'empty'}, but {there or 'empty'} in {self.directory}\nfix: {fix}"
            )

    def changes(self, name: str) -> bool:
        """Return whether the adapter has matrices for a weight, or replaces it, given by Hugging Face's name."""
        names = f"{name.removesuffix('.weight')}.lora_A", name
        return any(peft_name(each) in self.file.shapes for each in names)

    def merged(self, name: str, numbers: Tensor, begin: int, end: int, width: int) -> Tensor:
        """Return elements of W + scale * B A, in fp32 or wider; or of the trained W of a module that is saved whole.

        Args:
            name: The weight W, by Hugging Face's name.
            numbers: Its elements [begin, end), flattened.
            begin: First element.
            end: End of the elements.
            width: Columns of W.
        """
        wide = torch.promote_types(numbers.dtype, torch.float32)
        if peft_name(name) in self.file.shapes:
            return self.file.read(peft_name(name), begin, end).to(wide)
        stem = name.removesuffix(".weight")
        rank = self.lora.rank_of(stem)
        names = [peft_name(f"{stem}.lora_{letter}") for letter in "AB"]
        first, last = begin // width, -(-end // width)
        a = self.file.read(names[0], 0, rank * width).view(rank, width)
        b = self.file.read(names[1], first * rank, last * rank).view(-1, rank)
        term = (b.to(wide) @ a.to(wide)).view(-1)[begin - first * width :][: end - begin]
        return numbers.to(wide) + self.lora.scale_of(stem) * term


def open_adapter(directory: Path) -> Adapter:
    """Open an adapter of PEFT or of a LoRA run.

    Raises:
        UserError: There is no adapter, a file is damaged, or the adapter uses features that are not supported.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"no adapter in {directory}: it has no {CONFIG_FILE}\nfix: give the directory that has one")
    values = read_json(path)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"{path} is no LoRA adapter: peft_type is {shown(kind)}\nallowed: LORA\nfix: an adapter of LoRA"
        )
    rank: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    if rank == 0:
        raise UserError(f"{path} is no LoRA adapter: its rank r is 0\nfix: an adapter of PEFT's LoraConfig")
    try:
        require_keys(values, KEYS, "an adapter", _INSTEAD)
        old = (directory / _OLD_FILE).is_file() and not (directory / WEIGHTS_FILE).is_file()
        file = open_tensors(directory / (_OLD_FILE if old else WEIGHTS_FILE))
        sample, four_bit = (None, None) if old else _notes_in(directory / WEIGHTS_FILE)
        saved = tuple(values.get("modules_to_save") or ())
        lora = LoRAConfig(
            rank=rank,
            base="dtype" if four_bit is None else "4bit",
            alpha=alpha,
            targets=_targets(values.get("target_modules"), file, saved),
            dropout=values.get("lora_dropout") or 0.0,
            rslora=bool(values.get("use_rslora")),
            rank_pattern=values.get("rank_pattern") or (),
            alpha_pattern=values.get("alpha_pattern") or (),
            modules_to_save=saved,
        )
        lora = lora.having_effect([found["module"] for stored in file.shapes if (found := _MATRIX.fullmatch(stored))])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise UserError(f"{path}: base_model_name_or_path {base} is no text\nfix: the directory of the model, or null")
    return Adapter(directory=directory, lora=lora, base=base, file=file, sample=sample, four_bit=four_bit)


def _targets(given: object, file: TensorFile, saved: tuple[str, ...]) -> tuple[str, ...]:
    """Return the matrices that have an adapter, as the file has them.

    Args:
        given: target_modules, as PEFT reads it: a list of modules or of the ends of their names, or one regular
            expression that the whole name of a module matches.
        file: Tensors of the adapter.
        saved: modules_to_save.

    Raises:
        UserError: target_modules is neither, or selects other modules than those of the file or another kind of module;
            or the file has no numbers, or other tensors than adapters.
    """
    is_list = isinstance(given, list) and given and all(isinstance(each, str) for each in given)
    if not is_list and not isinstance(given, str):
        raise UserError(f"target_modules {shown(given)} does not fit\nallowed: names of modules\nfix: {_INSTEAD}")
    if not file.shapes or not all(prod(shape) for shape in file.shapes.values()):
        raise UserError(
            f"{WEIGHTS_FILE} is empty, or has tensors without numbers, as adapters of DeepSpeed ZeRO-3 may be saved\n"
            "fix: save the adapter again from gathered weights (stage3_gather_16bit_weights_on_model_save)"
        )
    modules: dict[str, str] = {}
    for stored in file.shapes:
        if (found := _MATRIX.fullmatch(stored)) is None:
            if any(stored.removesuffix(".weight").endswith(each) for each in saved):
                continue
            if ".lora_A." in stored or ".lora_B." in stored:
                raise UserError(
                    f"the adapter holds {stored}, which PEFT does not save under this name\n"
                    f"allowed: {_PREFIX}MODULE.lora_A.weight, and so for lora_B\nfix: {_RENAME}"
                )
            raise UserError(
                f"the adapter holds {stored.removeprefix(_PREFIX)}, which is no matrix of LoRA: embeddings, heads and "
                "biases beside the adapters are not supported unless modules_to_save names them\n"
                f"allowed: lora_A, lora_B, modules_to_save\nfix: {_INSTEAD}"
            )
        modules[found["module"]] = found["name"]
    if given in (ALL, [ALL]):
        return (ALL,)
    for module, name in modules.items():
        if name not in TARGETS:
            raise UserError(f"adapters on {module} are not supported\nallowed: {', '.join(TARGETS)}\nfix: {_INSTEAD}")
    layers = {module.rpartition(".")[0].rpartition(".")[0] for module in modules}
    possible = (f"{layer}.{part}" for layer in sorted(layers) for part in _PARTS)
    for module in (*modules, *possible):
        if (is_there := module in modules) != _selects(given, module):
            said = "does not select" if is_there else "selects"
            raise UserError(
                f"target_modules {shown(given)} {said} {module}, which has {'an' if is_there else 'no'} adapter\n"
                "fix: adapter_config.json and adapter_model.safetensors must be of the same adapter"
            )
    return tuple(sorted(set(modules.values())))


def _selects(given: Any, module: str) -> bool:
    """Return whether target_modules selects a module (PEFT, `check_target_module_exists`)."""
    if isinstance(given, str):
        try:
            return re.fullmatch(given, module) is not None
        except re.error as error:
            raise UserError(
                f"target_modules {shown(given)} is no regular expression: {error}\nfix: the one that PEFT was given"
            ) from None
    return any(module == each or module.endswith(f".{each}") for each in given)


def open_merged(adapter: Path, base: Path | None, option: str = "--base DIR") -> hugging_face.Weights:
    """Open a model's weights with an adapter merged into them.

    Args:
        adapter: Directory of the adapter.
        base: Directory of the base model; None: the one that the adapter names.
        option: Option that gives the base model, for messages.

    Raises:
        UserError: As in `open_weights` and `open_adapter`; or no base model is named, or it is the wrong one.
    """
    found = open_adapter(adapter)
    weights = hugging_face.open_weights(found.find_base(base, option))
    shapes = {name: file.shapes[inside] for name, (file, inside) in weights.places.items()}
    found.require_model(weights.config)
    found.require_shapes(adapter_shapes(found.lora, shapes))
    found.require_base(Base.of(weights.directory, shapes, weights.read))
    return replace(weights, adapter=found, base=None if found.four_bit is None else Dequantized(found.four_bit))


def _notes_in(path: Path) -> tuple[tuple[float, ...] | None, torch.dtype | None]:
    """Return the sample of the base in a file of ours, and its dtype if it was in 4 bits; None for other files."""
    file: Any = safe_open(str(path), framework="pt", device="cpu")  # Any: the type stub lacks most methods
    notes = file.metadata() or {}
    sample, four_bit = notes.get(_SAMPLE), notes.get(_FOUR_BIT)
    try:
        numbers = None if sample is None else tuple(float(word) for word in sample.split())
        return numbers, None if four_bit is None else dtype_of(four_bit)
    except (ValueError, KeyError):
        raise UserError(f"{path}: its metadata is damaged\nfix: copy the file again") from None


def check_resumed(folder: Path, base: Base) -> None:
    """Raise UserError, before ranks start, if the newest checkpoint of a run is of another base model."""
    newest = newest_complete(folder)
    if newest is not None and is_adapter_directory(newest):
        open_adapter(newest).require_base(base)


def contents(model: "Llama", base: Base | None) -> Contents:
    """Return what a checkpoint holds of a model's adapter.

    Args:
        model: Model with adapters.
        base: Base model that the adapter names; None if its weights are random.
    """
    from bmburst.zero import named_shards

    assert model.lora is not None
    shards = [each for each in named_shards(model) if _is_trained(each.name, model.lora)]
    metadata = {"format": "pt"}
    if base is not None:
        metadata[_SAMPLE] = " ".join(f"{number:.6g}" for number in base.sample)
    if model.lora.is_4bit:
        metadata[_FOUR_BIT] = name_of(shards[0].dtype)
    tensors = tuple(ShardedTensor.of_weights(peft_name(shard.name), shard) for shard in shards)
    group = TensorGroup(STEM, tensors, metadata, _ONE_FILE)
    return Contents((group,), {CONFIG_FILE: json_bytes(_config(model.lora, base))})


def load(model: "Llama", directory: Path, base: Base | None = None) -> None:
    """Load a model's adapters and the modules that are trained whole. Every rank must call it, and reads its shards.

    Args:
        model: Model with adapters.
        directory: Directory of the adapter.
        base: Base model of the weights, to be compared with the base model of the adapter.

    Raises:
        UserError: On all ranks, if the adapter is of another model or has other settings.
    """
    from bmburst.zero import named_shards, scatter_piece

    shards = [each for each in named_shards(model) if _is_trained(each.name, model.lora)]
    adapter: Adapter | None = None

    def check() -> str:
        nonlocal adapter
        adapter = open_adapter(directory)
        assert model.lora is not None
        adapter.require_like(model.lora, model.config)
        adapter.require_shapes({each.name: each.shape for each in shards})
        if base is not None:
            adapter.require_base(base)
        return repr(Base.of(directory, adapter.file.shapes, adapter.file.read).sample)  # NaN is not equal to itself

    require_same(f"adapter {directory}", check)
    assert adapter is not None
    for shard in shards:
        if shard.count:
            scatter_piece(shard, shard.read(partial(adapter.file.read, peft_name(shard.name))))


def peft_name(name: str) -> str:
    """Return PEFT's name of a trained parameter, such as "model.layers.0.self_attn.q_proj.lora_A" or a whole weight."""
    return f"{_PREFIX}{name.removesuffix('.weight')}.weight"


def _config(lora: LoRAConfig, base: Base | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base.directory.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "rank_pattern": {name: int(number) for name, number in _numbers(lora.rank_pattern)},
        "alpha_pattern": dict(_numbers(lora.alpha_pattern)),
        "modules_to_save": list(lora.modules_to_save) or None,
        "target_modules": list(lora.matrices),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _numbers(patterns: tuple[str, ...]) -> list[tuple[str, float]]:
    return [(name, float(number)) for name, _, number in (each.rpartition("=") for each in patterns)]


def adapter_shapes(lora: LoRAConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's adapters and of the modules that are trained whole, by our names.

    Args:
        lora: Settings of the adapters.
        shapes: Shapes of the model's weights, by Hugging Face's names.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        if name != stem and stem.rpartition(".")[2] in lora.matrices:
            rank = lora.rank_of(stem)
            found[f"{stem}.lora_A"], found[f"{stem}.lora_B"] = (rank, shape[1]), (shape[0], rank)
        elif lora.is_saved(name):
            found[name] = shape
    return found
