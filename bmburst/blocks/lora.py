"""Configuration of low-rank adapters (LoRA), with the names and the meaning that PEFT gives them. Imports no torch."""

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bmburst.blocks.kinds import kind_of
from bmburst.config import check_fields, field
from bmburst.errors import UserError

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a block, which can have an adapter."""
ALL = "all-linear"
SAVABLE = ("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
"""Modules that can be trained whole beside adapters. As in PEFT, one selects all modules whose name ends with it."""
_SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""The matrices that have the input of another."""
_TABLES = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
_MODULES = {name: f"{'mlp' if name in TARGETS[4:] else 'self_attn'}.{name}" for name in TARGETS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters on frozen weights (arXiv:2106.09685), as in PEFT."""

    rank: int = field("Rank of the adapters; 0: none, all weights are trained.", default=0, minimum=0, maximum=65536)
    base: Literal["dtype", "4bit"] = field(
        "Frozen matrices of blocks: in the run's dtype, or in 4 bits (QLoRA: NF4 with double quantization).",
        default="dtype",
    )
    alpha: float = field("Adapters are multiplied by alpha / rank.", default=16.0, above=0)
    targets: tuple[str, ...] = field(
        f"Matrices with adapters: {', '.join(TARGETS)}; or {ALL}.", default=("q_proj", "v_proj")
    )
    dropout: float = field(
        "Probability that training drops an element of an adapter's input.", default=0.0, minimum=0, below=1
    )
    rslora: bool = field("Multiply adapters by alpha / sqrt(rank) instead (rsLoRA).", default=False)
    rank_pattern: tuple[str, ...] = field(
        "Ranks of some adapters, as NAME=RANK: NAME is a regular expression for the end of a module's name, from a dot "
        "on; the first that fits counts. Example: layers.0.self_attn.q_proj=32,v_proj=4.",
        default=(),
        pairs=True,
    )
    alpha_pattern: tuple[str, ...] = field("Alphas of some adapters, as lora.rank_pattern.", default=(), pairs=True)
    modules_to_save: tuple[str, ...] = field(
        f"Modules that are trained whole beside the adapters: {', '.join(SAVABLE)}; all modules whose name ends so.",
        default=(),
        choices=SAVABLE,
    )
    loraplus_lr_ratio: float = field(
        "Learning rate of the second matrices of adapters (B), and of vectors, divided by optimizer.lr (LoRA+).",
        default=1.0,
        above=0,
    )
    init_from: Path | None = field(  # noqa: RUF009
        "Adapter that training starts from, of PEFT or of a run; it gives the settings above that are not given.",
        default=None,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.targets:
            raise UserError(f"lora.targets is empty\nallowed: {', '.join(TARGETS)}, {ALL}\nfix: q_proj,v_proj")
        for name in self.targets:
            if name not in (*TARGETS, ALL):
                near = difflib.get_close_matches(name, (*TARGETS, ALL), 1)
                raise UserError(
                    f"lora.targets: no layer has a matrix '{name}'\nallowed: {', '.join(TARGETS)}, {ALL}\n"
                    f"fix: {near[0] if near else 'q_proj,v_proj'}"
                )
        for option in ("rank_pattern", "alpha_pattern"):
            read = [_pattern(f"lora.{option}", each, whole=option == "rank_pattern") for each in getattr(self, option)]
            object.__setattr__(self, option, tuple(read))
        if not self.rank:
            self._require_nothing_else()

    def _require_nothing_else(self) -> None:
        if self.init_from is not None:
            raise UserError(
                f"lora.init_from {self.init_from} without the settings of its adapter\n"
                "fix: lora.rank and the others as in adapter_config.json, or bmburst.train.resolve.resolve"
            )
        for leaf in dataclasses.fields(self):
            if (value := getattr(self, leaf.name)) != leaf.default:
                raise UserError(
                    f"lora.{leaf.name} {in_words(value)} has no effect: lora.rank is 0, which trains all weights\n"
                    f"fix: --lora.rank 16, or leave lora.{leaf.name} out"
                )

    def require_model(self, model: "LlamaConfig") -> None:
        """Check that all settings apply to a model.

        Raises:
            UserError: A pattern or a name of modules_to_save fits no module, or names one of two tied matrices.
        """
        if not self.is_on:
            return
        names = [name for layer in range(model.num_layers) for name in self.modules(layer)]
        for option in ("rank_pattern", "alpha_pattern"):
            for each in getattr(self, option):
                pattern = each.rpartition("=")[0]
                if not any(_fits(pattern, name) for name in names):
                    raise UserError(
                        f"lora.{option}: no adapter has a name that ends with '{pattern}', so it would have no effect\n"
                        f"allowed: ends of names such as {names[0]}\n"
                        "fix: correct the pattern, add to lora.targets, or leave the pattern out"
                    )
        for each in self.modules_to_save:
            if model.tie_embeddings and each in _TABLES:
                raise UserError(
                    f"lora.modules_to_save {each} of a model whose embedding is its head: PEFT would train a copy that "
                    "is not tied\nallowed: modules_to_save of norms, or a model with a head of its own\n"
                    f"fix: leave {each} out of lora.modules_to_save"
                )
            if not any(name.endswith(each) for name, _ in _whole_modules(model)):
                raise UserError(
                    f"lora.modules_to_save: the model has no module {each}\n"
                    f"allowed: {', '.join(SAVABLE[:5])}\nfix: leave {each} out"
                )

    def having_effect(self, modules: Collection[str]) -> "LoRAConfig":
        """Return these settings without the patterns that fit none of the modules with adapters.

        PEFT accepts such patterns, and they have no effect. On the command line they are refused: they are misspelled.
        """

        def fitting(patterns: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(each for each in patterns if any(_fits(each.rpartition("=")[0], name) for name in modules))

        ranks, alphas = fitting(self.rank_pattern), fitting(self.alpha_pattern)
        return dataclasses.replace(self, rank_pattern=ranks, alpha_pattern=alphas)

    def require_tensor(self, degree: int) -> None:
        """Raise UserError if the base is in 4 bits, and tensor parallelism would cut its blocks."""
        if self.is_4bit and degree > 1:
            raise UserError(
                f"lora.base 4bit with tensor_parallel {degree}: blocks of 64 numbers are not cut\n"
                "allowed: --tensor-parallel 1, with any number of data and sequence parallel ranks\n"
                "fix: --tensor-parallel 1, or --lora.base dtype"
            )

    def allows_stages(self, stages: int, zero_level: int | str) -> bool:
        """Return whether the base supports a number of pipeline stages with a ZeRO stage; "auto" is 3 in a pipeline."""
        return not self.is_4bit or stages == 1 or zero_level != 2

    def require_stages(self, stages: int, zero_level: int | str) -> None:
        """Raise UserError if the base is in 4 bits, and ZeRO 2 would keep all matrices of a stage dequantized."""
        if not self.allows_stages(stages, zero_level):
            raise UserError(
                f"lora.base 4bit with pipeline_parallel {stages} and zero_level {zero_level}, which keeps the weights "
                "of a stage gathered\nallowed: zero_level 3\nfix: --parallel.zero_level 3, or --lora.base dtype"
            )

    def modules(self, layer: int) -> tuple[str, ...]:
        """Return the full names of the modules of a layer that have an adapter."""
        return tuple(f"model.layers.{layer}.{_MODULES[name]}" for name in self.matrices)

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter of a module, given by its full name."""
        return int(_value(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor on the adapter of a module: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        rank = self.rank_of(module)
        return _value(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def of_modules(self, option: str, model: "LlamaConfig") -> dict[str, float]:
        """Return the rank ("rank_pattern") or the alpha ("alpha_pattern") of the adapter of each module of a model."""
        default = self.rank if option == "rank_pattern" else self.alpha
        names = (name for layer in range(model.num_layers) for name in self.modules(layer))
        return {name: _value(getattr(self, option), name, default) for name in names}

    def is_saved(self, parameter: str) -> bool:
        """Return whether a parameter of the model, given by its full name, is trained whole."""
        module, _, leaf = parameter.rpartition(".")
        return leaf == "weight" and any(module.endswith(each) for each in self.modules_to_save)

    def parameters(self, model: "LlamaConfig") -> int:
        """Return the number of adapter parameters of a model; 0 if there are no adapters."""
        if not self.rank_pattern:
            return model.num_layers * self.elements(model)
        return sum(self._elements(model, 1, layer) for layer in range(model.num_layers))

    def saved(self, model: "LlamaConfig") -> int:
        """Return the number of parameters of the modules that are trained whole."""
        return sum(size for name, size in _whole_modules(model) if self.is_saved(f"{name}.weight"))

    def saved_in_blocks(self, model: "LlamaConfig") -> int:
        """Return the number of parameters of these modules that are in blocks."""
        names = ((name, size) for name, size in _whole_modules(model) if ".layers." in name)
        return sum(size for name, size in names if self.is_saved(f"{name}.weight"))

    @property
    def trains_head(self) -> bool:
        """Whether the head is trained whole."""
        return "lm_head" in self.modules_to_save

    def trained(self, model: "LlamaConfig") -> int:
        """Return the number of trained parameters: adapters, and modules that are trained whole."""
        return self.parameters(model) + self.saved(model)

    def trained_kinds(self, model: "LlamaConfig") -> frozenset[str]:
        """Return the kinds (`bmburst.blocks.kinds`) of a model's trained parameters; all of them without adapters.

        A head that is the embedding is of the kind "embeddings".
        """
        whole = [name for name, _ in _whole_modules(model) if not self.is_on or self.is_saved(f"{name}.weight")]
        found = {kind_of(name, (2, 2) if name in _TABLES.values() else (2,)) for name in whole}
        found |= {kind_of(_MODULES[name], (2, 2)) for name in (self.matrices if self.is_on else TARGETS)}
        return frozenset(found | ({"biases"} if model.qkv_bias and not self.is_on else set()))

    def elements(self, model: "LlamaConfig", tensor: int = 1) -> int:
        """Return the most elements of adapters of a block on one tensor rank.

        Tensor parallelism splits the inputs of `o_proj` and `down_proj`, and the outputs of the other matrices.
        """
        layers = range(model.num_layers if self.rank_pattern else 1)
        return max(self._elements(model, tensor, layer) for layer in layers)

    def features(self, model: "LlamaConfig", tensor: int = 1) -> tuple[int, int]:
        """Return the inputs of a block's matrices with adapters on a tensor rank, shared ones once, and outputs."""
        sides = self._sides(model, tensor)
        inputs = {_SHARED.get(name, name): sides[name][0] for name in self.matrices}
        return sum(inputs.values()), sum(sides[name][1] for name in self.matrices)

    def _elements(self, model: "LlamaConfig", tensor: int, layer: int) -> int:
        sides = self._sides(model, tensor)
        pairs = zip(self.matrices, self.modules(layer), strict=True)
        return sum(self.rank_of(module) * sum(sides[name]) for name, module in pairs)

    @staticmethod
    def _sides(model: "LlamaConfig", tensor: int) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs of each matrix of a block on a tensor rank."""
        hidden, query = model.hidden_size, model.num_heads // tensor * model.head_dim
        kv, inner = max(1, model.num_kv_heads // tensor) * model.head_dim, model.intermediate_size // tensor
        into = {"q_proj": query, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
        out_of = {"o_proj": query, "down_proj": inner}
        return {
            **{name: (hidden, width) for name, width in into.items()},
            **{name: (width, hidden) for name, width in out_of.items()},
        }

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0

    @property
    def is_4bit(self) -> bool:
        """Whether the frozen matrices of blocks are in 4 bits."""
        return self.base == "4bit"

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices that have an adapter, in the order of `TARGETS`."""
        return TARGETS if ALL in self.targets else tuple(name for name in TARGETS if name in self.targets)


def _whole_modules(model: "LlamaConfig") -> Iterator[tuple[str, int]]:
    """Yield names and numbers of elements of a model's tables and norms."""
    hidden, of_heads = model.hidden_size, model.head_dim
    for name, full in _TABLES.items():
        if name == "embed_tokens" or not model.tie_embeddings:
            yield full, model.vocab_size * hidden
    for layer in range(model.num_layers):
        yield f"model.layers.{layer}.input_layernorm", hidden
        yield f"model.layers.{layer}.post_attention_layernorm", hidden
        if model.qk_norm:
            yield f"model.layers.{layer}.self_attn.q_norm", of_heads
            yield f"model.layers.{layer}.self_attn.k_norm", of_heads
    yield "model.norm", hidden


def in_words(value: Any) -> str:
    """Return the value of a setting as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).removesuffix(".0")  # with all digits: a rounded number would be another one


def _pattern(option: str, text: str, *, whole: bool) -> str:
    """Return a checked pattern with its number as it is usually written."""
    pattern, _, number = text.rpartition("=")
    try:
        re.compile(pattern)
        value = int(number) if whole else float(number)
        is_fit = bool(pattern) and 0 < value <= (65536 if whole else sys.float_info.max)
    except (re.error, ValueError):
        is_fit = False
    if not is_fit:
        kind = "an integer from 1 to 65536" if whole else "a number above 0"
        raise UserError(
            f"{option}: '{text}' does not fit\nallowed: NAME=NUMBER, with {kind}; NAME is a regular expression\n"
            f"fix: {option} q_proj=8"
        )
    return f"{pattern}={in_words(value)}"


def _value(patterns: tuple[str, ...], module: str, default: float) -> float:
    """Return the number of the first pattern that fits a module, as PEFT chooses it (`get_pattern_key`)."""
    for each in patterns:
        pattern, _, number = each.rpartition("=")
        if _fits(pattern, module):
            return float(number)
    return default


def _fits(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
