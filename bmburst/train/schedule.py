"""Learning rate schedules: `ScheduleConfig` and the formulas of `learning_rate`. Imports no torch."""

import dataclasses
import math
from types import MappingProxyType
from typing import Literal

from bmburst.config import check_fields, field
from bmburst.errors import UserError

Decay = Literal["linear", "cosine", "sqrt", "exponential"]
_KINDS = MappingProxyType(
    {"decay": ("wsd",), "decay_fraction": ("wsd",), "final_lr_fraction": ("cosine", "linear", "wsd")}
)
"""Kinds of schedules that read a field; of the other fields, all do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule; formulas: `learning_rate`. `TrainConfig` fills in `warmup_steps`."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = field(
        "Shape of the schedule after the warm-up; wsd: warm-up, stable, decay, as for MiniCPM.", default="cosine"
    )
    warmup_steps: int | None = field(
        "Steps of linear warm-up.",
        default=None,
        default_text="10 for 1M parameters to 2000 for 8B; with init_from a tenth of the steps, 10 to 2000",
        unit="steps",
        minimum=0,
    )
    warmup_fraction: float | None = field(
        "Length of the warm-up as a fraction of all steps, instead of schedule.warmup_steps.",
        default=None,
        default_text="schedule.warmup_steps",
        minimum=0,
        maximum=1,
        unit="of steps",
    )
    decay_fraction: float = field(
        "wsd: fraction of all steps in the final decay.", default=0.2, minimum=0, maximum=1, unit="of steps"
    )
    decay: Decay = field(  # noqa: RUF009
        "wsd: shape of the final decay; exponential: MiniCPM's, which halves the rate at equal intervals.",
        default="linear",
    )
    final_lr_fraction: float = field(
        "Minimum learning rate, at the end of the run.", default=0.1, minimum=0, maximum=1, unit="of optimizer.lr"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise UserError(
                f"schedule.warmup_steps {self.warmup_steps} and schedule.warmup_fraction {self.warmup_fraction:g} both "
                "give the length of the warm-up\nfix: leave one of them out"
            )
        for leaf in dataclasses.fields(self):
            value, kinds = getattr(self, leaf.name), _KINDS.get(leaf.name, (self.kind,))
            if value != leaf.default and self.kind not in kinds:
                raise UserError(
                    f"schedule.{leaf.name} {value} has no effect with schedule.kind {self.kind}\n"
                    f"allowed: schedule.kind {', '.join(kinds)}, or schedule.{leaf.name} {leaf.default}, the default\n"
                    f"fix: leave schedule.{leaf.name} out, or --schedule.kind {kinds[0]}"
                )
        if self.decay == "exponential" and not self.final_lr_fraction:
            raise UserError(
                "schedule.decay exponential never reaches schedule.final_lr_fraction 0\n"
                "allowed: a fraction above 0\nfix: --schedule.final_lr_fraction 0.1, or another --schedule.decay"
            )

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps of a run; a fraction is rounded up, as in transformers."""
        if self.warmup_fraction is None:
            assert self.warmup_steps is not None  # `TrainConfig` has filled it in
            return self.warmup_steps
        # 0.07 * 100 is above 7 by rounding alone.
        return math.ceil(round(self.warmup_fraction * total_steps, 6))


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate of one optimizer step.

    Warm-up is linear and reaches `peak` at its last step; the first step has a rate above 0. With `final` for
    `final_lr_fraction` and `p` for the part of the decay that is done, from 0 to 1, the rate is then `peak` times

    - "cosine": `final + (1 - final) * (1 + cos(pi * p)) / 2` (arXiv:1608.03983);
    - "linear": `final + (1 - final) * (1 - p)`;
    - "wsd" (warm-up, stable, decay: arXiv:2404.06395, section 4.2): 1, until the last `decay_fraction` of all steps.
      There, by `decay`, "linear" and "cosine" as above; "sqrt": `final + (1 - final) * (1 - sqrt(p))`; "exponential":
      `final ** p`, MiniCPM's `0.5 ** (steps of decay / T)` with the half-life T that ends at `final`;
    - "constant": 1.

    A run that is resumed with another number of steps continues on the schedule of the new number. Steps after the last
    one have its rate. If the warm-up is longer than the run, the run ends during warm-up.

    Args:
        config: The schedule.
        peak: Peak learning rate.
        step: Number of the step, from 1.
        total_steps: Number of steps of the whole run.

    Raises:
        ValueError: `step` or `total_steps` is below 1.
    """
    if step < 1 or total_steps < 1:
        raise ValueError(f"steps count from 1: got step {step} of {total_steps}")
    step, begin = min(step, total_steps), config.warmup(total_steps)
    if step <= begin:
        return peak * step / begin
    if config.kind == "constant":
        return peak
    if config.kind == "wsd":
        begin = max(begin, total_steps - round(config.decay_fraction * total_steps))
    if step <= begin:
        return peak
    shape = config.decay if config.kind == "wsd" else config.kind
    return peak * _decayed(shape, (step - begin) / (total_steps - begin), config.final_lr_fraction)


def _decayed(shape: str, done: float, final: float) -> float:
    """Return the factor on the peak rate after a part `done` of the decay, in [0, 1]."""
    if shape == "exponential":
        return math.pow(final, done)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "sqrt": 1 - math.sqrt(done)}[shape]
    return final + (1 - final) * left
