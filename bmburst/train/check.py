"""Compares a training run on N ranks with one on a single rank, tensor by tensor: the work of `bmburst check`.

Each rank calls `record_steps`: it trains some steps and writes gradients and parameters. Rank 0 gathers and writes one
tensor at a time, so that no process holds the whole model. `compare_runs` then compares the files of the runs.

In float32, N ranks are compared with one rank. In bfloat16, rounding depends on how the work is split, so N ranks and
one rank are both compared with one rank in float32, and the error of N ranks may be twice that of one rank.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst.checkpoint.tensor_files import SafetensorsWriter, open_tensors
from bmburst.train.config import TrainConfig

if TYPE_CHECKING:
    from bmburst.train.trainer import Trainer
    from bmburst.zero import NamedShard, ShardData

# Trained parameters before the first step, gradients of the first step, parameters after the last step.
BEFORE_FILE, GRADIENT_FILE, AFTER_FILE = "before.safetensors", "gradient.safetensors", "after.safetensors"
STEPS_FILE = "steps.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Loss and gradient norm of each step of a run.

    Attributes:
        losses: Mean loss of each step, in nats per token.
        grad_norms: Norm of each step's gradient before clipping.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> "Steps":
        """Return the steps that `record_steps` wrote to a folder."""
        values = json.loads((folder / STEPS_FILE).read_text(encoding="utf-8"))
        return cls(losses=tuple(values["losses"]), grad_norms=tuple(values["grad_norms"]))

    def write(self, folder: Path) -> None:
        """Write the steps to a folder, for `read`."""
        (folder / STEPS_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def record_steps(config: TrainConfig, steps: int, *, valid_for: int | None = None) -> None:
    """Train some steps and write losses, gradients and parameters to `config.output`. Every rank calls it.

    With 16-bit weights, the fp32 masters are written at the end: rounding to 16 bits would hide small steps.

    Args:
        config: The run.
        steps: Number of steps.
        valid_for: See `bmburst.train.trainer.Trainer`.

    Raises:
        UserError: The configuration is not possible.
        RunError: Out of memory.
    """
    from bmburst.train.memory_plan import explained
    from bmburst.train.trainer import Trainer

    with explained(config):
        trainer = Trainer(config, valid_for=valid_for)
    with explained(trainer.config):
        trainer.restore()
        _record(trainer, steps)


def _record(trainer: "Trainer", steps: int) -> None:
    config = trainer.config
    # Import after the trainer has started BMTrain.
    from bmburst.optim.states import MASTER
    from bmburst.zero import ShardData, gradient_of, named_shards

    shards = [each for each in named_shards(trainer.model) if each.storage.requires_grad]
    _save(trainer.folder / BEFORE_FILE, shards, lambda _: ShardData.WEIGHTS)
    losses, norms = [], []
    for step in range(steps):
        trainer.mesh.set_checks(step == 0)
        facts = trainer.backward(trainer.next_batch())
        if step == 0:
            _save(trainer.folder / GRADIENT_FILE, shards, gradient_of)
        trainer.update(facts)
        losses.append(facts.loss)
        norms.append(facts.grad_norm)
    path = trainer.folder / AFTER_FILE
    if config.dtype == "float32":
        _save(path, shards, lambda _: ShardData.WEIGHTS)
    else:
        _save(path, shards, lambda shard: trainer.optimizer.state_of(shard, MASTER), torch.float32)
    if trainer.is_main:
        Steps(losses=tuple(losses), grad_norms=tuple(norms)).write(trainer.folder)


def _save(
    path: Path,
    shards: "list[NamedShard]",
    pick: "Callable[[NamedShard], Tensor | ShardData | None]",
    dtype: torch.dtype | None = None,
) -> None:
    """Gather the tensors of all parameters to rank 0, one at a time, and write them."""
    from bmburst.zero import gather

    full = (gather(shard, pick(shard), dtype=dtype, root=0) for shard in shards)
    if shards[0].rank != 0:
        for _ in full:  # take part in each gather
            pass
        return
    with SafetensorsWriter(path, [(s.name, s.shape, dtype or s.dtype) for s in shards]) as writer:
        for tensor in full:
            assert tensor is not None  # rank 0 is the root of the gather
            writer.write(tensor)


# Largest relative errors. The error of the gradient shows whether the computation is correct. Adam divides by the size
# of the gradient, so where a gradient is only rounding error, the sign of the step is arbitrary: hence the wider limit
# for the change of parameters. BMTrain sums the norm in fp32, one rank after the other.
TOLERANCES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "float32": {"gradient": 1e-5, "change": 1e-2, "loss": 1e-4, "norm": 1e-3},
        # Added to twice the error of one rank, because that error may be small by chance.
        "bfloat16": {"gradient": 2e-3, "change": 2e-2, "loss": 1e-3, "norm": 1e-2},
    }
)
BF16_FACTOR = 2.0
_FP32_EPS = 2.0**-23
_CHUNK = 1 << 22
_GRADIENT, _PARAMETER, _CHANGE = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Relative error of N ranks against one rank.

    Attributes:
        error: Error of N ranks: norm of the difference from one rank in float32, relative to the norm of the latter.
        single: The same error of one rank in bfloat16; None in float32, where one rank is the reference.
        allowed: Largest allowed error; infinite if there is no limit.
    """

    error: float
    single: float | None
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """The error divided by the allowed error; infinite for NaN."""
        return math.inf if math.isnan(self.error) else _ratio(self.error, self.allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """Errors of one parameter.

    Attributes:
        name: Name of the parameter; "all tensors" for all of them as one vector.
        shape: Its shape; empty for "all tensors".
        gradient: Error of the gradient of the first step.
        parameter: Error of the parameter after the steps. Shown without a limit, because the initial weights dominate.
        change: Error of the change of the parameter by the steps.
    """

    name: str
    shape: tuple[int, ...]
    gradient: Deviation
    parameter: Deviation
    change: Deviation

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the errors that exceed their limits."""
        return tuple(name for name in ("gradient", "change") if not getattr(self, name).ok)

    @property
    def severity(self) -> float:
        """The larger severity of gradient and change."""
        return max(self.gradient.severity, self.change.severity)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Loss and gradient norm of one step.

    Attributes:
        losses: Losses of N ranks, of one rank, and in bfloat16 also of one rank in float32, in nats per token.
        grad_norms: Norms of the gradient before clipping, in the same order.
        loss: Error of the loss.
        grad_norm: Error of the norm.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    loss: Deviation
    grad_norm: Deviation

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the errors that exceed their limits."""
        judged = (("loss", self.loss), ("gradient norm", self.grad_norm))
        return tuple(name for name, deviation in judged if not deviation.ok)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Result of `compare_runs`.

    Attributes:
        dtype: "float32" or "bfloat16".
        tensors: Report of each parameter.
        total: Report of all tensors as one vector.
        steps: Report of each step.
    """

    dtype: str
    tensors: tuple[TensorReport, ...]
    total: TensorReport
    steps: tuple[StepReport, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is within its tolerance."""
        tensors = (*self.tensors, self.total)
        return not any(tensor.faults for tensor in tensors) and not any(step.faults for step in self.steps)


def compare_runs(ranks: Path, exact: Path, single: Path | None = None, *, chunk: int = _CHUNK) -> CheckReport:
    """Compare the files that `record_steps` wrote for runs of the same configuration.

    Args:
        ranks: Folder of the run on N ranks.
        exact: Folder of the run on one rank in float32.
        single: Folder of the run on one rank in bfloat16; None: `ranks` is in float32.
        chunk: Elements of each file in memory at once.

    Raises:
        UserError: A file is missing or damaged.
    """
    dtype = "float32" if single is None else "bfloat16"
    runs = [_RunFiles(folder) for folder in (ranks, single) if folder is not None]
    one = _RunFiles(exact)
    totals = [torch.zeros(3, 2, dtype=torch.float64) for _ in runs]
    reports = []
    for name, shape in one.shapes.items():
        squares = [_squares(run, one, name, chunk) for run in runs]
        totals = [total + part for total, part in zip(totals, squares, strict=True)]
        reports.append(_tensor_report(dtype, name, shape, squares, slack=TOLERANCES[dtype]["gradient"]))
    # bfloat16: the sum over all parameters needs no margin, because a single small tensor hardly changes it.
    slack = 0.0 if dtype == "bfloat16" else TOLERANCES[dtype]["gradient"]
    return CheckReport(
        dtype=dtype,
        tensors=tuple(reports),
        total=_tensor_report(dtype, "all tensors", (), totals, slack=slack),
        steps=tuple(_step_reports(dtype, [run.steps for run in (*runs, one)])),
    )


class _RunFiles:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self._files = [open_tensors(folder / name) for name in (BEFORE_FILE, GRADIENT_FILE, AFTER_FILE)]
        self.shapes = self._files[0].shapes
        self.steps = Steps.read(folder)

    def read(self, name: str, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return elements of the gradient, of the parameter after the steps and of its change, in fp64."""
        before, gradient, after = (file.read(name, begin, end).double() for file in self._files)
        return gradient, after, after - before


def _squares(run: _RunFiles, one: _RunFiles, name: str, chunk: int) -> Tensor:
    """Return (squared distance between a run and `one`, squared norm of `one`) for gradient, parameter and change."""
    squares, numbers = torch.zeros(3, 2, dtype=torch.float64), prod(one.shapes[name])
    for begin in range(0, numbers, chunk):
        end = min(begin + chunk, numbers)
        for row, (ours, theirs) in enumerate(zip(run.read(name, begin, end), one.read(name, begin, end), strict=True)):
            squares[row] += torch.stack([(ours - theirs).square().sum(), theirs.square().sum()])
    return squares


def _tensor_report(
    dtype: str, name: str, shape: tuple[int, ...], squares: list[Tensor], *, slack: float
) -> TensorReport:
    errors = [[_ratio(*row.sqrt().tolist()) for row in part] for part in squares]
    parameter, change = (math.sqrt(squares[0][row, 1].item()) for row in (_PARAMETER, _CHANGE))
    # If the change is small relative to the parameter, rounding of the parameter's last bits dominates its error.
    last_bits = _FP32_EPS * (parameter / change if change else math.inf)
    single = [None, None, None] if len(errors) == 1 else errors[1]
    return TensorReport(
        name=name,
        shape=shape,
        gradient=_deviation(errors[0][_GRADIENT], single[_GRADIENT], slack),
        parameter=Deviation(error=errors[0][_PARAMETER], single=single[_PARAMETER], allowed=math.inf),
        change=_deviation(errors[0][_CHANGE], single[_CHANGE], TOLERANCES[dtype]["change"] + last_bits),
    )


def _step_reports(dtype: str, runs: list[Steps]) -> Iterator[StepReport]:
    tolerances = TOLERANCES[dtype]
    losses_by_step = zip(*(run.losses for run in runs), strict=True)
    norms_by_step = zip(*(run.grad_norms for run in runs), strict=True)
    for losses, norms in zip(losses_by_step, norms_by_step, strict=True):
        yield StepReport(
            losses=losses,
            grad_norms=norms,
            loss=_scalar_deviation(losses, tolerances["loss"]),
            grad_norm=_scalar_deviation(norms, tolerances["norm"]),
        )


def _scalar_deviation(values: tuple[float, ...], slack: float) -> Deviation:
    *runs, one = values
    errors = [_ratio(abs(value - one), abs(one)) for value in runs]
    return _deviation(errors[0], errors[1] if len(errors) > 1 else None, slack)


def _deviation(error: float, single: float | None, slack: float) -> Deviation:
    return Deviation(error=error, single=single, allowed=slack + (BF16_FACTOR * single if single is not None else 0.0))


def _ratio(distance: float, size: float) -> float:
    if size == 0:
        return 0.0 if distance == 0 else math.inf if distance > 0 else math.nan
    return distance / size
