"""The arithmetic of a step: what kernels and products alone would take, and utilisation in both conventions."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.training.cells import TrainCell
from bmburst.plan.candidates import Task
from bmburst.plan.counts import attention_flops, multiplied
from bmburst.plan.step import model_flops
from bmburst_ops.constants import ATTENTION_BACKWARD

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
    attention = model.num_layers * attention_flops(model, cell.tokens) * (1 + ATTENTION_BACKWARD)
    products = WEIGHT_FLOPS * multiplied(model) * cell.tokens
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
    task = Task(model=cell.model, preset=cell.preset, sequence=cell.tokens, gpus=cell.ranks)
    return model_flops(task, attention_backward=attention_backward)


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
