"""Models, lengths, methods, cells and the bound of `bmburst bench train`. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.engine.kinds import BaseCell, BaseSelection
from bmburst.amounts import GIB
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.errors import UserError, first_line, require_known
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.counts import attention_flops, multiplied
from bmburst.plan.search import Prediction, predict
from bmburst.plan.step import model_flops
from bmburst.plan.ways import candidates, with_attention_choice
from bmburst.recompute.policy import Policy
from bmburst.schedule.hardware import Hardware, load_hardware
from bmburst.schedule.parallelism import MeshShape
from bmburst.train.config import ParallelConfig, TrainConfig
from bmburst_ops import ATTENTION_BACKWARD

STEPS = {"loss": 30, "curve": 60}  # default training steps by suite; --repeats sets those of the suite step
OURS = "ours"
ZERO, STAGES = 3, (2, 3)  # default ZeRO stage, and the stages that BMTrain supports


class TrainSuite(NamedTuple):
    """The defaults of a suite."""

    presets: tuple[str, ...]  # names of `SHAPES`
    tokens: tuple[int, ...]  # sequence lengths
    dtypes: tuple[str, ...] = ()  # dtypes of weights and activations; empty: `BaseSelection.plain_dtype`


SUITES: Mapping[str, TrainSuite] = MappingProxyType(
    {
        "step": TrainSuite(("llama-3-8b", "llama-2-7b"), tuple(1024 * n for n in (32, 128, 256, 512, 1024, 2048))),
        "loss": TrainSuite(("tiny-8-heads",), (2048,), ("float32", "bfloat16")),
        "curve": TrainSuite(("llama-95m",), (131072,)),
        "save": TrainSuite(("llama-3-8b",), (1024 * 32,)),
    }
)
# Trained models: the presets, and two small ones for losses.
SHAPES: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        **PRESETS,
        # Has the width of llama-tiny, heads for up to 8 ranks, and a head dim that every kernel supports.
        "tiny-8-heads": replace(PRESETS["llama-tiny"], num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64),
        # 95 million parameters.
        "llama-95m": LlamaConfig(
            vocab_size=320,  # 256 bytes and special ids, rounded up
            hidden_size=1024,
            intermediate_size=2816,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            rope_theta=500000.0,
            max_position_embeddings=131072,
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainCell(BaseCell):
    """One measurement: all ranks of the run share each sequence; `dtype` is of weights and activations."""

    preset: str  # a name of `SHAPES`
    layers: int  # number of layers of the trained model; at most those of the preset
    tokens: int  # tokens per sequence
    recompute: str = ""  # policy of `bmburst.recompute`; "" selects the method's own
    batch: int = 1  # sequences per step, all in one micro-batch
    zero: int = ZERO  # ZeRO stage: 3, or 2, which keeps the gathered weights from forward to backward

    @property
    def model(self) -> LlamaConfig:
        """The model's configuration, with `layers` layers and positions for `tokens` tokens."""
        longest = max(self.tokens, SHAPES[self.preset].max_position_embeddings)
        return replace(SHAPES[self.preset], num_layers=self.layers, max_position_embeddings=longest)

    @property
    def all_layers(self) -> int:
        """Layers of the preset."""
        return SHAPES[self.preset].num_layers

    @property
    def model_name(self) -> str:
        """The preset, followed by the number of layers if it is reduced: `llama-3-8b-x2`."""
        return self.preset + ("" if self.layers == self.all_layers else f"-x{self.layers}")

    @property
    def name(self) -> str:
        """For example `step/llama-3-8b-x2/131072/ours` or `step/llama-2-7b/8x4096/ours`."""
        tokens = f"{self.batch}x{self.tokens}" if self.batch > 1 else f"{self.tokens}"
        return f"{self.suite}/{self.model_name}/{tokens}/{self.method}"

    @property
    def key(self) -> str:
        """See `BaseCell.key`; a selected recompute policy and ZeRO-2 are appended: `...@8-block-zero2`."""
        stage = "" if self.zero == ZERO else f"-zero{self.zero}"
        return super().key + (f"-{self.recompute}" if self.recompute else "") + stage


@dataclass(frozen=True, kw_only=True)
class TrainSelection(BaseSelection):
    """Selects the cells to list; for None the defaults of the suite apply.

    Raises:
        UserError: A preset is unknown, a length does not divide, or a number of layers or a stage is out of range.
    """

    presets: tuple[str, ...] | None = None  # names of `SHAPES`
    layers: tuple[int, ...] | None = None  # numbers of layers, instead of the preset's
    recompute: str = ""  # policy for all methods; "" selects each method's own
    batches: tuple[int, ...] = (1,)  # sequences per step in the suite step
    stages: tuple[int, ...] = (ZERO,)  # ZeRO stages in the suite step

    def __post_init__(self) -> None:
        for name in self.presets or ():
            require_known("preset", name, SHAPES)
        for stage in self.stages:
            if stage not in STAGES:
                raise UserError(f"--zero {stage}\nallowed: 2, 3 or 2,3\nfix: leave it out for ZeRO-3")
        most = max(SHAPES[name].num_layers for name in self.presets or SUITES["step"].presets)
        for layers in self.layers or ():
            if layers > most:
                raise UserError(f"--layers {layers}\nallowed: 1 to {most}\nfix: no more layers than the model has")
        super().__post_init__()


def list_cells(selection: TrainSelection) -> tuple[TrainCell, ...]:
    """Return the selected cells of every suite, short sequences first."""
    found = (cell for suite in SUITES for cell in _cells(selection, suite))
    return tuple(cell for cell in found if selection.fits(cell))


def _cells(selection: TrainSelection, name: str) -> Iterator[TrainCell]:
    suite = SUITES[name]
    first = None if name == "step" else 1  # the other suites train one model
    dtypes = suite.dtypes if selection.dtype is None else ()
    for dtype, tokens, batch, stage, preset in product(
        dtypes or (selection.plain_dtype,),
        selection.tokens or suite.tokens,  # short sequences of all models first: reserved memory only grows
        selection.batches if name == "step" else (1,),
        selection.stages if name == "step" else (ZERO,),
        (selection.presets or suite.presets)[:first],
    ):
        layers = (selection.layers or (SHAPES[preset].num_layers,))[:first]
        for number, ranks in product(layers, sorted({1, *selection.ranks}) if name == "loss" else selection.ranks):
            for method in _methods(selection, name, ranks):
                yield TrainCell(
                    suite=name,
                    preset=preset,
                    layers=number,
                    tokens=tokens,
                    method=method,
                    ranks=ranks,
                    device=selection.device,
                    dtype=dtype,
                    recompute=selection.recompute,
                    batch=batch,
                    zero=stage,
                )


def _methods(selection: TrainSelection, suite: str, ranks: int) -> tuple[str, ...]:
    """Return the methods of a suite: those selected, but only ours on one rank and in the suites curve and save."""
    if ranks > 1 and suite not in ("curve", "save"):
        return selection.methods
    # In the suite loss, ours on one rank is the reference, even if it is not selected.
    return (OURS,) if suite == "loss" or OURS in selection.methods else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of one GPU, in FLOP/s."""

    attention: float  # rate of the attention kernel, forward and backward together; a causal mask counts half the FLOPs
    matmul: float  # rate of a large matrix product


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Lower bound of a step's time, in seconds: the model's FLOPs at the measured rates.

    Of matrix products it has 6 N FLOPs per token. N excludes an embedding that is only a lookup.
    """

    attention: float  # 3.5 times the forward FLOPs of causal attention, at the kernel's rate
    matmul: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.attention + self.matmul


def bound(cell: TrainCell, rates: Rates) -> Bound:
    """Return the bound of a cell's step, with its FLOPs divided evenly over the ranks."""
    model = cell.model
    attention = cell.batch * model.num_layers * attention_flops(model, cell.tokens) * (1 + ATTENTION_BACKWARD)
    # 2 N each: forward, gradient of inputs, gradient of weights
    products = 6.0 * multiplied(model) * cell.tokens * cell.batch
    return Bound(attention=attention / rates.attention / cell.ranks, matmul=products / rates.matmul / cell.ranks)


def utilisation(cell: TrainCell, seconds: float, peak: float, *, attention_backward: float) -> float:
    """Return model FLOPs utilisation (MFU). Causal attention counts half; recomputation does not count.

    `peak` is a GPU's rate in FLOP/s. `attention_backward` is the FLOPs of attention's backward relative to its forward:
    2 by convention, 2.5 in the kernel.
    """
    return flops(cell, attention_backward=attention_backward) / seconds / cell.ranks / peak


def flops(cell: TrainCell, *, attention_backward: float = 2.0) -> float:
    """Return the model FLOPs of a cell's step over all ranks; see `utilisation`."""
    return model_flops(task_of(cell), attention_backward=attention_backward)


def task_of(cell: TrainCell) -> Task:
    """Return the planner's task for a cell's step."""
    return Task(
        model=cell.model,
        preset=cell.preset,
        sequence=cell.tokens,
        gpus=cell.ranks,
        batch=cell.batch,
        micro_batch=cell.batch,
    )


@dataclass(frozen=True, kw_only=True)
class TrainMethod:
    """One way to train a sequence on all ranks of a run."""

    name: str  # name in cells
    shares_matrices: bool = False  # tensor parallelism: ranks shard weight matrices and heads, not the sequence
    replicated: bool = False  # whether tensor parallel ranks also keep all tokens between the matrices
    peer: str = ""  # method of `benchmarks.attention.methods` that replaces our attention; "" keeps ours
    layout: str = "zigzag"  # layout of tokens on ranks
    strategy: str = "auto"  # of our attention
    by_messages: bool = False  # whether our attention transfers by NCCL (gloo on CPUs) instead of the fastest transport
    stores_scores: bool = False  # attention keeps each rank's rows of scores, which the planner does not model

    def tensor(self, cell: TrainCell) -> int:
        """Return the tensor parallel degree: the number of ranks that shard each matrix."""
        return cell.ranks if self.shares_matrices else 1

    def recompute(self, cell: TrainCell) -> str:
        """Return the cell's recompute policy; by default the trainer's for ours, "block-keep-attention" for others."""
        default = TrainConfig().recompute if self.name == OURS else "block-keep-attention"
        return cell.recompute or default

    def parallel(self, cell: TrainCell) -> ParallelConfig:
        """Return the parallel part of the trainer's configuration."""
        tensor = self.tensor(cell)
        messages = "nccl" if cell.device == "cuda" else "gloo"
        return ParallelConfig(
            sequence_parallel=cell.ranks // tensor,
            tensor_parallel=tensor,
            layout=self.layout,  # type: ignore[arg-type]  # check_fields validates the values
            strategy=self.strategy,
            transport=messages if self.by_messages else "auto",
            zero_level=cell.zero,  # type: ignore[arg-type]
        )

    def refusal(self, cell: TrainCell) -> str | None:
        """Return why the cell cannot run, as far as its shape and ranks determine that, or None."""
        model = cell.model
        if self.peer and not self.stores_scores and (model.num_heads % cell.ranks or model.num_kv_heads % cell.ranks):
            return f"{model.num_heads} query and {model.num_kv_heads} KV heads do not divide by {cell.ranks} ranks"
        try:
            model.require_mesh(MeshShape(1, cell.ranks // self.tensor(cell), self.tensor(cell)))
            Policy.parse(self.recompute(cell)).require_layers(model.num_layers)
        except UserError as error:
            return first_line(error)
        return None

    def predict(self, cell: TrainCell, machine: str | None) -> Prediction | None:
        """Return the planner's prediction for a cell; None for dtypes and methods that it does not model.

        `machine` is a name of `bmburst.schedule.hardware.shipped`; None if the hardware is unknown.
        """
        policy = self.recompute(cell)
        if machine is None or cell.dtype != "bfloat16" or self.stores_scores or self.refusal(cell) is not None:
            return None
        hardware = load_hardware(machine)
        ways = self._ways(cell, policy, hardware)
        return min((predict(way, hardware) for way in ways), key=lambda found: found.seconds)

    def _ways(self, cell: TrainCell, policy: str, hardware: Hardware) -> list[Candidate]:
        task = task_of(cell)
        if self.name == OURS:
            return candidates(task, recompute=(policy,), zero=(cell.zero,), tensor=(1,))
        fixed = Candidate(task=task, tensor=self.tensor(cell), recompute=policy, zero=cell.zero, transport="nccl")
        strategy = "heads" if self.peer else self.strategy
        return [with_attention_choice(fixed, strategy, None, hardware)]

    def memory_refusal(self, cell: TrainCell, machine: str | None, capacity: float) -> str | None:
        """Return why the cell would not fit in memory, by the planner's prediction, or None."""
        found = self.predict(cell, machine)
        if found is None:
            return None
        needed = found.memory.total + self.replicated_bytes(cell)
        if needed <= capacity:
            return None
        return f"would not fit: about {needed / GIB:.0f} GiB a rank by the planner, of {capacity / GIB:.0f} GiB"

    def replicated_bytes(self, cell: TrainCell) -> float:
        """Return the bytes of replicated activations on a rank: tokens of other ranks, which the planner omits."""
        others = cell.batch * (cell.tokens - cell.tokens // cell.ranks) if self.replicated else 0
        tensors = cell.layers + 2  # the input of each block, the stream inside a block, and its gradient
        return 2.0 * others * cell.model.hidden_size * tensors


METHODS: Mapping[str, TrainMethod] = MappingProxyType(
    {
        method.name: method
        for method in (
            TrainMethod(name=OURS),
            TrainMethod(name="ulysses", peer="ulysses", layout="contiguous"),
            # As in ring-flash-attn: K and V move around a zigzag ring, and dK and dV return to their ranks.
            TrainMethod(name="zigzag-ring-nccl", strategy="kv", by_messages=True),
            # Megatron tensor parallelism (arXiv:1909.08053), and with sequence parallelism (arXiv:2205.05198).
            TrainMethod(name="tensor-v1", shares_matrices=True, replicated=True, layout="contiguous"),
            TrainMethod(name="tensor-v3", shares_matrices=True, layout="contiguous"),
            # Ring self-attention (arXiv:2105.13120): K, then V moves around a ring; rows of scores stay in memory.
            TrainMethod(name="ring-li", peer="ring-li-2021", layout="contiguous", stores_scores=True),
        )
    }
)
