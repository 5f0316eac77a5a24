"""Precision of training: whether a GPU supports a dtype, and the dynamic loss scale of fp16.

The launcher does not open a GPU, so each rank checks its GPU after BMTrain has started.

The largest fp16 number is 65504, and numbers below 6e-5 are subnormal and lose digits. So BMTrain multiplies the loss,
and thereby all gradients, by a scale, and the optimizer divides by it in fp32. The rules are those of
`bmtrain.optim.OptimManager`: a step whose gradient is not finite is skipped and halves the scale, down to 1; after a
number of steps without a skip the scale doubles. All ranks have the same gradient norm, so they compute the same scale
without communication.
"""

from dataclasses import dataclass

import torch

from bmburst.errors import UserError
from bmburst.train.config import TrainConfig
from bmburst.train.sections import LOSS_SCALE, LOSS_SCALE_STEPS

_AMPERE = (8, 0)
_FACTOR, _LEAST = 2.0, 1.0  # factor of changes and minimum of the loss scale


def require_dtype(dtype: str, device: torch.device) -> None:
    """Check that a rank's device supports a dtype.

    Args:
        dtype: dtype of weights and activations, as in `TrainConfig`.
        device: Device of this rank.

    Raises:
        UserError: The GPU does not support bfloat16: BMTrain's kernels and tensor cores need Ampere or later.
    """
    if dtype != "bfloat16" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _AMPERE:
        raise UserError(
            f"dtype bfloat16 does not work on {torch.cuda.get_device_name(device)} (compute capability "
            f"{'.'.join(map(str, found))})\nallowed: float16, float32\n"
            "fix: --dtype float16, which keeps gradients in range with a loss scale"
        )


@dataclass(slots=True)
class LossScale:
    """The loss scale and its state.

    Attributes:
        value: The scale of the next step.
        interval: Number of steps without a skip after which it doubles; None: it is constant.
        taken: Number of steps since its last change.
    """

    value: float = 1.0
    interval: int | None = None
    taken: int = 0

    @classmethod
    def of(cls, config: TrainConfig) -> "LossScale":
        """Return the initial scale of a run: constant 1 unless the dtype is fp16."""
        if config.dtype != "float16":
            return cls()
        optimizer = config.optimizer
        return cls(optimizer.loss_scale or LOSS_SCALE, optimizer.loss_scale_steps or LOSS_SCALE_STEPS)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale can change."""
        return self.interval is not None

    def count(self, *, is_finite: bool) -> None:
        """Update the scale after a step.

        Args:
            is_finite: Whether loss and gradient were finite, so that the step was taken.
        """
        if self.interval is None:
            return
        if not is_finite:
            self.value, self.taken = max(self.value / _FACTOR, _LEAST), 0
            return
        self.taken += 1
        if self.taken >= self.interval:
            self.value, self.taken = self.value * _FACTOR, 0

    def state(self) -> tuple[float, int] | None:
        """Return the state for a checkpoint: the scale and the steps since its last change; None if it is constant."""
        return (self.value, self.taken) if self.is_dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Restore a result of `state`."""
        if state is not None and self.is_dynamic:
            self.value, self.taken = state
