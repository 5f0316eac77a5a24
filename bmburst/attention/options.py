"""What a user may set on an attention."""

import math
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from bmburst.comm.transports import TRANSPORTS
from bmburst.errors import UserError, require_known
from bmburst.numbers import brief, require_flag
from bmburst.schedule.layout import LAYOUTS
from bmburst.schedule.mask import Mask, make_mask
from bmburst.schedule.strategy_names import STRATEGIES
from bmburst_ops.flash import NAMES

MaskOption = Mask | str | tuple[Mask | str, ...]
"""A mask or its name, or one for each sample of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What a user may set on an attention; see `burst_attention` for the meaning of each."""

    mask: MaskOption = "causal"
    layout: str = "zigzag"
    scale: float | None = None
    kernel: str = "auto"
    strategy: str = "auto"
    transport: str = "auto"
    deterministic: bool = False

    def validate(self) -> None:
        """Check what can be known without tensors and ranks.

        Raises:
            UserError: A name is unknown, the scale is no positive number, or deterministic is neither true nor false.
        """
        if isinstance(self.mask, list):
            raise UserError(f"mask must be one mask, or a tuple of one for each sample, got a list of {len(self.mask)}")
        for mask in self.mask if isinstance(self.mask, tuple) else (self.mask,):
            make_mask(mask)
        require_known("layout", self.layout, LAYOUTS)
        require_known("kernel", self.kernel, NAMES)
        require_known("strategy", self.strategy, STRATEGIES)
        require_known("transport", self.transport, TRANSPORTS)
        require_scale(self.scale)
        require_flag("deterministic", self.deterministic)


def require_scale(scale: float | None) -> None:
    """Refuse a factor on scores that is neither None nor a positive number.

    Raises:
        UserError: It is.
    """
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    try:
        factor = float(scale) if is_number and scale is not None else math.nan
    except OverflowError:  # a whole number may be larger than any float
        factor = math.inf
    if scale is not None and not 0 < factor < math.inf:
        raise UserError(f"scale must be a positive number, got {brief(scale)}\nNone means 1 / sqrt(head_dim)")


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor on the scores of queries `[..., head_dim]`: the one given, or the default."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)
