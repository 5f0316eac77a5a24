"""`TrainConfig` and `EvalConfig`: a training run and an evaluation as frozen dataclasses. Does not import torch."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.dtypes import DtypeName
from bmburst.blocks.presets import PRESETS
from bmburst.blocks.presets import preset as model_preset
from bmburst.config import check_fields, field, option_name
from bmburst.errors import UserError
from bmburst.launch.spec import DEFAULT_HANG_TIMEOUT
from bmburst.optim.config import OptimizerConfig
from bmburst.recompute.policy import AUTO, Policy, require_end
from bmburst.record_format import RecordFormat
from bmburst.schedule.parallelism import STRATEGIES, MeshShape, can_share, divisors
from bmburst.schedule.pipeline import require_micro_batches, require_stages
from bmburst.train.schedule import ScheduleConfig
from bmburst.train.sections import (
    CHAT_TEMPLATE_HELP,
    LOSS_CHUNK_HELP,
    SEQUENCE_LENGTH_HELP,
    SEVERAL_SOURCES,
    TOKENIZER_HELP,
    DataConfig,
    DPOConfig,
    LayoutName,
    ParallelConfig,
    fill_defaults,
)

__all__ = [
    "BYTE_IDS",
    "DPOConfig",
    "DataConfig",
    "EvalConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ScheduleConfig",
    "TrainConfig",
    "profiled_steps",
]

# 256 bytes and 3 special ids: end of document, start, padding.
BYTE_IDS = 259


def _hang_timeout(ends: str) -> Any:
    what = f"Time after which {ends}; 0: no limit."
    return field(what, default=DEFAULT_HANG_TIMEOUT, unit="seconds", minimum=0, below=1e9)


def _start_timeout(first: str) -> Any:
    what = f"Time from the start of a rank until its first {first}; with hang_timeout 0 there is no limit."
    text = "3600, or hang_timeout if that is more"
    return field(what, default=None, default_text=text, unit="seconds", above=0, below=1e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of a training run. By default, llama-tiny is trained on the sources of Python's standard library.

    Raises:
        UserError: A field is out of range, or fields contradict each other.
    """

    preset: str | None = field(
        f"Named model shape, which model.* options override: {', '.join(PRESETS)}.", default="llama-tiny"
    )
    sequence_length: int = field(SEQUENCE_LENGTH_HELP, default=4096, unit="tokens", minimum=1)
    pack: Literal["stream", "documents", "trees"] = field(
        "What tokens attend to; stream: all text before them in the sequence; documents: only their own document, "
        "where positions and labels restart; trees: likewise, and the answers to one prompt share it.",
        default="stream",
    )
    steps: int = field("Total optimizer steps, also on resume.", default=200, unit="steps", minimum=1)
    epochs: float | None = field(
        "Passes over the data, in place of steps, also on resume. The last step has what is left.",
        default=None,
        default_text="as many as the steps are",
        unit="epochs",
        above=0,
        maximum=1e6,
    )
    batch_size: int = field(
        "Sequences per step, over all data ranks. The default in a pipeline is a micro-batch for each stage.",
        default=1,
        unit="sequences",
        minimum=1,
    )
    micro_batch_size: int = field(
        "Sequences that a rank computes at once; gradients accumulate.", default=1, unit="sequences", minimum=1
    )
    dtype: DtypeName = field(  # noqa: RUF009
        "Type of weights and activations. float16, with a dynamic loss scale: for GPUs without bfloat16.",
        default="float32",
        default_text="bfloat16 on GPUs that have it, else float32",
    )
    recompute: str = field(
        "Activation checkpointing policy: what backward recomputes. none, block, block-keep-attention (all but "
        "attention); :0.5 keeps attention for the second half of the sequence only. +offload keeps block inputs in "
        "host memory, +offload-all attention too; +first-20 is for the first 20 layers only; +every-4, "
        "+keep-attention-last-8, +offload-first-12, +offload-attention-first-6, +offload-mlp-first-12: "
        "docs/memory.md. auto: the fastest that fits.",
        default="block-keep-attention",
        default_text="auto on GPUs, else block-keep-attention",
    )
    host_memory: float | None = field(
        "Host memory of each machine that the run may use, a tenth of it kept in reserve.",
        default=None,
        default_text="the free memory",
        unit="GiB",
        above=0,
        maximum=1e9,
    )
    loss_chunk_tokens: int = field(LOSS_CHUNK_HELP, default=1024, unit="tokens", minimum=1)
    mlp_chunk_tokens: int | None = field(
        "Tokens of a rank that an MLP computes at once; 0: all.",
        default=None,
        default_text="16384 where blocks are recomputed, else all",
        unit="tokens",
        minimum=0,
    )
    seed: int = field("Seed of the initial weights and the data order.", default=0, minimum=0, maximum=2**32 - 1)
    output: Path | None = field("Run folder.", default=None, default_text="runs/<date-time>-<preset>")  # noqa: RUF009
    checkpoint_every: int | None = field(
        "Steps between checkpoints; 0: only at the end; never: none at all, also not at the end or when stopped.",
        default=50,
        unit="steps",
        minimum=0,
        none_text="never",
    )
    keep_checkpoints: int = field("Number of newest checkpoints to keep.", default=2, unit="checkpoints", minimum=1)
    eval_every: int = field("Steps between evaluations; 0: only at the end.", default=30, unit="steps", minimum=0)
    eval_sequences: int = field(
        "Maximum number of held-out sequences in an evaluation.", default=8, unit="sequences", minimum=1
    )
    resume: bool | Literal["auto"] = field(
        "Continue from the run's newest checkpoint; auto: begin where there is none.", default=False
    )
    init_from: Path | None = field(  # noqa: RUF009
        "Start from a Hugging Face model: the directory with its weights and shape.", default=None
    )
    sample_tokens: int | None = field(
        "Length of the text that is generated at the end; 0: none.",
        default=None,
        none_text="auto",
        default_text="256; 0 in a pipeline",
        unit="tokens",
        minimum=0,
    )
    context_report: bool | None = field(
        "Whether the run ends with losses of held-out text by position and by document length, and pass keys at three "
        "depths, in context.json and a picture.",
        default=None,
        none_text="auto",
        default_text="true for sequences of 4096 tokens or more, except in a pipeline",
    )
    hang_timeout: float = _hang_timeout("a step without progress ends the run")
    start_timeout: float | None = _start_timeout("step")
    max_skipped_steps: int = field(
        "End the run after this many skipped steps in a row (loss or gradient not finite), or if all of fewer steps "
        "are skipped; 0: never.",
        default=20,
        unit="steps",
        minimum=0,
    )
    profile: str | None = field(
        "Steps to record with torch's profiler, as 3 or 3-5; writes a Chrome trace of each rank to the run folder.",
        default=None,
    )
    wandb: str | None = field("Weights & Biases project that also receives the metrics.", default=None)
    wandb_entity: str | None = field("Team or user of the project.", default=None, default_text="the user's own")
    wandb_name: str | None = field("Name of the W&B run.", default=None, default_text="that of the run folder")
    wandb_tags: tuple[str, ...] = field("Tags of the W&B run.", default=())
    nproc: int | None = field(
        "Ranks to start on this machine.",
        default=None,
        default_text="the parallel degrees multiplied where sequence_parallel is given, else all GPUs, else at least 2",
        unit="processes",
        minimum=1,
    )
    # DEVIATION from keeping the given value: __post_init__ replaces None by the preset's shape.
    model: LlamaConfig = field("Shape of the model.", default=None)  # noqa: RUF009
    data: DataConfig = field("The text.", factory=DataConfig)  # noqa: RUF009
    optimizer: OptimizerConfig = field("AdamW.", factory=OptimizerConfig)  # noqa: RUF009
    schedule: ScheduleConfig = field("Learning rate.", factory=ScheduleConfig)  # noqa: RUF009
    lora: LoRAConfig = field("Low-rank adapters.", factory=LoRAConfig)  # noqa: RUF009
    dpo: DPOConfig = field("Preference training.", factory=DPOConfig)  # noqa: RUF009
    parallel: ParallelConfig = field("Ranks.", factory=ParallelConfig)  # noqa: RUF009

    def __post_init__(self) -> None:
        if self.preset is not None:
            model_preset(self.preset)
        if self.model is None:
            if self.preset is None:
                raise UserError("neither a preset nor a model is given\nfix: --preset, for example llama-tiny")
            if self.init_from is not None:
                raise UserError(
                    f"init_from {self.init_from} is given without the configuration of its model\n"
                    "fix: model=LlamaConfig.from_hugging_face(...), or bmburst.train.resolve.resolve"
                )
            object.__setattr__(self, "model", model_preset(self.preset))
        check_fields(self)
        optimizer, schedule = fill_defaults(
            self.model,
            self.steps,
            self.optimizer,
            self.schedule,
            is_started=self.init_from is not None,
            has_adapters=self.lora.is_on,
            has_pairs=self.dpo.is_on,
        )
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "schedule", schedule)
        optimizer.require_dtype(self.dtype)
        optimizer.require_decay(self.lora.trained_kinds(self.model))
        if self.optimizer.offload_weights and self.parallel.zero_level == 2:
            raise UserError("optimizer.offload_weights with parallel.zero_level 2\nfix: --parallel.zero_level 3")
        if self.recompute != AUTO:
            Policy.parse(self.recompute).require_layers(self.model.num_layers)
        if self.sequence_length > self.model.max_position_embeddings:
            most = self.model.max_position_embeddings
            raise UserError(
                f"sequence_length {self.sequence_length} is beyond the model's max_position_embeddings {most}\n"
                f"fix: --sequence-length {most}, or --model.max_position_embeddings {self.sequence_length}, with "
                "--model.rope_scaling.* for weights trained on shorter sequences"
            )
        if self.lora.is_on and self.init_from is None and self.checkpoint_every is not None:
            raise UserError(
                f"lora.rank {self.lora.rank} trains adapters of a model, but init_from names none\n"
                "allowed: without one only checkpoint_every never, to try speed and memory with random weights\n"
                "fix: --init-from DIR"
            )
        self.lora.require_model(self.model)
        self.lora.require_tensor(self.parallel.tensor_parallel)
        if self.dpo.beta is not None:
            self._require_pairs(self.dpo.beta)
        if self.parallel.pipeline_parallel > 1:
            self._require_stages(self.parallel.pipeline_parallel)
        self.model.require_packing(self.pack)
        if self.epochs is None and profiled_steps(self.profile).stop > self.steps + 1:
            raise UserError(f"profile '{self.profile}'\nallowed: steps 1 to {self.steps}\nfix: give earlier steps")
        if self.pack == "trees" and self.model.sliding_window is not None:
            raise UserError(
                f"pack trees with model.sliding_window {self.model.sliding_window}, in which an answer would not see "
                "the right tokens of its prompt\nallowed: pack documents\nfix: --pack documents"
            )
        if self.pack != "stream" and self.parallel.layout == "balanced" and self.micro_batch_size > 1:
            raise UserError(
                f"micro_batch_size {self.micro_batch_size} is not possible with pack {self.pack} and layout balanced\n"
                "allowed: 1\nfix: --micro-batch-size 1, or --parallel.layout zigzag"
            )
        if self.model.sliding_window is not None and self.parallel.layout == "balanced":
            raise UserError(
                f"layout balanced does not support model.sliding_window {self.model.sliding_window}\n"
                "allowed: another layout, or no sliding window\nfix: --parallel.layout zigzag or striped"
            )
        if self.data.tokenizer == "bytes" and self.model.vocab_size < BYTE_IDS:
            # The weights of init_from decide the size.
            larger = f"--model.vocab_size {BYTE_IDS}"
            if self.init_from is not None:
                larger = f"transformers' resize_token_embeddings({BYTE_IDS}) of the model"
            raise UserError(
                f"model.vocab_size {self.model.vocab_size} is too small for the tokenizer 'bytes'\n"
                f"allowed: at least {BYTE_IDS}\nfix: another --data.tokenizer, or {larger}"
            )

    @property
    def sampled(self) -> int:
        """Length of the text that is generated at the end."""
        if self.sample_tokens is None:
            return 256 if self.parallel.pipeline_parallel == 1 else 0
        return self.sample_tokens

    @property
    def reference(self) -> Path | None:
        """Directory of the reference model of preference training; None: the model without its adapters, or no DPO."""
        if not self.dpo.is_on:
            return None
        is_own = self.lora.is_on and not self.lora.modules_to_save  # whose frozen weights are the reference's
        return self.dpo.reference or (None if is_own else self.init_from)

    def _require_pairs(self, beta: float) -> None:
        """Check that the settings fit preference training, and that it has a reference."""
        lora, given = self.lora, self.dpo.reference
        if self.context_report:
            raise UserError(
                f"context_report true with dpo.beta {beta:g}: pairs have no loss by position\n"
                "allowed: context_report false\nfix: leave context_report out, or --context-report false"
            )
        if self.pack == "stream":
            raise UserError(
                f"dpo.beta {beta} with pack {self.pack}, in which an answer sees other ones\n"
                "allowed: pack trees, the default for preference pairs, and documents\nfix: --pack trees"
            )
        if lora.dropout:
            raise UserError(
                f"lora.dropout {lora.dropout:g} with dpo.beta {beta:g}: the reference has no dropout, so the log "
                "ratios would be noisy; TRL disables it, too\n"
                "allowed: lora.dropout 0\nfix: leave lora.dropout out, or --lora.dropout 0"
            )
        if lora.init_from is not None and given is None:
            raise UserError(
                f"lora.init_from {lora.init_from} with dpo.beta {beta:g}: the model without adapters is not the model "
                "that training starts from\nallowed: dpo.reference\n"
                "fix: bmburst convert --merge the adapter, and give that model as --dpo.reference"
            )
        if lora.is_4bit and lora.modules_to_save and given is None:
            raise UserError(
                f"lora.modules_to_save {','.join(lora.modules_to_save)} with lora.base 4bit and dpo.beta {beta:g}: the "
                "reference would be init_from, which is not in 4 bits as the model is that training starts from\n"
                "allowed: no modules_to_save, whose reference is the base in 4 bits, or dpo.reference\n"
                "fix: leave lora.modules_to_save out, or --dpo.reference DIR"
            )
        if self.reference is None and (not lora.is_on or lora.modules_to_save):
            raise UserError(
                f"dpo.beta {beta} without a reference model\n"
                "allowed: adapters (lora.rank), whose model is the reference, init_from, or dpo.reference\n"
                "fix: --init-from DIR"
            )

    def _require_stages(self, stages: int) -> None:
        """Check that the model can be divided into stages of a pipeline, and that the run does what stages can."""
        require_stages(stages, self.model.num_layers)
        self.lora.require_stages(stages, self.parallel.zero_level)
        if self.recompute != AUTO:
            Policy.parse(self.recompute).require_stages(stages)
        zero, sampled = self.parallel.zero_group, self.sample_tokens
        for is_given, name, value, allowed, why in (
            (self.dpo.is_on, "dpo.beta", self.dpo.beta, "none", "the reference needs the whole model"),
            (zero not in ("world", "auto"), "parallel.zero_group", zero, "world", "ZeRO shards over a stage's ranks"),
            (self.optimizer.offload_weights, "optimizer.offload_weights", "true", "false", "it streams all blocks"),
            (sampled, "sample_tokens", sampled, "0", "a stage cannot generate text"),
            (self.context_report, "context_report", "true", "false", "a stage cannot answer questions"),
        ):
            if is_given:  # by an option, or by the file of a resumed run
                raise UserError(
                    f"pipeline_parallel {stages} with {name} {value}: {why}\n"
                    f"allowed: {name} {allowed}, or pipeline_parallel 1\n"
                    f"fix: {option_name(name, {})} {allowed}, or --pipeline-parallel 1"
                )

    def mesh_shape(self, world_size: int) -> MeshShape:
        """Return the mesh of `world_size` ranks.

        Raises:
            UserError: The parallel degrees do not fit the number of ranks.
        """
        data, sequence = self.parallel.data_parallel, self.parallel.sequence_parallel
        tensor, pipe = self.parallel.tensor_parallel, self.parallel.pipeline_parallel
        inner = 1
        for name, degree in (("pipeline_parallel", pipe), ("tensor_parallel", tensor)):
            if world_size < 1 or world_size % (inner * degree):
                raise UserError(
                    f"{name} {degree} does not divide {world_size // inner} ranks"
                    f"{' of a stage' if inner > 1 else ''}\n"
                    f"allowed: {', '.join(map(str, divisors(world_size // inner)))}\n"
                    f"fix: --nproc {inner * degree * max(1, world_size // (inner * degree))}, "
                    f"or another --{name.replace('_', '-')}"
                )
            inner *= degree
        if sequence is not None and data * sequence * inner != world_size:
            shape = MeshShape(data, sequence, tensor, pipe=pipe)
            product = f"pipeline_parallel {pipe} x " if pipe > 1 else ""
            product += f"data_parallel {data} x sequence_parallel {sequence}"
            product += f" x tensor_parallel {tensor}" if tensor > 1 else ""
            raise UserError(
                f"{product} is {shape.size} ranks, but there are {world_size}\n"
                f"fix: --nproc {shape.size}, or leave --sequence-parallel out"
            )
        rest = world_size // inner
        if rest % data:
            each = f" with tensor_parallel {tensor}" if tensor > 1 else ""
            each += f" with pipeline_parallel {pipe}" if pipe > 1 else ""
            raise UserError(
                f"data_parallel {data} does not divide {world_size} ranks{each}\n"
                f"allowed: {', '.join(map(str, divisors(rest)))}\n"
                f"fix: --nproc {data * inner * max(1, rest // data)}, or another --data-parallel"
            )
        shape = MeshShape(data, rest // data, tensor, pipe=pipe)
        self.parallel.require_exchange(self.model, shape)
        return dataclasses.replace(shape, heads=self.parallel.head_parallel)

    def validate(self, world_size: int) -> None:
        """Check what depends on the number of ranks. The constructor has checked everything else.

        Raises:
            UserError: The parallel degrees fit neither ranks nor model, the batch size is not divisible, a rank would
                have no token, or the layout does not allow saving a fraction of attention.
        """
        shape = self.mesh_shape(world_size)
        self.model.require_mesh(shape)
        if isinstance(self.parallel.zero_group, int):
            shape.require_zero_group(self.parallel.zero_group)
        strategy, sequence = self.parallel.strategy, shape.sequence
        heads, kv_heads = shape.require_heads(self.model.num_heads, self.model.num_kv_heads)
        if STRATEGIES[strategy].exchange == "all" and not can_share(sequence, heads, kv_heads):
            allowed = ", ".join(str(degree) for degree in divisors(heads) if can_share(degree, heads, kv_heads))
            raise UserError(
                f"strategy '{strategy}' cannot work: {sequence} sequence ranks cannot share "
                f"{heads} query heads and {kv_heads} KV heads\n"
                f"allowed: {allowed} sequence ranks\nfix: --strategy auto, or another --sequence-parallel"
            )
        if self.recompute != AUTO:
            require_end(Policy.parse(self.recompute).attention, self.parallel.layout, sequence)
            Policy.parse(self.recompute).require_tensor(shape.tensor)
        if self.batch_size % (group := shape.data * self.micro_batch_size):
            raise UserError(
                f"batch_size {self.batch_size} does not divide by data_parallel {shape.data} x micro_batch_size "
                f"{self.micro_batch_size}\nallowed: multiples of {group}\n"
                f"fix: --batch-size {group * -(-self.batch_size // group)}"
            )
        if shape.pipe > 1:
            require_micro_batches(shape.pipe, self.batch_size // group)
        if self.sequence_length < sequence:
            raise UserError(
                f"sequence_length {self.sequence_length} leaves some of {sequence} sequence ranks without a token\n"
                f"allowed: at least {sequence}\nfix: a longer --sequence-length or a smaller --sequence-parallel"
            )

    def replace(self, **changes: object) -> "TrainConfig":
        """Return a copy with some fields changed. The copy is checked."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_parallel(self, **changes: object) -> "TrainConfig":
        """Return a copy with some fields of `parallel` changed. The copy is checked."""
        return self.replace(parallel=dataclasses.replace(self.parallel, **changes))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(RecordFormat):
    """An evaluation of one checkpoint on one held-out text."""

    checkpoint: Path = field(  # noqa: RUF009
        "Checkpoint, run folder (its newest checkpoint), or Hugging Face model directory."
    )
    adapter: Path | None = field("LoRA adapter of the model.", default=None)  # noqa: RUF009
    data: str = field(
        "Held-out data, as training takes them: a text file, JSONL file, directory of them, token file, or mixture of "
        "sources. For records, the loss is that of answers only.",
        several=SEVERAL_SOURCES,
    )
    sequence_length: int = field(SEQUENCE_LENGTH_HELP, default=4096, unit="tokens", minimum=1)
    pack: Literal["stream", "documents"] = field(
        "What tokens attend to; stream: all text before them in the sequence; documents: only their own document.",
        default="stream",
        default_text="documents for records, else stream",
    )
    tokenizer: str | None = field(
        TOKENIZER_HELP,
        default=None,
        default_text="the model's, else bytes",
    )
    chat_template: Path | None = field(  # noqa: RUF009
        CHAT_TEMPLATE_HELP,
        default=None,
        default_text="the tokenizer's",
    )
    max_sequences: int | None = field(
        "Maximum number of sequences to evaluate.", default=None, default_text="all", unit="sequences", minimum=1
    )
    dtype: DtypeName = field("Data type of weights and activations.", default="float32")  # noqa: RUF009
    layout: LayoutName = field("Which rank holds which tokens of a sequence.", default="zigzag")  # noqa: RUF009
    loss_chunk_tokens: int = field(LOSS_CHUNK_HELP, default=1024, unit="tokens", minimum=1)
    hang_timeout: float = _hang_timeout("a sequence without progress ends the evaluation")
    start_timeout: float | None = _start_timeout("batch")
    by_position: bool = field(
        "Also measure the loss by position, the number of tokens before: bins 0, 1, 2-3, 4-7, 8-15 and so on.",
        default=False,
    )
    output: Path | None = field(  # noqa: RUF009
        "JSON file for --by-position, --passkey or --tasks; the picture has the same path with suffix .png.",
        default=None,
        default_text="by_position.json, passkey.json or tasks.json",
    )
    nproc: int | None = field(
        "Number of ranks to start on this machine; all of them share each sequence.",
        default=None,
        default_text="all GPUs, else 2",
        unit="processes",
        minimum=1,
    )


def profiled_steps(text: str | None) -> range:
    """Return the steps of a text such as "3" or "3-5"; empty for None.

    Raises:
        UserError: The text is not a step or a range of steps.
    """
    if text is None:
        return range(0)
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"profile '{text}'\nallowed: a step or a range, counted from 1\nfix: --profile 3 or 3-5")
    return range(first, last + 1)
