"""The precision that a rank trains in: whether its GPU has a dtype, and the dynamic loss scale of fp16.

The launcher opens no GPU, so a rank asks its GPU once BMTrain has started.

fp16 numbers end at 65504, and below 6e-5 they lose digits. So BMTrain multiplies the loss, and with it all gradients,
by a scale, and the optimizer divides by it in fp32. The rules are those of `bmtrain.optim.OptimManager`: a step whose
gradient is not finite is skipped and halves the scale, down to 1; after so many steps without one the scale doubles.
All ranks see the same gradient norm, so they have the same scale without telling each other.
"""

from dataclasses import dataclass

import torch

from bmburst.errors import UserError
from bmburst.train.config import TrainConfig
from bmburst.train.sections import LOSS_SCALE, LOSS_SCALE_STEPS

_AMPERE = (8, 0)
_FACTOR, _LEAST = 2.0, 1.0  # of the loss scale


def require_dtype(dtype: str, device: torch.device) -> None:
    """Check that a rank's device computes in a dtype.

    Args:
        dtype: Of weights and activations, as `TrainConfig` names it.
        device: Of this rank.

    Raises:
        UserError: It is a GPU without bfloat16: BMTrain's kernels and tensor cores have it from Ampere on.
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
    """The scale and what it depends on.

    Attributes:
        value: The scale of the next step.
        interval: Steps after which it doubles; None: it never changes.
        taken: Steps that were taken since it changed.
    """

    value: float = 1.0
    interval: int | None = None
    taken: int = 0

    @classmethod
    def of(cls, config: TrainConfig) -> "LossScale":
        """Return that of a fresh run: 1 for ever unless weights are fp16."""
        if config.dtype != "float16":
            return cls()
        optimizer = config.optimizer
        return cls(optimizer.loss_scale or LOSS_SCALE, optimizer.loss_scale_steps or LOSS_SCALE_STEPS)

    @property
    def is_dynamic(self) -> bool:
        """Whether it changes."""
        return self.interval is not None

    def count(self, *, is_finite: bool) -> None:
        """Count a step.

        Args:
            is_finite: Whether loss and gradient were, so that the step is taken.
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
        """Return what a checkpoint keeps: the scale, and the steps since it changed; None where it does not."""
        return (self.value, self.taken) if self.is_dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Go on from what `state` returned."""
        if state is not None and self.is_dynamic:
            self.value, self.taken = state
