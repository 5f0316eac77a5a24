"""Cells of the training benchmark: models, lengths, the bound of a step, MFU, and the selection. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.engine.kind import BaseCell, BaseSelection
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.errors import UserError, require_known
from bmburst.plan.candidates import Task
from bmburst.plan.counts import attention_flops, multiplied
from bmburst.plan.step import model_flops
from bmburst_ops import ATTENTION_BACKWARD

_KIB = 1024
STEPS = {"loss": 30, "curve": 60}  # that are trained; of a step's cell, what the command line says is measured
OURS = "ours"
ZERO, STAGES = 3, (2, 3)  # the stage of ZeRO that is measured by default, and those that BMTrain has


class TrainSuite(NamedTuple):
    """What a suite measures where the options do not say.

    Attributes:
        presets: Models.
        tokens: Sequence lengths.
        dtypes: Of weights and activations; none: what the device is best at.
    """

    presets: tuple[str, ...]
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...] = ()


SUITES: Mapping[str, TrainSuite] = MappingProxyType(
    {
        "step": TrainSuite(("llama-3-8b", "llama-2-7b"), tuple(_KIB * n for n in (32, 128, 256, 512, 1024, 2048))),
        "loss": TrainSuite(("tiny-8-heads",), (2 * _KIB,), ("float32", "bfloat16")),
        "curve": TrainSuite(("llama-95m",), (128 * _KIB,)),
    }
)
# Models that are trained: the presets, and two small ones for losses.
SHAPES: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        **PRESETS,
        # As narrow as llama-tiny, with heads for up to 8 ranks, wide enough for every kernel.
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
    """One measurement: all ranks of the run share each sequence of a step.

    Attributes:
        suite: One of `SUITES`.
        method: A name of `benchmarks.training.methods`.
        dtype: Of weights and activations.
        preset: A name of `SHAPES`.
        layers: Of the model, where they are fewer than the preset's, too.
        tokens: Of a sequence.
        recompute: Policy of `bmburst.recompute`; "" leaves it to the method.
        batch: Sequences of a step, all computed at once.
        zero: ZeRO stage: 3, or 2, which keeps the gathered weights from forward to backward.
    """

    preset: str
    layers: int
    tokens: int
    recompute: str = ""
    batch: int = 1
    zero: int = ZERO

    @property
    def model(self) -> LlamaConfig:
        """The model's shape, for sequences of so many tokens."""
        longest = max(self.tokens, SHAPES[self.preset].max_position_embeddings)
        return replace(SHAPES[self.preset], num_layers=self.layers, max_position_embeddings=longest)

    @property
    def all_layers(self) -> int:
        """Layers of the preset."""
        return SHAPES[self.preset].num_layers

    @property
    def model_name(self) -> str:
        """The preset, and its layers where they are not all: `llama-3-8b-x2`."""
        return self.preset + ("" if self.layers == self.all_layers else f"-x{self.layers}")

    @property
    def name(self) -> str:
        """For example `step/llama-3-8b-x2/131072/ours` or `step/llama-2-7b/8x4096/ours`; globs take it."""
        tokens = f"{self.batch}x{self.tokens}" if self.batch > 1 else f"{self.tokens}"
        return f"{self.suite}/{self.model_name}/{tokens}/{self.method}"

    @property
    def key(self) -> str:
        """See `BaseCell.key`; with the recompute policy and ZeRO-2, where asked for: `...@8-block-zero2`."""
        stage = "" if self.zero == ZERO else f"-zero{self.zero}"
        return super().key + (f"-{self.recompute}" if self.recompute else "") + stage


@dataclass(frozen=True, kw_only=True)
class TrainSelection(BaseSelection):
    """Which cells are listed; None takes what the suite has.

    Attributes:
        presets: Models.
        layers: Numbers of layers, in place of the preset's.
        recompute: Policy for all methods, or "".
        batches: Sequences of a step, of the suite step.
        stages: Stages of ZeRO, likewise.

    Raises:
        UserError: A preset is unknown, it has not so many layers, a length does not divide, or there is no such batch
            or stage.
    """

    presets: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    recompute: str = ""
    batches: tuple[int, ...] = (1,)
    stages: tuple[int, ...] = (ZERO,)

    def __post_init__(self) -> None:
        for name in self.presets or ():
            require_known("preset", name, SHAPES)
        for batch in self.batches:
            if batch < 1:
                raise UserError(f"--batch {batch}\nallowed: at least 1\nfix: for example --batch 1,2,4,8")
        for stage in self.stages:
            if stage not in STAGES:
                raise UserError(f"--zero {stage}\nallowed: 2, 3 or 2,3\nfix: leave it out for ZeRO-3")
        most = max(SHAPES[name].num_layers for name in self.presets or SUITES["step"].presets)
        for layers in self.layers or ():
            if not 1 <= layers <= most:
                raise UserError(f"--layers {layers}\nallowed: 1 to {most}\nfix: no more layers than the model has")
        super().__post_init__()


def list_cells(selection: TrainSelection) -> tuple[TrainCell, ...]:
    """Return the selected cells of every suite, in the order in which they are listed: short sequences first."""
    found = (cell for suite in SUITES for cell in _cells(selection, suite))
    return tuple(cell for cell in found if selection.fits(cell))


def _cells(selection: TrainSelection, name: str) -> Iterator[TrainCell]:
    suite = SUITES[name]
    first = None if name == "step" else 1  # for losses one model is trained
    dtypes = suite.dtypes if selection.dtype is None else ()
    for dtype, tokens, batch, stage, preset in product(
        dtypes or (selection.plain_dtype,),
        selection.tokens or suite.tokens,  # before models: what cells leave in memory only grows
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
    """Return the selected methods; on one rank all are ours, and only ours is asked for a curve."""
    if ranks > 1 and suite != "curve":
        return selection.methods
    # Losses are compared with one rank's, whatever is selected.
    return (OURS,) if suite == "loss" or OURS in selection.methods else ()


WEIGHT_FLOPS = 6.0  # a weight and token: forward, its input's gradient, its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one GPU does, in FLOP/s.

    Attributes:
        attention: Of the attention kernel, forward and backward together, a causal mask counted as half.
        matmul: Of a large product of matrices.
    """

    attention: float
    matmul: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Seconds of a step in which nothing is done but the model's own FLOPs.

    Attributes:
        attention: Causal attention, 3.5 times its forward, at the kernel's rate.
        matmul: 6 N FLOPs a token at a product's rate, N without an embedding that is only looked up.
    """

    attention: float
    matmul: float

    @property
    def total(self) -> float:
        """Both."""
        return self.attention + self.matmul


def bound(cell: TrainCell, rates: Rates) -> Bound:
    """Return the bound of a cell's step, spread evenly over its ranks."""
    model = cell.model
    attention = cell.batch * model.num_layers * attention_flops(model, cell.tokens) * (1 + ATTENTION_BACKWARD)
    products = WEIGHT_FLOPS * multiplied(model) * cell.tokens * cell.batch
    return Bound(
        attention=attention / rates.attention / cell.ranks,
        matmul=products / rates.matmul / cell.ranks,
    )


def utilisation(cell: TrainCell, seconds: float, peak: float, *, attention_backward: float) -> float:
    """Return model FLOPs utilisation: causal attention halved, recomputation not counted.

    Args:
        cell: What took the seconds.
        seconds: Of a step.
        peak: FLOP/s of a GPU that it is of.
        attention_backward: What attention's backward counts over its forward: 2 as usual, 2.5 as the kernel does.
    """
    return flops(cell, attention_backward=attention_backward) / seconds / cell.ranks / peak


def flops(cell: TrainCell, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a cell's step as utilisation counts them."""
    return model_flops(task_of(cell), attention_backward=attention_backward)


def task_of(cell: TrainCell) -> Task:
    """Return a cell's step as the planner knows it."""
    return Task(
        model=cell.model,
        preset=cell.preset,
        sequence=cell.tokens,
        gpus=cell.ranks,
        batch=cell.batch,
        micro_batch=cell.batch,
    )


def to_all_layers(measured: Mapping[int, float], layers: int) -> float | None:
    """Return the value for so many layers on the line through what was measured for two numbers of them or more.

    Two points give the line; of more the least squares. None with fewer than two: a line needs them.
    """
    if len(measured) < 2:
        return None
    count = len(measured)
    middle, mean = sum(measured) / count, sum(measured.values()) / count
    slope = sum((n - middle) * (value - mean) for n, value in measured.items())
    slope /= sum((n - middle) ** 2 for n in measured)
    return mean + slope * (layers - middle)
