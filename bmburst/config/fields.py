"""Declares one field of a configuration (help, unit, bounds), checks values given for it, and suggests known names.

A field is declared with `field(...)` beside its type. Help texts, the command line, the reader of configuration files
and the check of values from Python all use this declaration. `nearest_name` knows fields by other trainers' names:

nearest_name("learning-rate", fields)    # "optimizer.lr"
nearest_name("training.seq_len", fields) # "sequence_length"
"""

import contextlib
import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bmburst.amounts import GIB_TOO, MOST, TOKENS_TOO, at_home, gibibytes, tokens, why_not_text
from bmburst.errors import UserError, unknown

_SPEC = "bmburst.field"
_MOST_NAME, _MOST_PATH = 255, 4096  # Linux's limits in bytes; longer paths raise OSError in every file operation
_PATH = f"a path of at most {_MOST_PATH} bytes, with names of at most {_MOST_NAME}"
_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """Meaning and allowed values of a field.

    Attributes:
        help: Meaning of the field, in one line.
        unit: Unit of the value, for example "tokens"; empty for none.
        default_text: Text for the default in help, if the value is computed later; empty to show the value.
        minimum: Smallest allowed value.
        above: Exclusive lower bound.
        maximum: Largest allowed value.
        below: Exclusive upper bound.
        none_text: Word for None in messages. "none" is also accepted.
        choices: The allowed texts, from the table that owns them; empty for any.
        pairs: Whether each value is NAME=VALUE, so that a file may also have an object of them.
        several: How to give several values, where users of other trainers repeat the option; empty for others.
    """

    help: str
    unit: str = ""
    default_text: str = ""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    none_text: str = "none"
    choices: tuple[str, ...] = ()
    pairs: bool = False
    several: str = ""

    @property
    def counts_tokens(self) -> bool:
        """Whether the value is a number of tokens, which may be given as 64K."""
        return self.unit == "tokens"

    @property
    def counts_gib(self) -> bool:
        """Whether the value is an amount of memory, which may be given as 128G."""
        return self.unit == "GiB"

    @property
    def suffixes(self) -> str:
        """Description of the suffixes that a value may have; empty for none."""
        return TOKENS_TOO if self.counts_tokens else GIB_TOO if self.counts_gib else ""

    def bounds(self) -> str:
        """Return the bounds in words, for example "at least 1"; empty for none."""
        words = (("at least", self.minimum), ("above", self.above), ("at most", self.maximum), ("below", self.below))
        return " and ".join(f"{word} {number_text(bound)}" for word, bound in words if bound is not None)

    def admits(self, value: float) -> bool:
        """Return whether a number lies within the bounds."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )


def field(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    factory: Callable[[], Any] | None = None,
    choices: Iterable[str] = (),
    **declared: Any,
) -> Any:
    """Declare a field of a configuration dataclass. Without `default` or `factory` a value is required.

    The other arguments are those of `FieldSpec`. Returns the result of `dataclasses.field`.
    """
    spec = FieldSpec(help=help, choices=tuple(choices), **declared)
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={_SPEC: spec})
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def spec_of(declared: "dataclasses.Field[Any]") -> FieldSpec:
    """Return the declaration of a dataclass field; an empty one if the field was not declared with `field`."""
    spec = declared.metadata.get(_SPEC)
    return spec if isinstance(spec, FieldSpec) else FieldSpec(help="")


@cache
def optional_part(annotation: Any) -> tuple[Any, bool]:
    """Return the type without `| None`, and whether None was allowed."""
    if _origin(annotation) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


@cache
def union_parts(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union such as `bool | Literal["auto"]`; of another type, that type alone."""
    is_union = _origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def choices_of(annotation: Any, spec: FieldSpec) -> tuple[Any, ...]:
    """Return the values that a field may have: those of its Literal, or of its declaration; empty for any."""
    return typing.get_args(annotation) if _origin(annotation) is typing.Literal else spec.choices


@cache
def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation)


def type_hints(cls: type) -> Mapping[str, Any]:
    """Return the types of the fields of a configuration by name."""
    return _type_hints(cls)


@cache
def _type_hints(cls: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(cls))


def is_none(value: object) -> bool:
    """Return whether a given value is None or a text for None."""
    return value is None or (isinstance(value, str) and value.lower() in _NONE)


def number_text(value: float) -> str:
    """Return a number as a user would write it: 4294967295, 1e-08, 0.95."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def shown(value: object) -> str:
    """Return a value as text for a message, at most 60 characters."""
    # Not repr(): with aliases, a YAML file of a few lines can hold nested lists that take hours to print.
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother = 2, 60, 60
    try:
        text = brief.repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        text = f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def describe_allowed(annotation: Any, spec: FieldSpec) -> str:
    """Return the allowed values in words, for example "an integer at least 1, or none"."""
    inner, none_allowed = optional_part(annotation)
    bounds = f" {spec.bounds()}" if spec.bounds() else ""
    if len(parts := union_parts(inner)) > 1:
        words = " or ".join(describe_allowed(part, spec) for part in parts)
    elif choices := choices_of(inner, spec):
        words = ", ".join(map(str, choices))
    elif _origin(inner) is tuple:
        words = f"values separated by commas, each {describe_allowed(typing.get_args(inner)[0], spec)}"
    elif dataclasses.is_dataclass(inner):
        words = "an object of fields"
    else:
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: _PATH}
        words = names[inner] + (bounds if inner in (int, float) else "")
        words += f", {spec.suffixes}" if spec.suffixes else ""
    return f"{words}, or {spec.none_text}" if none_allowed else words


def misfit(name: str, value: object, allowed: str) -> UserError:
    """Return the error for a value that a field cannot hold.

    Args:
        name: Dotted name of the field.
        value: The given value.
        allowed: The allowed values in words.
    """
    return UserError(f"{name}: {shown(value)} does not fit\nallowed: {allowed}\nfix: correct the value")


def convert_value(name: str, value: Any, annotation: Any, spec: FieldSpec) -> Any:
    """Convert a value from a file, the command line or Python to the type of its field.

    Text is parsed as the type of the field ("1e-3" as a number, "64K" as a number of tokens, "none" as None, "0.9,0.95"
    as a tuple), because the command line has only text and YAML reads 1e-3 as text.

    Args:
        name: Dotted name, for messages.
        value: The given value.
        annotation: Type of the field: bool, int, float, str, Path, Literal of strings or integers, a tuple or union
            of these, or one of these or None.
        spec: Declaration of the field.

    Raises:
        UserError: The value has another type, is not one of the choices, or is out of bounds.
    """
    inner, none_allowed = optional_part(annotation)
    if none_allowed and (is_none(value) or (isinstance(value, str) and value.lower() == spec.none_text)):
        return None
    parts = union_parts(inner)
    for part in parts if len(parts) > 1 else ():
        with contextlib.suppress(UserError):
            return convert_value(name, value, part, spec)
    if len(parts) > 1 or (isinstance(value, int) and abs(value) > MOST):
        raise misfit(name, value, describe_allowed(annotation, _to_most(value, spec)))
    if _origin(inner) is tuple:
        return _convert_tuple(name, value, inner, spec)
    if choices := choices_of(inner, spec):
        return _convert_choice(name, value, choices)
    converted = _converted(value, inner, spec)
    if converted is None or (isinstance(converted, int | float) and not spec.admits(converted)):
        raise misfit(name, value, describe_allowed(annotation, _to_most(value, spec)))
    return converted


def _to_most(value: Any, spec: FieldSpec) -> FieldSpec:
    """Return the declaration with `MOST` as its bound where a value has so many digits that this is what it misses."""
    is_bounded = spec.maximum is not None or spec.below is not None
    text = value.strip() if isinstance(value, str) else ""
    is_long = (text.isdecimal() and len(text) >= len(str(MOST))) or (isinstance(value, int) and abs(value) > MOST)
    return dataclasses.replace(spec, maximum=MOST) if is_long and not is_bounded else spec


def _converted(value: Any, inner: Any, spec: FieldSpec) -> Any:
    if spec.counts_tokens:
        return _to_int(value, tokens)
    if spec.counts_gib and isinstance(value, str):
        try:
            value = gibibytes(value)
        except ValueError:
            return None
    return _CONVERTERS[inner](value)


def check_fields(config: Any) -> None:
    """Check and convert every field of a configuration; its `__post_init__` calls this.

    Raises:
        UserError: A value has another type, is not one of the choices, or is out of bounds.
    """
    hints = type_hints(type(config))
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        if value is None and declared.default is None:  # __post_init__ fills it in later
            continue
        inner, none_allowed = optional_part(hints[declared.name])
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            if not isinstance(value, inner) and not (value is None and none_allowed):
                raise misfit(declared.name, value, inner.__name__)
            continue
        object.__setattr__(
            config, declared.name, convert_value(declared.name, value, hints[declared.name], spec_of(declared))
        )


def _convert_tuple(name: str, value: Any, annotation: Any, spec: FieldSpec) -> tuple[Any, ...]:
    arguments = typing.get_args(annotation)
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping) and spec.pairs:  # as YAML and PEFT write patterns
        value = [f"{key}={part}" for key, part in value.items()]
    open_ended = len(arguments) == 2 and arguments[1] is Ellipsis
    if not isinstance(value, list | tuple) or not (open_ended or len(value) == len(arguments)):
        raise misfit(name, value, describe_allowed(annotation, spec))
    kinds = [arguments[0]] * len(value) if open_ended else list(arguments)
    return tuple(convert_value(name, part, kind, spec) for part, kind in zip(value, kinds, strict=True))


def _convert_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    by_text = {str(choice): choice for choice in choices}
    if isinstance(value, str | int) and str(value) in by_text:
        return by_text[str(value)]
    raise unknown(name, value if isinstance(value, str) else shown(value), by_text)


def _to_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    return None


def _to_int(value: Any, read: Callable[[str], int] = int) -> int | None:
    if isinstance(value, str):
        try:
            value = read(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_one = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
    return value if is_one else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _to_text(value: Any) -> str | None:
    return at_home(value) if isinstance(value, str) and value and why_not_text(value) is None else None


def _to_path(value: Any) -> Path | None:
    if not isinstance(value, Path | str) or not str(value) or why_not_text(str(value)) is not None:
        return None
    whole = at_home(str(value))
    sizes = [len(part.encode()) for part in whole.split("/")]
    return Path(whole) if max(sizes) <= _MOST_NAME and sum(sizes) + len(sizes) <= _MOST_PATH else None


_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = types.MappingProxyType(
    {bool: _to_bool, int: _to_int, float: _to_float, str: _to_text, Path: _to_path}
)


# Maps our name to the names in transformers, TRL, torchtitan, Megatron-LM, DeepSpeed, axolotl, LLaMA-Factory, ms-swift,
# verl, OpenRLHF and vLLM.
# A key has several names where commands differ; a command has one of them.
_NAMES_ELSEWHERE: Mapping[tuple[str, ...], str] = types.MappingProxyType(
    {
        ("optimizer.lr",): "learning_rate peak_lr max_lr",
        ("optimizer.beta1",): "adam_beta1 beta_1",
        ("optimizer.beta2",): "adam_beta2 beta_2",
        ("optimizer.eps",): "adam_epsilon adam_eps epsilon",
        ("optimizer.weight_decay",): "wd decay",
        ("optimizer.weight_decay_on",): "weight_decay_groups decay_parameters no_decay",
        ("optimizer.clip_norm",): "max_grad_norm max_norm clip_grad clip_grad_norm grad_clip gradient_clipping",
        ("optimizer.state",): "adam_8bit optim_bits exp_avg_dtype exp_avg_sq_dtype optimizer_state_dtype",
        ("optimizer.offload",): "cpu_offload offload offload_optimizer optimizer_cpu_offload",
        ("optimizer.offload_weights",): "offload_param offload_params param_offload",
        ("schedule.kind",): "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
        ("schedule.warmup_steps",): "warmup num_warmup_steps lr_warmup_iters lr_warmup_steps",
        ("schedule.warmup_fraction",): "warmup_ratio lr_warmup_fraction lr_warmup_ratio lr_warmup_steps_ratio",
        ("schedule.decay",): "decay_type lr_decay_type lr_wsd_decay_style",
        ("schedule.decay_fraction",): "decay_ratio lr_decay_ratio",
        ("schedule.final_lr_fraction",): "min_lr min_lr_rate min_lr_ratio min_lr_factor lr_min",
        ("sequence_length", "tokens"): "seq seq_len seq_length seqlen max_length max_seq_length max_seq_len "
        "block_size cutoff_len context_length model_max_length max_model_len ctx context sequence_length sequence_len",
        ("epochs",): "num_epochs num_train_epochs total_epochs max_epochs",
        ("steps",): "max_steps max_iters train_iters train_steps total_steps total_training_steps max_train_steps",
        ("batch_size", "batch"): "global_batch_size train_batch_size gradient_accumulation_steps gradient_accumulation "
        "grad_accum",
        ("micro_batch_size",): "per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu "
        "micro_batch_size_per_gpu micro_train_batch_size",
        ("dtype",): "bf16 fp16 precision mixed_precision torch_dtype compute_dtype half",
        ("recompute",): "gradient_checkpointing enable_gradient_checkpointing activation_checkpoint "
        "activation_checkpointing recompute_granularity",
        ("init_from", "checkpoint"): "model_name model_name_or_path model_path base_model pretrained checkpoint model "
        "load initial_load_path partial_pretrain",
        ("preset",): "model_name model_type arch flavor preset model_name_or_path model_path base_model",
        ("output",): "output_dir output_path save save_dir save_path dump_folder default_local_dir",
        ("checkpoint_every",): "save_steps save_interval save_every save_freq save_strategy checkpoint_interval "
        "checkpoint_steps",
        ("keep_checkpoints",): "save_total_limit keep_latest_k",
        ("eval_every",): "eval_steps eval_interval eval_freq eval_strategy evaluation_strategy test_freq",
        ("eval_sequences",): "eval_iters max_eval_samples",
        ("resume",): "resume_from_checkpoint resume_from auto_resume resume_mode continue",
        ("data", "data.source", "input"): "dataset datasets dataset_name dataset_path data_path train_file train_data "
        "train_files training_data train_path",
        ("data.validation",): "eval_dataset test_datasets eval_file validation_file val_data val_file val_files "
        "val_dataset valid_data",
        ("data.held_out_fraction",): "val_set_size val_size validation_split",
        ("data.columns", "columns"): "field_mapping message_property_mappings column_mapping prompt_key response_key",
        ("data.messages_field", "messages_field"): "field_messages messages_key",
        ("data.learned_roles", "learned_roles"): "roles_to_train train_roles",
        ("data.tokenizer", "tokenizer"): "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model",
        ("data.chat_template", "chat_template"): "template chat_template_path",
        ("pack",): "packing sample_packing pack_sequences",
        ("lora.rank", "lora"): "lora_r lora_rank r rank peft adapter",
        ("lora.base",): "load_in_4bit qlora quantization_bit quantization bnb_4bit_quant_type",
        ("lora.alpha",): "lora_alpha alpha",
        ("lora.targets",): "lora_target lora_target_modules target_modules lora_target_linear",
        ("lora.dropout",): "lora_dropout",
        ("lora.rslora",): "use_rslora peft_use_rslora",
        ("lora.modules_to_save",): "lora_modules_to_save additional_target",
        ("lora.loraplus_lr_ratio",): "lora_plus_lr_ratio",
        ("lora.init_from",): "lora_model_dir adapter_name_or_path lora_path",
        ("nproc", "gpus"): "num_gpus n_gpus n_gpus_per_node gpus ngpu nproc_per_node num_processes world_size "
        "devices ranks",
        ("data_parallel", "parallel.data_parallel"): "dp data_parallel_size data_parallel_degree dp_size",
        ("sequence_parallel", "parallel.sequence_parallel"): "cp sp context_parallel context_parallel_size cp_size "
        "context_parallel_degree sequence_parallel_size sequence_parallel_degree sp_size ring_degree ring_attn_size",
        (
            "tensor_parallel",
            "parallel.tensor_parallel",
        ): "tp tensor tensor_parallel_size tensor_parallel_degree tp_size tensor_model_parallel_size",
        (
            "pipeline_parallel",
            "parallel.pipeline_parallel",
        ): "pp pipe pipe_size pipeline_parallel_size pipeline_parallel_degree pp_size pipeline_model_parallel_size",
        (
            "head_parallel",
            "parallel.head_parallel",
        ): "ulysses ulysses_degree ulysses_size ulysses_sequence_parallel_size",
        ("kernel", "parallel.kernel"): "attn_implementation attention_backend flash_attn attn attn_type",
        ("parallel.zero_level",): "zero zero_stage deepspeed",
        ("parallel.zero_group",): "hybrid_shard sharding_strategy zero_hpz_partition_size mics_shard_size "
        "dp_replicate dp_replicate_size data_parallel_replicate_degree",
        ("max_new_tokens", "sample_tokens"): "max_tokens n_predict num_tokens new_tokens",
        ("num_samples",): "n num_return_sequences num_generations",
        ("wandb",): "report_to wandb_project project_name",
        ("wandb_name",): "run_name experiment_name",
    }
)


_ALIKE = 0.75  # of a misspelled name; below, words meet that only share letters, such as deepspeed and seed


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that the user most likely meant, or None.

    Args:
        name: The given name, with dots, hyphens or underscores.
        known: Dotted names with underscores.
    """
    known = list(known)
    name = name.replace("-", "_").lower()
    leaf = name.rpartition(".")[2]
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    if same_leaf:
        return difflib.get_close_matches(name, same_leaf, n=1, cutoff=0.0)[0]
    for ours, theirs in _NAMES_ELSEWHERE.items():
        if leaf in theirs.split() and (found := next((each for each in ours if each in known), None)):
            return found
    if begun := next((other for other in known if other.startswith((f"{name.rstrip('.')}.", f"{name}_"))), None):
        return begun
    words = {other.rpartition(".")[2]: other for other in known}
    if "." not in name:  # two names of a section are alike by it alone: optimizer.name and optimizer.state
        words |= {other.replace(".", "_"): other for other in known}
    near = difflib.get_close_matches(leaf, words, n=1, cutoff=_ALIKE)
    return words[near[0]] if near else next((other for other in known if name.startswith(f"{other}.")), None)
