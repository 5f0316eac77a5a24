"""Operations that compute in the dtypes of their inputs, also under torch.autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast: the inputs' dtype decides, and sums are fp32 or wider."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
