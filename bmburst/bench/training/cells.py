"""What can be measured, as plain data: a cell is one method on one model and length, with a name that stays."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bmburst.bench.cells import fits
from bmburst.bench.rows import place
from bmburst.bench.training.shapes import SHAPES, shape
from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError, require_known

SUITES = ("step", "loss", "curve")
_KIB = 1024
STEP_PRESETS = ("llama-3-8b", "llama-2-7b")
STEP_TOKENS = tuple(_KIB * n for n in (32, 128, 256, 512, 1024, 2048))
LOSS_PRESET, LOSS_TOKENS, LOSS_DTYPES = "tiny-8-heads", 2 * _KIB, ("float32", "bfloat16")
CURVE_PRESET, CURVE_TOKENS = "llama-95m", 128 * _KIB
STEPS = {"loss": 30, "curve": 60}  # that are trained; of a step's cell, what the command line says is measured
OURS = "ours"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCell:
    """One measurement.

    Attributes:
        suite: One of `SUITES`.
        preset: A name of `SHAPES`.
        layers: Of the model, where they are fewer than the preset's, too.
        tokens: Of a sequence; a step trains one.
        method: A name of `bmburst.bench.training.methods`.
        ranks: Ranks of the run; all share the sequence.
        device: "cuda" or "cpu".
        dtype: Of weights and activations, a name of a torch dtype.
        recompute: Policy of `bmburst.recompute`; "" leaves it to the method.
    """

    suite: str
    preset: str
    layers: int
    tokens: int
    method: str
    ranks: int
    device: str
    dtype: str = "bfloat16"
    recompute: str = ""

    @property
    def model(self) -> LlamaConfig:
        """The model's shape."""
        return shape(self.preset, self.layers, self.tokens)

    @property
    def model_name(self) -> str:
        """The preset, and its layers where they are not all: `llama-3-8b-x2`."""
        return self.preset + ("" if self.layers == SHAPES[self.preset].num_layers else f"-x{self.layers}")

    @property
    def name(self) -> str:
        """For example `step/llama-3-8b-x2/131072/ours`; globs are matched against it."""
        return f"{self.suite}/{self.model_name}/{self.tokens}/{self.method}"

    @property
    def key(self) -> str:
        """The name with where and how it ran: `...@8` on 8 GPUs, `...@2-cpu-float32-block` on 2 CPU ranks."""
        where = place(self.ranks, self.device, self.dtype)
        return self.name + where + (f"-{self.recompute}" if self.recompute else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which cells are listed; None takes what the suite has.

    Attributes:
        ranks: Ranks of the runs.
        device: "cuda" or "cpu".
        dtype: Name of a torch dtype, in place of each suite's own.
        presets: Models.
        layers: Numbers of layers, in place of the preset's.
        tokens: Lengths of sequences.
        methods: Names of methods, in the order in which they are measured.
        recompute: Policy for all methods, or "".
        globs: Patterns for `TrainCell.name` or `TrainCell.key`; a cell is listed if one fits.

    Raises:
        UserError: A preset is unknown, it has not so many layers, or a length does not divide.
    """

    ranks: tuple[int, ...]
    device: str
    dtype: str | None = None
    presets: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    methods: tuple[str, ...]
    recompute: str = ""
    globs: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        for name in self.presets or ():
            require_known("preset", name, SHAPES)
        most = max(SHAPES[name].num_layers for name in self.presets or STEP_PRESETS)
        for layers in self.layers or ():
            if not 1 <= layers <= most:
                raise UserError(f"--layers {layers}\nallowed: 1 to {most}, the layers of the model")
        for ranks in self.ranks:
            bad = [n for n in self.tokens or () if n < 1 or n % (2 * ranks)]
            if bad:
                raise UserError(
                    f"--tokens {bad[0]} on {ranks} ranks\n"
                    f"allowed: multiples of {2 * ranks}, so that every method cuts the sequence evenly"
                )


def list_cells(choice: Choice) -> tuple[TrainCell, ...]:
    """Return the chosen cells of every suite, in the order in which they are listed: short sequences first."""
    found = (cell for suite in SUITES for cell in _SUITE_CELLS[suite](choice))
    return tuple(cell for cell in found if fits(cell, choice.globs))


def _step(choice: Choice) -> Iterator[TrainCell]:
    dtype = choice.dtype or ("bfloat16" if choice.device == "cuda" else "float32")
    for tokens in choice.tokens or STEP_TOKENS:  # outermost: what cells leave in memory only grows
        for preset in choice.presets or STEP_PRESETS:
            for layers in choice.layers or (SHAPES[preset].num_layers,):
                for ranks in choice.ranks:
                    for method in choice.methods if ranks > 1 else _alone(choice):
                        yield _cell(choice, "step", preset, layers, tokens, method, ranks, dtype)


def _loss(choice: Choice) -> Iterator[TrainCell]:
    preset = LOSS_PRESET if choice.presets is None else choice.presets[0]
    layers = (choice.layers or (SHAPES[preset].num_layers,))[0]
    for dtype in LOSS_DTYPES if choice.dtype is None else (choice.dtype,):
        for tokens in choice.tokens or (LOSS_TOKENS,):
            for ranks in sorted({1, *choice.ranks}):
                for method in choice.methods if ranks > 1 else (OURS,):
                    yield _cell(choice, "loss", preset, layers, tokens, method, ranks, dtype)


def _curve(choice: Choice) -> Iterator[TrainCell]:
    preset = CURVE_PRESET if choice.presets is None else choice.presets[0]
    layers = (choice.layers or (SHAPES[preset].num_layers,))[0]
    dtype = choice.dtype or ("bfloat16" if choice.device == "cuda" else "float32")
    for tokens in choice.tokens or (CURVE_TOKENS,):
        for ranks in choice.ranks:
            for method in _alone(choice):
                yield _cell(choice, "curve", preset, layers, tokens, method, ranks, dtype)


def _alone(choice: Choice) -> tuple[str, ...]:
    """On one GPU all methods are ours, and only ours is asked for a curve."""
    return tuple(method for method in choice.methods if method == OURS)


def _cell(
    choice: Choice, suite: str, preset: str, layers: int, tokens: int, method: str, ranks: int, dtype: str
) -> TrainCell:
    return TrainCell(
        suite=suite,
        preset=preset,
        layers=layers,
        tokens=tokens,
        method=method,
        ranks=ranks,
        device=choice.device,
        dtype=dtype,
        recompute=choice.recompute,
    )


_SUITE_CELLS: Mapping[str, Callable[[Choice], Iterator[TrainCell]]] = {"step": _step, "loss": _loss, "curve": _curve}
