"""The sections of a training run's configuration: data, optimizer, schedule, parallelism. Does not import torch."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from bmburst.config import check_fields, field
from bmburst.errors import UserError

STANDARD_LIBRARY = "stdlib"
LOSS_SCALE, LOSS_SCALE_STEPS = 65536.0, 1024
"""Defaults of fp16 training for `OptimizerConfig.loss_scale` and `loss_scale_steps`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data."""

    source: str = field(
        "Training text: a text file, JSONL file, directory of them, token file of `bmburst data`, or 'stdlib' for the "
        "source files of this Python's standard library. JSONL of messages, or of prompt and completion, and data sets "
        "of the package datasets are for fine-tuning: loss on answers only. With dpo.beta, JSONL of preference pairs.",
        default=STANDARD_LIBRARY,
    )
    tokenizer: str | None = field(
        "Tokenizer: 'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer.",
        default=None,
        default_text="the token file's, else bytes",
    )
    text_field: str = field("Field of a JSONL line that holds the text.", default="text")
    chat_template: Path | None = field(  # noqa: RUF009
        "Jinja file with the chat template of JSONL messages.", default=None, default_text="the tokenizer's"
    )
    held_out_fraction: float = field(
        "Fraction of the text held out for evaluation.", default=0.05, unit="of tokens", above=0, below=1
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
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. `TrainConfig` replaces None by the default for its model (`bmburst.train.defaults`)."""

    lr: float = field(
        "Peak learning rate.",
        default=None,
        default_text="as published for the preset (llama-3-8b 3e-4, llama-tiny 2e-3), else "
        "2e-3 * (1e6 / parameters)^0.21; a fifteenth of it with init_from, two thirds for adapters; a "
        "twentieth of these with dpo.beta",
        above=0,
    )
    beta1: float = field("Decay rate of the mean of gradients.", default=0.9, unit="per step", minimum=0, below=1)
    beta2: float = field(
        "Decay rate of the mean of squared gradients.",
        default=None,
        default_text="0.95 as for LLaMA, 0.999 for adapters",
        unit="per step",
        minimum=0,
        below=1,
    )
    eps: float = field("Added to the denominator of the update.", default=1e-8, above=0)
    weight_decay: float = field(
        "Weight decay, on matrices only.",
        default=None,
        default_text="0.1 as for LLaMA, 0 for adapters",
        unit="per step and lr",
        minimum=0,
    )
    clip_norm: float | None = field("Gradient norm to clip to; none: no clipping.", default=1.0, above=0)
    offload: bool = field(
        "Keep optimizer state and fp32 master weights in host memory and run AdamW there. Saves 12 bytes of GPU memory "
        "per weight of a rank in bfloat16, 8 in float32.",
        default=False,
    )
    offload_weights: bool = field(
        "With optimizer.offload: keep weights and gradients of blocks in host memory too, and copy them to the GPU "
        "block by block. Saves another 4 bytes per weight in bfloat16.",
        default=False,
    )
    kernel: Literal["auto", "bmtrain"] = field(
        "AdamW kernel for 16-bit weights on a GPU; auto: the Triton kernel where it runs, else BMTrain's for bfloat16 "
        "and torch's for float16.",
        default="auto",
    )
    loss_scale: float | None = field(
        "With dtype float16: loss scale of the first step, a power of 2. It halves at each step that is skipped "
        "because its gradient is not finite.",
        default=None,
        default_text=f"{LOSS_SCALE:.0f}",
        minimum=1,
        maximum=2.0**32,
    )
    loss_scale_steps: int | None = field(
        "With dtype float16: steps without a skipped one after which the loss scale doubles.",
        default=None,
        default_text=str(LOSS_SCALE_STEPS),
        unit="steps",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.offload_weights and not self.offload:
            raise UserError("optimizer.offload_weights without optimizer.offload\nfix: --optimizer.offload too")
        if self.loss_scale is not None and math.frexp(self.loss_scale)[0] != 0.5:
            raise UserError(
                f"optimizer.loss_scale {self.loss_scale:g} is no power of 2, and scaling by it would round\n"
                f"allowed: 1, 2, 4 and so on\nfix: --optimizer.loss_scale {2 ** math.floor(math.log2(self.loss_scale))}"
            )

    def require_dtype(self, dtype: str) -> None:
        """Check that the fields apply to weights of a dtype.

        Raises:
            UserError: A field has no effect, or the kernel would keep an overflow in its state.
        """
        for name in ("loss_scale", "loss_scale_steps"):
            if dtype != "float16" and getattr(self, name) is not None:
                raise UserError(
                    f"optimizer.{name} {getattr(self, name):g} has no effect with dtype {dtype}, whose gradients need "
                    f"no loss scale\nallowed: dtype float16\nfix: leave optimizer.{name} out, or --dtype float16"
                )
        if dtype == "float16" and self.kernel == "bmtrain" and not self.offload:
            raise UserError(
                "optimizer.kernel bmtrain with dtype float16: it keeps moments in fp16 times the loss scale, where an "
                "overflow stays\nallowed: auto, which keeps them in fp32\nfix: --optimizer.kernel auto"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule; formulas: `bmburst.train.step.learning_rate`. None: as in `OptimizerConfig`."""

    kind: Literal["cosine", "wsd", "constant"] = field("Shape of the schedule after the warm-up.", default="cosine")
    warmup_steps: int = field(
        "Steps of linear warm-up.",
        default=None,
        default_text="10 for 1M parameters to 2000 for 8B; with init_from a tenth of the steps, 10 to 2000",
        unit="steps",
        minimum=0,
    )
    decay_fraction: float = field(
        "wsd: fraction of all steps in the final decay.", default=0.2, minimum=0, maximum=1, unit="of steps"
    )
    final_lr_fraction: float = field(
        "Learning rate at the end of the run.", default=0.1, minimum=0, maximum=1, unit="of optimizer.lr"
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization (arXiv:2305.18290), on pairs of answers."""

    beta: float | None = field(
        "Weight of the log-probability ratios in the loss; none: no preference training.", default=None, above=0
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work."""

    data_parallel: int = field("Groups of ranks that train on different sequences.", default=1, unit="ranks", minimum=1)
    sequence_parallel: int | None = field(
        "Ranks that share each sequence.",
        default=None,
        default_text="ranks / data_parallel / tensor_parallel",
        unit="ranks",
        minimum=1,
    )
    tensor_parallel: int = field("Ranks that share each matrix and the heads.", default=1, unit="ranks", minimum=1)
    head_parallel: int | None = field(
        "Ulysses degree: ranks that exchange attention heads. Between such groups attention uses a ring or a gather.",
        default=None,
        default_text="the cheapest by the cost model",
        unit="ranks",
        minimum=1,
    )
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = field(
        "Which rank holds which tokens of a sequence; balanced: equal work per rank for packed documents.",
        default="zigzag",
    )
    strategy: Literal["auto", "heads", "gather", "ring", "kv", "burst", "heads+ring", "heads+gather", "double-ring"] = (
        field(
            "How attention is split over the ranks of a sequence; auto: the cheapest by the cost model.", default="auto"
        )
    )
    kernel: Literal["auto", "fa4", "fa3", "cudnn", "fa2", "torch", "cpu", "triton", "reference"] = field(
        "Attention kernel; auto: the fastest that is installed and supports the inputs.", default="auto"
    )
    transport: Literal["auto", "peer", "nccl", "gloo"] = field(
        "How attention sends blocks between ranks; auto: peer (copy-engine transfers) if possible.", default="auto"
    )
    zero_level: Literal[2, 3] = field(
        "ZeRO stage: 3 shards weights, gradients and optimizer; 2 keeps whole weights.", default=3
    )
    deterministic: bool = field("Bitwise reproducible runs, at the cost of speed.", default=False)

    def __post_init__(self) -> None:
        check_fields(self)
