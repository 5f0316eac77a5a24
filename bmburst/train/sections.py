"""Sections of a run's configuration: data, optimizer, parallelism, and their defaults. Imports no torch.

Learning rate, warm-up, beta2 and weight decay have defaults by model and kind of training (`fill_defaults`).

From scratch, presets use published learning rates, other models `2e-3 * (1e6 / parameters) ** 0.21`. The rule gives
3.0e-4 for LLaMA-3-8B (published 3e-4), 1.9e-4 for 70B (1.5e-4), 7.3e-4 for 125M (GPT-3 6e-4) and 2e-3 for the tiny
preset, for which it was tuned.

From scratch, the warm-up is `10 * (parameters / 1e6) ** 0.59` steps, at most LLaMA 2's 2,000, independent of the number
of steps. It is needed because Adam's first steps change every weight by about the learning rate: llama-3-8b's loss rose
from 12.5 to 19.1 after a first step of 3e-5, a tenth of the peak.

Fine-tuning of `init_from` uses a fifteenth of that rate: LLaMA 2 was fine-tuned with 2e-5 after 3e-4 (arXiv:2307.09288,
section 3.1). Adapters use two thirds: 2e-4 up to 13B, 1e-4 at 65B, beta2 0.999 (QLoRA, arXiv:2305.14314, B.2).
Preference training uses a twentieth of either: 1e-6 instead of 2e-5 (DPO, arXiv:2305.18290, appendix B).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.config import check_fields, field
from bmburst.errors import UserError
from bmburst.optim.config import OptimizerConfig
from bmburst.record_format import RecordFormat
from bmburst.schedule.parallelism import STRATEGIES, TRANSPORTS, MeshShape, can_share, divisors
from bmburst.train.schedule import ScheduleConfig

STANDARD_LIBRARY = "stdlib"
SEVERAL_SOURCES = "list several sources in a YAML file: docs/data.md, Mixtures"
# Help of options that training and evaluation have with the same meaning.
SEQUENCE_LENGTH_HELP = "Tokens of a sequence, over all of its ranks."
LOSS_CHUNK_HELP = "Tokens of a rank whose logits are computed at once."
TOKENIZER_HELP = (
    "Tokenizer: 'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer."
)
CHAT_TEMPLATE_HELP = "Chat template of JSONL messages: chatml, gemma, llama2, llama3, or a Jinja file."

HELD_OUT, HELD_OUT_FRACTION = "held_out", 0.05
"""Name in the metrics of what is held out of the training data, and its default share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(RecordFormat):
    """The training data, and the names of its columns, fields and roles."""

    source: str = field(
        "Training text: a text file, JSONL file, directory of them, token file of `bmburst data`, or 'stdlib' for the "
        "source files of this Python's standard library. JSONL of messages, or of prompt and completion, and data sets "
        "of the package datasets are for fine-tuning: loss on answers only. With dpo.beta, JSONL of preference pairs.",
        default=STANDARD_LIBRARY,
        several=SEVERAL_SOURCES,
    )
    tokenizer: str | None = field(
        TOKENIZER_HELP,
        default=None,
        default_text="the token file's, else bytes",
    )
    chat_template: Path | None = field(  # noqa: RUF009
        CHAT_TEMPLATE_HELP,
        default=None,
        default_text="the tokenizer's",
    )
    validation: tuple[str, ...] = field(
        "Text or records of your own to evaluate on: FILE or NAME=FILE, several separated by commas. NAME, by default "
        "that of the file, is its name in the metrics.",
        default=(),
        pairs=True,
    )
    held_out_fraction: float = field(
        "Fraction of the training text held out for evaluation; 0: none, with data.validation. If both are given, both "
        "are evaluated.",
        default=None,
        default_text="0.05; 0 with data.validation",
        unit="of tokens",
        minimum=0,
        below=1,
    )
    cache: Path | None = field(  # noqa: RUF009
        "Folder for token files.", default=None, default_text="tokens, beside the run folder"
    )
    verify: bool = field(
        "Verify the checksum of a token file's tokens before training, which reads the whole file; its header and "
        "tables are always verified.",
        default=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out_fraction is None:
            object.__setattr__(self, "held_out_fraction", 0.0 if self.validation else HELD_OUT_FRACTION)
        if not self.held_out_fraction and not self.validation:
            raise UserError(
                "data.held_out_fraction 0 without data.validation: nothing is left to evaluate on\n"
                f"allowed: above 0 and below 1\nfix: --data.validation FILE, or leave it out for {HELD_OUT_FRACTION}"
            )
        _named_files(self.validation)

    @property
    def validation_files(self) -> dict[str, str]:
        """The files of `validation`, by their names in the metrics."""
        return _named_files(self.validation)


def _named_files(given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not sign:
            name, path = Path(text).name.split(".")[0], text
        if not path or not re.fullmatch(r"[\w-]+", name) or name in (HELD_OUT, "train"):
            raise UserError(
                f"data.validation '{text}': the name '{name}' is not possible\n"
                f"allowed: letters, digits, _ and -, but neither {HELD_OUT} nor train\nfix: NAME={path or 'FILE'}"
            )
        if name in found:
            raise UserError(
                f"data.validation: {found[name]} and {path} have the same name {name}\nallowed: a name for each\n"
                f"fix: give names: {name}={found[name]},other={path}"
            )
        found[name] = path
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization (arXiv:2305.18290), on pairs of answers."""

    beta: float | None = field(
        "Weight of log-probability ratios in the loss; none: no preference training.", default=None, above=0
    )
    reference: Path | None = field(  # noqa: RUF009
        "Directory of the reference model.",
        default=None,
        default_text="the model without its adapters, else that of init_from",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reference is not None and not self.is_on:
            raise UserError(
                f"dpo.reference {self.reference} has no effect: dpo.beta is not given\n"
                "fix: --dpo.beta 0.1, or leave dpo.reference out"
            )

    @property
    def is_on(self) -> bool:
        """Whether the run is preference training."""
        return self.beta is not None


# The tables with these names need numpy and torch, which --help does not: a test compares the names with them.
LayoutName = Literal["contiguous", "zigzag", "striped", "balanced"]
KernelName = Literal["auto", "fa4", "fa3", "cudnn", "fa2", "torch", "cpu", "triton", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work."""

    data_parallel: int = field("Groups of ranks that train on different sequences.", default=1, unit="ranks", minimum=1)
    sequence_parallel: int | None = field(
        "Ranks that share each sequence.",
        default=None,
        default_text="ranks / data_parallel / tensor_parallel / pipeline_parallel",
        unit="ranks",
        minimum=1,
    )
    tensor_parallel: int = field("Ranks that share each matrix and the heads.", default=1, unit="ranks", minimum=1)
    pipeline_parallel: int = field(
        "Stages of a pipeline: groups of ranks that hold different layers. Micro-batches pass through them in turn.",
        default=1,
        unit="stages",
        minimum=1,
    )
    head_parallel: int | None = field(
        "Ulysses degree: ranks that exchange attention heads. Between such groups attention uses a ring or a gather.",
        default=None,
        default_text="the cheapest by the cost model",
        unit="ranks",
        minimum=1,
    )
    layout: LayoutName = field(  # noqa: RUF009
        "Which rank holds which tokens of a sequence; balanced: equal work per rank for packed documents.",
        default="zigzag",
    )
    strategy: str = field(
        "How attention is split over the ranks of a sequence; auto: the cheapest by the cost model.",
        default="auto",
        choices=STRATEGIES,
    )
    kernel: KernelName = field(  # noqa: RUF009
        "Attention kernel; auto: the fastest that is installed and supports the inputs.", default="auto"
    )
    transport: str = field(
        "How attention sends blocks between ranks; auto: peer (copy-engine transfers) if possible.",
        default="auto",
        choices=TRANSPORTS,
    )
    zero_level: Literal["auto", 2, 3] = field(
        "ZeRO stage: 3 shards weights, gradients and optimizer, and gathers weights before each pass; 2 keeps them "
        "gathered from forward to backward, and over the micro-batches of a step. auto: 2 if the planner predicts "
        "that this fits and is not slower, else 3; on a CPU, and in a pipeline, 3.",
        default="auto",
    )
    zero_group: Literal["world", "node", "auto"] | int = field(
        "Ranks over which ZeRO shards: world, all; node, those of each node, between which gradients are summed once a "
        "step; or the number of neighbouring ranks of a group. auto: node if the planner predicts a faster step, "
        "with the links between nodes that are measured at the start.",
        default="world",
        unit="ranks",
        minimum=1,
    )
    block_graphs: Literal["auto", "never"] = field(
        "Whether blocks run as CUDA graphs, which takes less time of the host and more memory. auto: if nothing is "
        "recomputed, and the planner predicts that the host bounds a step and that the memory is there.",
        default="auto",
    )
    deterministic: bool = field("Bitwise reproducible runs, at the cost of speed.", default=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def require_exchange(self, model: LlamaConfig, shape: MeshShape) -> None:
        """Raise UserError unless model, strategy and layout allow the configured Ulysses degree."""
        degree, ranks = self.head_parallel, shape.sequence
        if degree is None:
            return
        heads, kv_heads = shape.require_heads(model.num_heads, model.num_kv_heads)
        allowed = [part for part in divisors(ranks) if can_share(part, heads, kv_heads)]
        reason = f"{heads} query heads and {kv_heads} KV heads"
        if ranks > 1:
            allowed = [part for part in allowed if STRATEGIES[self.strategy].allows(part, ranks)]
            reason += f", parallel.strategy {self.strategy}"
        if self.layout == "striped":
            allowed = [part for part in allowed if part in (1, ranks)]
            reason += ", layout striped"
        if degree not in allowed:
            named = ", ".join(map(str, allowed)) or "none"
            other = "" if self.strategy == "auto" else ", or --parallel.strategy auto"
            raise UserError(
                f"head_parallel {degree} is not possible with {reason} on {ranks} sequence ranks\n"
                f"allowed: {named}\nfix: another --head-parallel{other}"
            )


Number = TypeVar("Number", int, float)
FINE_TUNING, ADAPTERS = 1 / 15, 2 / 3  # factors on the learning rate from scratch
PREFERENCE = 1 / 20  # further factor
FEWEST_WARMUP, MOST_WARMUP = 10, 2000  # steps; 2,000 are LLaMA 2's
_TINY, _TINY_LR, _EXPONENT, _WARMUP_EXPONENT = 1e6, 2e-3, 0.21, 0.59


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """Published hyperparameters of training from scratch.

    Attributes:
        lr: Peak learning rate.
        warmup_steps: Steps of linear warm-up; None: `warmup_by_size`.
    """

    lr: float
    warmup_steps: int | None = None


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "llama-tiny": Published(lr=2e-3, warmup_steps=10),
        # arXiv:2307.09288, section 2.2 and table 1.
        "llama-2-7b": Published(lr=3e-4, warmup_steps=2000),
        "llama-2-13b": Published(lr=3e-4, warmup_steps=2000),
        "llama-2-70b": Published(lr=1.5e-4, warmup_steps=2000),
        # arXiv:2407.21783, table 3.
        "llama-3-8b": Published(lr=3e-4),
        "llama-3-70b": Published(lr=1.5e-4),
        # arXiv:2404.06395, section 3.3: 0.01, divided by hidden_size / dim_model_base for matrices; here for all.
        "minicpm-1b": Published(lr=1.7e-3),
        "minicpm-2b": Published(lr=1.1e-3),
    }
)


def rate_by_size(parameters: int) -> float:
    """Return the peak learning rate from scratch for a model without a published one, rounded to two digits."""
    return float(f"{_TINY_LR * min(1.0, (_TINY / max(1, parameters)) ** _EXPONENT):.2g}")


def warmup_by_size(parameters: int) -> int:
    """Return the warm-up steps from scratch for a model without a published number."""
    return min(MOST_WARMUP, max(FEWEST_WARMUP, round(10 * math.pow(parameters / _TINY, _WARMUP_EXPONENT))))


def published(model: LlamaConfig) -> Published:
    """Return the hyperparameters for training from scratch: those of the preset with the same shape, else by size.

    Context length, rope_theta and rope_scaling may differ from the preset.
    """
    for name, values in PUBLISHED.items():
        known = PRESETS[name]
        longer = {key: getattr(model, key) for key in ("max_position_embeddings", "rope_theta", "rope_scaling")}
        if model == dataclasses.replace(known, **longer):
            return values
    return Published(lr=rate_by_size(model.num_parameters))


def fill_defaults(
    model: LlamaConfig,
    steps: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    *,
    is_started: bool,
    has_adapters: bool,
    has_pairs: bool,
) -> tuple[OptimizerConfig, ScheduleConfig]:
    """Return both sections with None replaced by defaults.

    Args:
        model: The model.
        steps: Number of steps of the run.
        optimizer: The optimizer section as given.
        schedule: The schedule section as given.
        is_started: Whether training starts from the weights of a trained model.
        has_adapters: Whether adapters are trained instead of the weights.
        has_pairs: Whether training is on preference pairs.
    """
    known = published(model)
    part = ADAPTERS if has_adapters else FINE_TUNING if is_started else 1.0
    part *= PREFERENCE if has_pairs else 1.0
    if is_started:
        warmup = min(MOST_WARMUP, max(FEWEST_WARMUP, steps // 10))
    else:
        warmup = _or(known.warmup_steps, warmup_by_size(model.num_parameters))
    optimizer = dataclasses.replace(
        optimizer,
        lr=_or(optimizer.lr, float(f"{known.lr * part:.2g}")),
        beta2=_or(optimizer.beta2, 0.999 if has_adapters else 0.95),
        weight_decay=_or(optimizer.weight_decay, 0.0 if has_adapters else 0.1),
    )
    if schedule.warmup_fraction is None:
        schedule = dataclasses.replace(schedule, warmup_steps=_or(schedule.warmup_steps, warmup))
    return optimizer, schedule


def _or(given: Number | None, default: Number) -> Number:
    return default if given is None else given
